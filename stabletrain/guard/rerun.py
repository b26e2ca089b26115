"""Runs a step's closures again on the live model, from where the step began, and restores everything.

A held step left the weights as they were. Its forward and backward pass changed buffers, random generators and
gradients: these are recorded before the step and set for the rerun. Afterwards everything has the values from before
the rerun. Ranks of DDP rerun without averaging gradients; the shards of FSDP2 are gathered as in training.

For the recheck, the gradients of a step are computed a second time; `checks/recheck.py` decides when, and judges a
difference. A step is left out if a rerun does not compute the same: closures without a batch, or that changed it;
compiled models; a loss scale; several ranks.
"""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.buffers import SavedBuffers, buffers_of
from stabletrain.checkpoint.tree import local_part
from stabletrain.forensics.rerun import RerunResult, in_true_fp32
from stabletrain.forensics.trace.recorder import Trace
from stabletrain.guard.checks.comparing import compare
from stabletrain.guard.checks.recheck import NoRecheck, repeats_exactly
from stabletrain.guard.checks.repeats import over_ranks
from stabletrain.guard.gradients import gradients, measure, summed_gradients
from stabletrain.guard.micro_batch import MicroBatch, loss_of
from stabletrain.machine.compiling import uncompiled
from stabletrain.machine.determinism import Generators
from stabletrain.machine.memory import within_memory
from stabletrain.machine.untouched import untouched
from stabletrain.parallel.loop import wrappers
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Number
from stabletrain.stability.precision.base import FullPrecision


@dataclass
class BegunStep:
    """A step that has begun: its state before the first forward pass, and its micro-batches so far.

    Attributes:
        micro_batches: the closures with their batches, in order.
        losses: of each, 0-d, on the device.
        after_forward: the buffers' values from before an update that was undone; None if none was.
        trace: of the step itself, if it was traced while it ran; else None.
        autocast: dtype of an autocast that the loop has entered around the guard; None for none.
        versions: the batches' tensors, each with its version from before the closure, which shows whether it changed.
    """

    generators: Generators
    buffers: SavedBuffers
    micro_batches: list[MicroBatch] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    after_forward: SavedBuffers | None = None
    trace: Trace | None = None
    autocast: torch.dtype | None = field(init=False)

    def __post_init__(self) -> None:
        kind = self.generators.device.type
        self.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    @property
    def loss(self) -> Tensor:
        """Sum of the micro-batches' losses, 0-d, on the device."""
        return total(self.losses)

    @property
    def batches_changed(self) -> bool:
        """Whether a batch was written since its closure first read it: a rerun would not compute the same."""
        return any(tensor._version != version for tensor, version in self.versions)

    def entered(self) -> AbstractContextManager:
        """Returns the autocast that the loop has entered around the guard, or a context without effect."""
        dtype = self.autocast
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.generators.device.type, dtype)

    def __enter__(self) -> None:
        """Begins a context in which an error ends the step: the buffers, as batch norm's statistics, are restored."""

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        if error is not None:
            self.buffers.put_back()


