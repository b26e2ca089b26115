"""Whether a resume restores everything: one step after it equals one step without it, bit for bit.

One loop is trained and saved; a fresh one loads the state, as a file would give it back. What both hold is compared
right after the load, and again after one more step of each. If the steps differ, a second fresh loop takes its step
from the random state of the first: what that repairs is due to random numbers, and the rest to what the load left out.
Two moments are tried, because some of what is lost is at its first value again every few steps, such as the count of
steps since the loss scale grew.
"""

import copy
import inspect
import io
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stabletrain.beside.preflight.finding import Finding, Verdict, listed
from stabletrain.beside.preflight.loop import Loop, Maker
from stabletrain.beside.preflight.state import (
    ATTRIBUTES,
    PLAIN,
    State,
    Values,
    copy_of,
    differences,
    flat,
    same,
    same_tree,
    sources_of,
    state_of,
)
from stabletrain.errors import is_own

LEAST_STEPS, LONGEST_EPOCH = 2, 6
"""Steps before the first save: two, or a whole epoch if it is so short, so that the second save is in the next one."""

GRADIENTS = "gradients"
"""What a training that adds up gradients over several steps goes on with, besides its state."""

UPCOMING = 8
"""At most so many batches after the compared step are compared too, so that short epochs are seen to their end."""

LEAST = 0.01
"""How far a hidden difference must bring the weights, relative to what the step moved them, to count as a fault.

A tensor that was loaded may lie in memory in another order than one that was trained, and a kernel then rounds
otherwise: by 1e-7 of a value in fp32, and 0.4 % in bf16.
"""

MOST_AHEAD = 256
"""Longest epoch whose batches are read, without a step, to see what a save at its end restores; more take too long."""

MOST_BATCHES = 64
"""So many batches are looked through for the one that the load goes on with."""

NUMBERS = (int, float, Tensor)
"""What moments and step counts are."""

ADVICE = {
    "parameters": (
        "the training goes on from other weights",
        "save model.state_dict() whole, and load it with strict=True",
    ),
    "buffers": (
        "running statistics and other buffers are not those of the training",
        "save model.state_dict() whole, buffers too, and load it with strict=True",
    ),
    "state": (
        "moments and step counts begin anew",
        "save optimizer.state_dict(), and load it into the optimizer that steps, after that was made",
    ),
    "param_groups": (
        "the optimizer steps with other options",
        "load the optimizer's state last: nothing after it may set options of its groups",
    ),
    "schedulers": (
        "the schedule goes on from another step",
        "save scheduler.state_dict(), and load it into the scheduler that steps, after that was made",
    ),
    "scaler": (
        "the loss scale is another one",
        "save scaler.state_dict(), and load it into the scaler that the loop uses",
    ),
}
"""What it means that a part of the loop is not restored, and what to do."""


@dataclass
class Moment:
    """A moment of a training that goes on, at which it was saved, and the step after it.

    Attributes:
        step: number of steps taken.
        saved: returns what `save()` returned, as a file would give it back, a fresh copy each time.
        state: the loop's values when it was saved, a copy.
        changed: what `save()` itself changed, by part.
        random: the states of its sources of random numbers.
        gradients: of the parameters, by name, if any are left.
        batch: of the next step.
        loss: of that step; None if unknown.
        after: the values after it.
        upcoming: the batches after it.
        unwritable: why `torch.save` cannot write the state; empty if it can.
        strangers: optimizers that took the step and are none of the loop's.
    """

    step: int
    saved: Callable[[], Any]
    state: State
    changed: dict[str, list[str]]
    random: dict[str, Any]
    gradients: dict[str, Tensor]
    unwritable: str = ""
    batch: Any = None
    loss: Any = None
    after: State = field(default_factory=dict)
    upcoming: list[Any] = field(default_factory=list)
    strangers: list[Optimizer] = field(default_factory=list)


