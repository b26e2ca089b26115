"""A repro: what running one step again needs, and a copy of the model to run it on.

A step whose update was withheld left the weights as they were, so the live model is where the step started, but for its
buffers: the step after it has run forward by the time anybody looks. `step.compute` holds the buffers from before, and
they belong to the repro. Nothing of the repro is ever written: what runs it takes `copy_model()`, which has its own
weights, buffers, gradients and attributes, and is not compiled until somebody does it.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.checkpoint.capture import Stateful
from stabletrain.checkpoint.tree import Tree, map_tensors
from stabletrain.machine.compiling import compiled_shape
from stabletrain.parallel.single import SingleProcess
from stabletrain.protocols import Precision, Tools
from stabletrain.records import Batch, Reading

CONTAINERS = ("_modules", "_parameters", "_buffers")
"""Where a module keeps its children and tensors."""


@dataclass(frozen=True)
class Repro:
    """One step, ready to be run again.

    Attributes:
        model: its weights are those that the step started from; read only.
        buffers: as they were before the step, in the order of `model.buffers()`.
        step: number of the step, counted from 0: it names the randomness.
        batch: what the step read, whole, on the host.
        micro_batches: into how many the step cut it.
        tools: what acted in the step; of the loss scale, which has moved since, see `loss_scale`.
        loss_scale: the one that the step ran with, as in its reading.
        device: where the model lives.
        reading: what the step measured; None if that is not known.
        compiled: whether it ran so, by the user's own doing, that a copy of the model computes other bits.
        compiled_for: the shape of inputs that the model was compiled for (`machine/compiling.py`); None if it was not.
        applied: whether its update has reached the weights, so that they are those after it: a replay is then of the
            same batch, and not of the same step.
        older: gives a captured state (`checkpoint/capture.py`) from before the step, or None if none is left.
        fresh: gives another batch, of a data position that the run has neither read nor passed over.
        deadline: of `time.monotonic()`, in seconds; what has not begun by then is not run.
        metadata: what else is to be kept with the repro, as a tree without tensors: the run's configuration.
    """

    model: nn.Module
    buffers: Sequence[Tensor]
    step: int
    batch: Batch
    micro_batches: int
    tools: Tools
    loss_scale: float
    device: torch.device
    reading: Reading | None = None
    compiled: bool = False
    compiled_for: tuple[int, ...] | None = None
    applied: bool = False
    older: Callable[[], Tree | None] | None = None
    fresh: Callable[[], Batch] | None = None
    deadline: float = math.inf
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def copy_model(self) -> nn.Module:
        """A copy of the model as the step found it, without gradients; what it does reaches nothing live."""
        model_copy = copy_of_model(self.model)
        self.reset_(model_copy)
        return model_copy

    @torch.no_grad()
    def reset_(self, model_copy: nn.Module) -> None:
        """Puts the buffers of such a copy to where the step started, so that it can run once more."""
        for buffer, before in zip(model_copy.buffers(), self.buffers, strict=True):
            buffer.copy_(before)

    def replay_tools(self) -> Tools:
        """The tools, with a precision of their own at the loss scale of the step, and without the other ranks."""
        return replace(self.tools, precision=at_scale(self.tools.precision, self.loss_scale), parallel=SingleProcess())

    def to_micro_batches(self, batch: Batch) -> list[Batch]:
        """A batch of the host on the device, cut as the step cut its own."""
        return replace(batch, counted=None).to(self.device).split(self.micro_batches)

    @property
    def comparable(self) -> bool:
        """Whether a replay on a copy of the model computes the very operations of the step, from where it started."""
        several = type(self.tools.parallel) is not SingleProcess  # of one rank's part alone the step has no numbers
        return not (
            several or self.applied or self.compiled or any(is_compiled(module) for module in self.model.modules())
        )


def copy_of_model(model: nn.Module) -> nn.Module:
    """A deep copy of a model that has been trained: uncompiled, without gradients, with the hooks of its parameters.

    A tensor that a forward pass left in an attribute is copied without its graph. What cannot be copied at all (a lock,
    an open file) is shared.
    """
    graphs: dict[int, Any] = {}

    def cut_off(tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            graphs[id(tensor)] = tensor.detach().clone()

    for module in model.modules():
        map_tensors(cut_off, vars(module))
    try:
        model_copy = copy.deepcopy(model, dict(graphs))
    except Exception:  # whatever an attribute raises that will not be copied
        model_copy = copy.deepcopy(model, shared(model, graphs) | graphs)
    for mine, live in zip(model_copy.parameters(), model.parameters(), strict=True):
        mine.grad = None
        for hook in (live._backward_hooks or {}).values():
            mine.register_hook(hook)
        for hook in (getattr(live, "_post_accumulate_grad_hooks", None) or {}).values():
            mine.register_post_accumulate_grad_hook(hook)
    return model_copy


def shared(model: nn.Module, copied: Mapping[int, Any]) -> dict[int, Any]:
    """The attributes of a model's modules that cannot be copied, by their identity."""
    found: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name in CONTAINERS:
                continue
            try:
                copy.deepcopy(value, dict(copied))
            except Exception:
                found[id(value)] = value
    return found


def is_compiled(module: nn.Module) -> bool:
    """Whether a module runs compiled, in place or wrapped, otherwise than by `machine/compiling.py`."""
    code = getattr(module, "_compiled_call_impl", None)
    return (code is not None and compiled_shape(module) is None) or hasattr(module, "_orig_mod")


def at_scale(precision: Precision, loss_scale: float) -> Precision:
    """A precision of its own at a given loss scale; one without a loss scale stays as it is."""
    then = copy.copy(precision)
    if isinstance(then, Stateful) and is_scaled(precision):
        then.load_state_dict({**then.state_dict(), "scale": torch.tensor(loss_scale, dtype=torch.float32)})
    return then


def is_scaled(precision: Precision) -> bool:
    """Whether a precision has a loss scale that moves."""
    return isinstance(precision, Stateful) and "scale" in precision.state_dict()
