"""Everything that training changes in a loop, by name, and the random states that its steps draw from."""

import copy
import random
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.beside.preflight.loop import Loop
from stabletrain.errors import is_own
from stabletrain.guard.checks.written import kept_outside, own, parts_of

Values = dict[str, Any]
"""Tensors, numbers and words by name."""

State = dict[str, Values]
"""The values of each part of a loop: `parameters`, `buffers`, `optimizers.0.state`, `schedulers.0`, `scaler` ..."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
ATTRIBUTES = "attributes"
"""End of the name of a part that holds attributes of objects, in which many a number counts for nothing."""

OF_WARNINGS = ("_step_count", "_is_initial", "_get_lr_called_within_step", "verbose")
"""What a scheduler of PyTorch's keeps for its warnings alone; one that is made with `last_epoch=` counts otherwise."""

MOST_ITEMS, MOST_OBJECTS = 1000, 20_000
"""Longer lists are data, in which no generator is looked for; and so many objects are looked at."""


def state_of(loop: Loop) -> State:
    """Returns the present values of a loop; the tensors are the loop's own."""
    state: State = {
        "parameters": dict(loop.model.named_parameters()),
        "buffers": dict(loop.model.named_buffers()),
        ATTRIBUTES: {
            f"{name}.{key}".removeprefix("."): value
            for name, module in loop.model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, (int, float, Tensor))
        }
        | {f"{name}.requires_grad": each.requires_grad for name, each in loop.model.named_parameters()},
    }
    for index, optimizer in enumerate(loop.optimizers):
        state |= state_of_optimizer(optimizer, f"optimizers.{index}", loop.parameters)
    for index, scheduler in enumerate(loop.schedulers):
        values = values_of(scheduler, f"schedulers.{index}")
        state[f"schedulers.{index}"] = {name: each for name, each in values.items() if not name.endswith(OF_WARNINGS)}
    if loop.scaler is not None:
        state["scaler"] = values_of(loop.scaler, "scaler")
    if not isinstance(loop.made, (Loop, Mapping)):
        known = {key: each for key, each in getattr(loop.made, "__dict__", {}).items() if isinstance(each, PLAIN)}
        state[f"loop.{ATTRIBUTES}"] = known
    for name, each in loop.others.items():
        state[name] = values_of(each, name)
    return state


def state_of_optimizer(optimizer: Optimizer, name: str, parameters: Mapping[str, Tensor]) -> State:
    """Returns state, groups and other attributes of an optimizer that is called `name`."""
    names = {id(each): known for known, each in parameters.items()}
    state: Values = {}
    groups: Values = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            known = names.get(id(parameter), f"param_groups[{number}].params[{place}]")
            state |= flat(optimizer.state.get(parameter, {}), f"{name}.state[{known}]")
        options = {key: value for key, value in group.items() if key != "params"}
        groups |= flat(options, f"{name}.param_groups[{number}]")
    kept = {key: each for key, each in kept_outside(optimizer).items() if isinstance(each, (*PLAIN, Tensor))}
    return {f"{name}.state": state, f"{name}.param_groups": groups, f"{name}.{ATTRIBUTES}": flat(kept, name)}


def values_of(thing: Any, name: str) -> Values:
    """Returns the values of anything with a state: a module, an object with `state_dict`, a tensor, a dictionary."""
    if isinstance(thing, nn.Module):
        return {f"{name}.{key}": value for key, value in (*thing.named_parameters(), *thing.named_buffers())}
    if isinstance(thing, (*PLAIN, Tensor, Mapping, list, tuple)):
        return flat(thing, name)
    if hasattr(thing, "state_dict"):
        return flat(thing.state_dict(), name)
    return flat({key: each for key, each in getattr(thing, "__dict__", {}).items() if not callable(each)}, name)