@dataclass
class Resumed:
    """A fresh loop that has loaded the state of a moment, and taken one step with that moment's next batch.

    Attributes:
        loop: after the step.
        lost: what differs from the moment right after the load, by part.
        loaded: the loop's values then, of these parts.
        random: its random states then.
        batch: the next batch of its own.
        loss: of its step.
        differs: what differs after the step, by part.
        strangers: optimizers that stepped and are none of the loop's.
        upcoming: the batches after it.
    """

    loop: Loop
    lost: dict[str, list[str]]
    loaded: State
    random: dict[str, Any]
    batch: Any
    loss: Any = None
    differs: dict[str, list[str]] = field(default_factory=dict)
    strangers: list[Optimizer] = field(default_factory=list)
    upcoming: list[Any] = field(default_factory=list)


class LoadFailed(Exception):
    """`load()` raised an error, its cause."""


def check(make: Maker) -> list[Finding]:
    """Checks a loop."""
    loop = make()
    missing = [name for name in ("step", "save", "load") if getattr(loop, name) is None]
    if missing:
        give = "step(batch), save() that returns what a checkpoint holds, and load(state) that restores it"
        text = f"make() returned no {listed(missing)}; to have a resume checked, return an object with {give}"
        return [Finding("resume", "not checked", text)]
    moments = uninterrupted(loop)
    audit = Audit(make, moments, line_of(loop.load))
    found = audit.of_save()
    try:
        found += audit.of(moments[1])
        if not any(each.verdict == "fault" for each in found):
            earlier = [each for each in audit.of(moments[0], step=False) if each.verdict == "fault"]
            found = [*earlier, *(each for each in found if not earlier or each.verdict != "passed")]
    except LoadFailed as failed:
        cause = failed.__cause__
        text = f"load() failed with what save() returned: {type(cause).__name__}: {cause}"
        line = line_of_error(cause) or audit.line
        found.append(Finding("resume", "fault", text, ("load",), line, "make load() take what save() returns"))
    if loop.next_batch is None:
        text = "whether the data go on at the same place: make() returned no next_batch()"
        found.append(Finding("resume", "not checked", text))
    return found


def passed(moment: Moment) -> str:
    """Returns what was compared."""
    leaves = [each for values in moment.state.values() for each in values.values()]
    tensors = sum(isinstance(each, Tensor) for each in leaves)
    return (
        f"a fresh loop that loads the state of step {moment.step} takes the next step bit for bit: {tensors} tensors "
        f"and {len(leaves) - tensors} other values compared"
    )


# ---- the training that goes on, and the one that is resumed


def uninterrupted(loop: Loop) -> list[Moment]:
    """Trains a fresh loop; returns two moments, one step apart."""
    steps = loop.epoch if LEAST_STEPS < loop.epoch <= LONGEST_EPOCH else LEAST_STEPS  # epochs of 1 and 2 end at 2 too
    for step in range(steps):
        take_step(loop, next_of(loop, step))
    moments = []
    for step in (steps, steps + 1):
        moment = moment_of(loop, step)
        batch = next_of(loop, step)
        moment.batch = copy.deepcopy(batch)
        with strangers_to(loop) as moment.strangers:
            moment.loss = take_step(loop, batch)
        moment.after = copy_of(state_of(loop))
        moments.append(moment)
    moments[-1].upcoming = upcoming(loop)
    return moments


def moment_of(loop: Loop, step: int) -> Moment:
    """Saves a loop."""
    assert loop.save is not None
    before = copy_of(state_of(loop))
    saved, unwritable = as_file(loop.save())
    changed = differences(before, state_of(loop))
    gradients = {name: each.grad.detach().clone() for name, each in loop.parameters.items() if each.grad is not None}
    state = copy_of(state_of(loop)) if changed else before
    return Moment(step, saved, state, changed, random_states(loop), gradients, unwritable)


