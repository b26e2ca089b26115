#!/usr/bin/env bash
# Uploads to Weights & Biases what compute nodes without network left on the disk; run on a login node, as often as you like:
#
#   slurm/sync.sh [--dry-run] [--all] [FOLDER ...]          folders of runs or sweeps; without any: outputs multirun
#
# It is `stabletrain sync` of this checkout. Needs `wandb login` once.
PYTHONPATH=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)${PYTHONPATH:+:$PYTHONPATH} exec python -m stabletrain.cli.commands sync "$@"
