"""An update is finite, or it did not happen: checks what an optimizer's step has written.

Finite gradients do not make a finite update: an optimizer may divide by the norm of a zero update, or take the root of
a second moment that is 0. An optimizer that is proven to keep a finite state finite (`optimizers/closed.py`) costs
nothing here. Any other is checked after each step: weights and moments must be finite. If they are not, the step is
undone in one of two ways:

- With `copies`, the bits from before the step are put back at once. This takes the memory of weights, moments and
  gradients once more, and one host read.
- Without, the step's reading says so (`bad_update`), which arrives before the next update is applied. The loop then
  restores a snapshot, replays the steps since, and takes this step again with `copies`. That needs a replay that gives
  the same bits.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.monitors.tensor_norms import lengths
from stabletrain.protocols import Tools
from stabletrain.records import Number, TrainState
from stabletrain.stability.optimizers.closed import after_update_is_proven, clipping_is_proven, why_unproven

NOT_WRITTEN = ("defaults", "_step_supports_amp_scaling", "grad_scale", "found_inf")
"""Attributes that an optimizer's step does not write, besides its hooks."""


class Unchecked:
    """An update that is not checked.

    Attributes:
        bad: 1 if the update left a value that is not finite, else 0.
        undone: whether the bits from before the update were put back.
        rank: on several ranks, the first one on which it was bad, -1 if it was on none or on all; else None.
    """

    bad: Number = 0.0
    undone = False
    rank: Tensor | None = None

    def judge(self, gate: Tensor) -> Tensor:
        """Judges the update; returns the gate of everything that follows it."""
        return gate


UNCHECKED = Unchecked()


class NoUpdateCheck:
    """Checks no update.

    Attributes:
        copies: whether a bad update is undone at once, from copies.
        failed: whether an update was bad in this process.
    """

    copies = False
    failed = False

    def of_step(self, state: TrainState, tools: Tools) -> Unchecked:
        """Returns what checks the step's update: nothing."""
        del state, tools
        return UNCHECKED

    def why(self, optimizer: Optimizer) -> str:
        """Returns why this optimizer's updates are checked; empty if they are not."""
        del optimizer
        return ""

    def copy(self, model: nn.Module, optimizer: Optimizer) -> "Copies | None":
        """Copies nothing."""
        del model, optimizer


class UpdateCheck(NoUpdateCheck):
    """Checks the updates of every optimizer that is not proven to keep a finite state finite."""

    def __init__(self) -> None:
        self.copies, self.failed = True, False
        self._kept: Copies | None = None

    def of_step(self, state: TrainState, tools: Tools) -> Unchecked:
        """Returns what checks the step's update; call it before gradients are clipped, with the learning rate set."""
        ours = clipping_is_proven(tools.clipping) and after_update_is_proven(tools.after_update)
        if ours and not why_unproven(state.optimizer):
            return UNCHECKED
        return Checked(self, state, tools, self.copy(state.model, state.optimizer))

    def why(self, optimizer: Optimizer) -> str:
        """Returns why this optimizer's updates are checked; empty if they are not."""
        return why_unproven(optimizer)

    def copy(self, model: nn.Module, optimizer: Optimizer) -> "Copies | None":
        """Copies what the next step may write, into the memory of the copies before; None without `copies`."""
        if not self.copies:
            self._kept = None
            return None
        self._kept = self._kept or Copies()
        self._kept.take(model, optimizer)
        return self._kept


class Checked(Unchecked):
    """An update that is checked."""

    def __init__(self, check: UpdateCheck, state: TrainState, tools: Tools, copies: "Copies | None") -> None:
        self._check, self._state, self._tools, self._copies = check, state, tools, copies
        clipping = getattr(tools.clipping, "state_dict", dict)() if copies is not None else {}
        self._clipping = {name: each.clone() if isinstance(each, Tensor) else each for name, each in clipping.items()}

    @torch.no_grad()
    def judge(self, gate: Tensor) -> Tensor:
        """Judges the update, and undoes it if it is bad and there are copies; returns the gate of what follows it."""
        written = written_by(self._state.model, self._state.optimizer)
        bad = suspicious(written, gate.device)
        if self._copies is None:
            self.bad, self.rank = self._tools.parallel.on_any_rank(bad)
            return gate & (self.bad == 0)
        if bad and finite(written):  # values so large that only their squares overflow
            bad = torch.zeros_like(bad)
        self.bad, self.rank = self._tools.parallel.on_any_rank(bad)
        if self.bad:
            self.undone = self._check.failed = True
            self._copies.put_back()
            if self._clipping:
                self._tools.clipping.load_state_dict(self._clipping)
            return torch.zeros_like(gate)
        return gate


