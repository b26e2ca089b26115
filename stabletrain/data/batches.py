"""Batches on their way to training: from a data set, computed ahead on background threads, to the device.

A batch is a pure function of its number. After a rollback, batches of other numbers are therefore computed on demand,
and unneeded ones are dropped.

On CUDA a batch is copied beside the computation, on a stream of its own. The host is ahead of the device, so this
happens while the device still computes with the batch before it. The computation waits, on the device, until its own
batch is there. `docs/plugins.md` lists what a data set may offer.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

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


class ToDevice:
    """Moves batches to a device, and applies their transforms there.

    On CUDA the batch is copied from page-locked memory, where `Prefetch` has put it already, or this puts it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batch: Batch) -> Batch:
        """Returns the batch on the device, complete for the operations that the current stream runs from now on."""
        if self._device.type != "cuda" or batch.inputs.is_cuda:
            return batch.to(self._device)
        self._stream = self._stream or torch.cuda.Stream(self._device)
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = batch.pin_memory().moved(self._device)
        computing.wait_event(self._stream.record_event())
        for tensor in moved.tensors():
            tensor.record_stream(computing)  # its memory must not be used again before the computation is done with it
        return moved.transformed()


class Dataset(Protocol):
    """A data set, of this package or a user's own."""

    def batch(self, step: int, size: int, split: str) -> Batch:
        """Returns batch number `step` of a split: a pure function of its arguments.

        Args:
            step: number of the batch, counted from 0.
            size: number of samples.
            split: `train` or `val`.
        """
        ...
