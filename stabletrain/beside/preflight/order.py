"""The order of a step's parts: gradients that stay from the step before, the loss scale, and schedulers."""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.beside.preflight.finding import Finding, listed
from stabletrain.beside.preflight.loop import Loop, Maker
from stabletrain.beside.preflight.loss_scale import loss_scale
from stabletrain.beside.preflight.recording import RecordedStep, parameters_of, record_step
from stabletrain.beside.preflight.schedulers import schedulers
from stabletrain.beside.preflight.state import state_of
from stabletrain.beside.preflight.summed import summed

FEWEST, MOST = 3, 32
"""Steps that are recorded: three show what happens every second step; more are taken, up to an epoch and one step, only
while a scheduler has not stepped."""

AFTER = 8
"""Most steps after one that was NaN, until one is taken: a loop may skip a few more on purpose, or by chance."""


def check(make: Maker) -> list[Finding]:
    """Checks a loop."""
    loop = make()
    if loop.step is None:
        return [Finding("order", "not checked", "make() returned no 'step', which is the order that is checked")]
    left, steps, found = LeftOver(), [], []
    while len(steps) < FEWEST or (len(steps) <= loop.epoch <= MOST and waits(loop, steps)):
        step = record_step(loop, len(steps))
        left.add(step, len(steps) + 1)
        found = found or misused(loop, step)
        step.gradients, step.left, step.given = {}, {}, {}  # only their names are needed, and they are large
        steps.append(step)
    found += left.found(make) or summed(make)
    found += schedulers(loop, steps, whole=0 < loop.epoch < len(steps))
    found += [*loss_scale(make), *nan_stays(make)]
    text = f"{len(steps)} steps: each begins without old gradients, and schedulers and loss scale are used once a step"
    return found or [Finding("order", "passed", text)]


def waits(loop: Loop, steps: list[RecordedStep]) -> bool:
    """Whether some scheduler has not stepped yet."""
    return len({event.index for step in steps for event in step.calls("scheduler")}) < len(loop.schedulers)


# ---- gradients of the step before


@dataclass
class LeftOver:
    """Finds gradients that an optimizer has used in one step, and gets again in the next, added to that step's own.

    A loop that accumulates over calls of `step` is clean: what it adds up no optimizer has used yet. So is one that
    writes gradients itself, in place of the old ones: what is left counts only where the same step, taken again with
    0 in place of the old gradients, gives the optimizers something else; or, where no step can be taken again, where a
    backward pass has added to them.

    Attributes:
        used: parameters whose gradient an optimizer has used and that was not missing or 0 at any backward pass since.
        steps: numbers of the steps in which a parameter's old gradient was used again, by the parameter's name.
        accumulated: names of those to which a backward pass has added then.
        line: of the first backward pass of the first such step.
    """

    used: set[str] = field(default_factory=set)
    accumulated: set[str] = field(default_factory=set)
    steps: dict[str, list[int]] = field(default_factory=dict)
    line: str = ""

    def add(self, step: RecordedStep, number: int) -> None:
        """Adds a step, with its number."""
        self.used -= step.cleared
        given = {name: each for gradients in step.given.values() for name, each in gradients.items()}
        self.accumulated |= self.used & step.accumulated & given.keys()
        for name in [name for name in given if name in self.used]:
            self.steps.setdefault(name, []).append(number)
            self.line = self.line or first_line(step)
        self.used |= {name for name, each in given.items() if bool(each.any())}

    def found(self, make: Maker | None) -> list[Finding]:
        """Returns what was found, and confirmed in fresh loops; None if there are none."""
        if not self.steps:
            return []
        most = Counter(number for each in self.steps.values() for number in each).most_common(1)[0][0]
        old = {name for name, each in self.steps.items() if most in each}
        changed = self.accumulated if make is None else changed_by(make, old, most)
        names = [name for name in self.steps if name in changed]
        if not names:
            return []
        numbers = sorted({number for name in names for number in self.steps[name]})
        text = f"in {'step' if len(numbers) == 1 else 'steps'} {listed([*map(str, numbers)])} the optimizer gets the "
        text += f"gradients of the step before once more, added to the new ones: {len(names)} parameters, "
        text += f"{listed(names)}"
        fix = "call optimizer.zero_grad() in each step, before the first backward pass"
        return [Finding("order", "fault", text, tuple(names), self.line, fix)]


def changed_by(make: Maker, old: set[str], number: int) -> set[str]:
    """Returns the parameters whose gradients in a step depend on those that are left from the step before.

    Args:
        make: makes fresh loops.
        old: names of the parameters whose old gradients are set to 0 before the step.
        number: of the step, from 1.
    """
    own, again, without = (given_in(make, zeroed, number) for zeroed in (set[str](), set[str](), old))
    # Where two equal loops differ too, by random numbers or sums in another order, a like difference shows nothing.
    return {
        name
        for name in own.keys() & again.keys() & without.keys()
        if length_of(own[name] - without[name]) > 10 * length_of(own[name] - again[name])
    }