def as_file(state: Any) -> tuple[Callable[[], Any], str]:
    """Returns a function that gives a state back as from a file, and why it cannot be written; empty if it can."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
    except Exception as error:  # a lambda in it, for example
        kept = copy.deepcopy(state)
        return lambda: copy.deepcopy(kept), f"{type(error).__name__}: {error}"
    return lambda: torch.load(io.BytesIO(file.getvalue()), weights_only=False), ""


def resumed(make: Maker, moment: Moment, repair: Sequence[str] = (), *, step: bool = True) -> Resumed:
    """Loads a moment's state into a fresh loop, compares, and takes a step.

    Args:
        make: the maker.
        moment: when the state was saved.
        repair: names of random states, and `GRADIENTS`, that are set to those of the moment after the load.
        step: False takes the step only if something differs before it.

    Raises:
        LoadFailed: the user's `load` raised an error.
    """
    loop = make()
    assert loop.load is not None
    state = moment.saved()
    try:
        loop.load(state)
    except Exception as error:
        raise LoadFailed from error
    loop = loop.current()
    lost = differences(moment.state, state_of(loop))
    loaded = copy_of({part: values for part, values in state_of(loop).items() if part in lost})
    drawn = random_states(loop)
    for name, source in sources_of(loop).items():
        if name in repair and name in moment.random:
            source.set(moment.random[name])
    if GRADIENTS in repair:
        for name, parameter in loop.parameters.items():
            parameter.grad = moment.gradients[name].clone() if name in moment.gradients else None
    result = Resumed(loop, lost, loaded, drawn, copy.deepcopy(next_of(loop, moment.step)))
    if step or lost or not same_tree(result.batch, moment.batch):
        with strangers_to(loop) as result.strangers:
            result.loss = take_step(loop, copy.deepcopy(moment.batch))
        result.differs = differences(moment.after, state_of(loop))
        result.upcoming = upcoming(loop, len(moment.upcoming))
    else:  # nothing to explain
        result.loss, result.upcoming = moment.loss, moment.upcoming
    return result


def next_of(loop: Loop, step: int) -> Any:
    """Returns the next batch: the loop's own, or that of a step if the loop has no position in the data."""
    return loop.batch(step) if loop.next_batch is None else loop.next_batch()


def upcoming(loop: Loop, most: int = UPCOMING) -> list[Any]:
    """Returns the next batches, copies; fewer if an epoch ends."""
    found = []
    with suppress(StopIteration):
        while loop.next_batch is not None and len(found) < min(most, loop.epoch or 1):
            found.append(copy.deepcopy(loop.next_batch()))
    return found


def take_step(loop: Loop, batch: Any) -> float | None:
    """Takes a step; returns its loss, None if it returns no number."""
    assert loop.step is not None
    loss = loop.step(batch)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return float(loss.detach())
    return loss if isinstance(loss, float) else None


@contextmanager
def strangers_to(loop: Loop) -> Generator[list[Optimizer], None, None]:
    """Yields a list of the optimizers that step inside and are none of the loop's."""
    known, found = {id(each) for each in loop.optimizers}, list[Optimizer]()

    def before(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) not in known:
            known.add(id(optimizer))
            found.append(optimizer)

    hook = register_optimizer_step_pre_hook(before)
    try:
        yield found
    finally:
        hook.remove()


def random_states(loop: Loop) -> dict[str, Any]:
    """Returns the states of all sources of random numbers, by name."""
    return {name: source.get() for name, source in sources_of(loop).items()}


# ---- what is concluded


