"""Whether the micro-batches' losses and gradients add up to those of the whole batch.

Takes a step without clipping, autocast, compilation and dropout, and compares the gradient that the optimizers get with
that of `loss` of the whole batch: for the first batch, and for the last of an epoch if it is smaller. If they differ,
the gradient of each micro-batch alone shows which weights the step gave them, and which they have in the batch.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stabletrain.beside.preflight.finding import Finding, listed
from stabletrain.beside.preflight.loop import Loop, Maker, seed
from stabletrain.beside.preflight.plain import (
    Gradients,
    cosine,
    dot,
    eager,
    gradient_of,
    mapped,
    norm,
    tensors_of,
    without_autocast,
    without_dropout,
)
from stabletrain.beside.preflight.recording import parameters_of, recording, replaced

NAME = "accumulation"

SHRINK = 2.0**-30
"""What gradients are multiplied with, so that no clipping sees a large one. A power of 2 rounds nothing."""

MOST_CALLS = 32
"""Calls of `step` within which the optimizers are expected to step; more would take too long."""

MOST_PARTS = 64
"""Micro-batches whose gradients are computed apart; more would take too long."""

SEVERAL = 8
"""Numbers of a gradient that are not all the same multiple of another's by accident."""

COORDINATES = 200_000
"""Numbers of a gradient that are used to find the weights of micro-batches: many more than there are weights."""


@dataclass
class Update:
    """What the optimizers got for one update.

    Attributes:
        batches: of the calls of `step` that it took.
        gradient: unscaled and not clipped.
        parts: numbers of the rows of each micro-batch, counted through all batches.
        loss: what the last call of `step` returned; NaN if that was no number.
        line: of the user's backward call.
        reason: why it cannot be checked; empty if it can.
    """

    batches: list[Any] = field(default_factory=list)
    gradient: Gradients = field(default_factory=dict)
    parts: list[Tensor] = field(default_factory=list)
    loss: float = float("nan")
    line: str = ""
    reason: str = ""


def check(make: Maker) -> list[Finding]:
    """Checks a loop."""
    loop = make()
    if loop.step is None:
        return [Finding(NAME, "not checked", "make() returned no step")]
    first = Compared(make, 0)
    if first.finding.verdict == "fault" or loop.epoch < 2 or len(first.update.batches) > 1:
        return [first.finding]
    if rows(loop.batch(loop.epoch - 1)) == rows(loop.batch(0)):
        return [first.finding]
    last = Compared(make, loop.epoch - 1, first)
    found = last.of_size() or last.finding
    return [first.finding] if found == first.finding else [first.finding, found]