def flat(values: Any, name: str, inside: tuple[int, ...] = ()) -> Values:
    """Returns the leaves of nested dictionaries and lists by path: `optimizers.0.param_groups[1].betas[0]`."""
    if id(values) in inside:  # a structure that contains itself
        return {}
    if isinstance(values, Mapping):
        parts = {f"{name}.{key}": value for key, value in values.items()}
    elif isinstance(values, (list, tuple)):
        parts = {f"{name}[{index}]": value for index, value in enumerate(values)}
    else:
        return {name: values}
    inside = (*inside, id(values))
    return {path: each for part, value in parts.items() for path, each in flat(value, part, inside).items()}


def copy_of(state: State) -> State:
    """Returns a copy that training does not change."""
    return {part: {name: copy_of_value(each) for name, each in values.items()} for part, values in state.items()}


def copy_of_value(value: Any) -> Any:
    """Returns a copy of a tensor or array; other values are not changed in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def differences(one: State, two: State) -> dict[str, list[str]]:
    """Returns the names of the values that differ or that one of them lacks, by part; parts without any are left out.

    Values of other types are the same if they are equal: 1, 1.0 and a tensor with 1.
    """
    found = {}
    for part in {**one, **two}:
        ours, theirs = one.get(part, {}), two.get(part, {})
        names = [n for n in {**ours, **theirs} if n not in ours or n not in theirs or not same(ours[n], theirs[n])]
        if names:
            found[part] = names
    return found


def same_tree(one: Any, two: Any) -> bool:
    """Whether nested values are the same."""
    return not differences({"": flat(one, "")}, {"": flat(two, "")})


@torch.no_grad()
def same(one: Any, two: Any) -> bool:
    """Whether two values are equal, bit for bit; NaN equals NaN."""
    if isinstance(one, np.ndarray | np.generic):
        one = torch.as_tensor(one) if one.dtype.kind in "biuf" else one.tolist()
    if isinstance(two, np.ndarray | np.generic):
        two = torch.as_tensor(two) if two.dtype.kind in "biuf" else two.tolist()
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return same_tensors(one, two)
    if isinstance(one, PLAIN) or isinstance(two, PLAIN):
        return bool(one == two) or (one != one and two != two)
    return type(one) is type(two)  # an object without values of its own, such as a function


def same_tensors(one: Any, two: Any) -> bool:
    """Whether two tensors are equal, or a tensor and a number."""
    if not all(isinstance(each, (Tensor, bool, int, float, complex)) for each in (one, two)):
        return False
    if not isinstance(one, Tensor):
        one, two = two, one
    if not isinstance(two, Tensor):
        two = torch.as_tensor(two, dtype=one.dtype)
    ones, twos = parts_of(one), parts_of(two)  # 8-bit values and their scales, for example
    return len(ones) == len(twos) and all(same_values(own(one), own(two)) for one, two in zip(ones, twos, strict=True))


def same_values(one: Tensor, two: Tensor) -> bool:
    """Whether two plain tensors are equal; dtype and device may be others, and the shape of a single number."""
    if one.numel() != two.numel() or (one.numel() != 1 and one.shape != two.shape):
        return False
    one, two = (each if each.layout == torch.strided else each.to_dense() for each in (one, two))
    if one.dtype != two.dtype:
        wide = torch.complex128 if one.is_complex() or two.is_complex() else torch.float64
        one, two = one.to(wide), two.to(wide)
    one, two = one.reshape(two.shape), two.to(one.device)
    return torch.equal(one, two) or bool(((one == two) | ((one != one) & (two != two))).all())


# ---- random states


class Source(NamedTuple):
    """A source of random numbers.

    Attributes:
        get: returns its state, a copy.
        set: sets it.
        fix: what saves and restores it.
    """

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    fix: str


def sources_of(loop: Loop) -> dict[str, Source]:
    """Returns every source of random numbers that a loop may draw from: those of the process and generators of its own.

    A loop's own generators are found in its attributes, and in what its functions refer to.
    """
    found = {
        "the random state of PyTorch": Source(
            torch.get_rng_state, torch.set_rng_state, "torch.get_rng_state() and torch.set_rng_state(...)"
        ),
        "the random state of Python": Source(
            random.getstate, random.setstate, "random.getstate() and random.setstate(...)"
        ),
        "the random state of NumPy": Source(
            np.random.get_state, np.random.set_state, "numpy.random.get_state() and numpy.random.set_state(...)"
        ),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        words = "torch.cuda.get_rng_state_all() and torch.cuda.set_rng_state_all(...)"
        get, put = torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
        found["the random state of PyTorch on the GPU"] = Source(get, put, words)
    for name, each in generators_of(loop):
        if isinstance(each, random.Random):
            source = Source(each.getstate, each.setstate, f"{name}.getstate() and {name}.setstate(...)")
        elif isinstance(each, np.random.Generator):
            source = source_of_numpy(each, name)
        else:
            source = Source(each.get_state, each.set_state, f"{name}.get_state() and {name}.set_state(...)")
        found[f"the random generator '{name}'"] = source
    return found


def source_of_numpy(generator: np.random.Generator, name: str) -> Source:
    """Returns a generator of NumPy's as a source."""

    def put(state: Any) -> None:
        generator.bit_generator.state = state

    return Source(lambda: copy.deepcopy(generator.bit_generator.state), put, f"{name}.bit_generator.state")


