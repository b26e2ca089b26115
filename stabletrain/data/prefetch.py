"""The next batches, computed on a background thread while the current one is trained on.

A batch is a pure function of its number, so guessing ahead cannot go wrong: a number that was not guessed (after a
rollback) is simply computed, and stale guesses are dropped.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from stabletrain.records import Batch


class Prefetch:
    """Batches by number, `ahead` of them under way.

    Attributes:
        ahead: how many to compute beyond the one asked for.
    """

    def __init__(self, load: Callable[[int], Batch], ahead: int = 2, pin: bool = False) -> None:
        """`load` gives the batch of a number; with `pin` it is put into page-locked memory on the thread too."""
        self.ahead = ahead
        self._load, self._pin = load, pin
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._waiting: dict[int, Future[Batch]] = {}

    def get(self, step: int) -> Batch:
        """The batch of number `step`; an error of `load` is raised here, at the step it belongs to."""
        wanted = range(step, step + self.ahead + 1)
        for number in [number for number in self._waiting if number not in wanted]:
            self._waiting.pop(number).cancel()
        for number in wanted:
            if number not in self._waiting:
                self._waiting[number] = self._pool.submit(self._make, number)
        return self._waiting.pop(step).result()

    def forget(self) -> None:
        """Drops every guess: the batches of the same numbers have become others."""
        for number in list(self._waiting):
            self._waiting.pop(number).cancel()

    def _make(self, number: int) -> Batch:
        batch = self._load(number)
        return batch.pin_memory() if self._pin else batch

    def close(self) -> None:
        """Stops the thread; what it is computing is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