class Compared:
    """The gradient of an update beside that of the loss of the same samples.

    Args:
        make: makes fresh loops.
        start: number of the first batch.
        first: of the first batch of the epoch, if this is the last.

    Attributes:
        finding: what was found.
        distance: from the gradient of the loss to that of the step, relative to it; 0 if they were not compared.
    """

    def __init__(self, make: Callable[[], Loop], start: int, first: "Compared | None" = None) -> None:
        self.make, self.start, self.first, self.factor, self.loss = make, start, first, 1.0, float("nan")
        self.loop, self.distance = make(), 0.0
        self.tolerance = tolerance(self.loop)
        self.update = taken(make(), start)
        with plainly(self.loop):
            self.finding = self.compared()

    def compared(self) -> Finding:
        """Returns what was found."""
        update = self.update
        if update.reason:
            return Finding(NAME, "not checked", update.reason)
        late = self.first is not None and len(update.batches) > 1  # the first batch had an update of its own
        if late:
            alone = self.of_loss(update.batches[-1])
            if far(update.gradient, alone) <= self.tolerance:
                return Finding(NAME, "passed", f"{self.name} gets no update, and leaves no gradient behind")
        try:
            batch = joined(update.batches)
        except (RuntimeError, ValueError, TypeError) as error:
            return Finding(NAME, "not checked", f"batches that share an update cannot be joined: {error}")
        whole = self.of_loss(batch)
        if not whole:
            reason = (
                "the optimizers hold none of the model's parameters that the loss depends on, but copies, for example"
            )
            reason += ": what they get has no names by which it can be compared with the gradient of loss"
            return Finding(NAME, "not checked", reason)
        self.distance = distance = far(update.gradient, whole)
        if distance <= self.tolerance:
            parts = f"{len(update.parts)} micro-batches" if len(update.parts) > 1 else "the step"
            same = "bit for bit" if distance == 0 else f"but for {distance:.0e} of its length"
            text = f"the gradient of {parts} is that of the whole batch, {same} ({self.name})"
            # 1 %: rounding is far below, and a wrong number of targets is not.
            if len(update.batches) == 1 and abs(update.loss - self.loss) > 0.01 * abs(self.loss):
                text = f"{text}, but step returns the loss {update.loss:.4g}, and the batch's is {self.loss:.4g}"
                return Finding(NAME, "note", text, line=update.line)
            return Finding(NAME, "passed", text)
        if len(update.parts) < 2:
            return self.one_part(whole)
        if len(update.parts) > MOST_PARTS:
            return Finding(NAME, "not checked", f"{len(update.parts)} micro-batches are too many to compare")
        return self.several_parts(batch, whole, late=late)

    @property
    def name(self) -> str:
        """Which batch it is."""
        return "the first batch" if self.first is None else f"the last batch of the epoch, number {self.start}"

    def of_loss(self, batch: Any) -> Gradients:
        """Returns the gradient of the loss of a batch, of what the optimizers train."""
        names = {self.loop.name_of(each) for optimizer in self.loop.optimizers for each in parameters_of(optimizer)}
        shrink = shrink_of(self.loop)  # as in the step: hooks may clip too
        with shrunk(shrink):
            self.loss, gradient = gradient_of(self.loop, batch)
        return {name: each / shrink for name, each in gradient.items() if name in names}

    def one_part(self, whole: Gradients) -> Finding:
        """Compares an update of a single backward call."""
        given, line = self.update.gradient, self.update.line
        factor = dot(given, whole) / max(dot(whole, whole), 1e-300)
        if far(given, {name: factor * each for name, each in whole.items()}) > self.tolerance * max(abs(factor), 1.0):
            text = (
                f"the gradient of step is not that of loss ({self.name}): cosine {cosine(given, whole):.3f}, "
                f"{norm(given) / max(norm(whole), 1e-300):.3g} times as long; step may draw other random numbers or "
                "train more than loss"
            )
            return Finding(NAME, "note", text, line=line)
        if self.normalized(factor):
            return self.normalized_note()
        self.factor = factor
        usual = 1.0 if self.first is None else self.first.factor
        # 1 %: far above rounding, and far below what another number of rows makes.
        if self.first is not None and abs(factor - usual) > 0.01 * abs(usual):
            text = (
                f"the gradient of {self.name} ({rows(self.update.batches[0])} rows) is {factor:.3g} times that of its "
                f"mean loss, that of the first batch ({rows(self.first.update.batches[0])} rows) {usual:.3g} times: "
                "backward divides by a number of rows that is not the batch's own"
            )
            return Finding(NAME, "fault", text, line=line, fix="divide the loss by the batch's own number of targets")
        text = f"the gradient of step is {factor:.4g} times that of loss ({self.name})"
        return Finding(NAME, "note", text, line=line)

    def several_parts(self, batch: Any, whole: Gradients, *, late: bool) -> Finding:
        """Compares an update of micro-batches: finds the weights that they have, and those they should have."""
        update = self.update
        apart = f"cosine {cosine(update.gradient, whole):.3f}, {norm(update.gradient) / max(norm(whole), 1e-300):.3g} "
        apart += "times as long"
        try:
            parts = [self.of_loss(chosen(batch, each)) for each in update.parts]
        except (RuntimeError, ValueError, IndexError) as error:
            reason = (
                f"the gradient of step is not that of loss ({self.name}: {apart}), and loss fails with a part of the "
                f"batch's rows ({type(error).__name__}: {error}): it takes all rows together, as in a loop that "
                "carries a state for each row from batch to batch, so that micro-batches cannot be compared with it"
            )
            return Finding(NAME, "not checked", reason)
        given, given_error = weights_of(update.gradient, parts)
        right, right_error = weights_of(whole, parts)
        if right_error > self.tolerance:
            # As with batch normalization, or a loss of pairs: then only the sum of the weights is known.
            total, usual = sum(given), len(given)
            if given_error <= self.tolerance and min(abs(total - usual), abs(total * usual - 1)) < 0.01:
                return self.fault(given, [1 / usual] * usual, late=late)
            if found := self.of_one_loss(batch, whole):
                return found
            text = (
                f"the gradient of step, taken as {len(parts)} micro-batches, is not that of loss ({self.name}): "
                f"{apart}; loss is not a sum over the parts of a batch, as with batch normalization, a loss of pairs, "
                "random numbers, or several terms that are divided by different numbers, so that it is not known which "
                "of them is meant"
            )
            fix = "if loss has several terms, divide each by its own number in the whole batch"
            return Finding(NAME, "note", text, line=update.line, fix=fix)
        if given_error > self.tolerance:
            if found := self.of_one_loss(batch, whole):
                return found
            text = (
                f"the gradient of step is not that of loss ({self.name}), and no weights of {len(parts)} micro-batches "
                f"explain it: cosine {cosine(update.gradient, whole):.3f}"
            )
            return Finding(NAME, "note", text, line=update.line)
        if self.normalized(sum(given)):
            return self.normalized_note()
        return self.fault(given, right, late=late)

    def of_size(self) -> Finding | None:
        """Finds a step that is right for full batches and wrong for a smaller one, whatever its rows are.

        This is certain if the step is wrong too for as few rows of the first batch, of which all together are right.
        """
        update, first = self.update, self.first
        known = self.distance > self.tolerance and self.finding.verdict != "fault" and len(update.batches) == 1
        if first is None or not known or update.reason or first.finding.verdict != "passed":
            return None
        few, many = rows(update.batches[0]), rows(first.update.batches[0])
        if not 0 < few < many:
            return None
        alone = chosen(first.update.batches[0], torch.arange(few))

        def shortened() -> Loop:
            loop = self.make()
            loop.batch = lambda *_: alone
            return loop

        try:
            short = Compared(shortened, 0)
        except (RuntimeError, ValueError, IndexError):
            return None
        if short.distance <= self.tolerance or len(short.update.batches) > 1:
            return None
        given = update.gradient
        with plainly(self.loop):
            whole = self.of_loss(update.batches[0])
            weights = self.of_rows(update.batches[0], whole) if few <= MOST_PARTS else ""
        text = (
            f"the gradient of step is that of loss for full batches, of {many} rows, and not for {self.name}, of {few} "
            f"(cosine {cosine(given, whole):.3f}, {norm(given) / max(norm(whole), 1e-300):.3g} times as long), nor for "
            f"{few} rows of the first one: as if rows were repeated or dropped{weights}"
        )
        fix = "take each row of a smaller batch once: do not fill it up, or leave out what was filled up by a mask"
        return Finding(NAME, "fault", text, line=update.line, fix=fix)

    def of_rows(self, batch: Any, whole: Gradients) -> str:
        """Says which rows of a batch count more or less in a step than in the loss; empty if that is not known."""
        parts = [self.of_loss(chosen(batch, torch.tensor([each]))) for each in range(rows(batch))]
        given, given_error = weights_of(self.update.gradient, parts)
        right, right_error = weights_of(whole, parts)
        if max(given_error, right_error) > self.tolerance or 0 in right:
            return ""
        shares = [one / other for one, other in zip(given, right, strict=True)]
        return f" (its rows count {numbers(shares)} times as much as in loss)"

    def of_one_loss(self, batch: Any, whole: Gradients) -> Finding | None:
        """Finds parameters of one of several losses that is not divided by the number of micro-batches, or twice.

        Their gradient is as many times too long as there are micro-batches, and right if there is only one. Parameters
        that several losses share have no factor, and are not looked at.
        """
        update = self.update
        count = len(update.parts)
        for factor in (count, 1 / count) if len(update.batches) == 1 else ():
            names = self.multiplied(update.gradient, whole, factor)
            if not names or not self.multiplied(update.gradient, whole, 1.0):
                continue
            for rows_of_one in (update.parts[0], update.parts[0][:1]):
                alone = chosen(batch, rows_of_one)
                loop = self.make()
                loop.batch = lambda *_, alone=alone: alone
                one = taken(loop, 0)
                # A weight of the loss, or of the parameters' gradient, would be there with one micro-batch as well.
                right = not one.reason and len(one.parts) == 1 and len(one.batches) == 1
                if right and {*names} <= {*self.multiplied(one.gradient, self.of_loss(alone), 1.0)}:
                    return self.fault_of_one_loss(names, factor)
        return None

    def multiplied(self, given: Gradients, whole: Gradients, factor: float) -> list[str]:
        """Returns the parameters whose gradient is so many times that of the loss; SEVERAL numbers are no accident."""
        found = [name for name, each in whole.items() if name in given and int((each != 0).sum()) >= SEVERAL]
        return [name for name in found if far({name: given[name]}, {name: factor * whole[name]}) <= self.tolerance]

    def fault_of_one_loss(self, names: list[str], factor: float) -> Finding:
        """Says which parameters have too long or too short a gradient."""
        count = len(self.update.parts)
        text = (
            f"the gradient of {count} micro-batches is {factor:.3g} times that of the batch for {listed(names)}, and "
            f"right for others ({self.name}); with one micro-batch it is right for them, too: of several losses one is "
        )
        if factor > 1:
            text, fix = f"{text}added up, not averaged", f"divide each of the losses by {count} before backward()"
        else:
            text, fix = f"{text}divided twice", f"divide each of the losses only once by {count}"
        return Finding(NAME, "fault", text, tuple(names), self.update.line, fix)

    def normalized(self, factor: float) -> bool:
        """Whether a gradient is longer than any sum over the numbers of a batch: then step sets its norm."""
        return abs(factor) > 2 * sum(each.numel() for batch in self.update.batches for each in tensors_of(batch))

    def normalized_note(self) -> Finding:
        """Says that the norm of the gradient is set."""
        text = "what step gives does not shrink with the loss (its norm is set, or noise is added): it is no measure"
        return Finding(NAME, "note", text, line=self.update.line)

    def fault(self, given: list[float], right: list[float], *, late: bool) -> Finding:
        """Says which weights the micro-batches have, and why they are wrong."""
        count, line = len(given), self.update.line
        means = (
            f"the gradient of {count} micro-batches is not that of the batch ({self.name}): they have the weights "
            f"{numbers(given)}, in the mean over all targets {numbers(right)}"
        )
        factor = sum(given) / (sum(right) or 1.0)
        proportional = all(
            abs(one - factor * other) <= 0.01 * max(abs(factor), 1.0) for one, other in zip(given, right, strict=True)
        )
        even = max(given) - min(given) <= 0.01 * max(abs(each) for each in given)
        if late:
            text = f"{self.name} gets no update, and its gradient is added to that of the next batch: {means}"
            fix = "step the optimizer with what is left at the end of the epoch, or call zero_grad() there"
        elif self.first is not None and proportional:
            text = f"{means}: {factor:.3g} times, though the gradient of the first batch is right"
            fix = "divide by the batch's own number of micro-batches or targets, not by the usual one"
        elif proportional and abs(factor - count) <= 0.01 * count:
            text, fix = f"{means}: {factor:.3g} times, their sum", f"divide each loss by {count} before backward()"
        elif proportional and abs(factor - 1 / count) <= 0.01 / count:
            text = f"{means}: {factor:.3g} times, as if divided twice"
            fix = f"divide each loss only once by {count}; a library may do so too"
        elif proportional:
            text = f"{means}: {factor:.3g} times"
            fix = "divide each loss's sum by the number of targets of the whole batch; ignored ones do not count"
        elif abs(sum(given) - count) <= 0.01 * count and even:
            text = f"{means}: the means are added up, not averaged"
            fix = "weight each loss by its number of targets / those of the whole batch before backward()"
        else:
            text = f"{means}: a mean of means, though their numbers of targets differ" if even else means
            fix = "weight each loss by its number of targets / those of the whole batch before backward()"
        return Finding(NAME, "fault", text, line=line, fix=fix)


