"""Prefetching: computes the next batches on background threads while the current one is trained on.

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

    def __init__(self, load: Callable[[int], Batch], ahead: int = 2, pin: bool = False, threads: int = 1) -> None:
        """Starts without batches.

        Args:
            load: returns the batch of a number. With several threads it is called at the same time for several numbers.
            ahead: see `Prefetch`.
            pin: whether to pin the batches' memory, on the background thread.
            threads: number of background threads. While one of two assembles a batch, the other keeps the workers busy.
        """
        self.ahead = ahead
        self._load, self._pin = load, pin
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="batches")
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
        """Stops the threads and drops the batches they have not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)
