"""Whether the gradient that training uses is that of the loss.

- The gradient as training computes it (compiled, recomputed) beside that of the same code run plainly.
- Each autograd function of the user's alone beside finite differences.
- Parameters that the loss depends on, by finite differences, though they get no gradient.
- The whole gradient along a random direction beside finite differences. A difference may be meant there, as with
  straight-through gradients, so this is a note.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.beside.preflight.finding import Finding, listed
from stabletrain.beside.preflight.functions import NAME, check_call, recorded_calls
from stabletrain.beside.preflight.loop import Loop, Maker, seed
from stabletrain.beside.preflight.plain import (
    Gradients,
    Recomputed,
    apart,
    cosine,
    doubled,
    eager,
    gradient_of,
    in_double,
    mapped,
    norm,
    trained,
    without_autocast,
    without_dropout,
)
from stabletrain.beside.preflight.recording import parameters_of, recording, users_line

SAME = 1e-3
"""Relative difference of a parameter's gradient that other kernels explain in fp32: ten thousand times its rounding."""

FLOOR = 1e-4
"""Difference relative to the whole gradient that does not matter: some gradients are 0 but for rounding, as that of a
bias before batch normalization."""

STEP = 1e-6
"""How far weights are moved, relative to their size: the error of central differences is of the order of its square,
and rounding in fp64 adds about 1e-16 / 1e-6 of the loss."""

ASIDE = 1e-2
"""How far the weights are moved off an edge of the loss, relative to their size: ten thousand times STEP, so that few
edges are within it, and no other loss in kind."""

SIGNIFICANT = 1e-7
"""Slope relative to the loss that is more than rounding: a thousand times 1e-10."""

ALIKE = 0.9
"""Cosine with the gradient in fp32 that low precision has at least: with 0.7 half of the step's squared length is
rounding, and bf16 gives more than 0.99 in networks of usual depth."""

MOST_PROBES = 8
"""Modules whose influence on the loss is looked at one by one; beyond, together."""


@dataclass
class Run:
    """The loss of a batch and its gradient, computed plainly.

    Attributes:
        loop: that it was computed with.
        loss: of the first batch.
        gradient: of it.
        calls: of the user's autograd functions.
        recomputed: what training recomputes.
        lines: where each module is called, by its name.
    """

    loop: Loop
    loss: float = 0.0
    gradient: Gradients = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)
    recomputed: list[Recomputed] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)


def check(make: Maker) -> list[Finding]:
    """Checks a loop."""
    run = plain_run(make())
    size = norm(run.gradient)
    if not (math.isfinite(run.loss) and math.isfinite(size)):
        text = f"the loss of the first batch is {run.loss:.3g}, the norm of its gradient {size:.3g}"
        return [Finding(NAME, "not checked", text)]
    found = [each for each in map(check_call, run.calls) if each is not None]
    if run.loop.compiled or run.recomputed:
        found += tried("the compiled or recomputed gradient", lambda: against_plain(make, run))
    if run.loop.precision in ("bf16", "fp16"):
        found += tried("the gradient in fp32", lambda: against_fp32(make, run))
    faulty = any(each.verdict == "fault" for each in found)
    return found + tried("finite differences", lambda: finite_differences(make, run, faulty=faulty))


def tried(name: str, part: Callable[[], list[Finding]]) -> list[Finding]:
    """Makes a part of the check; if the user's code fails in it, the others are still made."""
    try:
        return part()
    except (RuntimeError, TypeError, ValueError) as error:
        return [Finding(NAME, "not checked", f"{name}: it failed with {type(error).__name__}: {error}")]


def plain_run(loop: Loop) -> Run:
    """Computes the loss of the first batch and its gradient plainly, and records what it calls."""
    run = Run(loop)

    def called(module: nn.Module, _: Any) -> None:
        run.lines.setdefault(names[module], users_line())

    names = {module: name for name, module in loop.model.named_modules()}
    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_pre_hook(called).remove)
        run.recomputed = stack.enter_context(eager())
        run.calls = stack.enter_context(recorded_calls(loop))
        run.loss, run.gradient = gradient_of(loop, loop.batch(0))
    return run


