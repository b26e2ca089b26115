"""Repeats a gradient, or the update of one tensor, and leaves no trace of it; `recheck.py` says when and what for."""

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from stabletrain.buffers import SavedBuffers, buffers_of
from stabletrain.machine.determinism import Generators
from stabletrain.protocols import Tools
from stabletrain.records import Number, TrainState
from stabletrain.stability.guard.comparing import Compared, compare, sums

CONTAINERS = ("_modules", "_parameters", "_buffers")
"""Attributes in which a module keeps its children and tensors."""


class NoRepeat:
    """Repeats nothing: what most steps get."""

    difference: Number = 0.0

    def gradient(self, again: Callable[[], Any]) -> None:
        """Does nothing."""

    def update(self, apply: Callable[[Optimizer], Any]) -> Number:
        """Returns 0: nothing was compared."""
        del apply
        return 0.0


NOTHING = NoRepeat()


class RepeatGradient(NoRepeat):
    """Repeats the first micro-batch of a step. `compared` receives the comparison.

    Attributes:
        difference: 0-d fp32 on the device, the largest of all tensors and ranks; 0 if nothing was repeated.
    """

    def __init__(
        self,
        compared: MutableMapping[str, Compared],
        model: nn.Module,
        buffers: SavedBuffers,
        tools: Tools,
        device: torch.device,
    ) -> None:
        self._compared, self._model, self._buffers, self._tools = compared, model, buffers, tools
        self._generators, self._attributes = Generators.now(device), attributes_of(model)
        self.difference: Number = 0.0
        self._waiting = tools.parallel.keep_gradients()

    def gradient(self, again: Callable[[], Any]) -> None:
        """Compares the gradients of the micro-batch that has just run, if it is the first, with those of a second run.

        Args:
            again: runs forward and backward of that micro-batch, without communication.
        """
        if not self._waiting:
            return
        self._waiting = False
        named = [(name, each) for name, each in self._model.named_parameters() if each.requires_grad]
        first = self._tools.parallel.own_gradients([parameter for _, parameter in named])
        with self._rewound(), torch.enable_grad():
            again()
            second = [parameter.grad for _, parameter in named]
        pairs = [
            (name, a, b) for (name, _), a, b in zip(named, first, second, strict=True) if a is not None or b is not None
        ]
        compared = compare(pairs, generators=self._generators)
        self._compared["gradient"] = compared
        self.difference = over_ranks(compared.ratios.amax(), self._tools)

    @contextmanager
    def _rewound(self) -> Generator[None]:
        """Sets buffers, generators, gradients and attributes to the beginning of the step; restores them on exit."""
        model, device = self._model, self._generators.device
        buffers, closed = buffers_of(model), torch.zeros((), dtype=torch.bool, device=device)
        saved, generators, attributes = buffers.save(), Generators.now(device), attributes_of(model)
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        try:
            self._buffers.buffers.put_back()  # the forward pass may have replaced them
            self._buffers.buffers.restore_(self._buffers, closed)
            put_back_all(self._attributes)
            for parameter, _ in gradients:
                parameter.grad = None
            self._generators.set()
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            put_back_all(attributes)
            buffers.put_back()
            buffers.restore_(saved, closed)
            generators.set()


@dataclass(frozen=True)
class OneTensor:
    """A parameter before its update, with its gradient, its state and its group."""

    weight: Tensor
    gradient: Tensor
    state: Mapping[str, Any]
    group: Mapping[str, Any]

    @classmethod
    def of(cls, optimizer: Optimizer, group: Mapping[str, Any], weight: Tensor) -> "OneTensor":
        """Copies what the update of `weight` reads and writes."""
        assert weight.grad is not None
        options = {name: value for name, value in group.items() if name != "params"}
        return cls(copied(weight), copied(weight.grad), copied_state(optimizer.state.get(weight, {})), options)

    def updated(self, optimizer: Optimizer, apply: Callable[[Optimizer], Any]) -> dict[str, Tensor]:
        """Updates a copy with an optimizer of its own; returns the weight and its state by name."""
        weight = copied(self.weight)
        weight.grad = copied(self.gradient)
        alone = optimizer_of(optimizer, weight, copied_state(self.state), self.group)
        apply(alone)
        return results(alone, weight)


