"""Several ranks run a step again together, because each needs the others to gather FSDP2's shards.

What a rank runs next depends on what it found, so ranks may want different reruns. Before each, all tell what they
want. The first one's wish is then run by every rank: by those that want the same for their own result, by the others
only to take part. A rank that is done goes on taking part until all are.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from stabletrain.parallel.ranks import all_gather_object

T = TypeVar("T")


class Rounds:
    """Reruns of one rank alone: nothing to agree on."""

    def run(self, wish: tuple, work: Callable[[], T]) -> T:
        """Runs `work`, which does what `wish` describes."""
        del wish
        return work()

    def finish(self) -> None:
        """Takes part in the reruns that other ranks still want."""


class SharedRounds(Rounds):
    """Reruns of several ranks.

    Args:
        take_part: does what another rank's wish describes, with this rank's own micro-batches.
    """

    def __init__(self, take_part: Callable[[Any], None]) -> None:
        self._take_part = take_part

    def run(self, wish: tuple, work: Callable[[], T]) -> T:
        """Runs `work` when it is this wish's turn."""
        while (first := self._first(wish)) != wish:
            self._take_part(first)
        return work()

    def finish(self) -> None:
        """Takes part until no rank wants anything."""
        while (first := self._first(None)) is not None:
            self._take_part(first)

    def _first(self, wish: tuple | None) -> Any:
        """Tells the others what this rank wants, None for nothing; returns what the first of them wants."""
        return next((one for one in all_gather_object(wish) if one is not None), None)
