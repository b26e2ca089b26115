"""What can go wrong, by whose hand: the user's configuration, the run itself, or an interruption.

Each error carries one message for people: name, value, bound, fix. `train.py` prints it and exits with `exit_code`;
the codes are part of the command line's contract.
"""

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The name that `word` was probably meant to be; empty if none is close.

    Args:
        word: as typed.
        known: all names there are.
        cutoff: how similar it must be, in [0, 1]; see `difflib.get_close_matches`.
    """
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean ...?` for the closest of `known`; empty if none is close."""
    found = closest(word, known, cutoff)
    return f"; did you mean {found}?" if found else ""


class StabletrainError(Exception):
    """Base of the errors that are printed as one message, without a traceback."""

    exit_code = 1


class ConfigError(StabletrainError):
    """The configuration asks for something that cannot work; nothing was built and nothing was lost."""

    exit_code = 2


class TrainingHalted(StabletrainError):
    """The guard stopped the run because going on would not help; the last good checkpoint is kept."""

    exit_code = 3


class RankLost(StabletrainError):
    """Another of the processes that train together has ended, and this one cannot go on without it."""


class Interrupted(StabletrainError):
    """A signal ended the run between two steps; if the state is saved, `resume=auto` continues it.

    75 is EX_TEMPFAIL of sysexits.h: try again later. Without a saved state there is nothing to try again from: 130.
    """

    def __init__(self, message: str, *, saved: bool) -> None:
        super().__init__(message)
        self.saved = saved
        self.exit_code = 75 if saved else 130
