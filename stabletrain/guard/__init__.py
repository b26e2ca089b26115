"""The guard and the diagnosis for a training loop of the user's own: `Guard`.

The rules are those of `train.py`: the same `guard/policy/` judges a step, and the same `forensics/` explains one
that was withheld. The difference is where a step comes from: the user's closure, which runs again on the live model.

| file | |
|---|---|
| guard | `Guard`: runs the user's closures forward and backward, and applies the update, or changes nothing at all |
| attached_guard, attach | judges at `optimizer.step()`, for a loop that cannot be edited |
| loop_guard | what both do with a step: begin, judge, apply or withhold, follow the verdict |
| options | the options of a guard, and the policy that is built from them |
| judge | measures a step, judges it with `step.py`'s `close_gate`, and clips |
| micro_batch | a closure with its batch: one micro-batch of a step |
| gradients | the gradients of the optimizer's parameters, and their norms |
| spikes | what counts as a spike in a loop of which nothing is known |
| states | snapshots to roll back to, and the position of the data loader |
| load_listener | notices that the loop loads weights or moments by itself |
| rerun, shared_reruns | runs a step's closures again, and restores everything; on several ranks together |
| repeat | computes the gradients of a step twice, which must give the same bits |
| samples | the samples of a batch: which are bad, and which make the step fail |
| subject | the step as an investigation sees it |
| saved_step | the step in an incident's folder, and its replay from there |
| incidents | investigates a withheld step and writes its folder |
"""

from stabletrain.guard.policy import NoGuard, RollbackGuard, SkipGuard

__all__ = ["NoGuard", "RollbackGuard", "SkipGuard"]
