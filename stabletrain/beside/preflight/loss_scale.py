"""The loss scale: a step under another scale must give the optimizers the same gradients.

This holds for each correct loop, however it is written. It fails if gradients are clipped while they are scaled, in the
step or in hooks of the backward pass, or if the loss is scaled or the gradients unscaled twice, or never.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.loop import Maker
from stabletrain.beside.preflight.recording import RecordedStep, record_step

POWERS = range(4, -25, -4)
"""Powers of 2 by which the loop's own scale is multiplied, until two scales do not overflow in fp16.

The largest first: gradients of small size show clipping only under a large scale, and lose fewest values to rounding.
"""

APART = 0.1
"""Gradients that differ by more than this share are not the same.

Rounding to fp16 changes a value by 0.05 %, and a few operations one after the other by a few times as much. A scale
that has not been taken out again makes them differ by a factor of 16.
"""


SMALL = 2.0**-4
"""A loss scale that is small for hooks that clip, and under which fp16 still holds most gradients."""


@dataclass(frozen=True)
class Scaled:
    """A first step under one loss scale.

    Attributes:
        scale: the loss scale.
        step: the step.
    """

    scale: float
    step: RecordedStep

    @property
    def unscaled(self) -> dict[str, Tensor]:
        """The gradients of the backward pass, divided by the scale."""
        return {name: each / self.scale for name, each in self.step.gradients.items()}


def loss_scale(make: Maker) -> list[Finding]:
    """Takes the first step under two loss scales, in fresh loops, and compares the gradients."""
    scaler = make().scaler
    if scaler is None or not scaler.is_enabled():
        return []
    own, runs = scaler.get_scale(), []
    for power in POWERS:
        run = scaled(make, own * 2.0**power)
        if run.step.given:
            runs.append(run)
        if len(runs) == 2:
            return compared(make, *runs)
    text = f"no step between the loss scales {own * 2.0 ** POWERS[0]:g} and {own * 2.0 ** POWERS[-1]:g} reaches an "
    return [Finding("order", "not checked", text + "optimizer, so that the loss scale cannot be checked")]


def scaled(make: Maker, scale: float) -> Scaled:
    """Takes the first step of a fresh loop under a loss scale."""
    loop = make()
    assert loop.scaler is not None
    loop.scaler.load_state_dict({**loop.scaler.state_dict(), "scale": scale})
    return Scaled(scale, record_step(loop))


def compared(make: Maker, high: Scaled, low: Scaled) -> list[Finding]:
    """Compares two steps: first what the backward passes left, then what each optimizer was given."""
    ratio = high.scale / low.scale
    grows = length(high.unscaled) / max(length(low.unscaled), 1e-300)
    differs = backward_is_first(high.step) and differ(high.unscaled, low.unscaled)
    # Hooks that unscale leave gradients that are alike under each scale; right if nothing unscales them again.
    by_hooks = (
        differs
        and abs(grows * ratio - 1) < APART
        and not differ(high.step.gradients, scaled(make, SMALL).step.gradients)  # of clipped ones a small scale differs
    )
    again = [each for each in high.step.events if each.kind in ("unscale", "scaler_step")]
    if differs and (again or not by_hooks):
        line = high.step.calls("backward")[-1].line
        if not high.step.calls("scale"):
            cause, fix = "the loss is not scaled by the scaler", "call scaler.scale(loss).backward()"
        elif grows > 1 + APART:  # clipping makes gradients smaller under a larger scale
            whole = abs(grows / ratio - 1) < APART
            cause = f"the loss{'' if whole else ', or a part of it,'} is scaled twice by the scaler"
            fix = "call scaler.scale(loss) once for each backward pass"
        elif by_hooks:
            cause = "the gradients are divided by the loss scale twice, by hooks of the backward pass and by the scaler"
            fix, line = "leave it to the scaler: do not divide by the scale in hooks", again[0].line
        else:
            cause = "the gradients are clipped while they are scaled by the scaler, in a hook of the backward pass"
            fix = "clip after scaler.unscale_(optimizer), not in hooks of the parameters"
        what = norms("of the backward pass, divided by the scale,", high, high.unscaled, low, low.unscaled)
        return [Finding("order", "fault", f"{cause}: {what}", ("scaler",), line, fix)]
    found = []
    for index in sorted(high.step.given.keys() & low.step.given.keys()):
        one, two = high.step.given[index], low.step.given[index]
        if differ(one, two) or (not by_hooks and never_unscaled(high, index)):
            what = norms(f"that optimizers.{index} gets", high, one, low, two)
            cause, fix, line = reason(high, index, length(one) / length(two) / ratio)
            found.append(Finding("order", "fault", f"{cause}: {what}", ("scaler", f"optimizers.{index}"), line, fix))
    return found


def norms(which: str, high: Scaled, one: Mapping[str, Tensor], low: Scaled, two: Mapping[str, Tensor]) -> str:
    """Returns in words how long the gradients are under both scales."""
    text = f"the gradients {which} are not those of the loss alone; their norm is {length(one):.3g} under a loss scale "
    return f"{text}of {high.scale:g} and {length(two):.3g} under one of {low.scale:g}"


def reason(run: Scaled, index: int, grows: float) -> tuple[str, str, str]:
    """Returns why an optimizer's gradients depend on the loss scale, what to do, and the line.

    Args:
        run: one of the steps.
        index: number of the optimizer.
        grows: by what the gradients grow with the scale; 1 if as much as the scale does.
    """
    events = run.step.events
    begun = next(place for place, each in enumerate(events) if (each.kind, each.index) == ("optimizer", index))
    line = events[begun].line
    updates = [each for each in events[:begun] if each.kind == "scaler_update"]
    if abs(grows - 1) < APART or never_unscaled(run, index):
        cause = "the scaler's scale is never taken out of the gradients"
        return cause, "call scaler.step(optimizer) in place of optimizer.step()", line
    if updates:
        cause = "scaler.update() is called before the last optimizer has stepped, and forgets that its gradients are "
        return f"{cause}unscaled: they are unscaled twice", "call scaler.update() once, at the end", updates[0].line
    own = {name: each for name, each in run.unscaled.items() if name in run.step.given[index]}
    unscaled = [each.line for each in events[:begun] if each.kind == "unscale" and each.index == index]
    if abs(length(run.step.given[index]) / length(own) * run.scale - 1) < APART:
        cause = "the gradients are unscaled twice, by hand and by the scaler"
        return cause, "call scaler.unscale_(optimizer) alone, once for each optimizer", (unscaled or [line])[0]
    cause = "the gradients are clipped, or otherwise changed, while they are still scaled by the scaler"
    return cause, "call scaler.unscale_(optimizer) before clipping", (unscaled or [line])[0]


def never_unscaled(run: Scaled, index: int) -> bool:
    """Whether an optimizer is given longer gradients than those of the loss, and the scaler has not unscaled them.

    Clipping to a small norm hides that they depend on the scale, but never makes gradients longer.
    """
    if any(each.kind in ("unscale", "scaler_step") and each.index == index for each in run.step.events):
        return False
    given = run.step.given[index]
    own = {name: each for name, each in run.unscaled.items() if name in given}
    return backward_is_first(run.step) and length(given) > (1 + APART) * length(own)


def backward_is_first(step: RecordedStep) -> bool:
    """Whether all backward passes come before the gradients are unscaled: then what they left is still scaled."""
    kinds = [each.kind for each in step.events if each.kind in ("backward", "unscale", "scaler_step", "optimizer")]
    return "backward" in kinds and "backward" not in kinds[kinds.count("backward") :]


def differ(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    """Whether gradients differ by more than rounding explains."""
    apart = {name: one[name].double() - two[name].double() for name in one.keys() & two.keys()}
    return length(apart) > APART * max(length(one), length(two))


def length(gradients: Mapping[str, Tensor]) -> float:
    """Returns the norm of gradients, all taken together."""
    return float(sum(each.double().square().sum() for each in gradients.values())) ** 0.5
