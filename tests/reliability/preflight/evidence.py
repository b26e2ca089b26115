"""What shows that a planted fault is silent and real, and that a clean program is clean."""

import functools
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.reliability.preflight.faults import KINDS
from tests.reliability.preflight.faults.fault import Program
from tests.reliability.preflight.loop import Loop

STEPS = 3
LEAST = 0.01
"""How far from the clean program a fault must bring the weights, relative to what they move, to be one."""

HUGE = 1e10
"""A gradient that fp32 optimizers survive: its square is far from the largest number."""


@contextmanager
def warned(program: Program) -> Iterator[None]:
    """Ignores PyTorch's own warnings about a fault that says it has them."""
    with warnings.catch_warnings():
        if program.fault is not None and program.fault.warns:
            warnings.simplefilter("ignore")
        yield


def flat(values: Any, name: str = "") -> dict[str, Any]:
    """Returns the tensors and numbers of nested dictionaries and lists by path: `optimizers.0.param_groups[1].lr`."""
    if isinstance(values, dict):
        parts = {f"{name}.{key}".removeprefix("."): value for key, value in values.items()}
    elif isinstance(values, (list, tuple)):
        parts = {f"{name}[{index}]": value for index, value in enumerate(values)}
    else:
        return {name: values}
    return {path: each for part, value in parts.items() for path, each in flat(value, part).items()}


def state(loop: Loop) -> dict[str, Any]:
    """Returns copies of all that training changes; parameters and buffers by their names alone."""
    found = {name: each.state_dict() for name, each in loop.stateful().items() if name != "model"}
    weights = {**loop.model.state_dict(), **dict(loop.model.named_buffers())}  # those that are not persistent too
    found = flat({**weights, **found, "position": loop.position})
    return {name: each.clone() if isinstance(each, Tensor) else each for name, each in found.items()}


def same(one: Any, two: Any) -> bool:
    """Whether two values are equal, bit for bit."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one.shape == two.shape and torch.equal(torch.nan_to_num(one), torch.nan_to_num(two))
    return type(one) is type(two) and (callable(one) or one == two)


def differ(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """Returns the names of what differs."""
    return [name for name in {**one, **two} if name not in one or name not in two or not same(one[name], two[name])]


def finite(values: dict[str, Any]) -> bool:
    """Whether all numbers are finite."""
    return all(bool(each.isfinite().all()) for each in values.values() if isinstance(each, Tensor))


def trained(program: Program, steps: int = STEPS) -> tuple[Loop, list[float]]:
    """Trains a fresh loop; returns it and its losses. Each step draws its own numbers, whatever was drawn before."""
    with warned(program):
        loop, losses = program.make(), []
        for step in range(steps):
            torch.manual_seed(100 + step)
            random.seed(100 + step)
            if hasattr(loop, "noise"):
                loop.noise.manual_seed(100 + step)
            losses.append(float(loop.step(loop.next_batch())))
    return loop, losses


def sound(loop: Loop, losses: list[float]) -> bool:
    """Whether losses, weights and moments are finite."""
    return finite({"losses": torch.tensor(losses), **state(loop)})


@functools.cache
def trained_clean(loop: type[Loop], options: tuple[tuple[str, Any], ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the state of a clean program that has been trained, and its parameters before: for all faults in it."""
    program = Program("clean", loop, dict(options))
    start = {name: each.detach().clone() for name, each in program.make().model.named_parameters()}
    return state(trained(program)[0]), start


def trains_otherwise(program: Program, loop: Loop) -> float:
    """Returns how far a trained loop's weights are from the clean program's, relative to what those have moved.

    Infinity if the loss scale is another one.
    """
    ours, (clean, start) = state(loop), trained_clean(program.loop, tuple(program.options.items()))
    if any(name in ours and not same(ours[name], clean[name]) for name in clean if name.startswith("scaler")):
        return float("inf")
    both = [name for name in start if name in ours and ours[name].shape == clean[name].shape]
    moved = {name: float((clean[name] - start[name]).norm()) for name in both}
    apart = {name: float((ours[name] - clean[name]).norm()) for name in both}
    return max(apart[name] / moved[name] for name in both if moved[name])


def resumed(program: Program, loop: Loop, steps: int) -> list[str]:
    """Returns what differs between a trained loop and a fresh one that loaded its state, both after more steps."""
    saved = loop.save()
    take(loop, steps)
    fresh = program.make()
    fresh.load(saved)
    take(fresh, steps)
    return differ(state(loop), state(fresh))


def take(loop: Loop, steps: int) -> None:
    """Takes so many steps."""
    for _ in range(steps):
        loop.step(loop.next_batch())


def data_differ(program: Program) -> bool:
    """Whether batches of some step and rank differ from the clean program's."""
    ours, clean = program.make(), program.clean.make()
    places = [(step, rank) for step in range(2 * clean.epoch) for rank in range(clean.ranks)]
    return any(not all(map(same, ours.batch(*place), clean.batch(*place))) for place in places)


SPECIAL = ("zero_gradient", "huge_gradient", "zero_weights")


def survives(program: Program, kind: str) -> bool:
    """Whether weights and moments stay finite in a step of this kind, as the first step and after one."""
    return all(finite(state(special(kind, trained(program, before)[0]))) for before in (0, 1))


def survives_all(program: Program) -> bool:
    """Whether a clean program survives every special step; it is built once, and goes back to where it was."""
    loop, _ = trained(program, 0)
    for before in (0, 1):
        if before:
            take(loop, before)
        saved = loop.save()
        for kind in SPECIAL:
            if not finite(state(special(kind, loop))):
                return False
            loop.load(saved)
    return True


def special(kind: str, loop: Loop) -> Loop:
    """Takes a special step: with zero gradients, huge ones, or weights of 0; returns the loop."""
    for optimizer in loop.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, HUGE if kind == "huge_gradient" else 0.0)
                if kind == "zero_weights":
                    parameter.data.zero_()
                    parameter.grad.fill_(0.01)
        optimizer.step()
    return loop


def recovers(program: Program) -> bool:
    """Whether the step after one with NaN in its inputs, which the loop skips, moves the weights and is finite."""
    loop, _ = trained(program, 1)
    loop.step(tuple(each * torch.nan for each in loop.next_batch()))
    weights = {name: each.detach().clone() for name, each in loop.model.named_parameters()}
    loop.step(loop.next_batch())
    return finite(state(loop)) and bool(differ(weights, dict(loop.model.named_parameters())))


def real(program: Program, loop: Loop) -> bool:
    """Whether a fault changes what it is about; `loop` has been trained with it."""
    assert program.fault is not None
    group = KINDS[program.fault.kind]
    if program.fault.kind == "nan_stays":
        return not recovers(program)
    if group == "resume":
        return bool(resumed(program, loop, 1))
    if group == "data":
        return data_differ(program)
    if group == "optimizer":
        return not survives(program, program.fault.kind)
    return trains_otherwise(program, loop) > LEAST
