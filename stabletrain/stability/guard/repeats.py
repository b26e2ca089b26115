"""Repeats a gradient, or the update of one tensor, and leaves no trace of it; `recheck.py` says when and what for."""

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from stabletrain.buffers import SavedBuffers, buffers_of, can_be_written
from stabletrain.machine.determinism import Generators
from stabletrain.machine.memory import within_memory
from stabletrain.records import Number, TrainState
from stabletrain.stability.guard.comparing import Compared, compare, sums
from stabletrain.stability.step_tools import StepTools

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


OUT_OF_MEMORY = -1.0
"""Stands for a difference that is unknown, because there was not enough memory for the repetition on some rank."""

Judge = Callable[[Compared | None, Tensor], Tensor]
"""Keeps this rank's comparison, None if its memory did not suffice; returns by which number the repetition is judged.

It also gets `[tensors]` fp32, the largest of all ranks' differences; see `recheck.py`.
"""


class RepeatGradient(NoRepeat):
    """Repeats the first micro-batch of a step.

    Attributes:
        difference: 0-d fp32 on the device, equal on all ranks: what `judge` returns, or `OUT_OF_MEMORY`; 0 if nothing
            was repeated.
    """

    def __init__(
        self, judge: Judge, model: nn.Module, buffers: SavedBuffers, tools: StepTools, device: torch.device
    ) -> None:
        self._judge, self._model, self._buffers, self._tools = judge, model, buffers, tools
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
        named = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        first = self._tools.parallel.own_gradients([*named.values()])
        compared = None if first is None else self._compare(named, first, again)
        ratios = torch.zeros(len(named), device=self._generators.device) if compared is None else compared.ratios
        self.difference = over_ranks(compared, ratios, self._judge, self._tools)

    def _compare(
        self, named: Mapping[str, Tensor], first: Sequence[Tensor | None], again: Callable[[], Any]
    ) -> Compared | None:
        """Compares gradients with those of a second run; None if there was not enough memory."""
        with self._rewound(), torch.enable_grad():
            # An error is caught in here: what the second run holds is then free before all is put back.
            done = within_memory(lambda: (again(), True))
            second = [parameter.grad for parameter in named.values()]
        if done is None:
            return None
        pairs = [*zip(named, first, second, strict=True)]
        return within_memory(lambda: compare(pairs, self._generators.device, generators=self._generators))

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
    """Repeats the update of one tensor."""

    def __init__(
        self, judge: Judge, state: TrainState, chosen: tuple[dict[str, Any], Tensor], tools: StepTools
    ) -> None:
        group, self._weight = chosen
        self._judge, self._optimizer, self._tools = judge, state.optimizer, tools
        self._name = next((name for name, each in state.model.named_parameters() if each is self._weight), "a weight")
        self._before = within_memory(lambda: OneTensor.of(self._optimizer, group, self._weight))

    @torch.no_grad()
    def update(self, apply: Callable[[Optimizer], Any]) -> Number:
        """Compares the update that was just applied with a second computation; returns the number, as `difference`.

        Args:
            apply: what was called with the optimizer.
        """
        before = self._before
        compared = None if before is None else within_memory(lambda: self._compare(before, apply))
        # One limit for all that an update writes: its tensors take turns, and each would be learnt too late.
        ratio = torch.zeros((), device=self._weight.device) if compared is None else compared.ratios.amax()
        return over_ranks(compared, ratio[None], self._judge, self._tools)

    def _compare(self, before: OneTensor, apply: Callable[[Optimizer], Any]) -> Compared:
        """Compares what the update has written with what it writes into copies."""
        first, device = results(self._optimizer, self._weight), self._weight.device
        second = before.updated(self._optimizer, apply)
        # Two names for each: a state that only one of them has differs too.
        names = {name: self._name if name == "weight" else f"{name} of {self._name}" for name in {**first, **second}}

        def again() -> Tensor:
            third = before.updated(self._optimizer, apply)
            return sums([third.get(name) for name in names], device)

        pairs = [(text, first.get(name), second.get(name)) for name, text in names.items()]
        return compare(pairs, device, again=again)


def over_ranks(compared: Compared | None, ratios: Tensor, judge: Judge, tools: StepTools) -> Tensor:
    """Returns by which number a repetition is judged, 0-d: equal on all ranks, all of which must call it.

    A rank without a comparison calls it too, or the others would wait for it: all ranks then get `OUT_OF_MEMORY`.

    Args:
        compared: this rank's; None if its memory did not suffice.
        ratios: fp32 `[tensors]`, its differences; 0 without a comparison.
    """
    everywhere, failed = ratios.clone(), torch.full((1,), float(compared is None), device=ratios.device)
    tools.parallel.max_over_ranks_([everywhere, failed])
    return torch.where(failed[0] > 0, OUT_OF_MEMORY, judge(compared, everywhere))


def tensor_by_tensor(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer is known to update each tensor by itself.

    PyTorch's and this package's do. One of the user's own may not, and code that is hooked into a step may do anything.
    """
    known = type(optimizer).__module__.startswith(("torch.optim.", "stabletrain."))
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    ours = all((getattr(hook, "__module__", None) or "").startswith("stabletrain.") for hook in hooks)
    return known and ours and not isinstance(optimizer, LBFGS)


def next_tensor(optimizer: Optimizer, turn: int | None) -> tuple[dict[str, Any], Tensor] | None:
    """Returns the tensor whose turn it is, or without a turn the largest, with its group; None if none has a gradient.

    Leaves out weights in 16 bits: `precision=bf16_params` gives the optimizer others, and rounds them at random.
    """
    able = [
        (group, weight)
        for group in optimizer.param_groups
        for weight in group["params"]
        if weight.grad is not None and not weight.grad.is_sparse and weight.dtype in (torch.float32, torch.float64)
    ]
    if not able:
        return None
    return max(able, key=lambda each: each[1].numel()) if turn is None else able[turn % len(able)]


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


ALIGNMENT = 512
"""Bytes to which PyTorch aligns memory on a card; on a CPU it is 64."""


def copied(tensor: Tensor) -> Tensor:
    """Copies a tensor, bit for bit and without its graph, into memory with the same strides and the same alignment.

    A kernel may compute other bits from a view into a bucket than from a tensor with memory of its own: it reads
    aligned values several at a time.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        from torch.distributed.tensor import DTensor

        assert isinstance(tensor, DTensor)
        local, mesh = copied(tensor.to_local()), tensor.device_mesh
        return DTensor.from_local(
            local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    if hasattr(tensor, "__tensor_flatten__") or not can_be_written(tensor) or not tensor.numel():
        return tensor.clone()
    # Not by `data_ptr`, which tensors without values lack: every memory begins at a multiple of the alignment.
    begin = tensor.storage_offset() % (ALIGNMENT // tensor.element_size())
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.new_empty(begin + reach + 1)
    return memory.as_strided(tensor.shape, tensor.stride(), begin).copy_(tensor)


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