def given_in(make: Maker, zeroed: set[str], number: int) -> dict[str, Tensor]:
    """Returns the gradients that the optimizers get in a step of a fresh loop, by name.

    Args:
        make: makes fresh loops.
        zeroed: names of the parameters whose gradients are set to 0 before the step.
        number: of the step, from 1.
    """
    loop = make()
    for place in range(number - 1):
        record_step(loop, place)
    for parameter in (*loop.parameters.values(), *itertools.chain(*map(parameters_of, loop.optimizers))):
        if parameter.grad is not None and loop.name_of(parameter) in zeroed:
            parameter.grad = torch.zeros_like(parameter.grad)
    step = record_step(loop, number - 1)
    return {name: each for gradients in step.given.values() for name, each in gradients.items()}


def length_of(gradient: Tensor) -> float:
    """Returns the norm of a gradient, which may be sparse."""
    return float((gradient.to_dense() if gradient.is_sparse else gradient).double().norm())


# ---- each optimizer once, with the gradients


def misused(loop: Loop, step: RecordedStep) -> list[Finding]:
    """Finds an optimizer that steps twice with the same gradients, or after they have been zeroed."""
    found = []
    for index, optimizer in enumerate(loop.optimizers):
        place = (f"optimizers.{index}",)
        kinds = [event for event in step.events if event.kind == "backward" or event.index == index]
        kinds = [event for event in kinds if event.kind in ("backward", "optimizer", "updated")]
        for one, two in itertools.pairwise(kinds):  # `optimizer` twice in a row is an optimizer that wraps another
            if (one.kind, two.kind) == ("updated", "optimizer"):
                text = f"optimizers.{index} steps twice with the same gradients"
                fix = "call one of optimizer.step() and scaler.step(optimizer), once after each backward pass"
                found.append(Finding("order", "fault", text, place, two.line, fix))
                break
        if [event.kind for event in kinds[:2]] != ["backward", "optimizer"]:  # not LBFGS, which calls backward itself
            continue
        names = [loop.name_of(each) for each in parameters_of(optimizer)]
        had = any(bool(step.gradients[name].any()) for name in names if name in step.gradients)
        if had and not any(bool(each.any()) for each in step.given[index].values()):
            text = f"the gradients of optimizers.{index} are zeroed after the backward pass and before its step: "
            text += "it trains nothing"
            line = next((event.line for event in reversed(step.events) if event.kind == "zero_grad"), "")
            fix = "call optimizer.zero_grad() before the backward pass, or after optimizer.step()"
            found.append(Finding("order", "fault", text, (*place, "zero_grad"), line, fix))
    return found


# ---- gradients of a step that was skipped


def nan_stays(make: Maker) -> list[Finding]:
    """Takes a step whose inputs are NaN; if the loop skips it, the next ones must be taken and be finite.

    A loop that does not skip such a step is not this check's concern.
    """
    loop = make()
    if not record_step(loop, 0).calls("optimizer"):  # it overflows, or takes several calls
        return []
    batch = loop.batch(1) if loop.next_batch is None else loop.next_batch()
    try:
        skipped = poisoned_step(loop, batch)
    except Exception:  # the loop stops itself at NaN
        return []
    if skipped.calls("optimizer") or not finite(loop.parameters):
        return []
    steps: list[RecordedStep] = []
    while len(steps) < AFTER:
        try:
            step = record_step(loop, 2 + len(steps))
        except StopIteration:  # the data end
            break
        except Exception as error:  # such as unscale_() twice
            text = (
                f"after a step that the loop skips for its NaN, the next one fails with {type(error).__name__}: {error}"
            )
            fix = "skip a step only after scaler.update() and optimizer.zero_grad()"
            return [Finding("order", "fault", text, ("zero_grad",), fix=fix)]
        steps.append(step)
        if step.calls("optimizer") and finite(loop.parameters):
            return poisoned_buffers(make, loop, by_scaler=bool(skipped.calls("scaler_step")))
    return never_again(make, loop, steps) if steps else []