# ---- compiled, or recomputed in the backward pass


def against_plain(make: Maker, run: Run) -> list[Finding]:
    """Compares the gradient as training computes it with that of the same code run plainly."""
    loop = make()
    loss, gradient = gradient_of(loop, loop.batch(0))
    how = " and ".join((["compiled"] if loop.compiled else []) + (["recomputed"] if run.recomputed else []))
    allowed = allowed_of(make, loop, run.gradient)
    wrong = differing(gradient, run.gradient, allowed)
    same_loss = abs(loss - run.loss) <= SAME * max(abs(run.loss), 1e-30)
    if wrong and loop.compiled:
        # Compiled code may draw other random numbers: compare it without dropout.
        other = make()
        with eager():
            again = gradient_of(other, other.batch(0), 2)[1]
        if differing(again, run.gradient, allowed):
            return compiled_without_dropout(make, how)
    if not wrong and same_loss:
        text = f"the {how} gradient is that of the plain model: cosine {cosine(gradient, run.gradient):.7f}"
        return [Finding(NAME, "passed", text)]
    if not wrong:
        text = f"the {how} model's loss is {loss:.6g}, the plain one's {run.loss:.6g}; the gradients are the same"
        return [Finding(NAME, "note", text)]
    if loop.compiled:
        return [compiled_wrong(gradient, run.gradient, loss, run.loss, wrong)]
    return [recomputed_wrong(run, gradient, wrong)]


def allowed_of(make: Maker, loop: Loop, gradient: Gradients) -> dict[str, float]:
    """Returns how far the gradient of each parameter may be from the plain one.

    A compiled model in low precision may round elsewhere: as far as the plain one is from fp32, three times.
    """
    allowed = {name: SAME * float(each.double().norm()) + FLOOR * norm(gradient) for name, each in gradient.items()}
    if loop.compiled and loop.precision != "fp32":
        fresh = make()  # only then: to make a compiled loop takes the compiler's time
        with eager(), without_autocast():
            exact = gradient_of(fresh, fresh.batch(0))[1]
        for name, each in apart(gradient, exact).items():
            allowed[name] = allowed.get(name, 0.0) + 3 * each
    return allowed


def differing(one: Gradients, two: Gradients, allowed: dict[str, float]) -> list[str]:
    """Returns the names of the parameters whose gradients differ by more than is allowed."""
    return [name for name, each in apart(one, two).items() if each > allowed.get(name, 0.0)]


def compiled_without_dropout(make: Maker, how: str) -> list[Finding]:
    """Compares the compiled model with the plain one, both without dropout; in eval mode, if it still draws numbers."""
    for mode in ("without dropout", "in eval mode"):
        loop = _with_less_randomness(make, mode)
        with without_dropout(loop.model):
            loss, gradient = gradient_of(loop, loop.batch(0))
        loop = _with_less_randomness(make, mode)
        with eager(), without_dropout(loop.model):
            plain_loss, plain = gradient_of(loop, loop.batch(0))
            again = gradient_of(loop, loop.batch(0), 2)[1]
        allowed = allowed_of(make, loop, plain)
        wrong = differing(gradient, plain, allowed)
        if not wrong:
            value = cosine(gradient, plain)
            return [
                Finding(NAME, "passed", f"{mode} the {how} gradient is that of the plain model: cosine {value:.7f}")
            ]
        if not differing(again, plain, allowed):
            return [compiled_wrong(gradient, plain, loss, plain_loss, wrong)]
    text = "the compiled model draws random numbers of its own, perhaps others than the plain one, in eval mode too"
    return [Finding(NAME, "not checked", text)]


def _with_less_randomness(make: Maker, mode: str) -> Loop:
    """Returns a fresh loop, in eval mode if that is wanted."""
    loop = make()
    if mode == "in eval mode":
        loop.model.eval()
    return loop


