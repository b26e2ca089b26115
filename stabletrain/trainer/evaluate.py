"""Evaluation: one pass over the validation split, which does not change the training state."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from stabletrain.machine.untouched import evaluating
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Batch
from stabletrain.stability.averaging import averaged
from stabletrain.stability.objective import Objective
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.sanitize import Sanitizer
from stabletrain.trainer.run import TrainingRun


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterator[Batch],
    objective: Objective,
    precision: FullPrecision,
    sanitizer: Sanitizer,
    parallel: SingleProcess,
) -> dict[str, float]:
    """Computes the objective's metrics over the validation split; without label smoothing or z-loss.

    Args:
        model: runs in evaluation mode; afterwards each module is back in its previous mode.
        batches: this rank's batches, on the model's device; sizes may differ. A batch whose `counted` is 0 is run, but
            not counted.
        objective: chooses the metrics; see `stability/objective/`.
        precision: runs the forward pass under its autocast.
        sanitizer: finds bad data. Labels out of range and batches with bad inputs are not counted.
        parallel: sums the results over all ranks.

    Returns:
        `val/loss` and the objective's other metrics, such as `val/accuracy`, in [0, 1]. NaN if no target is valid.
        `val/bad_batches` is the number of batches with bad data, present only if there are any.
    """
    device = next(model.parameters()).device
    # Summed on the device, and read once at the end.
    sums: dict[str, Tensor] = {}
    n_bad, no = torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), dtype=torch.bool, device=device)
    with evaluating(model):
        for batch in batches:
            inputs, _, bad_inputs = sanitizer.inputs(batch.inputs)
            bad_inputs = bad_inputs | no  # a tensor, also where nothing was checked
            with precision.autocast():
                outputs = model(inputs)
            targets, bad_targets = sanitizer.targets(batch.targets, objective.classes(outputs))
            bad = bad_inputs
            if targets.is_floating_point():  # a bad label cannot be left out by itself
                bad = bad_inputs | bad_targets
            skipped = batch.counted == 0  # a rank that has no batch left repeats the last one
            n_bad = n_bad + (no if skipped else bad_inputs | bad_targets)
            for name, value in objective.sums(outputs, batch.having(inputs, targets)).items():
                counted = torch.zeros_like(value) if skipped else torch.where(bad, 0.0, value)
                sums[name] = sums[name] + counted if name in sums else counted
    shapes = {name: value.shape for name, value in sums.items()}
    flat = torch.cat([value.flatten() for value in (n_bad, *sums.values())])
    total, *parts = np.split(
        np.array(parallel.all_reduce_sum(flat).tolist()),
        np.cumsum([1, *(shape.numel() for shape in shapes.values())])[:-1],
    )
    found = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    metrics = {f"val/{name}": value for name, value in objective.metrics(found).items()}
    return metrics | ({"val/bad_batches": int(total[0])} if total[0] else {})


def evaluate_now(run: TrainingRun) -> dict[str, float]:
    """Evaluates the weights that the model has now."""
    batches, tools = map(run.data.to_device, run.data.validation()), run.tools
    return evaluate(run.state.model, batches, tools.objective.plain, tools.precision, tools.sanitizer, run.parallel)


def validate(run: TrainingRun) -> float:
    """Evaluates, logs the metrics, records the best; returns the validation loss.

    With `averaging`, evaluates the averaged weights too: `averaging/val_loss` and so on. All choices follow the live
    ones.
    """
    state, history, tracker = run.state, run.history, run.tracker
    metrics = evaluate_now(run)
    if state.average is not None:
        with averaged(state.average):
            others = evaluate_now(run)
        metrics |= {f"averaging/{name.replace('/', '_')}": value for name, value in others.items()}
    if bad_batches := metrics.get("val/bad_batches"):
        text = f"evaluation: {bad_batches} batches hold bad data; bad labels and inputs are not counted"
        if not history.val.get("val/bad_batches"):
            tracker.note(f"step {state.step}: {text}")
        tracker.event("bad_validation", state.step, batches=bad_batches)
    history.val, history.val_step = metrics, state.step
    history.val_losses = [*history.val_losses, metrics["val/loss"]]
    if metrics["val/loss"] < history.best_loss:
        history.best_loss, history.best_step = metrics["val/loss"], state.step
        tracker.summary({"best/val_loss": metrics["val/loss"], "best/step": state.step})
    tracker.log(state.step, {"tick": state.executed_steps, **metrics})
    return metrics["val/loss"]