def never_again(make: Maker, loop: Loop, steps: list[RecordedStep]) -> list[Finding]:
    """Returns what is said of a loop that has not taken a step since the one that it skipped.

    Args:
        make: makes fresh loops.
        loop: after the steps.
        steps: those after the one with NaN.
    """
    kept = [name for name, each in steps[-1].left.items() if not bool(each.isfinite().all())]
    if kept:
        text = (
            f"after a step that the loop skips for its NaN, the gradients of {len(kept)} parameters stay NaN, as they "
        )
        text += f"are not zeroed: the {len(steps)} next steps are NaN too ({listed(kept)})"
        fix = "call optimizer.zero_grad() before each backward pass, also after a step that was skipped"
        return [Finding("order", "fault", text, (*kept, "zero_grad"), first_line(steps[-1]), fix)]
    usual = make()
    taken = [record_step(usual, number).calls("optimizer") for number in range(2 + len(steps))]
    if not any(taken[2:]):  # nor does it take these steps without the NaN
        return []
    before = not_finite(usual)
    names = [name for name in not_finite(loop) if name not in before]
    optimizers = [f"optimizers.{index}" for index in range(len(loop.optimizers))]
    kept_in = f"; NaN is kept in {listed(names)}" if names else ""
    if not finite(loop.parameters):
        text = f"after a step that the loop skips for its NaN, a later step makes the weights NaN{kept_in}"
    else:
        text = f"after a step that the loop skips for its NaN, it skips each of the {len(steps)} next ones too, which "
        text += f"are not NaN: no step moves the weights any more{kept_in}"
    certain = "fault" if len(steps) == AFTER else "note"
    fix = "decide on a step by values that a skipped step has not entered: update averages only after a step was taken"
    return [Finding("order", certain, text, (*optimizers, *names), fix=fix)]


def poisoned_buffers(make: Maker, loop: Loop, *, by_scaler: bool) -> list[Finding]:
    """Returns what is said of buffers that a skipped step has left NaN, and that the step after it has not restored.

    If the loop itself looks for NaN and skips the step, it reckons with NaN in the forward pass, and each one leaves
    the model without its running statistics for ever: a fault. A loss scaler skips a step when the scaled gradients
    overflow, and then the forward pass and the statistics are nearly always finite. A loop that leaves it to the scaler
    is as PyTorch's documentation has it: a note.

    Args:
        make: makes fresh loops.
        loop: after the step that was skipped, and one that was taken.
        by_scaler: whether the loop called `scaler.step()`, and the scaler skipped the step.
    """
    buffers = [name for name, each in loop.model.named_buffers() if not bool(each.isfinite().all())]
    buffers = [name for name in buffers if bool(dict(make().model.named_buffers())[name].isfinite().all())]
    if not buffers:
        return []
    broken = finite_in_eval(make()) and not finite_in_eval(loop)
    text = f"a step that the loop skips for its NaN leaves NaN in {listed(buffers)}"
    text += ", and the next step does not take it away"
    text += ": the loss is NaN in eval mode" if broken else ""
    fix = "restore the buffers of the model after a step that is skipped; stabletrain.Guard does"
    return [Finding("order", "fault" if broken and not by_scaler else "note", text, tuple(buffers), fix=fix)]


@torch.no_grad()
def finite_in_eval(loop: Loop) -> bool:
    """Whether the loss is finite with the model in eval mode, even if `loss` itself puts it into training mode."""
    handle = loop.model.register_forward_pre_hook(lambda model, _: model.eval() and None)
    try:
        loop.model.eval()
        return bool(loop.loss(loop.batch(0)).isfinite().all())
    finally:
        handle.remove()


def not_finite(loop: Loop) -> list[str]:
    """Returns the names of numbers and tensors that are not finite, in all that training changes."""
    values = {name: each for part in state_of(loop).values() for name, each in part.items()}
    floats = {name: torch.as_tensor(each) for name, each in values.items() if isinstance(each, (float, Tensor))}
    return [name for name, each in floats.items() if not bool(each.isfinite().all())]


def poisoned_step(loop: Loop, batch: Any) -> RecordedStep:
    """Takes a step with NaN in place of the batch's numbers, or, if it has only integers, of the layers' outputs."""
    handles = []
    bad = poisoned(batch)
    if bad is batch:
        layers = [module for module in loop.model.modules() if not [*module.children()]]
        handles = [module.register_forward_hook(lambda _module, _args, out: poisoned(out)) for module in layers]
    try:
        return record_step(loop, 1, bad)
    finally:
        for handle in handles:
            handle.remove()


def poisoned(value: Any) -> Any:
    """Returns a value with NaN in place of all floating point numbers; the value itself if it has none."""
    if isinstance(value, Tensor):
        return value * torch.nan if value.is_floating_point() else value
    if isinstance(value, Mapping):
        parts = {name: poisoned(each) for name, each in value.items()}
        same = all(parts[name] is each for name, each in value.items())
        return value if same else parts
    if isinstance(value, (list, tuple)):
        items = [poisoned(each) for each in value]
        same = all(one is two for one, two in zip(items, value, strict=True))
        return value if same else type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def first_line(step: RecordedStep) -> str:
    """Returns the line of the first backward pass of a step."""
    return next((event.line for event in step.calls("backward")), "")


def finite(parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether all parameters are finite."""
    return all(bool(each.isfinite().all()) for each in parameters.values())