@dataclass(frozen=True)
class Rerun:
    """What is needed to run the closures of a step again.

    Attributes:
        model: the user's own module, without wrappers.
        outer: the model as the user gave it, with the wrappers of DDP and the compiler.
        parameters: those that the optimizer updates.
        precision: gives the autocast context.
        begun: the step's state before it, and its micro-batches.
        loss_scale: the step's.
    """

    model: nn.Module
    outer: nn.Module
    parameters: list[Tensor]
    precision: FullPrecision
    begun: BegunStep
    loss_scale: float

    def run(
        self,
        micro_batches: Sequence[MicroBatch] | None = None,
        *,
        true_fp32: bool = False,
        weights: Mapping[str, Any] | None = None,
        backward: bool = True,
        watched_by: AbstractContextManager | None = None,
    ) -> RerunResult:
        """Runs forward and backward of the step; afterwards everything is as it was.

        The loss is the sum over the micro-batches; the gradients are those of `parameters`.

        Args:
            micro_batches: closures and batches; None for the step's own.
            true_fp32: without autocast, loss scale and TF32, with parameters in fp32.
            weights: values for parameters by name; None for the present ones.
            backward: whether to compute gradients.
            watched_by: a context around forward and backward only, such as a trace.
        """
        # Gradients of other models must not change; FSDP2's own backward pass needs all.
        own = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        own = None if any(hasattr(parameter, "to_local") for parameter in own) else own
        scale = 1.0 if true_fp32 else self.loss_scale
        losses: list[Tensor] = []
        with self._at_beginning(weights), uncompiled(), torch.enable_grad():
            numbers = in_true_fp32(self.model) if true_fp32 else self.begun.entered()
            with numbers, watched_by or contextlib.nullcontext():
                for micro_batch in self.begun.micro_batches if micro_batches is None else micro_batches:
                    with contextlib.nullcontext() if true_fp32 else self.precision.autocast():
                        loss = loss_of(micro_batch())
                    if backward:
                        (loss * scale if scale != 1.0 else loss).backward(inputs=own)
                    losses.append(loss.detach())
            found = gradients(self.parameters)
            if scale != 1.0 and found:
                torch._foreach_div_(found, scale)
            summed = summed_gradients(self.parameters, found)
            norm = float(measure(summed, [])[0].total) if found else float("nan")
            each = [parameter.grad for parameter in self.parameters]
        return RerunResult(float(total(losses).float()), norm, each)

    @contextlib.contextmanager
    def _at_beginning(self, weights: Mapping[str, Any] | None) -> Generator[None]:
        """Sets buffers and generators to the beginning of the step; restores everything on exit."""
        begun = self.begun
        device = begun.generators.device
        with untouched(self.model, device):
            buffers_of(self.model).restore_(begun.buffers, torch.zeros((), dtype=torch.bool, device=device))
            torch.clear_autocast_cache()  # it may hold casts of other weights
            try:
                with without_communication(self.outer), with_weights(self.model, weights or {}):
                    begun.generators.set()
                    yield
            finally:
                torch.clear_autocast_cache()


def total(losses: Sequence[Tensor]) -> Tensor:
    """Returns the loss of a step: the sum over its micro-batches, 0-d."""
    return sum(losses[1:], losses[0])


@contextlib.contextmanager
def without_communication(model: nn.Module) -> Generator[None]:
    """A context in which ranks of DDP do not communicate."""
    with contextlib.ExitStack() as stack:
        for wrapper in wrappers(model):
            stack.enter_context(wrapper.no_sync())
            stack.callback(setattr, wrapper, "require_forward_param_sync", wrapper.require_forward_param_sync)
            wrapper.require_forward_param_sync = False
        yield


@contextlib.contextmanager
@torch.no_grad()
def with_weights(model: nn.Module, values: Mapping[str, Any]) -> Generator[None]:
    """A context in which parameters have other values; their own bits are restored on exit."""
    live = {name: local_part(tensor) for name, tensor in model.named_parameters() if name in values}
    own = {name: tensor.clone() for name, tensor in live.items()}
    try:
        for name, tensor in live.items():
            tensor.copy_(local_part(values[name]))
        yield
    finally:
        for name, tensor in live.items():
            tensor.copy_(own[name])


def repeatable(rerun: Rerun) -> bool:
    """Returns whether a rerun computes what the step computed."""
    begun = rerun.begun
    with_batch = all(each.takes_batch for each in begun.micro_batches)
    return rerun.outer is rerun.model and with_batch and not begun.batches_changed and rerun.loss_scale == 1.0


def repeat(recheck: NoRecheck, rerun: Rerun, step: int) -> Number:
    """Computes the gradients of a step again, if it can be repeated; returns the number that judges it, 0-d fp32, or 0.

    Args:
        recheck: receives the comparison.
        step: number of the step, counted from 0; its gradients are those of the parameters, neither scaled nor clipped.

    Returns:
        `OUT_OF_MEMORY` if memory did not suffice.
    """
    recheck.forget()
    device, first = rerun.begun.generators.device, [parameter.grad for parameter in rerun.parameters]
    recheck.exact = repeats_exactly(rerun.model, device)  # the repetition of the update reads it too
    if not repeatable(rerun):
        return 0.0
    again = within_memory(rerun.run)
    pairs = [] if again is None else [*zip(names(rerun), first, again.gradients, strict=True)]
    compared = within_memory(lambda: compare(pairs, device)) if pairs else None
    ratios = torch.zeros(len(first), device=device) if compared is None else compared.ratios
    eps = torch.finfo(getattr(rerun.precision, "dtype", torch.float32)).eps
    return over_ranks(compared, ratios, recheck.judge_of(step, "gradient", eps), SingleProcess())


def names(rerun: Rerun) -> list[str]:
    """Returns the names of the parameters, in order."""
    known = {id(parameter): name for name, parameter in rerun.model.named_parameters()}
    return [known.get(id(parameter), "a weight") for parameter in rerun.parameters]
