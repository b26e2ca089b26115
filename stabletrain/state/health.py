"""Health: what makes a checkpoint unhealthy whatever its owner believes of it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from stabletrain.state.tree import Tree, flatten

SECOND_MOMENT = "exp_avg_sq"
"""PyTorch's name of the running mean of squared gradients."""


def unsound(tree: Tree) -> str | None:
    """Why the first bad tensor among weights, buffers and optimizer state is bad; None if there is none."""
    judged = {"model": tree["model"], "optimizer": tree.get("optimizer", {}).get("state", {})}
    return unsound_among(flatten(judged)[0])


def unsound_among(tensors: Mapping[str, Tensor]) -> str | None:
    """The same of tensors, or of parts of them, that are named `model/<name>` and `optimizer/<name>/<kind>`.

    A weight or moment must be finite; a second moment, as a mean of squares, at least 0: one that is below was damaged,
    and its square root would be NaN in the very next update.
    """
    for path, tensor in tensors.items():
        name = path.removeprefix("model/")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} is not finite"
        if path.endswith(f"/{SECOND_MOMENT}") and bool((tensor < 0).any()):
            return f"{name} is negative"
    return None