class Audit:
    """Compares resumed loops with one that was not interrupted.

    Args:
        make: the maker.
        moments: of the loop that was not interrupted.
        line: where the user's `load` is.
    """

    def __init__(self, make: Maker, moments: list[Moment], line: str) -> None:
        self.make, self.moments, self.line = make, moments, line

    def finding(self, verdict: Verdict, text: str, places: Sequence[str], fix: str = "") -> Finding:
        """Returns a finding at the user's `load`."""
        return Finding("resume", verdict, text, tuple(places), self.line, fix)

    def of_save(self) -> list[Finding]:
        """Says whether saving itself changes the loop, and whether its result can be written."""
        found, last = [], self.moments[-1]
        if last.changed:
            names = [name for part in last.changed.values() for name in part]
            text = f"save() itself changes the training: {listed(names)} differ after it"
            found.append(self.finding("fault", text, names, "let save() copy, and put back what it swaps"))
        if last.unwritable:
            text = f"torch.save cannot write what save() returns: {last.unwritable}"
            found.append(self.finding("note", text, ["save"]))
        return found

    def of(self, moment: Moment, *, step: bool = True) -> list[Finding]:
        """Says what a resume from a moment does not restore, or that it restores everything.

        Args:
            moment: at which the state was saved.
            step: False compares the loops after the load, and after a step only if they differ before it.
        """
        own = resumed(self.make, moment, step=step)
        if goes_on(own, moment):
            # A buffer that the next step writes anew, and an attribute, need not be restored.
            left = {part: names for part, names in own.lost.items() if part != "buffers" and not is_attributes(part)}
            return [*self.of_parts(moment, own, left, "note"), Finding("resume", "passed", passed(moment))]
        repaired = resumed(self.make, moment, [*moment.random, GRADIENTS])
        found: list[Finding] = []
        claims = [*self.of_data(moment, repaired), *self.of_random_numbers(moment, own, repaired)]
        if matters(repaired, moment):
            lost = lasting(repaired)
            found += self.of_parts(moment, repaired, lost, "fault")
            if repaired.strangers and not moment.strangers:
                found.append(self.of_strangers(repaired))
            if not found and not claims:
                claims.append(self.of_something_hidden(moment, repaired))
        if claims and not goes_on(repaired, moment) and (unlike := self.unlike()):
            # What one step changes says nothing then. What the load itself left out is seen without a step.
            return [*found, unlike]
        alike = "two loops that loaded the same state took other steps, and nothing that was compared says why"
        return [*found, *claims] or [Finding("resume", "not checked", alike)]

    def unlike(self) -> Finding | None:
        """Says how two fresh loops differ that are trained alike; None if they do not."""
        last, again = self.moments[-1], uninterrupted(self.make())[-1]
        differ = differences(last.after, again.after)
        names = [name for part, each in differ.items() if not is_attributes(part) for name in each]
        if not same_tree(last.batch, again.batch):
            names = ["the batches", *names]
        if not names:
            return None
        text = f"two fresh loops differ after {last.step + 1} steps ({listed(names)}), so that a resume cannot be "
        return Finding("resume", "not checked", f"{text}compared bit for bit; seed what they draw from in make()")

    def of_data(self, moment: Moment, repaired: Resumed) -> list[Finding]:
        """Says whether the data go on at another place."""
        fix = "save how many batches the training has taken, its epoch too, and let load() go on from there"
        if not same_tree(repaired.batch, moment.batch):
            loop = self.make()
            found, right = (batch_number(loop, moment, each) for each in (repaired.batch, moment.batch))
            which = f"that of step {found}, not of step {right}" if found and right else "not the next of the training"
            text = f"the first batch after the load is {which}: the position in the data is not restored"
            begins = bool(found) and (found - 1) % max(loop.epoch, 1) == 0
            if begins and loop.epoch and self.goes_on_after_an_epoch(loop):
                text += " within an epoch: it begins anew, and the batches before the save come twice"
                if kept := places_in_the_epoch(self.make, loop.epoch):
                    text += f". save() keeps the place in the epoch ({listed(kept)}), and "
                    text += "load() does not go on from there"
                    return [self.finding("fault", text, ["position", "data", *kept], fix)]
                ends = "may be" if loop.epoch > MOST_AHEAD else "is"
                text += f". At the end of an epoch it {ends} restored, and nothing in the state shows that save() is "
                text += "called within one"
                return [self.finding("note", text, ["position", "data"], f"save at the end of an epoch only, or {fix}")]
            return [self.finding("fault", text, ["position", "data"], fix)]
        pairs = zip(repaired.upcoming, moment.upcoming, strict=False)
        places = [number for number, pair in enumerate(pairs, moment.step + 2) if not same_tree(*pair)]
        if not places:
            return []
        text = f"the first batch after the load is the right one, and that of step {places[0]} is not: "
        text += "part of the position in the data is not restored, such as the epoch"
        return [self.finding("fault", text, ["position", "data"], fix)]

    def goes_on_after_an_epoch(self, loop: Loop) -> bool:
        """Whether the data go on at the right place if the loop was saved at the end of an epoch, in its new order.

        In an epoch that is too long to see that, they may.
        """
        if loop.epoch > MOST_AHEAD:
            return True
        ended = [each for each in self.moments if each.step % loop.epoch == 0] or self.after_an_epoch()
        found = [resumed(self.make, each, [*each.random], step=False) for each in ended]
        right = all(same_tree(each.batch, moment.batch) for each, moment in zip(found, ended, strict=True))
        return bool(ended) and right and not any(same_tree(moment.batch, loop.batch(0)) for moment in ended)

    def after_an_epoch(self) -> list[Moment]:
        """Returns a moment at the end of the first epoch, whose batches are only read; none if they come otherwise."""
        loop = self.make()
        with suppress(StopIteration):
            for step in range(loop.epoch):
                next_of(loop, step)
            moment = moment_of(loop, loop.epoch)
            moment.batch = copy.deepcopy(next_of(loop, loop.epoch))
            return [moment] if same_tree(moment.batch, loop.batch(loop.epoch)) else []
        return []

    def of_random_numbers(self, moment: Moment, own: Resumed, repaired: Resumed) -> list[Finding]:
        """Says whether the random states are not restored, and matter."""
        if not took_another(own, repaired):
            return []
        causes = [name for name, state in own.random.items() if not same_tree(state, moment.random.get(name))]
        causes += [GRADIENTS] if moment.gradients else []
        if len(causes) > 1:  # some may be drawn from for what does not matter
            causes = [name for name in causes if took_another(own, resumed(self.make, moment, [name]))]
        names, found = [name for name in causes if name != GRADIENTS], []
        if names:
            text = (
                f"{listed(names)} {'is' if len(names) == 1 else 'are'} not restored, and the next steps draw from it: "
            )
            text += "dropout, noise or augmentation are not those of a training that goes on"
            fix = f"in save() and load(): {'; '.join(sources_of(own.loop)[name].fix for name in names)}"
            found.append(self.finding("fault", text, names, fix))
        if GRADIENTS in causes:
            text = "the next step adds to gradients that are left from before the save, and they are not restored"
            fix = "save only after a step that zeroes the gradients"
            found.append(self.finding("note", text, [*moment.gradients], fix))
        return found

    def of_strangers(self, repaired: Resumed) -> Finding:
        """Says that another optimizer steps after the load than the loop's."""
        kinds = listed([type(each).__name__ for each in repaired.strangers])
        text = f"after the load steps an optimizer ({kinds}) that is none of the loop's: it lacks the loaded state"
        return self.finding("fault", text, ["optimizers.0"], ADVICE["state"][1])

    def of_something_hidden(self, moment: Moment, repaired: Resumed) -> Finding:
        """Says that a step differs although everything that was compared after the load is the same."""
        names = [name for part, each in repaired.differs.items() if not is_attributes(part) for name in each]
        attributes = [name for part, each in lasting(repaired, True).items() for name in each]
        because = f"; {listed(attributes)} differ after the load" if attributes else ""
        text = f"one step after the load {listed(names) or 'the loss'} differ from a training that goes on, although "
        text += f"all parts of the state were the same{because}: the step depends on something that is not restored, "
        text += "such as a counter, or a random generator that is not among the loop's attributes"
        verdict = "fault" if distance(moment, repaired) >= LEAST else "note"
        return self.finding(verdict, text, [*attributes, *names], "save what step() and loss() keep between two steps")

    def of_parts(self, moment: Moment, found: Resumed, lost: dict[str, list[str]], verdict: Verdict) -> list[Finding]:
        """Says what each part of the state lacks after the load."""
        findings = []
        for part, names in lost.items():
            before, after = moment.state.get(part, {}), found.loaded.get(part, {})
            means, fix = ADVICE.get(
                kind_of(part), ("it goes on from other values", f"save {part}.state_dict(), and load it")
            )
            if part == "buffers" and {*names}.isdisjoint(found.loop.model.state_dict()):
                fix = "register them with persistent=True: state_dict() leaves them out"
            if part.endswith(".state") and (mixed := exchanged(part, names, before, after)):
                means = f"moments are exchanged between {listed(mixed)}"
                fix = "keep the order of the parameters in the optimizer: its state dict knows them by number only"
            elif part.endswith(".state") and not begins_anew(names, after):
                means = "moments or step counts are not those that were saved"
            meant = means if verdict == "fault" else "which makes no difference to the next step"
            text = f"{difference_of(part, names, before, after)}: {meant}"
            findings.append(self.finding(verdict, text, names, fix if verdict == "fault" else ""))
        return findings


