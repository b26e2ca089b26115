#!/usr/bin/env bash
# Runs everything that needs a GPU in ten minutes on one H100 or H200: the benchmarks and the tests marked gpu (laws 3,
# 4 and 5, no step waits, strict determinism, precisions, NCCL with one rank). Ends with three tables: what each part
# shows and whether it ran; what each test shows, and its verdict; which targets are met, and by which part. On a GPU it
# also writes the section "On a card" of docs/evidence/results.md.
#
#   benchmarks/gpu.sh [folder]                  writes to ./gpu-results, or to the given folder
#   benchmarks/gpu.sh --only tests,fp8 [folder] only these parts
#   benchmarks/gpu.sh --device cpu [folder]     the same parts with tiny models, only to check that the script runs
#
# The parts are ordered by worth, and each has a budget in seconds: what a part does not use, the later ones have. At the
# end of its budget a benchmark begins no further round or model, and pytest no further test. What they have measured by
# then is written, and what is left out is named in the first table. All parts share the folder's cache of compiled code.
#
# A part that fails, leaves something out or is not reached does not stop the others, but makes the exit code 1. A
# missed target is reported and is not a failure.
set -euo pipefail

device=cuda only=
while [[ ${1:-} == --device || ${1:-} == --only ]]; do
    case $1 in
        --device) device=${2:?gpu.sh: --device needs cpu or cuda} ;;
        --only) only=${2:?gpu.sh: --only needs names of parts, separated by commas} ;;
    esac
    shift 2
done
if [[ $device != cpu && $device != cuda ]]; then
    echo "gpu.sh: --device $device is neither cpu nor cuda" >&2
    exit 2
