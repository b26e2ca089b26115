"""Moves batches to the training device: on CUDA beside the computation, on a stream of its own.

The host is ahead of the device, so a batch is copied while the device still computes with the one before it. The
computation waits, on the device, until its own batch is there.
"""

import torch

from stabletrain.records import Batch


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
