"""A few steps of a loop, with everything that they call, in order: backward, zero_grad, unscale, step, update."""

import functools
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from stabletrain.beside.preflight.loop import Loop
from stabletrain.errors import is_own


@dataclass(frozen=True)
class Event:
    """A call of a part of the step.

    Attributes:
        kind: `backward`, `zero_grad`, `scale`, `unscale`, `optimizer` (its update begins), `updated` (it has ended),
            `scheduler`, `scaler_step` or `scaler_update`.
        index: number of the optimizer or scheduler; -1 if it is none of the loop's, or does not matter.
        line: of the user's code that called it, `file:line`.
    """

    kind: str
    index: int
    line: str


@dataclass
class RecordedStep:
    """One step.

    Attributes:
        events: in order.
        loss: what the loop returned, or what its backward calls differentiated, summed; NaN if unknown.
        left: gradients before the first backward pass that are not 0, by name of the parameter.
        cleared: parameters whose gradient was missing or 0 at the beginning of a backward pass, by name.
        accumulated: parameters whose gradient a backward pass has changed, by name.
        gradients: copies after the last backward pass, by name; still scaled. A parameter without gradient is missing.
        given: the same when each optimizer steps, of its own parameters, by number of the optimizer.
        lrs: learning rate of each group, `lrs[optimizer][group]`, with which the optimizers stepped.
        scheduled: learning rates that each scheduler had set last when an optimizer stepped,
            `scheduled[optimizer][scheduler]`.
        training: whether the model was in training mode at the first backward pass.
        evaluating: names of the modules that were in eval mode then; the model's own name is empty.
    """

    events: list[Event] = field(default_factory=list)
    loss: float = float("nan")
    left: dict[str, Tensor] = field(default_factory=dict)
    cleared: set[str] = field(default_factory=set)
    accumulated: set[str] = field(default_factory=set)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    given: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    lrs: dict[int, list[float]] = field(default_factory=dict)
    scheduled: dict[int, dict[int, list[float]]] = field(default_factory=dict)
    training: bool = True
    evaluating: list[str] = field(default_factory=list)

    def rates(self, optimizer: int, scheduler: int) -> list[float]:
        """Returns the rates that a scheduler had set last when an optimizer stepped; empty if neither is known."""
        return self.scheduled.get(optimizer, {}).get(scheduler, [])

    def calls(self, kind: str) -> list[Event]:
        """Returns the events of a kind."""
        return [event for event in self.events if event.kind == kind]


def record_steps(loop: Loop, steps: int, batches: list[Any] | None = None) -> list[RecordedStep]:
    """Takes steps of a loop that has `step`, and returns them.

    Args:
        loop: fresh.
        steps: how many.
        batches: one for each step; None for the loop's own next ones.
    """
    return [record_step(loop, number, None if batches is None else batches[number]) for number in range(steps)]


def record_step(loop: Loop, number: int = 0, batch: Any = None) -> RecordedStep:
    """Takes one step of a loop that has `step`, and returns it.

    Args:
        loop: fresh, or after the steps before.
        number: of the step, for a loop that has no `next_batch`.
        batch: None for the loop's own next one.
    """
    assert loop.step is not None
    with recording(loop) as step:
        if batch is None:
            batch = loop.batch(number) if loop.next_batch is None else loop.next_batch()
        value = loop.step(batch)
    if isinstance(value, Tensor) and value.numel() == 1:
        step.loss = float(value.detach())
    return step


@contextmanager
def recording(loop: Loop) -> Generator[RecordedStep, None, None]:
    """Records the step that is taken inside."""
    recorder = Recorder(loop)
    with recorder.installed(), ExitStack() as stack:
        for index, each in enumerate(loop.schedulers):
            stack.enter_context(replaced(each, "step", functools.partial(recorder.scheduler, index)))
        yield recorder.step


