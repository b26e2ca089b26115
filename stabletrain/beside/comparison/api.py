"""`stabletrain.compare`: runs as a data frame."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from stabletrain.beside.comparison import frames


def compare(runs: Sequence[str | Path] | str | Path, *, by_seed: bool = False) -> pd.DataFrame:
    """Returns a data frame with one row per run, indexed by the run folder; runs may still be running.

    Args:
        runs: run folders, sweep folders, or folders that contain them.
        by_seed: one row for runs that differ only in their seed, with means and standard deviations.

    Returns:
        The columns are listed at `stabletrain.beside.comparison.frame`: `val_loss` in nats per target,
        `settings.<key>` for each setting that differs, and so on. `attrs["shared"]` holds the settings that all runs
        have in common.

    Raises:
        ConfigError: a folder does not exist, or contains no runs.
    """
    found = frames.frame(*([runs] if isinstance(runs, str | Path) else runs))
    return frames.by_seed(found) if by_seed else found
