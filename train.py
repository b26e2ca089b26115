"""Trains one configuration, or with `-m` sweeps over several. See `python train.py --help`."""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from stabletrain.cli.train import launch, run_job
from stabletrain.parallel.ranks import exit_process


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Trains one run; returns the validation loss, which Hydra's optimizing sweepers minimize."""
    return run_job(cfg)


if __name__ == "__main__":
    exit_process(launch(main, Path(__file__).parent / "conf"))
