"""Health: what makes a checkpoint unhealthy whatever its owner believes of it."""

import torch

from stabletrain.state.tree import Tree, flatten

SECOND_MOMENT = "exp_avg_sq"
"""PyTorch's name of the running mean of squared gradients."""


def unsound(tree: Tree) -> str | None:
    """Why the first bad tensor among weights, buffers and optimizer state is bad; None if there is none.

    A weight or moment must be finite; a second moment, as a mean of squares, at least 0: one that is below was damaged,
    and its square root would be NaN in the very next update.
    """
    judged = {"model": tree["model"], "optimizer": tree.get("optimizer", {}).get("state", {})}
    for path, tensor in flatten(judged)[0].items():
        name = path.removeprefix("model/")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} is not finite"
        if path.endswith(f"/{SECOND_MOMENT}") and bool((tensor < 0).any()):
            return f"{name} is negative"
    return None