def compiled_wrong(one: Gradients, two: Gradients, loss: float, plain_loss: float, wrong: list[str]) -> Finding:
    """Says how a compiled model differs from the plain one."""
    part = {name: one[name] for name in wrong if name in one}, {name: two[name] for name in wrong if name in two}
    apart_by = abs(loss - plain_loss) / max(abs(plain_loss), 1e-30)
    kept = "its loss is the same" if apart_by <= 1e-5 else f"its loss is {loss:.6g}, the plain one's {plain_loss:.6g}"
    text = (
        f"the compiled model computes another gradient than the plain one, beyond rounding: {kept}; the gradient of "
        f"{listed(wrong)} has cosine {cosine(*part):.4f} and is {norm(part[0]) / max(norm(part[1]), 1e-300):.3g} times "
        "as long"
    )
    fix = "train without torch.compile, or with backend='aot_eager' to see which part is at fault; update PyTorch"
    return Finding(NAME, "fault", text, tuple(wrong), fix=fix)


def recomputed_wrong(run: Run, gradient: Gradients, wrong: list[str]) -> Finding:
    """Says that a recomputation in the backward pass is not what the forward pass has computed."""
    names = {module: name for name, module in run.loop.model.named_modules()}
    owners = [getattr(each.function, "__self__", each.function) for each in run.recomputed]
    places = [names[each] for each in owners if isinstance(each, nn.Module) and each in names]
    places = list(dict.fromkeys(places)) or wrong
    part = [{name: each[name] for name in wrong if name in each} for each in (gradient, run.gradient)]
    text = (
        f"recomputation in the backward pass (checkpoint) does not repeat the forward pass of {listed(places)}: "
        f"the gradient of {listed(wrong)} has cosine {cosine(*part):.4f} with that without recomputation"
    )
    fix = "make what is recomputed depend on its inputs alone: no counter, no buffer that it changes, no own generator"
    if not all(each.preserves for each in run.recomputed):
        text, fix = f"{text}; it draws other random numbers", "pass preserve_rng_state=True to checkpoint()"
    return Finding(NAME, "fault", text, tuple(places), run.recomputed[0].line, fix)


def against_fp32(make: Maker, run: Run) -> list[Finding]:
    """Compares the gradient under autocast with that in fp32; if they differ, without dropout, which draws masks."""
    loop, gradient = make(), run.gradient
    with eager(), without_autocast():
        exact = gradient_of(loop, loop.batch(0))[1]
    if cosine(gradient, exact) <= ALIKE:
        first, second = make(), make()
        with eager(), without_dropout(first.model):
            gradient = gradient_of(first, first.batch(0))[1]
        with eager(), without_dropout(second.model), without_autocast():
            exact = gradient_of(second, second.batch(0))[1]
    value, ratio = cosine(gradient, exact), norm(gradient) / max(norm(exact), 1e-300)
    text = f"the gradient in {loop.precision} has cosine {value:.4f} with that in fp32 and is {ratio:.3g} times as long"
    return [Finding(NAME, "passed" if value > ALIKE else "note", text)]


# ---- parameters without gradient


STEPS = 6
"""Steps in which a parameter is expected to get a gradient: some loops train a part only every fifth step."""


def silent_parameters(make: Maker, run: Run) -> list[str]:
    """Returns the parameters in the optimizers that get no gradient, or exactly 0, from the loss and from any step."""
    loop = run.loop
    names = {loop.name_of(each) for optimizer in loop.optimizers for each in parameters_of(optimizer)}
    silent = [name for name in trained(loop) if name in names and not gets_some(run.gradient, name)]
    if silent and loop.precision != "fp32":  # in fp16 a small gradient becomes 0
        loop = make()
        with eager(), without_autocast():
            gradient = gradient_of(loop, loop.batch(0))[1]
        silent = [name for name in silent if not gets_some(gradient, name)]
    if silent and loop.step is not None:
        loop = make()
        for number in range(STEPS):
            assert loop.step is not None
            with eager(), without_autocast(), recording(loop) as step:
                loop.step(loop.batch(number))
            given = [step.gradients, *step.given.values()]
            silent = [name for name in silent if not any(gets_some(each, name) for each in given)]
    return silent


def gets_some(gradient: Gradients, name: str) -> bool:
    """Whether a parameter has a gradient that is not 0."""
    return name in gradient and bool(gradient[name].any())


