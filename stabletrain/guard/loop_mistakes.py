"""Two mistakes of a training loop that no step shows, because every number is finite: each is one alarm.

| kind | mistake |
|---|---|
| `scaled_clipping` | gradients are clipped while they are still multiplied by the loss scale: steps are far too short |
| `lost_moments` | a resumed loop has restored the guard, but not the optimizer: its moments begin at zero |
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torch.optim import Optimizer

from stabletrain.monitors.rolling import Alarm
from stabletrain.records import Reading

SAME_NORMS = 5
"""After so many steps in a row whose norm, times the loss scale, is the same round number, it is a clipping's bound."""

ROUNDING = 1e-4
"""Relative distance of such a norm from the bound; `clip_grad_norm_` leaves 1e-6 / norm."""

SMALL = 1e-2
"""A loop that means to clip does not clip to less than this."""


class ScaledClipping:
    """Finds a loop that clips the gradients before `scaler.unscale_`.

    Their norm is then the clipping's bound divided by the loss scale, in every step.
    """

    def __init__(self) -> None:
        self._bound, self._steps = 0.0, 0

    def add(self, reading: Reading) -> list[Alarm]:
        """Adds an applied step; returns an alarm when it is the `SAME_NORMS`-th of its kind in a row."""
        if not (reading.loss_scale > 1 and 0 < reading.grad_norm < SMALL):
            self._steps = 0
            return []
        scaled = reading.grad_norm * reading.loss_scale
        bound = float(f"{scaled:.2g}")
        clipped = abs(scaled - bound) <= ROUNDING * bound
        self._steps = self._steps + 1 if clipped and bound == self._bound else int(clipped)
        self._bound = bound
        if self._steps != SAME_NORMS:
            return []
        text = (
            f"in {SAME_NORMS} steps in a row, the gradient norm times the loss scale was {bound:g}: the loop clips the "
            f"gradients to {bound:g} while they are still scaled by {reading.loss_scale:g}, so updates are far too "
            "short. fix: call scaler.unscale_(optimizer) before it clips"
        )
        return [Alarm("scaled_clipping", text, reading.step - SAME_NORMS + 1)]


def watch_for_lost_moments(optimizer: Optimizer, steps: int, show: Callable[[Alarm], None]) -> None:
    """Calls `show` if the optimizer's next step finds no state of it, and makes one.

    Args:
        optimizer: of a loop that is resumed.
        steps: number of steps that the guard had judged when it was saved.
        show: a method of the guard, which is held weakly.
    """
    shown, found = WeakMethod(show), []

    def before(optimizer: Optimizer, *_: Any) -> None:
        found.append(any(optimizer.state.values()))

    def after(optimizer: Optimizer, *_: Any) -> None:
        for handle in handles:
            handle.remove()
        if not any(found) and any(optimizer.state.values()) and (tell := shown()) is not None:
            text = (
                f"{type(optimizer).__name__} had no state, although the guard was restored after {steps:,} steps: its "
                "moments begin at zero. fix: save its state_dict() with the guard's, and load it too"
            )
            tell(Alarm("lost_moments", text))

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
