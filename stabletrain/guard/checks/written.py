"""The values that an optimizer's step may write, and whether they are finite."""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import lru_cache, partial
from inspect import isroutine, signature
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.buffers import buffers_of
from stabletrain.several_optimizers import optimizers_of
from stabletrain.stability.optimizers.closed import note_largest_weight

NOT_WRITTEN = ("defaults", "_step_supports_amp_scaling", "grad_scale", "found_inf", "scale_update", "owners")
"""Attributes that an optimizer's step does not write, besides its hooks."""

LEAVES = frozenset((Tensor, nn.Parameter, float, int, bool, str, type(None)))
"""Types that are no containers: nearly all that an optimizer holds, so that a walk through it passes over them."""

GIVEN_TO_ALL = frozenset(vars(torch.optim.SGD([torch.zeros(())], lr=0.0)))
"""Attributes that PyTorch gives to every optimizer."""

_INFINITE: "WeakKeyDictionary[Optimizer, dict[int, ref[Tensor]]]" = WeakKeyDictionary()
"""Tensors that held an infinity before the first step, by `id`: a mask of -inf, a best loss so far."""


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns an optimizer's attributes that its step may write."""
    kept = {name: each for name, each in vars(optimizer).items() if name not in NOT_WRITTEN}
    return {name: each for name, each in kept.items() if not name.endswith("_hooks")}


def kept_outside(optimizer: Optimizer) -> dict[str, Any]:
    """Returns an optimizer's own attributes that its step may write, besides its state and its parameter groups.

    Snapshots and checkpoints lack them, so a replay from one may give other bits.
    """
    fixed = str | bool | tuple | type | partial | None
    own = {name: value for name, value in attributes_of(optimizer).items() if name not in GIVEN_TO_ALL}
    return {name: value for name, value in own.items() if not (isinstance(value, fixed) or isroutine(value))}


def contents_of(value: Any, in_state: bool) -> dict[Any, Any] | list[Any] | None:
    """Returns the contents of a container, as a new dict or list; None if `value` is no container.

    An object of another class counts as a container only in an optimizer's state: elsewhere it may hold anything.
    """
    if isinstance(value, Optimizer):
        return attributes_of(value)
    if isinstance(value, nn.Module):
        return {"parameters": value._parameters, "buffers": value._buffers, "modules": value._modules}
    if isinstance(value, dict):
        return {**value}
    if isinstance(value, list | tuple | set | deque):
        return [*value]
    plain = in_state and not isinstance(value, Tensor | type) and not isroutine(value)
    of_torch = type(value).__module__.partition(".")[0] == "torch"
    return {**value.__dict__} if plain and not of_torch and hasattr(value, "__dict__") else None


def containers(value: Any, seen: set[int], in_state: bool = False) -> Generator[tuple[Any, dict[Any, Any] | list[Any]]]:
    """Yields every container in `value`, including itself, with its contents."""
    if id(value) in seen or (held := contents_of(value, in_state)) is None:
        return
    seen.add(id(value))
    yield value, held
    for each in [*held.keys(), *held.values()] if isinstance(held, dict) else held:
        if type(each) not in LEAVES:
            yield from containers(each, seen, in_state or (isinstance(value, Optimizer) and each is value.state))


def tensors_in(held: dict[Any, Any] | list[Any]) -> Iterator[Tensor]:
    """Yields the tensors that a container holds."""
    for each in [*held.keys(), *held.values()] if isinstance(held, dict) else held:
        if isinstance(each, Tensor):
            yield each


