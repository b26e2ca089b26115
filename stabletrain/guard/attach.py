"""Records the steps of a loop that cannot be edited, and judges when the loop calls `optimizer.step()`.

The loop computes gradients as it likes. `LoopRecorder` records the model's forward calls, with the buffers and random
generators that a held step must restore. At `optimizer.step()` the gradients are judged; the optimizer's step runs
only if the update is applied. If the gradients are finite and the loss is not, this is seen only if the model returns
the loss, if it passes through a `GradScaler`, or if the module that computes it is known (`criterion`).

To explain a held step, the recorded forward calls run again. An adapter that knows how the loop computes its loss
records that instead (`record`). Otherwise, if the model does not return its loss, only the forward pass can run again.
If the fault is in the loop's loss or in the backward pass, the step is still skipped, but the faulty operation cannot
be named.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from stabletrain.guard.checks.written import needs_closure
from stabletrain.guard.evaluations import Evaluations
from stabletrain.guard.gradients import unwrapped
from stabletrain.guard.micro_batch import MicroBatch, named_tensors, versions
from stabletrain.guard.rerun import BegunStep
from stabletrain.records import GradNorms

FORWARD_ONLY = "the loop's own loss is not known: only the model's forward pass was run again (use guard.step)"

NO_FORWARD_SEEN = (
    "no forward call of the model was seen: the loop calls parts of it, or trains in eval mode (use guard.step)"
)

MAX_CALLS = 256
"""Maximum number of forward calls that are recorded in a step: a loop that never steps must not keep every batch."""


class WeakHook:
    """A hook of a module that does not keep its target alive, and does nothing in a copy of the module."""

    def __init__(self, target: Callable[..., Any] | None = None) -> None:
        self._target = None if target is None else WeakMethod(target)

    def __call__(self, *args: Any) -> None:
        """Calls the target, if it is still there."""
        target = None if self._target is None else self._target()
        if target is not None:
            target(*args)

    def __reduce__(self) -> tuple:
        return WeakHook, ()  # for `copy.deepcopy` and `torch.save`


class LoopRecorder:
    """Records the current step of a loop for an attached guard.

    Args:
        criterion: the module that computes the loop's loss; None if unknown.
        begin: returns the state before the first forward pass.
        decide: judges the step; returns whether it is applied.
        update: returns the context in which the loop's update runs.

    Attributes:
        begun: the state before the step, with the forward calls so far; None before the first.
        forward_only: whether the loop's loss cannot be computed again.
        recorded: whether the loop calls `record` for its micro-batches, so that forward calls are not recorded.
        watching: whether forward calls are recorded; off while they are run again.
        unclipped: norms of the gradients from before the loop clipped them; None if unknown.
        run_own_step: the optimizer's own step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: GradScaler | None,
        criterion: nn.Module | None,
        begin: Callable[[], BegunStep],
        decide: Callable[[Tensor | None], bool],
        update: Callable[[], AbstractContextManager],
    ) -> None:
        self._model, self._optimizer, self._begin, self._decide = model, optimizer, begin, decide
        self._update = update
        self.begun: BegunStep | None = None
        self.forward_only, self.watching, self.recorded, self._judged = False, True, False, False
        self._backward_ran, self._before = False, begin()
        self._seen_losses: list[Tensor] = []
        self.unclipped: GradNorms | None = None
        self.run_own_step: Callable[[], Any] = optimizer.step
        self._undo = [
            model.register_forward_pre_hook(WeakHook(self._before_forward), with_kwargs=True).remove,
            model.register_forward_hook(WeakHook(self._after_forward)).remove,
            replace_method(optimizer, "step", self._stepping),
        ]
        if scaler is not None:
            self._undo.append(replace_method(scaler, "step", self._scaled_stepping))
            self._undo.append(replace_method(scaler, "scale", self._scaling))
        if criterion is not None:
            self._undo.append(criterion.register_forward_hook(WeakHook(self._after_criterion)).remove)

    def detach(self) -> None:
        """Leaves model, optimizer and scaler as they were."""
        while self._undo:
            self._undo.pop()()

    def before_forward(self, batch: Any, first: bool) -> None:
        """Begins a micro-batch that the loop will `record`."""
        if first or self.begun is None:
            self.begun = self._begin()
        self.begun.versions += versions(batch)
        self.recorded, self.forward_only = True, False

    def record(self, micro_batch: MicroBatch, loss: Tensor) -> None:
        """Records how the loop computes the loss of one micro-batch, and this loss; forward calls are dropped."""
        if self.begun is None:
            self.begun = self._begin()
        if not self.recorded:
            self.begun.micro_batches.clear()
            self.begun.losses.clear()
            self.recorded, self.forward_only = True, False
        self.begun.micro_batches.append(micro_batch)
        self.begun.losses.append(loss.detach())

    def take(self) -> BegunStep:
        """Returns the recorded step and starts a new one; without forward calls, the state after the last step."""
        begun, self.begun, self.recorded, self._backward_ran = self.begun, None, False, False
        self._seen_losses = []
        return begun or self._before

    def seen_loss(self) -> Tensor:
        """Returns NaN if a seen loss is not finite, else 0, because a seen loss may be only a part of the whole."""
        return sum(self._seen_losses, torch.zeros(())) * 0.0

    def end_step(self) -> None:
        """Records the state after a step, for a loop whose forward calls are not seen."""
        self._before = self._begin()

    def gap(self, begun: BegunStep) -> str:
        """Returns why the loop's own loss cannot be computed again; empty if it can."""
        if not begun.micro_batches:
            return NO_FORWARD_SEEN
        return FORWARD_ONLY if self.forward_only else ""

    def norms_before_clipping(self, norms: GradNorms) -> GradNorms:
        """Returns the norms from before the loop clipped, if they are known and clipping damaged nothing."""
        before, self.unclipped = self.unclipped, None
        if before is None or before.each.shape != norms.each.shape:
            return norms
        damaged = torch.isfinite(before.total) & ~torch.isfinite(norms.total)
        return GradNorms(torch.where(damaged, norms.total, before.total), torch.where(damaged, norms.each, before.each))

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if not (self.watching and module.training and torch.is_grad_enabled()):
            return
        if self.begun is None or (self._backward_ran and self._gradients_are_gone()):
            self.begun, self.recorded, self._backward_ran, self._seen_losses = self._begin(), False, False, []
        if not self.recorded and len(self.begun.micro_batches) < MAX_CALLS:
            call = MicroBatch(lambda given: loss_in(self._model(*given["args"], **given["kwargs"]))[0],
                        {"args": args, "kwargs": dict(kwargs)})  # fmt: skip
            self.begun.micro_batches.append(call)
            self.begun.versions += versions(call.batch)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (self.watching and module.training and torch.is_grad_enabled()):
            return
        if not self.recorded and self.begun is not None:
            if len(self.begun.losses) >= MAX_CALLS:
                return
            for tensor in [tensor for _, tensor in named_tensors(output) if tensor.requires_grad][:1]:
                tensor.register_hook(self._note_backward)
            with torch.no_grad():
                loss, known = loss_in(output)
            self.forward_only = not known
            # An unknown loss counts as 0, or as NaN if the model's output is not finite.
            self.begun.losses.append(loss.detach() if known else loss.detach() * 0.0)

    def _after_criterion(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.watching and torch.is_grad_enabled():
            self._note_loss(output)

    def _note_loss(self, losses: Any) -> None:
        """Notes losses that the loop is about to differentiate; only scalars: of others it may use some values only."""
        if self.begun is None or len(self._seen_losses) >= MAX_CALLS:
            return
        scalars = [tensor for _, tensor in named_tensors(losses) if tensor.requires_grad and tensor.numel() == 1]
        self._seen_losses += [tensor.detach().reshape(()) for tensor in scalars]

    def _note_backward(self, gradient: Tensor) -> None:
        """Notes that a backward pass has begun."""
        self._backward_ran = True

    def _gradients_are_gone(self) -> bool:
        """Whether the loop has dropped the recorded calls' gradients without a step, as with a GradScaler."""
        begun = self.begun
        if begun is None or not begun.micro_batches:
            return False
        groups = self._optimizer.param_groups
        return all(parameter.grad is None for group in groups for parameter in group["params"])

    def _stepping(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the optimizer's new step."""

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            optimizer._opt_called = True  # ty: ignore[missing-attribute]  a scheduler asks for it
            if self._judged:  # the scaler's step has judged it
                return inner(*args, **kwargs) if closure is None else inner(closure, *args, **kwargs)
            loss = None
            if closure is not None:  # forward and backward run inside, as in Lightning
                with torch.enable_grad():
                    loss = closure()
            if self._decide(loss if isinstance(loss, Tensor) and loss.numel() == 1 else None):
                self.run_own_step = lambda: inner(*args, **kwargs)
                if closure is not None and needs_closure(optimizer):
                    parameters = [each for group in optimizer.param_groups for each in group["params"]]
                    self.run_own_step = lambda: inner(Evaluations(parameters, loss, closure), *args, **kwargs)
                    self.watching = False  # the forward calls of later evaluations belong to this step
                try:
                    with self._update():
                        self.run_own_step()
                finally:
                    self.watching = True
            return loss

        # A scheduler that was made before marks the step that it has wrapped, and warns if the mark is gone.
        if hasattr(inner, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # ty: ignore[missing-attribute]
        return step

    def _scaling(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the scaler's new `scale`, which is given the loop's loss."""

        def scale(scaler: GradScaler, outputs: Any) -> Any:
            if self.watching:
                self._note_loss(outputs)
            return inner(outputs)

        return scale

    def _scaled_stepping(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the scaler's new step."""

        def step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if unwrapped(optimizer) is not self._optimizer or not scaler.is_enabled():
                return inner(optimizer, *args, **kwargs)
            try:
                scaler.unscale_(self._optimizer)
            except RuntimeError as error:
                if "already been called" not in str(error):
                    raise
            if not self._decide(None):
                return None
            self._judged = True
            try:
                with self._update():
                    return inner(self._optimizer, *args, **kwargs)
            finally:
                self._judged = False

        return step


def replace_method(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replaces a method of an optimizer or scaler by `make(method)`; returns a function that undoes this."""
    own, inner = vars(owner).get(name), getattr(owner, name)
    setattr(owner, name, MethodType(make(inner), owner))

    def undo() -> None:
        if own is None:
            vars(owner).pop(name, None)
        else:
            setattr(owner, name, own)

    return undo


def loss_in(output: Any) -> tuple[Tensor, bool]:
    """Returns the loss that a model's output holds and True; else the sum of its values and False.

    The sum is not finite if a value is not, so that at least the forward pass can be examined.
    """
    inside = getattr(output, "loss", None)
    if isinstance(output, Mapping) and "loss" in output:
        inside = output["loss"]
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].ndim == 0:
        inside = output[0]
    if isinstance(output, Tensor) and output.ndim == 0:
        inside = output
    if isinstance(inside, Tensor) and inside.numel() == 1:
        return inside.reshape(()), True
    values = [tensor for _, tensor in named_tensors(output) if tensor.is_floating_point()]
    sums = [value.sum(dtype=torch.float32) if value.itemsize < 4 else value.sum() for value in values]
    return sum(sums, torch.zeros(())), False
