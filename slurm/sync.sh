#!/usr/bin/env bash
# Uploads offline runs to Weights & Biases. Run it on a login node, as often as you like:
#
#   slurm/sync.sh [--dry-run] [--all] [FOLDER ...]          folders of runs or sweeps (default: outputs multirun)
#
# The same as `stabletrain sync` of this checkout. Requires `wandb login` once.
PYTHONPATH=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)${PYTHONPATH:+:$PYTHONPATH} exec python -m stabletrain.cli.commands sync "$@"
