"""Scores: how large the numbers are that a model takes a softmax of, whoever wrote its attention."""

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stabletrain.forensics.values import is_float, tensors

SOFTMAXES = ("aten._softmax", "aten._safe_softmax")
"""Not the log-softmax of a loss, whose inputs are the model's logits."""


class Scores(TorchDispatchMode):
    """Keeps the largest finite entry that a softmax reads within it; what a mask has made very small is none.

    Attributes:
        largest: that entry; NaN if there was no softmax.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = math.nan

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs the operation as it is."""
        if str(getattr(func, "overloadpacket", func)) in SOFTMAXES:
            scores = next(iter(tensors(args)))
            if is_float(scores) and scores.numel():
                top = float(torch.where(torch.isfinite(scores), scores, -math.inf).max())
                self.largest = top if math.isnan(self.largest) else max(self.largest, top)
        return func(*args, **(kwargs or {}))
