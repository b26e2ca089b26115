"""The gradients that one rank of FSDP2 computes by itself, whole and before any reduction.

Without the reduction, FSDP2 leaves them at the whole weights, which are not the module's parameters while these are
sharded. So every unit is gathered before they are read, and all ranks must do so together.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def unreduced(model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor | None]:
    """Runs forward and backward of a micro-batch; returns its loss and this rank's own gradients.

    The sums of earlier micro-batches that wait for their reduction are put back.

    Args:
        model: the root unit; its parameters have no gradient. The next micro-batch sets again what is reduced.
        run: runs forward and backward, and returns the loss.
    """
    assert isinstance(model, FSDPModule)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    model.set_requires_gradient_sync(False)
    gather(units)
    waiting = [(weight, weight.grad) for weight in model.parameters()]
    try:
        for weight, _ in waiting:
            weight.grad = None
        loss = run()
        gather(units)
        return [loss, *(weight.grad for weight in model.parameters() if weight.requires_grad)]
    finally:
        for weight, gradient in waiting:
            weight.grad = gradient
        for unit in units:
            unit.reshard()


def gather(units: Sequence[FSDPModule]) -> None:
    """Makes the weights of all units whole."""
    for unit in units:
        unit.unshard()