class Recorder:
    """Records what a loop calls.

    Args:
        loop: of which the calls are.

    Attributes:
        step: the step that is recorded.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop, self.step = loop, RecordedStep()
        self._stepping: list[int] = []  # an optimizer may be made of others, which step within its step
        self._hooks: list[RemovableHandle] = []  # of the optimizers that step
        self.name_parameters()

    def name_parameters(self) -> None:
        """Names the parameters of the loop's model and optimizers."""
        held = [each for optimizer in self.loop.optimizers for each in parameters_of(optimizer)]
        self.names = {id(each): self.loop.name_of(each) for each in held}
        self.names |= {id(each): name for name, each in self.loop.model.named_parameters()}
        self.parameters = {self.names[id(each)]: each for each in held}
        self.parameters |= dict(self.loop.model.named_parameters())

    def number_of(self, optimizer: Any) -> int:
        """Returns the number of an optimizer; -1 if it is none of the loop's."""
        return next((index for index, each in enumerate(self.loop.optimizers) if each is optimizer), -1)

    def add(self, kind: str, index: int = -1) -> None:
        """Adds an event, at the user's line that is running."""
        self.step.events.append(Event(kind, index, users_line()))

    @contextmanager
    def installed(self) -> Generator[None, None, None]:
        """Records the calls inside; the caller records those of schedulers."""
        with ExitStack() as stack:
            stack.callback(self.remove_hooks)
            stack.callback(register_optimizer_step_pre_hook(self.begin).remove)
            stack.callback(register_optimizer_step_post_hook(self.after).remove)
            stack.enter_context(replaced(torch.autograd, "backward", self.backward))
            stack.enter_context(replaced(Optimizer, "zero_grad", self.zero_grad))
            stack.enter_context(replaced(nn.Module, "zero_grad", self.zero_grad))
            calls = {"scale": "scale", "unscale_": "unscale", "step": "scaler_step", "update": "scaler_update"}
            for name, kind in calls.items():
                stack.enter_context(replaced(GradScaler, name, functools.partial(self.scaler, kind)))
            yield

    # ---- what is called in place of each

    def backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a backward pass."""
        if not self.step.calls("backward"):
            left = copies(self.parameters)
            self.step.left = {name: each for name, each in left.items() if bool(each.any())}
            self.step.training = self.loop.model.training
            modules = self.loop.model.named_modules()
            self.step.evaluating = [name for name, module in modules if not module.training]
        for name in self.parameters.keys() - self.step.cleared:
            gradient = self.parameters[name].grad
            if gradient is None or not gradient.any():
                self.step.cleared.add(name)
        before = versions(self.parameters)
        value = run(*args, **kwargs)
        self.step.accumulated |= {name for name, each in versions(self.parameters).items() if each != before.get(name)}
        self.add("backward")
        self.step.gradients = copies(self.parameters)
        return value

    def begin(self, optimizer: Optimizer, *_: Any) -> None:
        """Is called first in an optimizer's step: what hooks of the user's own do there comes before the update."""
        self._hooks.append(optimizer.register_step_pre_hook(self.before))

    def remove_hooks(self) -> None:
        """Removes the hooks of optimizers whose step an error has ended."""
        while self._hooks:
            self._hooks.pop().remove()

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        """Is called before an optimizer's update, after the hooks of the user's own."""
        index = self.number_of(optimizer)
        self._stepping.append(index)
        if index < 0 and len(self._stepping) > 1:
            return
        self.add("optimizer", index)
        self.step.given[index] = copies({self.names.get(id(each), "?"): each for each in parameters_of(optimizer)})
        self.step.lrs[index] = [float(group.get("lr", float("nan"))) for group in optimizer.param_groups]
        rates = [[float(rate) for rate in getattr(each, "_last_lr", ())] for each in self.loop.schedulers]
        self.step.scheduled[index] = dict(enumerate(rates))

    def after(self, *_: Any) -> None:
        """Is called after an optimizer's step."""
        self._hooks.pop().remove()
        index = self._stepping.pop()
        if index >= 0 or not self._stepping:
            self.add("updated", index)

    def zero_grad(self, run: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs `zero_grad` of an optimizer or a module."""
        self.add("zero_grad", self.number_of(owner))
        return run(owner, *args, **kwargs)

    def scaler(self, kind: str, run: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a method of a scaler."""
        self.add(kind, self.number_of(args[0]) if args else -1)
        return run(owner, *args, **kwargs)

    def scheduler(self, index: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the step of a scheduler."""
        self.add("scheduler", index)
        return run(*args, **kwargs)


def versions(of: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Returns a mark of the gradients of parameters, by name; another one if they are written, or replaced."""
    return {name: (id(each.grad), each.grad._version) for name, each in of.items() if each.grad is not None}


def copies(of: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies of the gradients of parameters, by name."""
    return {name: each.grad.detach().clone() for name, each in of.items() if each.grad is not None}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of an optimizer's groups."""
    return [each for group in optimizer.param_groups for each in group["params"]]


@contextmanager
def replaced(owner: Any, name: str, by: Callable[..., Any]) -> Generator[None, None, None]:
    """Replaces a function or method: `by` is called with the original before the arguments."""
    inner, own = getattr(owner, name), name in vars(owner)

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return by(inner, *args, **kwargs)

    setattr(owner, name, outer)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, inner)
        else:
            delattr(owner, name)


def users_line() -> str:
    """Returns the innermost line of the user's code that is running, `file:line`; empty if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and is_own(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