def taken(loop: Loop, start: int) -> Update:
    """Calls `step` until the optimizers step; returns what they got.

    Args:
        loop: fresh.
        start: number of the first batch.
    """
    assert loop.step is not None
    update = Update()
    shrink = shrink_of(loop)
    with plainly(loop), shrunk(shrink):
        for number in range(start, start + MOST_CALLS):
            batch = loop.batch(number)
            update.batches.append(batch)
            seed(1)
            before = sum(map(rows, update.batches[:-1]))
            with parts_of(loop, batch, update.parts, before), recording(loop) as step:
                value = loop.step(batch)
            backward, stepped = step.calls("backward"), step.calls("optimizer")
            update.line = backward[-1].line if backward else update.line
            kinds = [event.kind for event in step.events]
            if "optimizer" in kinds and "backward" in kinds[kinds.index("optimizer") :]:
                update.reason = "an optimizer steps before the last backward call: there is no gradient of one loss"
            elif len(stepped) > len({event.index for event in stepped}):
                update.reason = "an optimizer steps more than once in a step"
            elif not backward and not update.line:
                update.reason = "step calls no backward()"
            if isinstance(value, (float, Tensor)) and torch.as_tensor(value).numel() == 1:
                update.loss = float(torch.as_tensor(value).detach())
            if stepped or update.reason:
                update.gradient = {name: each / shrink for given in step.given.values() for name, each in given.items()}
                return update
    update.reason = f"no optimizer stepped in {MOST_CALLS} calls of step"
    return update


