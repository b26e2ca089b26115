"""Finds the largest attention logit of a forward pass, whichever code implements the attention."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stabletrain.forensics.probes.fp8_casts import FORMATS
from stabletrain.forensics.trace.values import is_float, tensors

SOFTMAXES = ("aten._softmax", "aten._safe_softmax")
"""Softmax operations of attention. The log-softmax of a loss is excluded: it reads the model's logits."""


class Scores(TorchDispatchMode):
    """Records the largest finite value that a softmax reads.

    Attributes:
        largest: that value; NaN if no softmax ran.
        fp8: whether an operation wrote fp8 values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = math.nan
        self.fp8 = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs the operation unchanged."""
        if str(getattr(func, "overloadpacket", func)) in SOFTMAXES:
            scores = next(iter(tensors(args)))
            if is_float(scores) and scores.numel():
                # masked entries are -inf or very small, and must not count
                top = float(torch.where(torch.isfinite(scores), scores, -math.inf).max())
                self.largest = top if math.isnan(self.largest) else max(self.largest, top)
        out = func(*args, **(kwargs or {}))
        self.fp8 |= isinstance(out, Tensor) and out.dtype in FORMATS
        return out

    def metrics(self) -> dict[str, float]:
        """Returns the values, named as the monitors' metrics."""
        return {"monitors/softmax_max": self.largest, "monitors/fp8": float(self.fp8)}