def places_in_the_epoch(make: Maker, epoch: int) -> list[str]:
    """Returns the names of numbers in the saved state that are the place in the epoch, which only a save within needs.

    Such a number is that of the batches that were taken of an epoch, in saves of the first epoch and of the second. In
    the first alone a count of all steps is the same. Counts of schedulers and of the loss scale may begin anew with
    each epoch too, and are left out.
    """
    if not 2 <= epoch <= MOST_AHEAD:
        return []
    loop = make()
    assert loop.save is not None
    parts = [*loop.schedulers, *loop.optimizers, *([] if loop.scaler is None else [loop.scaler])]
    others = {name.rpartition(".")[2] for part in parts for name in flat(part.state_dict(), "")}
    places: set[str] | None = None
    with suppress(StopIteration):
        for step in range(epoch + 2):
            if step <= LEAST_STEPS or step >= epoch:
                saved = flat(loop.save(), "")
                right = {name for name, each in saved.items() if type(each) is int and each == step % epoch}
                places = right if places is None else places & right
            batch = next_of(loop, step)
            if epoch <= LONGEST_EPOCH:  # of longer ones the batches are only read
                take_step(loop, batch)
        return sorted(name.removeprefix(".") for name in places or () if name.rpartition(".")[2] not in others)
    return []


