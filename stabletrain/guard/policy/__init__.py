"""The guard decides which updates are applied, and what the loop does after a skipped step.

| kind | skips | if the skips do not end |
|---|---|---|
| off | only fp16's overflows | continues |
| skip | also bad data, non-finite values and spikes | halts |
| rollback | the same as skip | rolls back to a healthy state; halts if that does not help |

`gate` runs inside the step, on the device, and must not synchronise with the host. `judge` runs on the host after the
step, on its reading, and updates the guard's statistics. A step is skipped for one of these reasons:

- `bad_data`: the batch cannot be trained on (`stability/sanitize.py`).
- `nonfinite`: the loss, the gradient norm or the norm of the buffers is NaN or Inf.
- `spike`: the loss, the gradient norm or the inputs are far above their recent values (`limits.py`).
- `recheck`: the gradient differs from that of a second computation (`recheck.py`).
- `overflow`: fp16's routine loss-scale calibration (the loss is finite, the scaled gradients are not, and the loss
  scale can still fall). It is counted separately and is not a fault.
- `state`: weights, moments or buffers have changed since the last update (`state_check.py`).
- `update`: the optimizer's step gave values that are not finite, and was undone (`update_check.py`).
"""

from stabletrain.guard.policy.rollback import RollbackGuard
from stabletrain.guard.policy.skip import NoGuard, SkipGuard

__all__ = ["NoGuard", "RollbackGuard", "SkipGuard"]
