"""Which samples of a batch cannot be trained on, and what is wrong with each, from the batch as it lies on the host."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stabletrain.records import IGNORE_INDEX, Batch

MOST = 8
"""Samples that are named one by one."""


def bad_samples(batch: Batch, vocab_size: int | None, classes: int | None) -> list[dict[str, Any]]:
    """The samples that `stability/sanitize.py` refuses, the first few, in the order of the batch.

    Args:
        batch: where it was made.
        vocab_size: bound of whole-number inputs; None if nobody knows it.
        classes: bound of the targets; None if the model has not said.

    Returns:
        for each `index` (its place in the batch), `id` and `source` (file and offset) where the data says them, the
        `fault` (input, label, ignored, empty), and `what` is wrong. A fault of the whole batch has index None.
    """
    if batch.targets.numel() == 0:
        return [{"index": None, "fault": "empty", "what": "the batch is empty"}]
    batch, found = replace(batch, inputs=batch.inputs.cpu(), targets=batch.targets.cpu()), []
    for index in range(len(batch)):
        for fault, what in (
            ("input", bad_input(batch.inputs[index], vocab_size)),
            ("label", bad_label(batch.targets[index], classes)),
        ):
            if what:
                found.append({"index": index, **named(batch, index), "fault": fault, "what": what})
                break
    if not found and not batch.counted and bool((batch.targets == IGNORE_INDEX).all()):
        found = [
            {
                "index": None,
                **named(batch, 0),
                "fault": "ignored",
                "what": f"every target is {IGNORE_INDEX}, so none counts",
            }
        ]
    return found[:MOST]


def named(batch: Batch, index: int) -> dict[str, Any]:
    """Id and source of a sample, as far as the data says them."""
    found: dict[str, Any] = {}
    with suppress(IndexError, TypeError, ValueError):  # whatever the data says of itself, a run does not end by it
        found |= {} if batch.ids is None else {"id": int(batch.ids[index])}
        found |= {} if batch.sources is None else {"source": str(batch.sources[index])}
    return found


def bad_input(inputs: Tensor, vocab_size: int | None) -> str:
    """What is wrong with the input of one sample, in words; empty if nothing is."""
    if inputs.is_floating_point():
        bad = ~torch.isfinite(inputs)
        if bool(bad.any()):
            return f"input holds {int(bad.sum())} of {inputs.numel()} values that are NaN or Inf, the first{at(bad)}"
    elif vocab_size is not None:
        bad = (inputs < 0) | (inputs >= vocab_size)
        if bool(bad.any()):
            return f"token {int(inputs[bad][0])}{at(bad)} is outside [0, {vocab_size})"
    return ""


def bad_label(targets: Tensor, classes: int | None) -> str:
    """What is wrong with the targets of one sample, in words; empty if nothing is."""
    if classes is None:
        return ""
    bad = ((targets < 0) | (targets >= classes)) & (targets != IGNORE_INDEX)
    return f"target {int(targets[bad][0])}{at(bad)} is outside [0, {classes})" if bool(bad.any()) else ""


def at(bad: Tensor) -> str:
    """Where in the sample the first bad value is: ` at [0, 3, 5]`; nothing for a single value."""
    place = bad.nonzero()[0].tolist()
    return f" at {place}" if place else ""


def describe(samples: Sequence[Mapping[str, Any]]) -> str:
    """The first bad sample in one line, and how many more there are."""
    if not samples:
        return "no sample of the batch looks bad on the host: it may have been damaged on its way to the device"
    first = samples[0]
    who = "" if first["index"] is None else f"sample {first['index']} of the batch: "
    where = f" ({first['source']})" if "source" in first else f" (id {first['id']})" if "id" in first else ""
    more = f", and {len(samples) - 1} more" if len(samples) > 1 else ""
    return f"{who}{first['what']}{where}{more}"
