"""The guard: no unsafe update reaches the weights, and a step that was held is explained.

Two doors lead into this room: `train.py`, whose loop is `trainer/loop.py`, and `Guard`, for a training loop of the
user's own. Both judge a step by the same policy, explain it by the same forensics, and go back to the same kind of
snapshots.

| file | |
|---|---|
| engine | what follows from a step's numbers: the verdict, the explanation, the test of the machine |
| policy/ | which updates are applied, and what follows a skipped one |
| checks/ | self-checks of a step: memory, arithmetic, updates that are not finite |
| states | snapshots: which are kept, and which one is restored |

The rest is the door for a user's own loop:

| file | |
|---|---|
| guard | `Guard`: runs the user's closures forward and backward, and applies the update, or changes nothing at all |
| attached_guard, attach | judges at `optimizer.step()`, for a loop that cannot be edited |
| loop_guard | what both do with a verdict: skip, take again, restore, roll back, halt; the step as the engine sees it |
| own_loop | the step itself: begin, judge, apply, hold, run again |
| evaluations | the closure of an optimizer that runs it in its own step, such as LBFGS |
| options | checks the options, and builds the policy and the precision from them |
| judge | measures a step, judges it and clips |
| micro_batch | a closure with its batch: one micro-batch of a step |
| gradients | the gradients of the optimizer's parameters, and their norms |
| loop_states | the snapshots of the loop, and the position of its data loader |
| loop_forecast | predicts trouble from the applied steps |
| reports | events and lines |
| rerun | runs a step's closures again, and restores everything; twice, to compare the bits |
| samples | the samples of a batch: which are bad, and which make the step fail |
| whole_weights | whole weights in a model that FSDP2 shards, to try single samples |
| subject, saved_step, incidents | the step as an investigation sees it, on disk, and its incident |
| in_code | fixes in words that hold in any loop |
"""

from stabletrain.guard.policy import NoGuard, RollbackGuard, SkipGuard

__all__ = ["NoGuard", "RollbackGuard", "SkipGuard"]
