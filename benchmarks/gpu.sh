#!/usr/bin/env bash
# Runs everything that needs a GPU, in under ten minutes on one H100 or H200: the tests marked gpu, including laws 3, 4 and
# 5 on the GPU, and the benchmarks. Ends with one table: which parts ran, and which targets are met.
#
#   benchmarks/gpu.sh [folder]                  writes to ./gpu-results, or to the given folder
#   benchmarks/gpu.sh --device cpu [folder]     the same parts with tiny models, only to check that the script runs
#
# A part that fails or exceeds its time limit does not stop the others, but makes the exit code 1. A missed target is
# reported and is not a failure.
set -euo pipefail

device=cuda
if [[ ${1:-} == --device ]]; then
    device=${2:?gpu.sh: --device needs cpu or cuda}
    shift 2
fi
if [[ $device != cpu && $device != cuda ]]; then
    echo "gpu.sh: --device $device is neither cpu nor cuda" >&2
    exit 2
fi
if (($# > 1)) || [[ ${1:-} == -* ]]; then
    echo "usage: benchmarks/gpu.sh [--device cpu|cuda] [folder]" >&2
    exit 2
fi

results=${1:-gpu-results}
mkdir -p "$results"
results=$(cd "$results" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8} # before CUDA starts: determinism=strict needs it

if [[ $device == cuda ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: PyTorch sees no CUDA device; use --device cpu to check that the script runs" >&2
    exit 2
fi

failed=0
parts=()

# part NAME LIMIT COMMAND...: runs a command for at most LIMIT seconds, and copies its output to NAME.txt.
part() {
    local name=$1 limit=$2 begun=$SECONDS code=0
    shift 2
    printf '\n== %s (at most %s s)\n' "$name" "$limit"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$results/$name.txt" || code=$?
    local verdict=ran
    if ((code == 124 || code == 137)); then
        verdict="did not end within $limit s"
    elif ((code != 0)); then
        verdict="FAILED, code $code"
    fi
    if ((code != 0)); then
        failed=1
    fi
    parts+=("| $name | $verdict | $((SECONDS - begun)) |")
}

# bench NAME LIMIT OPTIONS...: runs a benchmark with --json.
bench() {
    local name=$1 limit=$2
    shift 2
    rm -f "$results/$name.json"
    part "$name" "$limit" "$python" "benchmarks/$name.py" --device "$device" --json "$results/$name.json" "$@"
}

if [[ $device == cuda ]]; then
    part tests 150 "$python" -m pytest -m gpu -n 4 --dist worksteal tests
    bench start 45 --rounds 1
    bench recovery 100 --size gpt2 --precision bf16 --rounds 2
    bench overhead 90 --precision bf16
    bench throughput 120 --sizes gpt2,resnet18 --rounds 5
    bench memory 35
    bench growth 50 --only width,block,data --rounds 3
else # generous limits: a CPU may be busy with other work
    part tests 300 "$python" -m pytest -n 1 tests/laws/test_on_a_card.py -k cpu
    bench start 300 --rounds 1
    bench recovery 300 --size tiny --precision fp32 --rounds 1
    bench overhead 300 --tiny --precision fp32 --rounds 2
    bench throughput 300 --sizes gpt_tiny,resnet_tiny --precision fp32 --rounds 2
    bench memory 120 --samples 2 --zloss palm
    bench growth 300 --tiny --precision fp32 --only width,data --rounds 1
fi

{
    printf '| part | | seconds |\n|---|---|---|\n'
    printf '%s\n' "${parts[@]}"
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
exit "$failed"
