#!/usr/bin/env bash
# Uploads to Weights & Biases what compute nodes without network left on the disk; run on a login node, as often as you like:
#
#   slurm/sync.sh [--dry-run] [--all] [FOLDER ...]          folders of runs or sweeps; without any: outputs multirun
#
# A run that was continued is in several pieces, which become one run again: each in its turn, the oldest first. A piece
# that its run is still writing is left for the next time; --all takes it too (for runs that were killed, and look as if
# they still ran). What is uploaded is not uploaded again. Needs `wandb login` once.
set -euo pipefail

dry='' all='' folders=()
for argument in "$@"; do
  case $argument in
    --dry-run) dry=1 ;;
    --all) all=1 ;;
    --help | -h) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) echo "slurm/sync.sh: $argument is not an option: there are --dry-run, --all and --help" >&2; exit 2 ;;
    *) folders+=("$argument") ;;
  esac
done
if ((${#folders[@]} == 0)); then
  for folder in outputs multirun; do
    if [[ -d $folder ]]; then folders+=("$folder"); fi
  done
fi
if ((${#folders[@]} == 0)); then
  echo "slurm/sync.sh: there is neither outputs nor multirun here: name the folders of runs" >&2
  exit 2
fi
for folder in "${folders[@]}"; do
  if [[ ! -d $folder ]]; then
    echo "slurm/sync.sh: $folder is not a folder: name those of runs or sweeps, such as multirun/<date>/<time>" >&2
    exit 2
  fi
done
if [[ -z $dry ]] && ! command -v wandb >/dev/null; then
  echo "slurm/sync.sh: there is no wandb here: activate the environment that stabletrain is installed in" >&2
  exit 2
fi

append=()   # older versions of wandb take the later pieces of a run only so
if [[ -z $dry && $(wandb sync --help 2>/dev/null) == *--append* ]]; then append=(--append); fi

uploaded=0 waiting=0 failed=0
while IFS= read -r -d '' pieces; do
  mapfile -d '' -t found < <(find "$pieces" -mindepth 1 -maxdepth 1 -type d -name 'offline-run-*' -print0 | sort -z)
  for number in "${!found[@]}"; do
    piece=${found[number]}
    if compgen -G "$piece/*.wandb.synced" >/dev/null; then continue; fi
    if [[ -z $all ]] && ((number == ${#found[@]} - 1)) && grep -qs '"status": "running"' "$pieces/../run.json"; then
      waiting=$((waiting + 1))
    elif [[ -n $dry ]]; then
      printf 'wandb sync %q\n' "$piece"
    elif wandb sync ${append[@]+"${append[@]}"} "$piece" </dev/null; then
      uploaded=$((uploaded + 1))
    else
      echo "slurm/sync.sh: $piece was not uploaded; what follows it in the same run waits for it" >&2
      failed=$((failed + 1))
      break
    fi
  done
done < <(find "${folders[@]}" -type d -name wandb -prune -print0 | sort -z)
if [[ -n $dry ]]; then exit 0; fi
echo "$uploaded uploaded, $waiting still being written, $failed failed"
((failed == 0))
