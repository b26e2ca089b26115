"""Why a step was skipped: its kind, which is counted, and the reason in one line.

| kind | |
|---|---|
| `state` | weights, moments or buffers have changed since the last update (`checks/state_check.py`) |
| `bad_data` | the batch cannot be trained on (`stability/sanitize.py`) |
| `update` | the optimizer's step gave values that are not finite, and was undone (`checks/update_check.py`) |
| `overflow` | fp16's scaled gradients are not finite, but the loss is: routine, the loss scale falls |
| `nonfinite` | the loss, the gradient norm or the norm of the buffers is NaN or Inf |
| `recheck` | the gradient differs from that of a second computation (`checks/recheck.py`) |
| `spike` | the loss, the gradient norm or the inputs are far above their recent values (`limits.py`) |

If several apply, the first one in this table is named: the others may follow from it.
"""

import math

from stabletrain.guard.policy.limits import Limits
from stabletrain.records import Reading

KINDS = ("bad_data", "nonfinite", "spike", "overflow", "state", "recheck", "update")
"""All kinds, in the order in which they are logged."""

CHANGED = "weights, moments or buffers are not what the last update left"
GRADIENT_DIFFERS = "the gradient came out differently when it was computed a second time"
BAD_UPDATE = "the optimizer's step gave values that are not finite, from a finite gradient"
UPDATE_DIFFERS = "the optimizer's update came out differently when it was computed a second time"


def overflow_reason(reading: Reading) -> str:
    """Describes in one line an update that fp16's loss scaling skipped."""
    return f"fp16 overflow at loss scale {reading.loss_scale:g}: the scale is lowered"


def kind_and_reason(reading: Reading, limits: Limits, *, gradient_differs: bool) -> tuple[str, str]:
    """Returns kind and reason of a skipped step.

    Args:
        reading: of the step.
        limits: those that hold in this step.
        gradient_differs: whether its gradient differs from that of a second computation.
    """
    if reading.state_changed:
        return "state", CHANGED
    if reading.bad_data:
        return "bad_data", "the batch holds data that cannot be trained on"
    if reading.bad_update:
        return "update", BAD_UPDATE
    if reading.overflow:
        return "overflow", overflow_reason(reading)
    measured = (
        ("loss", reading.loss),
        ("gradient norm", reading.grad_norm),
        ("norm of the buffers", reading.buffers),
    )
    for what, value in measured:
        if not math.isfinite(value):
            return "nonfinite", f"{what} is {value}"
    if gradient_differs:
        return "recheck", GRADIENT_DIFFERS
    return "spike", limits.exceeded(reading)
