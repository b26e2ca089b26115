"""The errors that end a run: a bad configuration, a halt by the guard, a lost rank, an interruption.

The message of each error is written for the user: name, value, bound, fix. `train.py` prints it and exits with
`exit_code`, which is part of the command line's contract.
"""

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the known name most similar to `word`; empty if none reaches `cutoff`, in [0, 1] (see `difflib`)."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns `; did you mean ...?` with the closest of `known`; empty if none is close."""
    found = closest(word, known, cutoff)
    return f"; did you mean {found}?" if found else ""


class StabletrainError(Exception):
    """Base class of errors that are printed as one message, without a traceback."""

    exit_code = 1


class ConfigError(StabletrainError):
    """The configuration, or the user's model or data, cannot work as given."""

    exit_code = 2


class TrainingHalted(StabletrainError):
    """The guard stopped the run, because continuing would not help. The last good checkpoint is kept."""

    exit_code = 3


class RankLost(StabletrainError):
    """Another rank has ended, and this one cannot continue without it."""


class Interrupted(StabletrainError):
    """A signal ended the run between two steps; if its state was saved, `resume=auto` continues it.

    The exit code is 75 (EX_TEMPFAIL of sysexits.h: try again later) if the state was saved, else 130.
    """

    def __init__(self, message: str, *, saved: bool) -> None:
        super().__init__(message)
        self.saved = saved
        self.exit_code = 75 if saved else 130