def dependence(probe: "Probe", run: Run, silent: list[str]) -> list[Finding]:
    """Says which parameters without gradient the loss depends on."""
    groups = {name: [name] for name in silent}
    if len(groups) > MOST_PROBES:
        groups = {}
        for name in silent:
            groups.setdefault(owner_of(name), []).append(name)
    if len(groups) > MOST_PROBES:
        groups = {"all of them": silent}
    found = []
    sure: list[str] = []
    copies: list[str] = []
    unclear: list[str] = []
    slopes: dict[str, float] = {}
    for group, names in groups.items():
        direction = probe.direction(names)
        slope = probe.slope(direction)
        if not probe.smooth(direction, slope):
            unclear += names
        elif abs(slope) > SIGNIFICANT * abs(probe.value):
            slopes[group] = slope
            (copies if is_copy(run.loop, group, silent) else sure).extend(names)
    if sure:
        group = next(each for each in slopes if sure[0] in groups[each])
        text = (
            f"the loss depends on {listed(sure)}, but their gradient is missing or 0, though an optimizer trains them: "
            f"along a random direction of {group} the loss has the slope {slopes[group]:.3g}"
        )
        fix = (
            "remove what cuts them off, between them and the loss: no_grad(), detach(), .data or .item(); if that is "
            "meant, call requires_grad_(False) on them"
        )
        # Without steps it is not known whether another loss trains them.
        verdict = "fault" if run.loop.step is not None or len(run.loop.optimizers) == 1 else "note"
        found.append(Finding(NAME, verdict, text, tuple(sure), run.lines.get(owner_of(sure[0]), ""), fix))
    if copies:
        text = f"the loss depends on {listed(copies)}, which get no gradient: they are copies, as of a target network"
        found.append(Finding(NAME, "note", text, tuple(copies)))
    if unclear:
        text = (
            f"{listed(unclear)} get no gradient, and the loss is not smooth in them: whether it depends on them is open"
        )
        found.append(Finding(NAME, "note", text, tuple(unclear)))
    return found


def owner_of(name: str) -> str:
    """Returns the name of the module that a parameter belongs to."""
    return name.rpartition(".")[0]


def is_copy(loop: Loop, group: str, silent: list[str]) -> bool:
    """Whether a module has the values of others that are trained, as a target network has at first."""
    parameters = trained(loop)
    others = [each for name, each in parameters.items() if name not in silent]

    def copied(parameter: Tensor) -> bool:
        varied = parameter.numel() > 1 and bool((parameter != parameter.flatten()[0]).any())
        return varied and any(each.shape == parameter.shape and torch.equal(each, parameter) for each in others)

    owner = group if group in dict(loop.model.named_modules()) else owner_of(group)
    return any(copied(parameters[name]) for name in silent if owner_of(name) == owner)


# ---- finite differences


def finite_differences(make: Maker, run: Run, *, faulty: bool) -> list[Finding]:
    """Looks at parameters without gradient; and if there is no fault, at the whole gradient along a direction."""
    silent = silent_parameters(make, run)
    if faulty and not silent:
        return []
    probe = Probe(make)
    found = dependence(probe, run, silent) if silent else []
    if faulty or any(each.verdict == "fault" for each in found):
        return found
    names = [name for name in probe.gradient if name not in silent]
    whole = along_a_direction(probe, names)
    if whole.verdict != "passed":
        # Weights that begin at 0, or a constant background, put the inputs of many ReLUs at exactly 0. The gradient is
        # right everywhere or nowhere: compare it beside this edge.
        probe = Probe(make, ASIDE)
        beside = along_a_direction(probe, [name for name in names if name in probe.gradient])
        whole = whole if beside.verdict == "not checked" else beside
    return [*found, whole]