def generators_of(loop: Loop) -> Iterator[tuple[str, Any]]:
    """Yields the generators that belong to a loop, with their names."""
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    return ((name, value) for name, value in objects_of(loop) if isinstance(value, kinds))


def parameters_beside(loop: Loop) -> dict[str, nn.Parameter]:
    """Returns the parameters that a loop refers to and that are not its model's, by name."""
    known = {id(each) for each in loop.model.parameters()}
    found: dict[str, nn.Parameter] = {}
    for name, value in objects_of(loop):
        parts = value.named_parameters() if isinstance(value, nn.Module) else [("", value)]
        for part, each in parts:
            if isinstance(each, nn.Parameter) and id(each) not in known:
                known.add(id(each))
                found[f"{name}.{part}".strip(".")] = each
    return found


def objects_of(loop: Loop) -> Iterator[tuple[str, Any]]:
    """Yields what a loop and its functions refer to, with names, the nearest first; not what is a library's own."""
    functions = (loop.loss, loop.batch, loop.step, loop.next_batch, loop.save, loop.load)
    waiting: list[tuple[str, Any]] = [("", loop.made), ("model", loop.model), *loop.others.items()]
    waiting += [("", each) for each in functions if each is not None]
    seen: set[int] = set()
    while waiting and len(seen) < MOST_OBJECTS:
        name, value = waiting.pop(0)
        if id(value) in seen or isinstance(value, (*PLAIN, np.ndarray, type, types.ModuleType)):
            continue
        seen.add(id(value))
        yield name, value
        if isinstance(value, (Tensor, torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
            continue
        waiting += [(f"{name}.{key}".removeprefix("."), each) for key, each in held_by(value).items()]


def held_by(value: Any) -> dict[str, Any]:
    """Returns what a container, an object or a function refers to, by name; nothing if it is a library's."""
    if isinstance(value, types.MethodType):
        return {**held_by(value.__self__), **held_by(value.__func__)}
    if isinstance(value, types.FunctionType):
        if not is_own(value.__code__.co_filename):
            return {}
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        found = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
        for name, cell in cells:
            with suppress(ValueError):  # a variable without a value yet
                found[name] = cell.cell_contents
        return found
    if isinstance(value, (Mapping, list, tuple)):
        if len(value) > MOST_ITEMS:
            return {}
        return {str(key): each for key, each in (value.items() if isinstance(value, Mapping) else enumerate(value))}
    library = type(value).__module__.partition(".")[0] in ("torch", "numpy")
    looked_into = isinstance(value, (nn.Module, Loop)) or type(value).__module__.startswith("torch.utils.data")
    return dict(getattr(value, "__dict__", {})) if looked_into or not library else {}
