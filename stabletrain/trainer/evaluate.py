"""Evaluation: one pass over the validation split, in a fixed order, that leaves no trace in the training state."""

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
    """Mean cross-entropy over all valid targets, in nats, without label smoothing or z-loss.

    Args:
        model: put into evaluation mode for the pass; afterwards each module is back in the mode it was in.
        batches: on the model's device; sizes may differ.
        precision: its autocast is used.
        sanitizer: finds bad data; a label out of range is not counted, nor is a batch with bad inputs.
        parallel: the ranks, each of which has batches of its own.

    Returns:
        `val/loss`, and for `[batch, classes]` logits `val/accuracy`, in [0, 1]. NaN where no target is valid. Where a
        batch held bad data, `val/bad_batches` says how many did.
    """
    modes, device = [(module, module.training) for module in model.modules()], next(model.parameters()).device
    model.eval()
    loss = count = correct = spoilt = 0
    classifies = False
    try:
        for batch in batches:
            inputs, _, bad_inputs = sanitizer.inputs(batch.inputs)
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
        for module, training in modes:  # a model may keep some of its modules in evaluation mode always
            module.training = training
    mine = [torch.as_tensor(each, dtype=torch.float64, device=device) for each in (loss, count, correct, spoilt)]
    loss, total, correct, spoilt = parallel.all_reduce_sum(torch.stack(mine)).tolist()
    metrics = {"val/loss": loss / total if total else float("nan")}
    if classifies:
        metrics["val/accuracy"] = correct / total if total else float("nan")
    return metrics | ({"val/bad_batches": int(spoilt)} if spoilt else {})


def in_parts(rows: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of logits and their targets, no more at once than `LOGITS_AT_ONCE` of them."""
    size = max(1, LOGITS_AT_ONCE // max(rows.shape[-1], 1))
    return zip(rows.split(size), targets.split(size), strict=True)