def is_attributes(part: str) -> bool:
    """Whether a part holds attributes of objects: many count what does not matter, and none is a fault by itself."""
    return part.endswith(ATTRIBUTES)


def goes_on(found: Resumed, moment: Moment) -> bool:
    """Whether a resumed loop went on as the one that was not interrupted."""
    return (
        not matters(found, moment)
        and same_tree(found.batch, moment.batch)
        and all(map(same_tree, found.upcoming, moment.upcoming))
    )


def matters(found: Resumed, moment: Moment) -> bool:
    """Whether the step after the load had another result. Attributes of objects may count things that do not matter."""
    return not same(found.loss, moment.loss) or any(not is_attributes(part) for part in found.differs)


def lasting(found: Resumed, attributes: bool = False) -> dict[str, list[str]]:
    """Returns what was lost in a load, but for buffers that the next step writes anew.

    Args:
        found: the resumed loop.
        attributes: whether to return attributes of objects alone: modes, and those that still differ after the step.
    """
    lost = {}
    for part, names in found.lost.items():
        if part == "buffers" or attributes:
            modes = ("training", "requires_grad") if attributes else ()
            names = [name for name in names if name in found.differs.get(part, ()) or name.endswith(modes)]
        if names and is_attributes(part) == attributes:
            lost[part] = names
    return lost


def took_another(one: Resumed, two: Resumed) -> bool:
    """Whether two resumed loops went different ways: by batches, loss, or more than attributes after the step."""
    if not same_tree((one.loss, one.batch, one.upcoming), (two.loss, two.batch, two.upcoming)):
        return True
    return any(not is_attributes(part) for part in differences(state_of(one.loop), state_of(two.loop)))


