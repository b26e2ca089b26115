"""Repeats a gradient, or the update of one tensor, without a trace; `recheck.py` says when and why."""

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.buffers import SavedBuffers, can_be_written
from stabletrain.guard.checks.comparing import Compared, compare, sums
from stabletrain.guard.checks.neighbours import NO_SHIFT, NoShift, Result
from stabletrain.guard.checks.written import needs_closure
from stabletrain.machine.determinism import Generators
from stabletrain.machine.memory import within_memory
from stabletrain.machine.untouched import attributes_of, put_back_attributes, untouched
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Batch, Number, TrainState
from stabletrain.several_optimizers import optimizers_of
from stabletrain.stability.step_tools import StepTools


class NoRepeat:
    """Repeats nothing: most steps are computed once."""

    difference: Number = 0.0

    def gradient(self, again: Callable[[Batch], Any], batch: Batch, loss: Tensor) -> None:
        """Does nothing."""

    def update(self, apply: Callable[[Optimizer], Any]) -> Number:
        """Returns 0: nothing was compared."""
        return 0.0


NO_REPEAT = NoRepeat()


OUT_OF_MEMORY = -1.0
"""The difference of a repetition for which some rank had too little memory."""

Judge = Callable[[Compared | None, Tensor], Tensor]
"""Called with this rank's comparison (None without enough memory), and with the largest differences on any rank, fp32
`[tensors]`; returns the number that judges the repetition. See `recheck.py`.
"""


class RepeatGradient(NoRepeat):
    """Repeats the first micro-batch of a step.

    Attributes:
        difference: 0-d fp32 on the device, equal on all ranks: the result of `judge`, or `OUT_OF_MEMORY`; 0 if nothing
            was repeated.
    """

    def __init__(
        self,
        judge: Judge,
        model: nn.Module,
        buffers: SavedBuffers,
        tools: StepTools,
        device: torch.device,
        shift: NoShift = NO_SHIFT,
    ) -> None:
        self._judge, self._model, self._buffers, self._tools, self._shift = judge, model, buffers, tools, shift
        self._generators, self._attributes = Generators.now(device), attributes_of(model)
        self.difference: Number = 0.0
        self._keeps = tools.parallel.keep_gradients()
        self._waiting = self._keeps or shift is not NO_SHIFT

    def gradient(self, again: Callable[[Batch], Any], batch: Batch, loss: Tensor) -> None:
        """If this is the first micro-batch, runs it again and compares its gradients with those of the first run.

        Args:
            again: runs forward and backward of a micro-batch, without reducing gradients; its result has a `loss`.
            batch: the micro-batch, on the device.
            loss: of it, 0-d.
        """
        if not self._waiting:
            return
        self._waiting = False
        named = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        run = partial(self._run, again)
        own = partial(run, batch, self._generators)
        if not self._keeps:
            difference = torch.zeros((), device=self._generators.device)
        else:
            first = self._tools.parallel.own_gradients([*named.values()])
            compared = None if first is None else self._compare(named, first, own)
            ratios = torch.zeros(len(named), device=self._generators.device) if compared is None else compared.ratios
            difference = over_ranks(compared, ratios, self._judge, self._tools.parallel)
            own = partial(_same, None if first is None else [loss, *first])
        names = ["loss", *named]
        self.difference = self._shift.judged(difference, batch, self._generators, run, own, names, repeated=self._keeps)

    def _run(self, again: Callable[[Batch], Any], batch: Batch, generators: Generators) -> Result:
        """Runs a micro-batch from the beginning of the step, without a trace."""
        with self._rewound(generators), torch.enable_grad():
            # It catches an error inside: the memory of the run is then free before everything is restored.
            return self._tools.parallel.own_backward(self._model, lambda: again(batch).loss.total)

    def _compare(
        self, named: Mapping[str, Tensor], first: Sequence[Tensor | None], run: Callable[[], Result]
    ) -> Compared | None:
        """Compares gradients with those of a second run; None if there was not enough memory."""
        if (second := run()) is None:
            return None
        pairs = [*zip(named, first, second[1:], strict=True)]
        return within_memory(lambda: compare(pairs, self._generators.device, generators=self._generators))

    @contextmanager
    def _rewound(self, generators: Generators) -> Generator[None]:
        """Sets buffers, gradients, attributes and generators as for the step's beginning; restores them on exit."""
        with untouched(self._model, self._generators.device):
            self._buffers.put_back()
            put_back_attributes(self._attributes)
            generators.set()
            yield


