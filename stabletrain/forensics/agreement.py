"""How ranks explain an incident together: they agree after every part that may fail, so none waits for another forever.

A part runs on each rank by itself. Afterwards all ranks exchange whether it raised. If it raised on any of them,
`NotInvestigated` is raised on all, with that rank's error. A rank must therefore never leave a part while others wait
for it, and must exchange exactly as often as they do.

What only some ranks need, but all must do together, is a request (`SharedRequests`).
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

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


class Requests:
    """What this rank does by itself: there are no others, or it needs none of them."""

    def run(self, name: str, *arguments: Any, work: Callable[[], T]) -> T:
        """Runs `work`, which does what the request describes."""
        return work()

    def finish(self, error: Exception | None = None) -> None:
        """Serves the other ranks' requests until all are done; `error` is this rank's own error, if it failed."""
        if error is not None:
            raise error


class SharedRequests(Requests):
    """What ranks can only do together, such as gathering shards, although each decides by itself whether it needs it.

    Before each request is run, all ranks exchange what they need. All run the first request: those that need it with
    `work`, the others only take part. A rank that is done goes on serving until all are.

    Attributes:
        serves: what this rank does for another's request, by the request's name; called with its arguments.

    Raises:
        NotInvestigated: a rank failed; on all ranks.
    """

    def __init__(self, serves: Mapping[str, Callable[..., object]]) -> None:
        self.serves = {**serves}

    def run(self, name: str, *arguments: Any, work: Callable[[], T]) -> T:
        """Serves other requests until this one is first, then runs `work`. The arguments are exchanged."""
        request = (name, *arguments)
        while (first := self._first(lambda: request)) != request:
            self._serve(first)
        return work()

    def finish(self, error: Exception | None = None) -> None:
        """See `Requests`."""

        def nothing() -> None:
            if error is not None:
                raise error

        while (first := self._first(nothing)) is not None:
            self._serve(first)

    def _first(self, needs: Callable[[], tuple | None]) -> Any:
        """Exchanges requests, None for nothing; returns the first one."""
        return next((each for each in exchange(needs) if each is not None), None)

    def _serve(self, request: tuple) -> None:
        name, *arguments = request
        try:
            self.serves[name](*arguments)
        except NotInvestigated:
            raise
        except Exception:  # the rank that asked has a result of its own, and taking part must not end the run
            return


OLDER_STATE = "older state"
"""The request for an older state, which all ranks gather together."""


class OlderState:
    """The older state for replays. It is gathered only if a rank needs it, and then by all ranks together.

    Calling it returns the state, with whole tensors, or None if none is left.
    """

    def __init__(self, states: WholeState, requests: SharedRequests) -> None:
        self._states, self._requests, self._gathered = states, requests, False
        self._tree: Tree | None = None
        requests.serves[OLDER_STATE] = self._gather

    def __call__(self) -> Tree | None:
        """Returns the state."""
        if not self._gathered:
            self._requests.run(OLDER_STATE, work=self._gather)
        return self._tree

    def _gather(self) -> None:
        self._gathered = True
        on_all_ranks(self._states.prepare_older)
        self._tree = on_all_ranks(self._states.gather_older)