fi
if (($# > 1)) || [[ ${1:-} == -* ]]; then
    echo "usage: benchmarks/gpu.sh [--device cpu|cuda] [--only part,part] [folder]" >&2
    exit 2
fi

known=$(sed -nE 's/^ *(part|tests|bench) ([a-z0-9_]+) [0-9].*/\2/p' "${BASH_SOURCE[0]}" | sort -u | paste -sd ' ')
for name in ${only//,/ }; do
    if [[ " $known " != *" $name "* ]]; then
        echo "gpu.sh: --only $name is none of its parts: $known" >&2
        exit 2
    fi
done

results=${1:-gpu-results}
mkdir -p "$results"
results=$(cd "$results" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export TORCHINDUCTOR_CACHE_DIR=$results/compiled TRITON_CACHE_DIR=$results/compiled/triton # compile once for all parts
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8} # before CUDA starts: determinism=strict needs it

if [[ $device == cuda ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: PyTorch sees no CUDA device; use --device cpu to check that the script runs" >&2
    exit 2
fi

failed=0
reports=()
rows=$results/parts.md # a line for each part
printf '| part | what it shows | | seconds |\n|---|---|---|---|\n' >"$rows"
SECONDS=0 # bash counts from here, but takes its start from the environment
total=600
if [[ $device == cpu ]]; then
    total=3600
fi

# wanted NAME: whether that part is to run.
wanted() { [[ -z $only || ,$only, == *,$1,* ]]; }

# budget LIMIT: prints the seconds that a part may take: LIMIT, or what is left of the whole.
budget() {
    local left=$((total - 20 - SECONDS)) # 10 s until timeout kills, 10 s for the tables
    echo $(($1 < left ? $1 : left))
}

# part NAME LIMIT SHOWS COMMAND...: runs a command for at most LIMIT seconds, and copies its output to NAME.txt.
part() {
    local name=$1 limit shows=$3 begun=$SECONDS code=0 verdict=ran left
    limit=$(budget "$2")
    shift 3
    wanted "$name" || return 0
    if ((limit <= 0)); then
        failed=1
        note "$name" "$shows" "not run: the $total s are over" 0
        return
    fi
    printf '\n== %s (at most %s s): %s\n' "$name" "$limit" "$shows"
    # After an interrupt, pytest writes the report of the tests that have ended.
    timeout --signal="${signal:-TERM}" --kill-after=10 "$limit" "$@" 2>&1 | tee "$results/$name.txt" ||
        code=$?
    left=$(sed -n 's/^left out, no time: //p' "$results/$name.txt" | paste -sd ';')
    if ((code == 124 || code == 137)); then
        verdict="stopped after $limit s"
    elif ((code != 0)); then
        verdict="FAILED, code $code"
    elif [[ -n $left ]]; then
        verdict="ran without ${left//;/; }"
    fi
    if [[ $verdict != ran ]]; then
        failed=1
    fi
    note "$name" "$shows" "$verdict" $((SECONDS - begun))
}

# note NAME SHOWS VERDICT SECONDS: adds a part to the first table.
note() { printf '| %s | %s | %s | %s |\n' "$@" >>"$rows"; }

# tests NAME LIMIT SHOWS OPTIONS...: runs pytest with a report, of which the last table has a row for each test.
tests() {
    local name=$1 limit=$2 shows=$3
    shift 3
    wanted "$name" || return 0
    rm -f "$results/$name.xml"
    reports+=("$results/$name.xml")
    signal=INT part "$name" "$limit" "$shows" "$python" -m pytest --junitxml="$results/$name.xml" "$@"
}

# bench NAME LIMIT SHOWS OPTIONS...: runs a benchmark with --json.
bench() {
    local name=$1 limit=$2 shows=$3
    shift 3
    wanted "$name" || return 0
    rm -f "$results/$name.json"
    part "$name" "$limit" "$shows" "$python" "benchmarks/$name.py" --device "$device" --json "$results/$name.json" \
        --budget $(($(budget "$limit") - 10)) "$@"
}

gpu_tests="the tests marked gpu: the next table"
start="time to the first step, to --help and to an error"
recovery="stall by a snapshot, a checkpoint, a rollback and a diagnosis"
overhead="the defaults over a bare loop, and whether a step waits for the card"
operations="kernels that a step launches beyond a bare loop's, as if on a card"
graphs="compile=graph beside compiled and uncompiled steps"
throughput="speed over plain PyTorch and torchvision's recipe, MFU, waiting for data"
fp8="fp8 beside bf16: speed, MFU and loss, at widths 768 and 4096"
memory="peak memory of a loss in chunks"
images="images per second from JPEG files, beside torchvision's DataLoader with as many workers"
heads="speed of head and loss: padded vocabulary, compiled"
growth="time and memory over width, block and data"

part card 60 "PyTorch's build can run on this card" "$python" benchmarks/card.py --device "$device"
if [[ $device == cuda ]]; then
    workers=$(($(nproc) < 14 ? $(nproc) : 14))
    compiled=tests/trainer/test_compile_warmup.py # takes minutes: last, with the time that is left
    mapfile -t files < <(grep -rlE '\bCARD\b|mark\.gpu' tests --include='test_*.py') # not all, which take 30 s to collect
    bench throughput 190 "$throughput" --sizes gpt2,resnet50,resnet18 --rounds 5
    tests tests 170 "$gpu_tests" --all -m gpu -n "$workers" --maxprocesses="$workers" --dist worksteal \
        --ignore="$compiled" "${files[@]}"
    bench overhead 80 "$overhead" --precision bf16
    bench fp8 70 "$fp8" --rounds 40
    bench recovery 60 "$recovery" --size gpt2 --precision bf16 --rounds 2
    bench graphs 50 "$graphs" --rounds 5
    bench operations 40 "$operations" --precision bf16
    bench images_per_second 40 "$images" --workers "1,2,8" --rounds 3
    bench head 30 "$heads"
    bench memory 30 "$memory"
    bench start 30 "$start" --rounds 1
    bench growth 40 "$growth" --only width,block,data --rounds 3
    tests compiled 300 "compiled runs on the card: the next table" --all -m gpu -n 0 "$compiled"
else # generous limits: a CPU may be busy with other work
    tests tests 300 "the same tests where they run on a CPU: the next table" --all -n 1 -k cpu \
        tests/laws/test_on_a_card.py tests/parallel/test_nccl.py tests/machine/test_determinism.py
    bench start 300 "$start" --rounds 1
    bench overhead 300 "$overhead" --tiny --precision fp32 --rounds 2
    bench graphs 300 "$graphs" --rounds 1 --turn 1
    bench operations 300 "$operations" --precision fp32
    bench throughput 300 "$throughput" --sizes gpt_tiny,resnet_tiny --precision fp32 --rounds 2
    bench recovery 300 "$recovery" --size tiny --precision fp32 --rounds 1
    bench memory 120 "$memory" --samples 2 --zloss palm
    bench images_per_second 120 "$images" --files 24 --batch 4 --count 3 --rounds 1
    bench fp8 300 "$fp8" --rounds 4 --widths 32
    bench head 120 "$heads" --tiny --precision bf16 --rounds 2
    bench growth 300 "$growth" --tiny --precision fp32 --only width,data --rounds 1
fi

{
    cat "$rows"
    printf '\n'
    "$python" benchmarks/shown.py "${reports[@]}" || failed=1
    printf '\n'
} >"$results/table.md"
shopt -s nullglob
files=("$results"/*.json)
if ((${#files[@]})); then
    "$python" benchmarks/targets.py --device "$device" "${files[@]}" >>"$results/table.md" || failed=1
fi
if [[ $device == cpu ]]; then
    printf '\nTiny models only: their steps are almost all overhead, so the ratios mean nothing.\n' >>"$results/table.md"
fi
printf '\n'
cat "$results/table.md"
if [[ $device == cuda ]]; then
    "$python" docs/results.py --card "$results" || failed=1
fi
exit "$failed"