def _same(result: Result) -> Result:
    """Returns a result that is known already."""
    return result


@dataclass(frozen=True)
class OneTensor:
    """A parameter before its update, with its gradient, its state and its group."""

    weight: Tensor
    gradient: Tensor
    state: Mapping[str, Any]
    group: Mapping[str, Any]

    @classmethod
    def of(cls, optimizer: Optimizer, group: Mapping[str, Any], weight: Tensor) -> "OneTensor":
        """Copies everything that the update of `weight` reads and writes."""
        assert weight.grad is not None
        options = {name: value for name, value in group.items() if name != "params"}
        return cls(copied(weight), copied(weight.grad), copied_state(optimizer.state.get(weight, {})), options)

    def updated(self, optimizer: Optimizer, apply: Callable[[Optimizer], Any]) -> dict[str, Tensor]:
        """Updates a copy with a separate optimizer; returns the weight and its state by name."""
        weight = copied(self.weight)
        weight.grad = copied(self.gradient)
        alone = optimizer_of(optimizer, weight, copied_state(self.state), self.group)
        apply(alone)
        return results(alone, weight)


class RepeatUpdate(NoRepeat):
    """Repeats the update of one tensor."""

    def __init__(
        self, judge: Judge, state: TrainState, chosen: tuple[dict[str, Any], Tensor, Optimizer], parallel: SingleProcess
    ) -> None:
        group, self._weight, self._optimizer = chosen
        self._judge, self._parallel = judge, parallel
        self._name = next((name for name, each in state.model.named_parameters() if each is self._weight), "a weight")
        self._before = within_memory(lambda: OneTensor.of(self._optimizer, group, self._weight))

    @torch.no_grad()
    def update(self, apply: Callable[[Optimizer], Any]) -> Number:
        """Repeats the update that was just applied and compares; returns the number that judges the repetition.

        Args:
            apply: applies the update of an optimizer.
        """
        before = self._before
        compared = None if before is None else within_memory(lambda: self._compare(before, apply))
        # One limit for everything that an update writes: tensors take turns, so limits for each would be learnt late.
        ratio = torch.zeros((), device=self._weight.device) if compared is None else compared.ratios.amax()
        return over_ranks(compared, ratio[None], self._judge, self._parallel)

    def _compare(self, before: OneTensor, apply: Callable[[Optimizer], Any]) -> Compared:
        """Compares the values that the update wrote with those that it writes into copies."""
        first, device = results(self._optimizer, self._weight), self._weight.device
        second = before.updated(self._optimizer, apply)
        # The names of both: a state that only one of them has is a difference too.
        names = {name: self._name if name == "weight" else f"{name} of {self._name}" for name in {**first, **second}}

        def again() -> Tensor:
            third = before.updated(self._optimizer, apply)
            return sums([third.get(name) for name in names], device)

        pairs = [(text, first.get(name), second.get(name)) for name, text in names.items()]
        return compare(pairs, device, again=again)


def over_ranks(compared: Compared | None, ratios: Tensor, judge: Judge, parallel: SingleProcess) -> Tensor:
    """Returns the number that judges a repetition, 0-d, equal on all ranks. All ranks must call it.

    A rank that had too little memory calls it too, because the others wait for it. All ranks then get `OUT_OF_MEMORY`.

    Args:
        compared: this rank's comparison; None if its memory did not suffice.
        ratios: fp32 `[tensors]`, its differences; 0 without a comparison.
    """
    everywhere, failed = ratios.clone(), torch.full((1,), float(compared is None), device=ratios.device)
    parallel.max_over_ranks_([everywhere, failed])
    return torch.where(failed[0] > 0, OUT_OF_MEMORY, judge(compared, everywhere))


