"""The reference: a training loop as one writes it by hand, in plain PyTorch, with nothing that is not needed.

Batches lie ready on the device, the loss is never read, autocast in bf16 if asked; a fused optimizer, clipping at a
global norm, a linear warmup and a cosine: what the training loop of nanoGPT does in a step.
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
    """Fused AdamW; weight decay on matrices, none on norms, biases and embeddings."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with_decay = [p for p in model.parameters() if p.ndim >= 2 and id(p) not in tables]
    without = [p for p in model.parameters() if p.ndim < 2 or id(p) in tables]
    groups = [{"params": with_decay, "weight_decay": 0.1}, {"params": without, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


def sgd(model: nn.Module, lr: float) -> Optimizer:
    """Fused SGD with momentum; weight decay on convolutions and matrices only."""
    with_decay = [p for p in model.parameters() if p.ndim >= 2]
    without = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": with_decay, "weight_decay": 1e-4}, {"params": without, "weight_decay": 0.0}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=lr, momentum=0.9, fused=True)


def cosine(step: int, warmup: int, steps: int) -> float:
    """The factor of the peak learning rate: a linear warmup, then half a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min((step - warmup) / (steps - warmup), 1.0)))


class BareLoop:
    """The loop, a step for each call.

    Args:
        model: on its device.
        batches: on that device too; read round and round.
        optimizer: over the model's parameters.
        bf16: autocast.
        steps: of the whole cosine.
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
        """One step."""
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