def needs_closure(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer's step must be given a closure, which it may run several times, as LBFGS's.

    Such a step also writes what forward and backward write: gradients, buffers and attributes of modules.
    """
    return takes_closure(type(optimizer).step)


@lru_cache
def takes_closure(step: Callable[..., Any]) -> bool:
    """Returns whether a step has an argument `closure` without a default."""
    closure = signature(step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def weights_of(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Returns the weights that a step may write; frozen ones only if the step has a hook, such as weight averaging."""
    hooked = any(getattr(each, "_optimizer_step_post_hooks", ()) for each in optimizers_of(optimizer))
    return [parameter for parameter in model.parameters() if parameter.requires_grad or hooked]


def written_by(model: nn.Module, optimizer: Optimizer, buffers: bool = True) -> dict[int, Tensor]:
    """Returns the tensors with floating-point values that a step may write, by `id`.

    These are weights, the buffers that are judged, and everything that the optimizer holds except its settings.
    """
    found: list[Tensor] = [*weights_of(model, optimizer), *(buffers_of(model).judged if buffers else ())]
    # A step only reads the tensors in its parameter groups, such as a learning rate.
    settings = {id(each) for group in optimizer.param_groups for each in group.values() if isinstance(each, Tensor)}
    for _, held in containers(optimizer, set()):
        found += [each for each in tensors_in(held) if id(each) not in settings]
    parts = [part for tensor in found for part in parts_of(tensor)]
    return {id(part): part for part in parts if part.is_floating_point() or part.is_complex()}


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Returns the plain tensors inside a tensor subclass, such as 8-bit values and their scales; else the tensor."""
    if hasattr(tensor, "to_local") or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # ty: ignore[not-callable]
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def as_dense(tensor: Tensor) -> Tensor | None:
    """Returns a tensor's values as a real, strided tensor without a graph; None if there are none."""
    tensor = own(tensor)
    if tensor.layout == torch.sparse_coo:
        tensor = tensor._values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.element_size() == 1:  # PyTorch has no reductions for 8 bits
        tensor = tensor.float()
    usable = tensor.layout == torch.strided and tensor.is_floating_point() and not tensor.is_meta
    return tensor if usable and tensor.numel() else None


def own(tensor: Tensor) -> Tensor:
    """Returns a tensor without its graph; of a sharded one, this rank's shard."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # ty: ignore[not-callable]


def extremes(tensors: list[Tensor]) -> Tensor:
    """Returns the largest magnitudes in tensors of one device and dtype, 1-d: NaN if a value is NaN, Inf if one is."""
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(tensors, math.inf))
    # `_foreach_norm` is twenty times slower than this on a CPU.
    return torch.stack([each for tensor in tensors for each in tensor.aminmax()]).abs()


@torch.no_grad()
def all_finite(model: nn.Module, optimizer: Optimizer, device: torch.device, buffers: bool = True) -> Bool[Tensor, ""]:
    """Returns whether all values that a step may write are finite; on `device`, without a host read.

    A tensor that held an infinity before the first step may hold some, but no NaN.
    """
    judged: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
    infinite = _INFINITE.get(optimizer, {})
    for key, tensor in written_by(model, optimizer, buffers).items():
        if (dense := as_dense(tensor)) is not None:
            may = key in infinite and infinite[key]() is tensor
            judged.setdefault((dense.device, dense.dtype, may), []).append(dense)
    good = [torch.full((), numbers_are_finite(optimizer), device=device)]
    for (_, _, may), some in judged.items():
        found = extremes(some)
        good.append((~torch.isnan(found) if may else torch.isfinite(found)).all().to(device))
    return torch.stack(good).all()


def numbers_are_finite(optimizer: Optimizer) -> bool:
    """Returns whether no number in an optimizer's state, which it counts in Python, is NaN."""
    return not any(
        isinstance(each, float) and math.isnan(each)
        for _, held in containers(optimizer.state, set(), in_state=True)
        for each in (held.values() if isinstance(held, dict) else held)
    )


@torch.no_grad()
def state_is_sound(model: nn.Module, optimizer: Optimizer) -> bool:
    """Returns whether weights and moments are finite, and no mean of squares is negative; waits for the device.

    Buffers are left out: the forward pass of a later step may have written them.
    """
    device = next(model.parameters()).device
    sound = all_finite(model, optimizer, device, buffers=False)
    for state in optimizer.state.values():
        if "exp_avg_sq" in state and (moment := as_dense(state["exp_avg_sq"])) is not None:
            sound = sound & (moment >= 0).all().to(device)  # the root of a negative one is NaN in the next update
    return bool(sound)


def update_is_finite(model: nn.Module, optimizer: Optimizer) -> bool:
    """Returns whether everything that an update may have written is finite; waits for the device."""
    return bool(all_finite(model, optimizer, next(model.parameters()).device))


@torch.no_grad()
def note_start(model: nn.Module, optimizer: Optimizer) -> None:
    """Remembers which tensors hold infinities on purpose, and how large weights are.

    Waits for the device. Call it before the first step.
    """
    known: dict[int, ref[Tensor]] = {}
    weights = {id(parameter) for parameter in model.parameters()}
    largest = 0.0
    for key, tensor in written_by(model, optimizer).items():
        if (dense := as_dense(tensor)) is None:
            continue
        value = float(extremes([dense]).amax())
        if math.isinf(value):
            known[key] = ref(tensor)
        elif key in weights:
            largest = max(largest, value)
    for each in {optimizer, *optimizers_of(optimizer)}:
        _INFINITE[each] = known
    note_largest_weight(optimizer, largest)
