"""The reference: a hand-written PyTorch training loop with nothing beyond what training needs.

It does what nanoGPT's training loop does in a step: bf16 autocast if asked, a fused optimizer, clipping by global norm,
linear warmup and cosine decay. Batches are on the device already, and the loss is never read.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from stabletrain.records import Batch


def adamw(model: nn.Module, lr: float) -> Optimizer:
    """Returns fused AdamW with weight decay on matrices; none on norms, biases and embeddings."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with_decay = [p for p in model.parameters() if p.ndim >= 2 and id(p) not in tables]
    without = [p for p in model.parameters() if p.ndim < 2 or id(p) in tables]
    groups = [{"params": with_decay, "weight_decay": 0.1}, {"params": without, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


def sgd(model: nn.Module, lr: float) -> Optimizer:
    """Returns fused SGD with momentum and weight decay on convolutions and matrices only."""
    with_decay = [p for p in model.parameters() if p.ndim >= 2]
    without = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": with_decay, "weight_decay": 1e-4}, {"params": without, "weight_decay": 0.0}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=lr, momentum=0.9, fused=True)


def cosine(step: int, warmup: int, steps: int) -> float:
    """Returns the factor on the peak learning rate: linear warmup, then cosine decay to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min((step - warmup) / (steps - warmup), 1.0)))


class BareLoop:
    """The training loop; each call takes one step.

    Args:
        model: on its device.
        batches: on the same device; cycled through.
        optimizer: of the model's parameters.
        bf16: use autocast.
        steps: length of the cosine schedule.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], optimizer: Optimizer, *, bf16: bool, steps: int = 1_000_000
    ) -> None:
        self.model, self.optimizer, self.bf16, self.steps = model, optimizer, bf16, steps
        self.device = batches[0].inputs.device
        self.batches: Iterator[Batch] = cycle(batches)
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.step = 0

    def __call__(self) -> None:
        """Takes one training step."""
        batch = next(self.batches)
        factor = cosine(self.step, 50, self.steps)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.model(batch.inputs)
        loss = F.cross_entropy(logits.flatten(0, -2).float(), batch.targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