def written_by(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Returns the floating-point tensors that a step may write: weights and moments; of a sharded one, the shard."""
    found: dict[int, Tensor] = {}
    for tensor in [*(p for p in model.parameters() if p.requires_grad), *inside(optimizer, set())]:
        for part in as_dense(tensor):
            found.setdefault(id(tensor), part)
    return [*found.values()]


def as_dense(tensor: Tensor) -> list[Tensor]:
    """Returns a tensor's values as a real, strided, floating-point tensor without a graph; nothing if it has none."""
    tensor = own(tensor)
    if tensor.layout == torch.sparse_coo:
        tensor = tensor._values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    usable = tensor.layout == torch.strided and tensor.is_floating_point() and tensor.element_size() > 1
    return [tensor] if usable and tensor.numel() else []


def inside(value: Any, seen: set[int]) -> Iterable[Tensor]:
    """Yields the tensors in an optimizer, or in a container of its state: in its groups, state and attributes."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Optimizer):
        value = attributes_of(value)
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(key, Tensor):
                yield key
            yield from inside(each, seen)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from inside(each, seen)


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns an optimizer's attributes that its step may write."""
    kept = {name: each for name, each in vars(optimizer).items() if name not in NOT_WRITTEN}
    return {name: each for name, each in kept.items() if not name.endswith("_hooks")}


def kept_outside(optimizer: Optimizer) -> dict[str, Any]:
    """Returns an optimizer's own attributes that its step may write, besides its state and its parameter groups.

    Snapshots and checkpoints do not have them, so that a replay from one need not give the same bits.
    """
    of_all = vars(torch.optim.SGD([torch.zeros(())], lr=0.0)).keys()
    fixed = str | bool | tuple | None
    own = {name: value for name, value in attributes_of(optimizer).items() if name not in of_all}
    return {name: value for name, value in own.items() if not (isinstance(value, fixed) or callable(value))}


def suspicious(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Returns 1 if a value may not be finite, else 0; 0-d fp32 on `device`, without a host read.

    A length is not finite if a value is not, or if the sum of the squares overflows.
    """
    found = []
    for part in {(tensor.device, tensor.dtype == torch.float64) for tensor in tensors}:
        some = [tensor for tensor in tensors if (tensor.device, tensor.dtype == torch.float64) == part]
        found.append(torch.isfinite(torch.stack(lengths(some))).all().to(device))
    return torch.logical_not(torch.stack(found).all()).float() if found else torch.zeros((), device=device)


def finite(tensors: list[Tensor]) -> bool:
    """Returns whether every value is finite; waits for the device."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def state_is_finite(model: nn.Module, optimizer: Optimizer) -> bool:
    """Returns whether weights and moments are finite; waits for the device."""
    tensors = written_by(model, optimizer)
    return not tensors or not suspicious(tensors, tensors[0].device) or finite(tensors)


class Copies:
    """Copies of everything that an optimizer's step may write, and of the gradients, which some overwrite."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._contents: list[tuple[Any, Any]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []

    @torch.no_grad()
    def take(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Copies the present values, into the memory of the copies before where that fits."""
        before, self._tensors, self._contents = self._tensors, {}, []
        self._model, self._optimizer = model, optimizer
        self._gradients = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.requires_grad]
        self._collect(optimizer, set())
        for parameter, gradient in self._gradients:
            self._tensors.setdefault(id(parameter), (parameter, parameter))
            if gradient is not None:
                self._tensors.setdefault(id(gradient), (gradient, gradient))
        old, new = [], []
        for key, (tensor, _) in self._tensors.items():
            known, value = before.get(key), own(tensor)
            if known is not None and known[0] is tensor and fits(known[1], value):
                old.append(known[1])
                new.append(value)
                self._tensors[key] = known
            else:
                self._tensors[key] = (tensor, value.clone())
        if old:
            torch._foreach_copy_(old, new)

    def _collect(self, value: Any, seen: set[int]) -> None:
        """Notes the tensors in a value, and the contents of its containers."""
        if isinstance(value, Tensor):
            self._tensors.setdefault(id(value), (value, value))
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Optimizer):
            held = attributes_of(value)
            self._contents.append((value, held))
            value = held
        elif isinstance(value, dict | list):
            self._contents.append((value, value.copy()))
        if isinstance(value, dict):
            for key, each in value.items():
                self._collect(key, seen)
                self._collect(each, seen)
        elif isinstance(value, list | tuple):
            for each in value:
                self._collect(each, seen)

    def are_finite_now(self) -> bool:
        """Returns whether what the step has written is finite; waits for the device."""
        assert self._model is not None
        assert self._optimizer is not None
        return state_is_finite(self._model, self._optimizer)

    @torch.no_grad()
    def put_back(self) -> None:
        """Gives everything the values it had, bit for bit; what was added since is removed."""
        for container, contents in self._contents:
            if isinstance(container, Optimizer):
                for name in attributes_of(container).keys() - contents.keys():
                    delattr(container, name)
                vars(container).update(contents)
            elif isinstance(container, dict):
                container.clear()
                container.update(contents)
            else:
                container[:] = contents
        for tensor, copy in self._tensors.values():
            if fits(copy, own(tensor)):
                own(tensor).copy_(copy)
            else:  # the step has given it other memory
                tensor.data = copy.clone()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


def own(tensor: Tensor) -> Tensor:
    """Returns a tensor without its graph; of a sharded one, this rank's shard."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # ty: ignore[not-callable]


def fits(copy: Tensor, tensor: Tensor) -> bool:
    """Returns whether a tensor can be copied to another bit for bit."""
    return copy.shape == tensor.shape and copy.dtype == tensor.dtype and copy.device == tensor.device


@contextmanager
def put_back_after(model: nn.Module, optimizer: Optimizer) -> Generator[None]:
    """A context in which an optimizer's step may run: all that it writes has the same bits again on exit."""
    copies = Copies()
    copies.take(model, optimizer)
    try:
        yield
    finally:
        copies.put_back()
