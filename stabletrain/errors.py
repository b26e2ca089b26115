"""The errors that end a run: a bad configuration, a halt by the guard, a lost rank, an interruption.

The message of each error is written for the user: name, value, bound, fix. `train.py` prints it and exits with
`exit_code`, which is part of the command line's contract.
"""

import difflib
import functools
import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

PACKAGE = os.path.realpath(Path(__file__).parent) + os.sep
LIBRARIES = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of stabletrain and of Python, and names of folders of installed packages: their code is not the user's."""


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


class WrongCard(ConfigError):
    """This machine's card, or its build of PyTorch, cannot do what the run needs; `slurm/job.sh` asks for another."""

    exit_code = 4


class TrainingHalted(StabletrainError):
    """The guard stopped the run, because continuing would not help. The last good checkpoint is kept.

    Attributes:
        advice: lines that say what to type next; empty if nothing is known.
    """

    exit_code = 3
    advice: str = ""


class NotSaved(StabletrainError):
    """A run has finished, but its last state could not be written.

    Attributes:
        loss: the last validation loss, nats per target.
    """

    def __init__(self, message: str, loss: float | None) -> None:
        super().__init__(message)
        self.loss = loss


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


def own_traceback(error: BaseException) -> str | None:
    """Formats an error with a traceback shortened to the user's code; None if no frame is the user's.

    Leaves out the frames before the first one in the user's code, and all frames of libraries such as PyTorch.
    """
    shown = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = shown
    found = False
    while each is not None:  # the error, and those that caused it
        files = [frame.filename for frame in each.stack]
        mine = [i for i, file in enumerate(files) if is_own(file)]
        kept = [i for i in range(mine[0], len(files)) if not is_library(files[i])] if mine else []
        each.stack = traceback.StackSummary.from_list([each.stack[i] for i in kept])
        found = found or bool(mine)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return "".join(shown.format()) if found else None


@functools.cache
def is_library(file: str) -> bool:
    """Returns whether a source file belongs to Python or to an installed package, or is generated code."""
    path = os.path.realpath(file)
    return not os.path.isabs(file) or path.startswith(LIBRARIES) or not INSTALLED.isdisjoint(Path(path).parts)


@functools.cache
def is_own(file: str) -> bool:
    """Returns whether a source file is the user's: not stabletrain's, not Python's, not an installed package's."""
    return not is_library(file) and not os.path.realpath(file).startswith(PACKAGE)