class RepeatUpdate(NoRepeat):
    """Repeats the update of one tensor. `compared` receives the comparison."""

    def __init__(
        self,
        compared: MutableMapping[str, Compared],
        state: TrainState,
        chosen: tuple[dict[str, Any], Tensor],
        tools: Tools,
    ) -> None:
        group, self._weight = chosen
        self._compared, self._optimizer, self._tools = compared, state.optimizer, tools
        self._name = next((name for name, each in state.model.named_parameters() if each is self._weight), "a weight")
        self._before = OneTensor.of(self._optimizer, group, self._weight)

    @torch.no_grad()
    def update(self, apply: Callable[[Optimizer], Any]) -> Number:
        """Compares the update that was just applied with a second computation; returns the difference, 0-d fp32.

        Args:
            apply: what was called with the optimizer.
        """
        first = results(self._optimizer, self._weight)
        second = self._before.updated(self._optimizer, apply)
        # Two names for each: a state that only one of them has differs too.
        names = {name: self._name if name == "weight" else f"{name} of {self._name}" for name in {**first, **second}}

        def again() -> Tensor:
            third = self._before.updated(self._optimizer, apply)
            return sums([third.get(name) for name in names], self._weight.device)

        pairs = [(text, first.get(name), second.get(name)) for name, text in names.items()]
        compared = compare(pairs, again=again)
        self._compared["update"] = compared
        return over_ranks(compared.ratios.amax(), self._tools)


def over_ranks(difference: Tensor, tools: Tools) -> Tensor:
    """Returns the largest difference over all ranks: all have the same step due, so all of them call it."""
    difference = difference.clone()
    tools.parallel.max_over_ranks_([difference])
    return difference


def tensor_by_tensor(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer is known to update each tensor by itself.

    PyTorch's and this package's do. One of the user's own may not, and code that is hooked into a step may do anything.
    """
    known = type(optimizer).__module__.startswith(("torch.optim.", "stabletrain."))
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    ours = all((getattr(hook, "__module__", None) or "").startswith("stabletrain.") for hook in hooks)
    return known and ours and not isinstance(optimizer, LBFGS)


def next_tensor(optimizer: Optimizer, turn: int) -> tuple[dict[str, Any], Tensor] | None:
    """Returns the tensor whose turn it is, with its group; None if no tensor has a gradient.

    Leaves out weights in 16 bits: `precision=bf16_params` gives the optimizer others, and rounds them at random.
    """
    able = [
        (group, weight)
        for group in optimizer.param_groups
        for weight in group["params"]
        if weight.grad is not None and not weight.grad.is_sparse and weight.dtype in (torch.float32, torch.float64)
    ]
    return able[turn % len(able)] if able else None


def optimizer_of(optimizer: Optimizer, weight: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Optimizer:
    """Returns an optimizer of the same class and options for one tensor, without the other's hooks."""
    alone = object.__new__(type(optimizer))
    left_out = ("state", "param_groups", "step", "zero_grad")
    alone.__dict__.update(
        {name: each for name, each in vars(optimizer).items() if name not in left_out and not name.endswith("_hooks")}
    )
    mine = defaultdict(dict, {weight: state} if state else {})
    alone.__setstate__({"defaults": optimizer.defaults, "state": mine, "param_groups": [{**group, "params": [weight]}]})
    return alone


def results(optimizer: Optimizer, weight: Tensor) -> dict[str, Tensor]:
    """Returns what an update writes: the weight, and the tensors of its state by name."""
    state = optimizer.state.get(weight, {})
    return {"weight": weight, **{name: each for name, each in state.items() if isinstance(each, Tensor)}}


def copied(tensor: Tensor) -> Tensor:
    """Copies a tensor, bit for bit and in its memory format, without its graph."""
    return tensor.detach().clone()


def copied_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the state of one tensor."""
    return {name: copied(each) if isinstance(each, Tensor) else each for name, each in state.items()}


def attributes_of(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Returns each module with its attributes. Values that are changed in place are not copied."""
    return [(module, {**vars(module)}) for module in model.modules()]


def put_back_all(attributes: Sequence[tuple[nn.Module, Mapping[str, Any]]]) -> None:
    """Restores the attributes of all modules."""
    for module, before in attributes:
        put_back_attributes(module, before)


def put_back_attributes(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Restores a module's attributes, except the containers of its children and tensors."""
    live = vars(module)
    for name in [*live]:
        if name not in before:
            del live[name]
    live.update({name: value for name, value in before.items() if name not in CONTAINERS})
