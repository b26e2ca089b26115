"""How ranks explain an incident together: they agree after every part that may fail, so none waits for another forever.

A part runs on each rank by itself. Afterwards all ranks exchange whether it raised. If it raised on any of them,
`NotInvestigated` is raised on all, with that rank's error. A rank must therefore never leave a part while others wait
for it, and must exchange exactly as often as they do.
"""

from collections.abc import Callable
from typing import TypeVar

from stabletrain.checkpoint.tree import Tree
from stabletrain.errors import StabletrainError
from stabletrain.parallel.ranks import all_gather_object
from stabletrain.parallel.whole import WholeState

T = TypeVar("T")

MAX_LENGTH = 300
"""Maximum length of an error's text in characters."""


class NotInvestigated(StabletrainError):
    """An incident could not be explained; the message gives the reason. On several ranks, all raise it together."""


def one_line_of(error: Exception) -> str:
    """Returns an error's text in one line; with its type, unless it was written for the user."""
    text = str(error) if isinstance(error, StabletrainError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:MAX_LENGTH]


def exchange(work: Callable[[], T]) -> list[T]:
    """Runs `work` on every rank, and returns the results of all of them. The results must be small and picklable.

    Raises:
        NotInvestigated: `work` raised on a rank; on all ranks.
    """
    result, reason = [], ""
    try:
        result.append(work())
    except Exception as error:  # if one rank raises, all must: another would wait for it
        reason = one_line_of(error)
    gathered = all_gather_object((reason, result))
    failed = [(rank, text) for rank, (text, _) in enumerate(gathered) if text]
    if failed:
        more = f" (and {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
        raise NotInvestigated(f"rank {failed[0][0]}{more}: {failed[0][1]}")
    return [value for _, (value,) in gathered]


def on_all_ranks(work: Callable[[], T]) -> T:
    """Runs `work` on every rank, and returns this rank's own result, which is not sent.

    Raises:
        NotInvestigated: `work` raised on a rank; on all ranks.
    """
    own_result: list[T] = []
    exchange(lambda: own_result.append(work()))
    return own_result[0]


class OlderState:
    """The older state for replays. It is gathered only if a rank needs it, and then by all ranks together.

    Calling it returns the state, or None if none is left. A rank that did not need it calls `finish` instead.

    Raises:
        NotInvestigated: a rank failed; on all ranks.
    """

    def __init__(self, states: WholeState) -> None:
        self._states = states
        self._gathered = False
        self._tree: Tree | None = None

    def __call__(self) -> Tree | None:
        """Returns the state, with whole tensors."""
        if not self._gathered:
            self._gather(lambda: True)
        return self._tree

    def finish(self, error: Exception | None = None) -> None:
        """Takes part in gathering, if another rank needs the state; `error` is this rank's own error, if it failed."""

        def not_needed() -> bool:
            if error is not None:
                raise error
            return False

        if not self._gathered:
            self._gather(not_needed)

    def _gather(self, needs: Callable[[], bool]) -> None:
        self._gathered = True
        if any(exchange(needs)):
            on_all_ranks(self._states.prepare_older)
            self._tree = on_all_ranks(self._states.gather_older)
