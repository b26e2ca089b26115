"""The guard and the diagnosis for a training loop of the user's own: `Guard`.

The rules are those of `train.py`: the same `stability/guard/` judges a step, and the same `forensics/` explains one
that was withheld. What differs is where a step comes from: the user's closure, which is run again on the live model.

| file | |
|---|---|
| guard | `Guard`: forward, backward, judge, clip, update, or nothing at all |
| judge | measures a step, judges it and clips |
| part | a closure with its batch: one micro-batch of a step |
| gradients | the gradients of the optimizer's parameters, and their norms |
| spikes | what counts as a spike in a loop of which nothing is known |
| scaling | the loss scale: none, this project's, or a `torch.amp.GradScaler` |
| agreement | the numbers of a step, equal on all ranks |
| states | snapshots to roll back to, and the position of the data loader |
| rerun | runs a step's closures again, and puts everything back |
| samples | the samples of a batch: which are bad, and which make the step fail |
| subject | the step as an investigation sees it |
| rounds | several ranks run again together |
| incidents | investigates a withheld step and writes its folder |
| attached_guard, attach | judges at `optimizer.step()`, for a loop that cannot be edited |
"""
