"""The guard: which updates may reach the weights, and what the loop does about those that did not.

| kind | withholds | and then |
|---|---|---|
| off | what fp16's loss scaling withholds | goes on |
| skip | bad data, non-finite values, spikes | goes on; halts when that does not end |
| rollback | the same | goes back to a healthy state when that does not end; halts when that does not help |

`gate` runs on the device, within the step, and must not read from the host; `judge` runs on the host, on the numbers
of a step that is over, and keeps the guard's own memory. Updates are withheld for one of these reasons:

- `bad_data`: the batch held something no model can learn from (`stability/sanitize.py`).
- `nonfinite`: loss or gradient norm is NaN or Inf.
- `spike`: one of them is far above what it was (`limits.py`).
- `overflow`: fp16's routine calibration (the loss is finite, the scaled gradients are not, and the loss scale can still
  fall). It is counted apart, and no fault.
"""

from stabletrain.stability.guard.rollback import RollbackGuard
from stabletrain.stability.guard.skip import NoGuard, SkipGuard

__all__ = ["NoGuard", "RollbackGuard", "SkipGuard"]