def tensor_by_tensor(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer is known to update each tensor independently.

    PyTorch's optimizers and this package's do. A user's optimizer may not, and a hook may do anything. A step that
    communicates is left out: a rank without the memory to repeat it would leave the others waiting.
    """
    known = type(optimizer).__module__.startswith(("torch.optim.", "stabletrain."))
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    ours = all((getattr(hook, "__module__", None) or "").startswith("stabletrain.") for hook in hooks)
    return known and ours and not needs_closure(optimizer) and not getattr(optimizer, "communicates", False)


def next_tensor(optimizer: Optimizer, turn: int | None) -> tuple[dict[str, Any], Tensor, Optimizer] | None:
    """Returns the tensor whose turn it is, with its group and optimizer; None if none can be repeated.

    Leaves out tensors without a gradient, optimizers that are not `tensor_by_tensor`, and weights that
    `precision=bf16_params` rounds at random. Also leaves out what another rank computes: a repetition does not
    communicate, and the rank whose arithmetic is wrong should notice it.

    Args:
        turn: number of the turn; None for the largest tensor.
    """
    each_one = optimizers_of(optimizer)
    hooks = [hook for each in each_one for hook in each._optimizer_step_post_hooks.values()]
    rounded = {id(each) for hook in hooks for each in getattr(getattr(hook, "__self__", None), "rounded_at_random", ())}
    able = [
        (group, weight, each)
        for each in each_one
        if tensor_by_tensor(each)
        for group in each.param_groups
        for weight in group["params"]
        if weight.grad is not None and not weight.grad.is_sparse and weight.dtype in (torch.float32, torch.float64)
        if id(weight) not in rounded
    ]
    elsewhere = {id(weight) for each in each_one for weight in getattr(each, "computed_elsewhere", list)()}
    # All ranks repeat something, or none: they compare their results. So a rank without work of its own takes any.
    able = [each for each in able if id(each[1]) not in elsewhere] or [
        each for each in able if not hasattr(each[1], "to_local")
    ]
    if not able:
        return None
    return max(able, key=lambda each: each[1].numel()) if turn is None else able[turn % len(able)]


def optimizer_of(optimizer: Optimizer, weight: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Optimizer:
    """Returns an optimizer of the same class and options for one tensor, without hooks."""
    alone = object.__new__(type(optimizer))
    left_out = ("state", "param_groups", "step", "zero_grad", "owners")  # without owners it does all work itself
    alone.__dict__.update(
        {name: each for name, each in vars(optimizer).items() if name not in left_out and not name.endswith("_hooks")}
    )
    mine = defaultdict(dict, {weight: state} if state else {})
    alone.__setstate__({"defaults": optimizer.defaults, "state": mine, "param_groups": [{**group, "params": [weight]}]})
    return alone


def results(optimizer: Optimizer, weight: Tensor) -> dict[str, Tensor]:
    """Returns the tensors that an update writes by name: the weight and its state."""
    state = optimizer.state.get(weight, {})
    return {"weight": weight, **{name: each for name, each in state.items() if isinstance(each, Tensor)}}


ALIGNMENT = 512
"""Bytes to which PyTorch aligns memory on a card; on a CPU it is 64."""


def copied(tensor: Tensor) -> Tensor:
    """Copies a tensor, bit for bit and without its graph, into memory with the same strides and the same alignment.

    A kernel reads several aligned values at a time, so it may compute other bits from a view into a bucket than from a
    separate tensor.
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
    # From the offset, not from `data_ptr`, which tensors without values lack: memory begins at a multiple of ALIGNMENT.
    begin = tensor.storage_offset() % (ALIGNMENT // tensor.element_size())
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.new_empty(begin + reach + 1)
    return memory.as_strided(tensor.shape, tensor.stride(), begin).copy_(tensor)


def copied_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the state of one tensor."""
    return {name: copied(each) if isinstance(each, Tensor) else each for name, each in state.items()}
