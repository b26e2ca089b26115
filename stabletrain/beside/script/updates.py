"""What is left for an optimizer to which no guard can be attached: an update that is not finite is undone.

Its steps run as they are, and may run forward and backward themselves. Gradients and losses are not judged.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from stabletrain.guard.attach import replace_method
from stabletrain.guard.checks.copies import Copies
from stabletrain.guard.checks.written import note_start


class CheckedUpdates:
    """Undoes the steps of an optimizer that leave a weight, a moment or a buffer that is not finite.

    Args:
        model: holds all parameters of the optimizer.
        tell: shows a line.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, tell: Callable[[str], None]) -> None:
        self._model, self._optimizer, self._tell = model, optimizer, tell
        self._copies, self._steps = Copies(), 0
        note_start(model, optimizer)
        self._copies.take(model, optimizer)
        replace_method(optimizer, "step", self._checking)

    def _checking(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the optimizer's new step."""

        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._steps += 1
            self._copies.take(self._model, self._optimizer)
            result = inner(*args, **kwargs)
            if not self._copies.are_finite_now():
                self._copies.put_back()
                self._tell(f"step {self._steps}: the update was not finite, and was undone")
            return result

        if hasattr(inner, "_wrapped_by_lr_sched"):  # see `LoopRecorder`
            step._wrapped_by_lr_sched = True  # ty: ignore[missing-attribute]
        return step
