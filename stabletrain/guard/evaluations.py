"""The closure of an optimizer that runs it in its own step, such as LBFGS: forward and backward, several times.

The guard runs the first evaluation itself, at the weights where the step starts, and judges it as any step. If it
passes, the optimizer's own step runs, and its first call of the closure returns that evaluation without computing it
again. So the step has the bits that it has without the guard, and draws the same random numbers.

The evaluations after that belong to the optimizer: a line search may leave again a point where the loss is not finite.
They are judged by what the step leaves: if weights, state or buffers are not finite, all of it is undone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Evaluations:
    """The closure for one step of an optimizer.

    Args:
        parameters: those that the optimizer updates, with the gradients of the first evaluation.
        loss: returned by the first evaluation.
        evaluate: runs forward and backward at the present weights; returns the loss.
    """

    def __init__(self, parameters: Sequence[Tensor], loss: Any, evaluate: Callable[[], Any]) -> None:
        self._parameters, self._loss, self._evaluate = parameters, loss, evaluate
        self._first: list | None = self._present()

    def __call__(self) -> Any:
        """Returns the loss; the gradients are those at the present weights."""
        first, self._first = self._first, None
        # A two-step method may first move the weights, or drop the gradients: then nothing is known yet.
        if first == self._present():
            return self._loss
        with torch.enable_grad():
            return self._evaluate()

    def _present(self) -> list[tuple[int, int, int]]:
        """Identifies the present values of weights and gradients: every write in place counts a version up."""
        return [(each._version, id(each.grad), getattr(each.grad, "_version", 0)) for each in self._parameters]