def shrink_of(loop: Loop) -> float:
    """Returns what gradients are multiplied with: nothing in fp16, which has no numbers that small."""
    return 1.0 if any(each.dtype == torch.float16 for each in loop.model.parameters()) else SHRINK


@contextmanager
def plainly(loop: Loop) -> Generator[None, None, None]:
    """Computes without compilation, autocast and dropout: then parts of a batch differ by their samples alone."""
    with eager(), without_autocast(), without_dropout(loop.model):
        yield


@contextmanager
def shrunk(by: float) -> Generator[None, None, None]:
    """Multiplies the gradients of the outermost backward calls."""
    inside = False

    def backward(inner: Callable[..., Any], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return inner(tensors, grad_tensors, *args, **kwargs)
        roots = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        given = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, Tensor) else [*grad_tensors]
        given = given if len(given) == len(roots) else [None] * len(roots)
        small = [
            by * (torch.ones_like(root) if each is None else each) for root, each in zip(roots, given, strict=True)
        ]
        inside = True
        try:
            return inner(roots, small, *args, **kwargs)
        finally:
            inside = False

    with replaced(torch.autograd, "backward", backward):
        yield


@contextmanager
def parts_of(loop: Loop, batch: Any, parts: list[Tensor], offset: int) -> Generator[None, None, None]:
    """Adds the numbers of the rows of each micro-batch of a step, by what the model gets before the backward calls.

    If the model is not called as a whole, or with something else, the batch counts as split evenly.

    Args:
        loop: whose step is taken inside.
        batch: of the step.
        parts: to add to.
        offset: number of the batch's first row.
    """
    seen: list[Tensor] = []
    last: list[Tensor] = []
    calls = mark = 0

    def called(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = [each for each in tensors_of([args, kwargs]) if each.ndim]
        if inputs and torch.is_grad_enabled():
            seen.append(inputs[0].detach())

    def backward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls, mark
        last.extend(seen[mark:][-1:])
        calls, mark = calls + 1, len(seen)
        return inner(*args, **kwargs)

    with ExitStack() as stack:
        stack.callback(loop.model.register_forward_pre_hook(called, with_kwargs=True).remove)
        stack.enter_context(replaced(torch.autograd, "backward", backward))
        yield
    count = rows(batch)
    # One call of the model for each micro-batch, or several of which the last counts; then each has rows of its own.
    inputs = next((each for each in (seen, last) if sum(map(len, each)) == count), [])
    numbers = torch.arange(count)
    if inputs:
        found = rows_of(inputs, batch) or [*numbers.split([len(each) for each in inputs])]
    else:
        found = [*numbers.split(-(-count // max(calls, 1)))] if count else []
    parts.extend(each + offset for each in found)


def rows_of(inputs: list[Tensor], batch: Any) -> list[Tensor]:
    """Returns which rows of a batch each of several inputs holds; nothing if they are not its rows, each once."""

    def keys(tensor: Tensor) -> list[bytes]:
        return [each.contiguous().view(torch.uint8).numpy().tobytes() for each in tensor.detach().cpu()]

    for each in tensors_of(batch):
        if each.ndim < 2 or any(one.shape[1:] != each.shape[1:] or one.dtype != each.dtype for one in inputs):
            continue
        places: dict[bytes, list[int]] = {}
        for number, key in enumerate(keys(each)):
            places.setdefault(key, []).append(number)
        try:
            return [torch.tensor([places[key].pop(0) for key in keys(one)]) for one in inputs]
        except (KeyError, IndexError):
            continue
    return []


def rows(batch: Any) -> int:
    """Returns the length of a batch's first tensor."""
    return next((len(each) for each in tensors_of(batch) if each.ndim), 0)


def joined(batches: list[Any]) -> Any:
    """Returns several batches as one."""
    if len(batches) == 1:
        return batches[0]
    columns = [iter(each) for each in zip(*map(tensors_of, batches), strict=True)]
    whole = iter([torch.cat([*column]) for column in columns])
    return mapped(lambda _: next(whole), batches[0])


def chosen(batch: Any, numbers: Tensor) -> Any:
    """Returns some rows of a batch; a tensor of another length is returned whole."""
    length = rows(batch)
    return mapped(lambda each: each[numbers.to(each.device)] if each.ndim and len(each) == length else each, batch)


def tolerance(loop: Loop) -> float:
    """Returns the share of its norm by which a gradient may differ through rounding alone.

    A thousand times the rounding of the weights' precision: sums of many terms that cancel lose some digits. It is
    still far below what a wrong weight of a micro-batch makes.
    """
    rounding = max((torch.finfo(each.dtype).eps for each in loop.model.parameters()), default=1e-7)
    return min(max(1e3 * rounding, 1e-3), 0.05)


def far(one: Gradients, two: Gradients) -> float:
    """Returns the norm of the difference of two gradients, relative to that of the second."""
    zero = torch.zeros(())
    difference = {name: one.get(name, zero).double() - two.get(name, zero).double() for name in {**one, **two}}
    return norm(difference) / max(norm(two), 1e-300)


def weights_of(gradient: Gradients, parts: list[Gradients]) -> tuple[list[float], float]:
    """Returns the weights with which gradients of parts add up to a gradient, and the share that is left."""
    names = sorted({name for each in (gradient, *parts) for name in each})
    lengths = {name: each.numel() for gradients in (gradient, *parts) for name, each in gradients.items()}
    stride = max(sum(lengths.values()) // COORDINATES, 1)

    def flat(gradients: Gradients) -> Tensor:
        zeros = {name: torch.zeros(lengths[name]) for name in names if name not in gradients}
        chosen = [(gradients[name].flatten() if name in gradients else zeros[name])[::stride] for name in names]
        return torch.cat([each.double().cpu() for each in chosen])

    columns, wanted = torch.stack([flat(each) for each in parts], 1), flat(gradient)
    weights = torch.linalg.lstsq(columns, wanted[:, None]).solution[:, 0]
    left = (columns @ weights - wanted).norm() / wanted.norm().clamp_min(1e-300)
    return weights.tolist(), float(left)


def numbers(weights: list[float]) -> str:
    """Returns weights for a text: `0.25, 0.25 and 2 more`."""
    shown = ", ".join(f"{each:.3g}" for each in weights[:4])
    return shown if len(weights) <= 4 else f"{shown} and {len(weights) - 4} more"