class Probe:
    """The loss of the first batch and its gradient, and the loss near the weights, computed plainly in fp64.

    Args:
        make: makes fresh loops.
        aside: how far the weights are moved along a random direction first, relative to their size.
    """

    def __init__(self, make: Maker, aside: float = 0.0) -> None:
        self.make, self.aside = make, aside
        self.loop = self.moved_aside()
        batch = mapped(doubled, self.loop.batch(0))
        with in_double(self.loop):
            self.value, self.gradient = gradient_of(self.loop, batch)
        # Else each loss takes a fresh loop: it draws from a generator of its own, or changes its state.
        self.repeats = True
        self.repeats = self.loss({}, 0.0) == self.value

    def moved_aside(self) -> Loop:
        """Returns a fresh loop with its weights moved aside."""
        loop = self.make()
        if self.aside:
            generator = torch.Generator().manual_seed(2)
            for each in trained(loop).values():
                size = float(each.detach().square().mean().sqrt()) or 0.01
                noise = torch.randn(each.shape, generator=generator).to(each)
                each.data.add_(noise, alpha=self.aside * size)
        return loop

    def loss(self, direction: Gradients, step: float) -> float:
        """Returns the loss with the weights moved so far along a direction."""
        loop = self.loop if self.repeats else self.moved_aside()
        batch = mapped(doubled, loop.batch(0))
        with in_double(loop):
            parameters = trained(loop)
            kept = {name: parameters[name].data.clone() for name in direction}
            for name, each in direction.items():
                parameters[name].data.add_(each, alpha=step)
            seed(1)
            value = float(loop.loss(batch).detach())
            for name, each in kept.items():
                parameters[name].data.copy_(each)
        return value

    def direction(self, names: list[str]) -> Gradients:
        """Returns a random direction of parameters, each in its own size."""
        parameters = trained(self.loop)
        sizes = {name: float(parameters[name].detach().square().mean().sqrt()) or 0.01 for name in names}
        seed(0)
        return {name: torch.randn_like(parameters[name]) * sizes[name] for name in names}

    def slope(self, direction: Gradients, step: float = STEP) -> float:
        """Returns the slope of the loss along a direction."""
        return (self.loss(direction, step) - self.loss(direction, -step)) / (2 * step)

    def smooth(self, direction: Gradients, slope: float) -> bool:
        """Whether the slope does not depend on the step, to 1 %, and is not that of one side alone.

        At an edge or a jump it does. Where a ReLU's input is exactly 0, the loss has another slope on either side.
        """
        wider, least = self.slope(direction, 10 * STEP), SIGNIFICANT * abs(self.value)
        one_sided = self.bend(direction) > max(abs(slope), least)
        return not one_sided and abs(wider - slope) <= max(0.01 * max(abs(wider), abs(slope)), least)

    def bend(self, direction: Gradients) -> float:
        """Returns how far the slopes on the two sides of the weights are apart."""
        return abs(self.loss(direction, STEP) + self.loss(direction, -STEP) - 2 * self.loss(direction, 0.0)) / STEP


def along_a_direction(probe: Probe, names: list[str]) -> Finding:
    """Compares the gradient of parameters with finite differences along a random direction."""
    gradient, direction = probe.gradient, probe.direction(names)
    slope = probe.slope(direction)
    meant = sum(float((gradient[name] * each).sum()) for name, each in direction.items())
    # The typical slope along such a direction: this one may be near 0 by chance.
    typical = norm({name: gradient[name] * (each.norm() / each.numel() ** 0.5) for name, each in direction.items()})
    if abs(slope - meant) <= max(1e-3 * max(abs(slope), abs(meant), typical), SIGNIFICANT * abs(probe.value)):
        text = (
            f"along a random direction of all weights the loss has the slope {slope:.6g}, by its gradient {meant:.6g}"
        )
        if probe.aside:
            text = f"{text}, with the weights moved by {probe.aside:.0%}, as the loss is not smooth where they are"
        return Finding(NAME, "passed", text)
    # Where the loss has a kink, any number between the slopes of the two sides may be taken for its gradient.
    if not probe.smooth(direction, slope) or probe.bend(direction) >= abs(slope - meant):
        return Finding(NAME, "not checked", "finite differences: the loss is not smooth at the weights")
    text = (
        f"along a random direction of all weights the loss has the slope {slope:.4g}, by its gradient {meant:.4g}: a "
        "part is detached, or has a gradient of its own; that may be meant, as with straight-through gradients"
    )
    return Finding(NAME, "note", text)
