"""Several ranks run a step again together, because each needs the others to gather FSDP2's shards.

A rank decides from its own findings what it runs next, so ranks may request different variants. Before each rerun, all
exchange their requests. All ranks run the first variant requested; the others only join the collectives. A rank that is
done goes on joining until all are.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from stabletrain.parallel.ranks import all_gather_object

T = TypeVar("T")


class Reruns:
    """Reruns of a single rank: nothing to agree on."""

    def run(self, request: tuple, work: Callable[[], T]) -> T:
        """Runs `work`, which does what `request` describes."""
        del request
        return work()

    def finish(self) -> None:
        """Joins the reruns that other ranks still request."""


class SharedReruns(Reruns):
    """Reruns of several ranks.

    Args:
        join: runs what another rank requested, with this rank's own micro-batches.
    """

    def __init__(self, join: Callable[[Any], None]) -> None:
        self._join = join

    def run(self, request: tuple, work: Callable[[], T]) -> T:
        """Joins other requests until it is the turn of this one, then runs `work`."""
        while (first := self._first(request)) != request:
            self._join(first)
        return work()

    def finish(self) -> None:
        """Joins until no rank requests anything."""
        while (first := self._first(None)) is not None:
            self._join(first)

    def _first(self, request: tuple | None) -> Any:
        """Exchanges requests, None for nothing; returns the first one."""
        return next((each for each in all_gather_object(request) if each is not None), None)