def distance(moment: Moment, found: Resumed) -> float:
    """Returns how far the weights are from those of the moment's step, relative to what that step moved them.

    If only losses differ, how far they are; infinity if something else differs and no weights do.
    """
    if all(map(is_attributes, found.differs)) and moment.loss and found.loss is not None:
        return abs(found.loss - moment.loss) / abs(moment.loss)
    before, after, now = moment.state["parameters"], moment.after["parameters"], found.loop.parameters
    shares = [
        float((now[name].detach() - after[name]).norm() / (after[name] - before[name]).norm())
        for name in found.differs.get("parameters", ())
        if not same(after[name], before[name])
    ]
    return max(shares, default=float("inf"))


def batch_number(loop: Loop, moment: Moment, batch: Any) -> int:
    """Returns the number of the step, from 1, whose batch this is; 0 if none near the moment has it."""
    steps = range(min(moment.step + max(loop.epoch, 1) + 1, MOST_BATCHES))
    return next((step + 1 for step in steps if same_tree(loop.batch(step), batch)), 0)


# ---- words


def kind_of(part: str) -> str:
    """Returns the key of `ADVICE` for a part."""
    first, _, rest = part.partition(".")
    return rest.partition(".")[2] if first == "optimizers" else first


def difference_of(part: str, names: list[str], before: Values, after: Values) -> str:
    """Says how a part differs: the numbers that do, or how many tensors."""
    if part.endswith(".state") and not after:
        saved = sum(isinstance(each, Tensor) for each in before.values())
        optimizer = part.removesuffix(".state")
        return f"{optimizer}: optimizer state empty after load: {saved} tensors saved, 0 restored"
    if all(is_short(before.get(name)) and is_short(after.get(name)) for name in names):
        return listed([f"{n} is {shown(before, n)} when saved and {shown(after, n)} after load" for n in names])
    missing = sum(name not in after for name in names)
    how = f" ({missing} of them missing)" if missing else ""
    return f"{len(names)} of the {len(before)} values of {part} differ after load{how}: {listed(names)}"


def exchanged(part: str, names: list[str], before: Values, after: Values) -> list[str]:
    """Returns the names of parameters of which each got all that was saved of another one; empty if not all did.

    Args:
        part: `optimizers.0.state` or the like.
        names: of the values that differ, such as `optimizers.0.state[weight].exp_avg`.
        before: the values when they were saved.
        after: the values after the load.
    """
    own: dict[str, list[str]] = {}  # the kinds of values that differ, by parameter
    for name in names:
        parameter, _, kind = name.removeprefix(f"{part}[").rpartition("].")
        own.setdefault(parameter, []).append(kind)

    def got(one: str, other: str) -> bool:
        pairs = [(f"{part}[{one}].{kind}", f"{part}[{other}].{kind}") for kind in own[one]]
        return all(mine in after and other in before and same(after[mine], before[other]) for mine, other in pairs)

    return [*own] if all(any(got(one, other) for other in own if other != one) for one in own) else []


def begins_anew(names: list[str], after: Values) -> bool:
    """Whether values of an optimizer's state are missing, or 0."""
    return not any(bool(torch.as_tensor(after[name]).any()) for name in names if isinstance(after.get(name), NUMBERS))


def is_short(value: Any) -> bool:
    """Whether a value can be shown in a text."""
    return isinstance(value, PLAIN) or (isinstance(value, Tensor) and value.numel() == 1)


def shown(values: Values, name: str) -> str:
    """Returns a number or word as a text."""
    if name not in values:
        return "missing"
    value = values[name].item() if isinstance(values[name], Tensor) else values[name]
    return f"{value:g}" if isinstance(value, float) else repr(value)


def line_of(function: Any) -> str:
    """Returns where a function of the user's is defined, `file:line`; empty if it is a library's."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None and is_own(code.co_filename) else ""


def line_of_error(error: BaseException | None) -> str:
    """Returns the innermost line of the user's code that an error came through, `file:line`; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    own = [f"{frame.filename}:{frame.lineno}" for frame in frames if is_own(frame.filename)]
    return own[-1] if own else ""
