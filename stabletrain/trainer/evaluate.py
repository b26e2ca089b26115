"""Evaluation: one pass over the validation split, which does not change the training state."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabletrain.protocols import Parallel, Precision, Sanitizer
from stabletrain.records import IGNORE_INDEX, LOGITS_AT_ONCE, Batch


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterator[Batch], precision: Precision, sanitizer: Sanitizer, parallel: Parallel
) -> dict[str, float]:
    """Computes the mean cross-entropy over all valid targets, in nats, without label smoothing or z-loss.

    Args:
        model: runs in evaluation mode; afterwards each module is back in its previous mode.
        batches: this rank's batches, on the model's device; sizes may differ.
        precision: runs the forward pass under its autocast.
        sanitizer: finds bad data. Labels out of range and batches with bad inputs are not counted.
        parallel: sums the results over all ranks.

    Returns:
        `val/loss`; for `[batch, classes]` logits also `val/accuracy`, in [0, 1]. Both are NaN if no target is valid.
        `val/bad_batches` is the number of batches with bad data, present only if there are any.
    """
    modes, device = [(module, module.training) for module in model.modules()], next(model.parameters()).device
    model.eval()
    # Summed on the device, and read once at the end.
    loss, count, correct, spoilt = torch.zeros(4, dtype=torch.float64, device=device).unbind()
    classifies, no = False, torch.zeros((), dtype=torch.bool, device=device)
    try:
        for batch in batches:
            inputs, _, bad_inputs = sanitizer.inputs(batch.inputs)
            bad_inputs = bad_inputs | no  # a tensor, also where nothing was checked
            with precision.autocast():
                logits = model(inputs)
            known, bad_targets = sanitizer.targets(batch.targets, logits.shape[-1])
            spoilt = spoilt + (bad_inputs | bad_targets)
            targets = torch.where(bad_inputs, IGNORE_INDEX, known.flatten())
            classifies = logits.ndim == 2
            for rows, wanted in in_parts(logits.flatten(0, -2), targets):
                rows = torch.where(bad_inputs, 0.0, rows.float())
                loss = loss + F.cross_entropy(rows, wanted, ignore_index=IGNORE_INDEX, reduction="sum").double()
                valid = wanted != IGNORE_INDEX
                count = count + valid.sum()
                if classifies:
                    correct = correct + ((rows.argmax(dim=-1) == wanted) & valid).sum()
    finally:
        model.train(modes[0][1])
        for module, training in modes:  # some may always be in evaluation mode, such as a frozen BatchNorm
            module.training = training
    sums = torch.stack([loss, count, correct, spoilt])
    loss, total, correct, spoilt = parallel.all_reduce_sum(sums).tolist()
    metrics = {"val/loss": loss / total if total else float("nan")}
    if classifies:
        metrics["val/accuracy"] = correct / total if total else float("nan")
    return metrics | ({"val/bad_batches": int(spoilt)} if spoilt else {})


def in_parts(rows: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Splits rows of logits and their targets into parts of at most `LOGITS_AT_ONCE` logits, but at least one row."""
    size = max(1, LOGITS_AT_ONCE // max(rows.shape[-1], 1))
    return zip(rows.split(size), targets.split(size), strict=True)
