"""The guard decides which updates are applied, and what the loop does after a skipped step.

| kind | skips | if the skips do not end |
|---|---|---|
| off | only fp16's overflows | continues |
| skip | also bad data, non-finite values and spikes | halts |
| rollback | the same as skip | rolls back to a healthy state; halts if that does not help |

`gate` runs inside the step, on the device, and must not synchronise with the host. `judge` runs on the host after the
step, on its reading, and updates the guard's statistics.

| file | |
|---|---|
| off, skip, rollback | the three guards: `NoGuard`, `SkipGuard`, `RollbackGuard` |
| limits | limits above which the loss, the gradient norm or the inputs are a spike; why a step was skipped |
| high_norms | high gradient norms that a user's loop accepts: those that persist, and those of coupled guards |
| machine_faults | takes a step again if memory or arithmetic failed |
| kept | takes a step again without the samples that are at fault |
| slow | slow spikes and divergence: changes that no single step shows |
| retained | steps of the states that a rollback may restore |
"""

from stabletrain.guard.policy.off import NoGuard
from stabletrain.guard.policy.rollback import RollbackGuard
from stabletrain.guard.policy.skip import SkipGuard

__all__ = ["NoGuard", "RollbackGuard", "SkipGuard"]
