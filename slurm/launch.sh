#!/usr/bin/env bash
# Submits to Slurm what `python train.py` would train here; slurm/launch.sh --help lists the options.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$(command -v python || command -v python3)}
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m stabletrain.beside.slurm "$@"
