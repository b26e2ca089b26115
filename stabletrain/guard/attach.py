"""Records the steps of a loop that cannot be edited, and judges when the loop calls `optimizer.step()`.

The loop computes gradients as it likes. `LoopRecorder` records the model's forward calls, with the buffers and random
generators that a held step must restore. At `optimizer.step()` the gradients are judged; the optimizer's step runs
only if the update is applied.

The loss of a step is the sum of what the loop's backward calls differentiated (`backward_calls.py`). A backward call
belongs to the step if it changed a gradient of the optimizer, and if the loop has not dropped the gradients since: the
loss of a GAN's generator runs through the discriminator too, but does not count there. A loop that computes gradients
in other ways, as by `torch.autograd.grad`, has no known loss.

To explain a held step, the recorded forward calls run again. If the loss comes from the model's outputs alone
(`loss_graph.py`), that is the whole step. If an adapter knows how the loop computes its loss, it records that instead
(`record`). Otherwise only the forward pass can run again; then the next steps are traced while they run
(`live_trace.py`), so that a fault in the loop's loss or in the backward pass is named when it comes again.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from stabletrain.guard.backward_calls import listen, within_backward
from stabletrain.guard.checks.written import needs_closure
from stabletrain.guard.evaluations import Evaluations
from stabletrain.guard.gradients import unwrapped
from stabletrain.guard.live_trace import LiveTrace
from stabletrain.guard.loop_hooks import WeakHook, not_watched
from stabletrain.guard.loss_graph import ForwardCall, Root, mark, note_scaled, tensors_in
from stabletrain.guard.micro_batch import MicroBatch, map_tensors, named_tensors, versions
from stabletrain.guard.rerun import BegunStep
from stabletrain.parallel.loop import innermost
from stabletrain.records import GradNorms

FORWARD_ONLY = "the loop computes its loss itself: only the model's forward pass was run again (use guard.step)"

NO_FORWARD_SEEN = (
    "no forward call of the model was seen: the loop calls parts of it, or trains in eval mode (use guard.step)"
)

MAX_CALLS = 256
"""Maximum number of forward calls that are recorded in a step: a loop that never steps must not keep every batch."""


class LoopRecorder:
    """Records the current step of a loop for an attached guard.

    Args:
        begin: returns the state before the first forward pass.
        decide: judges the step; returns whether it is applied.
        update: returns the context in which the loop's update runs.

    Attributes:
        begun: the state before the step, with the forward calls so far; None before the first.
        recorded: whether the loop calls `record` for its micro-batches, so that forward calls are not recorded.
        live: traces steps while they run.
        unclipped: norms of the gradients from before the loop clipped them; None if unknown.
        run_own_step: the optimizer's own step.
        stepping: whether the optimizer's step is running under the guard.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: GradScaler | None,
        begin: Callable[[], BegunStep],
        decide: Callable[[Tensor | None], bool],
        update: Callable[[], AbstractContextManager],
    ) -> None:
        self._optimizer, self._begin, self._decide = optimizer, begin, decide
        self._update = update
        self.begun: BegunStep | None = None
        self.recorded, self._judged, self._call = False, False, None
        self._before = begin()
        self._dropped, self._runs_through = False, False
        self._forget_backward_calls()
        self.live = LiveTrace(innermost(model))
        self.unclipped: GradNorms | None = None
        self.run_own_step: Callable[[], Any] = optimizer.step
        self.stepping = False
        self._undo = [
            replace_method(optimizer, "step", lambda inner: self._noted(self._stepping(inner))),
            replace_method(optimizer, "zero_grad", self._dropping),
            listen(self),
            self.live.disarm,
        ]
        self.record_calls_of(model)
        if scaler is not None:
            self.use_scaler(scaler)

    def record_calls_of(self, module: nn.Module) -> None:
        """Records the forward calls of the model, or of a part of it that the loop calls by itself."""
        before, after = WeakHook(self._before_forward), WeakHook(self._after_forward)
        self._undo.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._undo.append(module.register_forward_hook(after).remove)

    def use_scaler(self, scaler: GradScaler) -> None:
        """Judges a step when the scaler takes it, and sees the losses that it scales."""
        self._undo.append(replace_method(scaler, "step", self._scaled_stepping))
        self._undo.append(replace_method(scaler, "scale", self._scaling))

    def detach(self) -> None:
        """Leaves model, optimizer and scaler as they were."""
        while self._undo:
            self._undo.pop()()

    def before_forward(self, batch: Any, first: bool) -> None:
        """Begins a micro-batch that the loop will `record`."""
        if first or self.begun is None:
            self.begun = self._begin()
            self._forget_backward_calls()
        self.begun.versions += versions(batch)
        self.recorded = True

    def record(self, micro_batch: MicroBatch, loss: Tensor) -> None:
        """Records how the loop computes the loss of one micro-batch, and this loss; forward calls are dropped."""
        if self.begun is None:
            self.begun = self._begin()
        if not self.recorded:
            self.begun.micro_batches.clear()
            self.recorded = True
        self.begun.micro_batches.append(micro_batch)
        self.begun.losses.append(loss.detach())

    def take(self) -> tuple[BegunStep, Tensor | None]:
        """Returns the recorded step and its loss, None if unknown, and starts a new one.

        Without forward calls, the step is the state after the last one.
        """
        begun, trace = self.begun or self._before, self.live.end_step()
        begun.trace = None if self.recorded else trace
        if not begun.losses and self._loss is not None and not self._dropped:
            begun.losses = [self._loss * 0.0 if self._partial else self._loss]
        for call in calls_of(begun) if self._outside else ():
            call.loss = None
        self.begun, self.recorded = None, False
        self._forget_backward_calls()
        return begun, begun.loss if begun.losses else None

    def end_step(self) -> None:
        """Records the state after a step, for a loop whose forward calls are not seen."""
        self._before = self._begin()

    def gap(self, begun: BegunStep) -> str:
        """Returns why the loop's own loss cannot be computed again; empty if it can."""
        if not begun.micro_batches:
            return NO_FORWARD_SEEN
        return FORWARD_ONLY if any(call.loss is None for call in calls_of(begun)) else ""

    def norms_before_clipping(self, norms: GradNorms) -> GradNorms:
        """Returns the norms from before the loop clipped, if they are known and clipping damaged nothing."""
        before, self.unclipped = self.unclipped, None
        if before is None or before.each.shape != norms.each.shape:
            return norms
        damaged = torch.isfinite(before.total) & ~torch.isfinite(norms.total)
        return GradNorms(torch.where(damaged, norms.total, before.total), torch.where(damaged, norms.each, before.each))

    # ---- forward calls

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        self._call = None
        if not (module.training and torch.is_grad_enabled()):
            return
        # Activation checkpointing repeats a forward pass that ran without a graph, and has written buffers then.
        if within_backward() and self.begun is None:
            self.begun, self.recorded = self._before, False
        if self.begun is None or (self._backward_ran and self._gradients_are_gone()):
            self.live.end()
            self.begun, self.recorded = self._begin(), False
            self._forget_backward_calls()
        if not self.recorded and len(self.begun.micro_batches) < MAX_CALLS:
            self._call, given = ForwardCall(module), {"args": args, "kwargs": dict(kwargs)}
            if any(tensor.grad_fn is not None for _, tensor in named_tensors(given)):  # the output of another part
                given = map_tensors(lambda tensor: tensor.detach() if tensor.grad_fn is not None else tensor, given)
            call = MicroBatch(self._call, given)
            self.begun.micro_batches.append(call)
            self.begun.versions += versions(call.batch)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        tensors = tensors_in(output)
        for tensor in [tensor for tensor in tensors if tensor.requires_grad][:1]:
            tensor.register_hook(self._note_backward)
        mark(tensors, call, self)

    # ---- backward calls

    def _forget_backward_calls(self) -> None:
        """Forgets the backward calls so far."""
        self._loss: Tensor | None = None  # sum of what they differentiated
        self._partial = False  # whether the sum says only whether all of it is finite
        self._outside = False  # whether the recorded calls do not compute all of it
        self._backward_ran, self._calls_before = False, 0  # number of calls before the end of the last one
        self._left: tuple[Tensor, ref[Tensor], int] | None = None  # a parameter, its gradient, and the version left

    @contextlib.contextmanager
    def backward_call(self, roots: Sequence[Any], factors: Sequence[Tensor | None]) -> Generator[None]:
        """A context for a backward call of the loop: adds its roots to the loss if it changes the gradients.

        Args:
            roots, factors: see `listen`.
        """
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        before = [(parameter.grad, version(parameter.grad)) for parameter in parameters]
        gone, written = self._gradients_are_gone(), self._gradients_were_written()
        losses = [Root(root, factor, self) for root, factor in zip(roots, factors, strict=False)]
        self._runs_through = False
        yield
        self._backward_ran |= self._runs_through
        pairs = zip(parameters, before, strict=True)
        changed = next((p for p, (grad, was) in pairs if p.grad is not grad or version(p.grad) != was), None)
        # Several calls of a sharded model may be summed up before its gradients change.
        if changed is None and not (self._runs_through and any(hasattr(each, "to_local") for each in parameters)):
            return
        begun, first = self.begun or self._before, self._calls_before
        if gone:  # with the forward calls before them; the state that was recorded is older then
            self._forget_backward_calls()
            del begun.micro_batches[:first]
            self._outside = first > 0
        calls = calls_of(begun)
        self._dropped, self._backward_ran, self._calls_before = False, True, len(calls)
        self._partial |= written and not gone
        for root in losses:
            self._loss = root.loss if self._loss is None else self._loss + root.loss.to(self._loss.device)
            self._partial |= not root.whole
            self._outside |= root.parts is None
            for call, compute in root.parts or ():
                self._outside |= call not in calls or call.loss is not None
                call.loss = compute
        if changed is not None and changed.grad is not None:
            self._left = changed, ref(changed.grad), version(changed.grad)

    def _note_backward(self, gradient: Tensor) -> None:
        """Notes that the present backward call runs through a recorded call."""
        self._runs_through = True

    def _dropping(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the optimizer's new `zero_grad`."""

        def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._dropped = True
            return inner(*args, **kwargs)

        return zero_grad

    def _gradients_are_gone(self) -> bool:
        """Whether the loop has dropped the gradients of the last backward call: a GAN's, or with a GradScaler."""
        groups = self._optimizer.param_groups
        return self._dropped or all(parameter.grad is None for group in groups for parameter in group["params"])

    def _gradients_were_written(self) -> bool:
        """Whether the loop has written to the gradients since the last backward call: perhaps it has dropped them."""
        if self._left is None:
            return False
        parameter, left, was = self._left
        return parameter.grad is not left() or version(parameter.grad) != was

    def _stepping(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the optimizer's new step."""

        def step(optimizer: Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            if hasattr(inner, "_wrapped_by_lr_sched"):
                optimizer._opt_called = True  # ty: ignore[missing-attribute]  the scheduler asks for it
            if self._judged:  # the scaler's step has judged it
                return inner(*args, **kwargs) if closure is None else inner(closure, *args, **kwargs)
            if closure is not None and not callable(closure):  # a step with arguments of its own
                args, closure = (closure, *args), None
            loss = returned = None
            if closure is not None:  # forward and backward run inside, as in Lightning
                with torch.enable_grad():
                    loss = closure()
            if self._decide(loss if isinstance(loss, Tensor) and loss.numel() == 1 else None):
                parameters = [each for group in optimizer.param_groups for each in group["params"]]

                def run() -> Any:
                    nonlocal returned
                    if closure is None or not needs_closure(optimizer):
                        returned = inner(*args, **kwargs)
                        return returned
                    with not_watched():  # later evaluations belong to this step
                        return inner(Evaluations(parameters, loss, closure), *args, **kwargs)

                self.run_own_step = run
                with self._update():
                    run()
            return loss if returned is None else returned

        # A scheduler that was made before marks the step that it has wrapped, and warns if the mark is gone.
        if hasattr(inner, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # ty: ignore[missing-attribute]
        return step

    def _noted(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the same step, which notes that it is running."""

        @functools.wraps(inner)
        def step(*args: Any, **kwargs: Any) -> Any:
            before, self.stepping = self.stepping, True
            try:
                return inner(*args, **kwargs)
            finally:
                self.stepping = before

        return torch._disable_dynamo(step)  # a loop may compile its call: verdicts are not for the compiler

    def _scaling(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the scaler's new `scale`, which notes the loss that it was given."""

        def scale(scaler: GradScaler, outputs: Any) -> Any:
            returned = inner(outputs)
            note_scaled(returned, outputs)
            return returned

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
            self._judged = self.stepping = True
            try:
                with self._update():
                    return inner(self._optimizer, *args, **kwargs)
            finally:
                self._judged = self.stepping = False

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


def notice_steps(optimizer: Optimizer, replaced: Callable[[], bool]) -> None:
    """Calls `replaced` before each step of an optimizer; if it returns that `step` is another one now, this runs."""
    redirected = False

    def noticing(inner: Callable[..., Any]) -> Callable[..., Any]:
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            nonlocal redirected
            if not replaced() or redirected:
                return inner(*args, **kwargs)
            redirected = True
            try:
                return optimizer.step(*args, **kwargs)
            finally:
                redirected = False

        return torch._disable_dynamo(step)

    replace_method(optimizer, "step", noticing)


def calls_of(begun: BegunStep) -> list[ForwardCall]:
    """Returns the recorded forward calls of a step; none if the loop records its micro-batches itself."""
    return [each.closure for each in begun.micro_batches if isinstance(each.closure, ForwardCall)]


def version(gradient: Tensor | None) -> int:
    """Returns how often a gradient, or this rank's shard of it, was written to."""
    return 0 if gradient is None else getattr(gradient, "_local_tensor", gradient)._version
