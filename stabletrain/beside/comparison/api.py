"""`stabletrain.compare`: runs as a data frame."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from stabletrain.beside.comparison import frames
from stabletrain.beside.comparison.by_setting import by_setting


class Comparison(pd.DataFrame):
    """A data frame with one row per run. What pandas makes of it, such as a part of its rows, is a plain data frame."""

    def by_setting(self, *keys: str) -> pd.DataFrame:
        """Returns one row per setting, the best first, with the differences to it; see `by_setting.by_setting`.

        Args:
            keys: what tells the settings apart, such as `precision`; by default all but seed and learning rate.

        Raises:
            ConfigError: a key is the same in all runs.
        """
        return by_setting(self, *keys)


def compare(runs: Sequence[str | Path] | str | Path, *, by_seed: bool = False) -> Comparison:
    """Returns a data frame with one row per run, indexed by the run folder; runs may still be running.

    Args:
        runs: run folders, sweep folders, or folders that contain them.
        by_seed: one row for runs that differ only in their seed, with means and standard deviations.

    Returns:
        The columns are listed at `stabletrain.beside.comparison.frame`: `val_loss` in nats per target,
        `settings.<key>` for each setting that differs, and so on. `attrs["shared"]` holds the settings that all runs
        have in common. `.by_setting("precision")` compares settings: mean and deviation, and paired differences.

    Raises:
        ConfigError: a folder does not exist, or contains no runs.
    """
    found = frames.frame(*([runs] if isinstance(runs, str | Path) else runs))
    found = frames.by_seed(found) if by_seed else found
    made = Comparison(found)
    made.attrs = found.attrs
    return made
