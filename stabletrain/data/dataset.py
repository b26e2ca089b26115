"""What a data set must offer; `docs/plugins.md` lists what it may offer besides."""

from typing import Protocol

from stabletrain.records import Batch


class Dataset(Protocol):
    """A data set, of this package or a user's own."""

    def batch(self, step: int, size: int, split: str) -> Batch:
        """Returns batch number `step` of a split: a pure function of its arguments.

        Args:
            step: number of the batch, counted from 0.
            size: number of samples.
            split: `train` or `val`.
        """
        ...
