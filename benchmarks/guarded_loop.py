"""The plain loop of bare.py with `Guard` in place of backward, clipping and update."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bare import BareLoop, cosine
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.guard.guard import Guard
from stabletrain.records import Batch


class GuardedLoop(BareLoop):
    """The plain loop, guarded.

    Args:
        folder: for incidents.
        checked: whether each update is checked, as that of an optimizer that is not proven to stay finite.
        options: of the guard.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        optimizer: Optimizer,
        *,
        bf16: bool,
        folder: Path,
        checked: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, batches, optimizer, bf16=bf16)
        if checked:
            optimizer.register_step_pre_hook(lambda *_: None)  # as far as the guard knows, it may write weights
        self.guard = Guard(model, optimizer, folder=folder, max_norm=1.0, **options)

    def __call__(self) -> None:
        """Takes one training step."""
        batch = next(self.batches)
        factor = cosine(self.step, 50, self.steps)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        self.guard.step(self.loss, batch=(batch.inputs, batch.targets))
        self.step += 1

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Runs the forward pass."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.model(inputs)
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class AttachedLoop(BareLoop):
    """The plain loop as it is, with a guard attached.

    Args:
        folder: for incidents.
        traced: whether all steps are traced, as after a fault that could not be named.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        optimizer: Optimizer,
        *,
        bf16: bool,
        folder: Path,
        traced: bool = False,
    ) -> None:
        super().__init__(model, batches, optimizer, bf16=bf16)
        self.guard, self.traced = Guard.attach(model, optimizer, folder=folder), traced

    def __call__(self) -> None:
        """Takes one training step."""
        if self.traced:
            self.guard._recorder.live.arm()
        super().__call__()


def guarded_of(
    bare: BareLoop,
    batches: Sequence[Batch],
    optimizer: tuple[Callable[[nn.Module, float], Optimizer], float],
    folder: Path,
    *,
    kind: type[BareLoop] = GuardedLoop,
    **options: Any,
) -> BareLoop:
    """Returns a guarded loop that starts where a plain one does.

    Args:
        optimizer: makes the optimizer, and its peak learning rate.
        folder: for incidents.
        kind: `GuardedLoop` or `AttachedLoop`.
        options: of the guard.
    """
    make, lr = optimizer
    model = copy.deepcopy(bare.model)
    return kind(model, batches, make(model, lr), bf16=bare.bf16, folder=folder, **options)
