"""The loss scale of steps that are only watched: gradients that change while they are scaled, or are not unscaled once.

Without a second step under another scale (`loss_scale.py`) only this is certain: clipping, by the norm or by value, and
unscaling twice or never. Another change may be one that is right under any scale, such as a division.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.loss_scale import Scaled, length, never_unscaled
from stabletrain.beside.preflight.recording import RecordedStep

EXACT = 1e-4
"""Relative difference of two numbers that are meant to be one: rounding in fp32 is 1e-7, in a norm a few times that."""

DIFFERENT = 1e-2
"""Relative difference of two norms that are not the same."""

FIX = "call scaler.unscale_(optimizer) before clipping"


@dataclass(frozen=True)
class Change:
    """How an optimizer's gradients differ between the backward pass and their unscaling.

    Attributes:
        index: number of the optimizer.
        scale: the loss scale.
        before: norm after the backward pass.
        after: norm when they are unscaled.
        alike: whether all numbers are multiplied by the same factor.
        bound: what they are clipped to, if only numbers above it were changed, to it; else 0.
        line: of the user's code that has them unscaled.
    """

    index: int
    scale: float
    before: float
    after: float
    alike: bool
    bound: float
    line: str


def change_of(
    index: int, before: Mapping[str, Tensor], now: Mapping[str, Tensor], scale: float, line: str
) -> Change | None:
    """Compares gradients after the backward pass with those now; None if they are equal, or not finite."""
    names = [name for name in before if name in now and before[name].layout == now[name].layout == torch.strided]
    if all(torch.equal(before[name], now[name]) for name in names):
        return None
    ours, theirs = {name: now[name] for name in names}, {name: before[name] for name in names}
    was, is_now = length(theirs), length(ours)
    if not 0 < was < float("inf") or not 0 < is_now < float("inf"):
        return None
    factor = is_now / was
    apart = {name: ours[name].double() - factor * theirs[name].double() for name in names}
    bound = max(float(each.abs().max()) for each in ours.values() if each.numel())
    clipped = all(torch.equal(ours[name], theirs[name].clamp(-bound, bound)) for name in names)
    return Change(index, scale, was, is_now, length(apart) <= EXACT * is_now, bound if clipped else 0.0, line)


def of_changes(changes: Sequence[Change]) -> list[Finding]:
    """Says what is wrong with the changes of all steps."""
    found = []
    for index in sorted({each.index for each in changes}):
        own = [each for each in changes if each.index == index]
        places, first = ("scaler", f"optimizers.{index}"), own[0]
        start = f"the gradients of optimizers.{index} are "
        if bounded := [each for each in own if each.bound]:
            text = f"{start}clipped to {bounded[0].bound:.3g} while they are still scaled by {bounded[0].scale:g}: "
            text += "what is left of them depends on the scale"
            found.append(Finding("order", "fault", text, places, bounded[0].line, FIX))
        elif twice := [each for each in own if each.alike and same(each.before / each.after, each.scale)]:
            text = f"{start}divided by the loss scale {twice[0].scale:g} by hand, and unscaled once more by the scaler"
            fix = "call scaler.unscale_(optimizer) alone, once for each optimizer"
            found.append(Finding("order", "fault", text, places, twice[0].line, fix))
        elif norm := norm_clipped([each for each in own if each.alike]):
            text = f"{start}clipped to a norm of {norm:.3g} while they are still scaled by {first.scale:g} (before, "
            text += f"their norm was {first.before:.3g}): what is left of them depends on the scale"
            found.append(Finding("order", "fault", text, places, first.line, FIX))
        else:
            text = f"{start}changed while they are still scaled by {first.scale:g}: their norm goes from "
            text += f"{first.before:.3g} to {first.after:.3g}, which is right only if the change is a multiplication"
            found.append(Finding("order", "note", text, places, first.line, f"if they are clipped, {FIX}"))
    return found


def norm_clipped(changes: Sequence[Change]) -> float:
    """Returns the norm to which gradients of different norms were clipped in several steps; 0 if there is none."""
    for one in changes:
        for two in changes:
            if one.after < one.before and same(one.after, two.after) and differ(one.before, two.before):
                return one.after
    return 0.0


def same(one: float, two: float) -> bool:
    """Whether two positive numbers are one."""
    return abs(one - two) <= EXACT * max(one, two)


def differ(one: float, two: float) -> bool:
    """Whether two positive numbers are different for certain."""
    return abs(one - two) > DIFFERENT * max(one, two)


def wrongly_unscaled(step: RecordedStep, scale: float) -> list[Finding]:
    """Finds gradients that a step has unscaled twice, or never, and a scaler that is updated twice.

    Args:
        step: with its gradients.
        scale: the loss scale; 0 if nothing was scaled.
    """
    if not scale:
        return []
    found, updates, unscaled = [], 0, set()
    for event in step.events:
        if event.kind == "backward":
            unscaled = set()
        elif event.kind == "unscale" and event.index in unscaled:
            text = (
                f"the gradients of optimizers.{event.index} are unscaled twice: scaler.update(), called before their "
            )
            text += "step, forgets that they are unscaled"
            fix = "call scaler.update() once, at the end"
            found.append(Finding("order", "fault", text, ("scaler", f"optimizers.{event.index}"), event.line, fix))
        elif event.kind == "unscale":
            unscaled.add(event.index)
        updates = (
            updates + 1 if event.kind == "scaler_update" else 0 if event.kind in ("unscale", "scaler_step") else updates
        )
        if updates == 2:
            text, fix = "scaler.update() is called twice after a step", "call scaler.update() once, at the end"
            found.append(Finding("order", "fault", text, ("scaler",), event.line, fix))
    run = Scaled(scale, step)
    for index in step.given:
        if index >= 0 and step.calls("scale") and never_unscaled(run, index):
            own = {name: each for name, each in run.unscaled.items() if name in step.given[index]}
            text = f"the scaler's scale is never taken out of the gradients of optimizers.{index}: their norm is "
            text += f"{length(step.given[index]):.3g}, and without the scale {scale:g} {length(own):.3g}"
            line = next(each.line for each in step.calls("optimizer") if each.index == index)
            fix = "call scaler.step(optimizer) in place of optimizer.step()"
            found.append(Finding("order", "fault", text, ("scaler", f"optimizers.{index}"), line, fix))
    return found
