"""Prefetching: computes the next batches on a background thread while the current one is trained on.

A batch is a pure function of its number. After a rollback, batches of other numbers are therefore computed on demand,
and unneeded ones are dropped.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from stabletrain.records import Batch


class Prefetch:
    """Returns batches by number and prefetches the next ones.

    Attributes:
        ahead: number of batches to compute beyond the requested one.
    """

    def __init__(self, load: Callable[[int], Batch], ahead: int = 2, pin: bool = False) -> None:
        """Takes `load`, which returns the batch of a number; `pin` also pins its memory on the background thread."""
        self.ahead = ahead
        self._load, self._pin = load, pin
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._waiting: dict[int, Future[Batch]] = {}

    def get(self, step: int) -> Batch:
        """Returns batch number `step`; raises an error of `load` at the step it belongs to."""
        wanted = range(step, step + self.ahead + 1)
        for number in [number for number in self._waiting if number not in wanted]:
            self._waiting.pop(number).cancel()
        for number in wanted:
            if number not in self._waiting:
                self._waiting[number] = self._pool.submit(self._make, number)
        return self._waiting.pop(step).result()

    def forget(self) -> None:
        """Drops all prefetched batches. Call this if `load` now returns other batches for the same numbers."""
        for number in list(self._waiting):
            self._waiting.pop(number).cancel()

    def _make(self, number: int) -> Batch:
        batch = self._load(number)
        return batch.pin_memory() if self._pin else batch

    def close(self) -> None:
        """Stops the thread and drops the batches it has not finished."""
        self._pool.shutdown(wait=True, cancel_futures=True)
