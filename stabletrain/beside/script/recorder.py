"""Records the first updates of a script: what it calls, its batches, and once the numbers of a forward pass.

| what | noticed when |
|---|---|
| an optimizer | it is made or copied, when PyTorch prepares its `step` |
| its model | the script calls a module that is trained, before its first backward pass |
| a scheduler, a scaler | the script calls its `step` |
| targets | the script calls a loss function, between such a call and the backward pass |

A recorded step ends where the first call of a trained module, or the first backward pass, after an update begins.
Nothing is added to the script's objects but hooks of modules while these run, and no random numbers are drawn. Once
enough is recorded the checks run, on copies, and the next call of a module or backward pass raises `Ended`.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from stabletrain.beside.preflight.functions import recorded_calls
from stabletrain.beside.preflight.network import hidden_tensors, split_ties
from stabletrain.beside.preflight.recording import Recorder, parameters_of, replaced, users_line
from stabletrain.beside.preflight.report import Report
from stabletrain.beside.preflight.script import LossCalls, Script, ScriptStep, bare_loop, copied, report_of
from stabletrain.beside.preflight.tracing import Named, Tracing, running, tensors_of
from stabletrain.beside.preflight.while_scaled import change_of
from stabletrain.beside.script.check import Ended
from stabletrain.beside.script.model import model_of
from stabletrain.errors import ConfigError
from stabletrain.guard.backward_calls import within_backward
from stabletrain.guard.gradients import unwrapped
from stabletrain.parallel.loop import innermost
from stabletrain.parallel.ranks import current_ranks

UPDATES = 6
"""Updates that are recorded: a fault of every second step shows three times, and a few steps are over soon."""

MOST_CALLS = 1000
"""Calls of a trained module without an update, after which the script is ended: its optimizer may not be PyTorch's."""

MOST_NUMBERS = 2**27
"""Most numbers of batches that are kept: half a GiB in fp32."""

COMPILED = "the script calls torch.compile, and the compiler must not meet what watches it"

PATIENCE = 10
"""How often `Ended` is raised. A script that catches even that would go on for ever."""


class ScriptRecorder(Recorder):
    """Records a script.

    Args:
        show: prints a report, and returns the exit code.
        compiles: whether the script has called `torch.compile`.
    """

    step: ScriptStep

    def __init__(self, show: Callable[[Report], int], *, compiles: bool) -> None:
        super().__init__(bare_loop(nn.Module()))
        self._show, self._compiles = show, compiles
        self._script = Script(self.loop)
        self.step = self._script.step
        self._made = self._script.made
        self._called: list[nn.Module] = []
        self._undo, self._watch = ExitStack(), ExitStack()
        self._region = ExitStack()  # from the call of a trained module to the backward pass
        self._losses: Tracing | LossCalls | None = None  # of the present region
        self._kinds: set[type[LRScheduler]] = set()  # of schedulers, whose step is recorded
        self._report: Report | None = None
        self._updates = self._calls = self._numbers = self._raised = 0
        self._named = self._inside = self._scheduling = self._ended = False
        self._process = os.getpid()

    def install(self) -> None:
        """Begins to record."""
        self._undo.enter_context(self.installed())
        self._undo.enter_context(replaced(Tensor, "backward", self._begin_backward))
        self._undo.enter_context(replaced(DataLoader, "__iter__", self._iterate))
        self._undo.callback(self._watch.close)
        if self._compiles:
            self.notice_compiler()
        else:
            self._watch.enter_context(replaced(nn.Module, "__call__", self._call))

    def remove(self) -> None:
        """Leaves everything as it was."""
        self._close_region()
        self._undo.close()

    def notice(self, optimizer: Optimizer) -> None:
        """Notices an optimizer, and new kinds of schedulers."""
        self._made[optimizer] = users_line()
        for kind in {LRScheduler, *_kinds_of(LRScheduler)} - self._kinds:
            self._kinds.add(kind)
            if "step" in vars(kind):
                self._undo.enter_context(replaced(kind, "step", self._schedule))

    def notice_compiler(self) -> None:
        """Ends the watch of modules and losses: the compiler would trace it, and compile something else."""
        self._compiles, self._script.untraced = True, COMPILED
        self._close_region()
        self._watch.close()

    def show(self) -> int:
        """Ends the recording and shows what the checks say of it, on the first rank; returns the exit code."""
        report = self._checked()
        return 0 if report is None else self._show(report)

    def _checked(self) -> Report | None:
        """Ends the recording, and returns what the checks say of it; None on other ranks than the first."""
        if not self._ended:
            self._ended = True
            self.remove()
            if current_ranks().is_main:
                self._name_model()
                self._add_idle_optimizers()
                self._script.end_step()
                self._report = report_of(self._script)
        return self._report

    # ---- the end

    def _finish(self) -> None:
        """Has the checks made, and ends the script now; or with its next call, if it goes on all the same."""
        self._checked()
        self._undo.enter_context(replaced(torch.autograd, "backward", self._end))
        self._undo.enter_context(replaced(nn.Module, "__call__", self._end))
        self._end(self._finish)

    def _end(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Ends the script."""
        if self._is_elsewhere():
            return run(*args, **kwargs)
        self._raised += 1
        if self._raised > PATIENCE:
            code = self.show()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        raise Ended("enough has been recorded for --check")

    def _is_elsewhere(self) -> bool:
        """Whether this is another thread, or a process that the script has forked, such as a worker of a loader."""
        return os.getpid() != self._process or threading.current_thread() is not threading.main_thread()

    # ---- steps

    def backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a backward pass; the first one after an update begins a step."""
        if within_backward() or self._is_elsewhere():
            return run(*args, **kwargs)
        self._close_region()
        self._begin_step()
        self._name_model()
        return super().backward(run, *args, **kwargs)

    def _begin_backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the backward pass of a tensor; within it the trace could not be ended, as it would trace the pass."""
        if not within_backward() and not self._is_elsewhere():
            self._close_region()
        return run(*args, **kwargs)

    def _begin_step(self) -> None:
        """Begins a step, if there was an update, or one that the scaler has skipped, in the present one."""
        if not (self.step.calls("updated") or self.step.calls("scaler_step")):
            return
        if self._updates >= UPDATES:
            self._finish()
        self._script.end_step()
        self.step = self._script.step

    def before(self, optimizer: Optimizer, *given: Any) -> None:
        """Is called before an optimizer's step."""
        self._close_region()
        if given and _has_closure(*given):  # its backward passes are yet to come
            self._begin_step()
        self._name_model()
        super().before(optimizer, *given)
        index = self._stepping[-1]
        if index >= 0 and index not in self._script.fresh:
            self._script.fresh[index] = copied(self.loop, index)
        own = parameters_of(optimizer)
        self._script.sparse |= {id(each) for each in own if each.grad is not None and each.grad.is_sparse}

    def after(self, *_: Any) -> None:
        """Is called after an optimizer's step."""
        first = not self.step.calls("updated")
        super().after()
        if first and self.step.calls("updated"):
            self._updates, self._calls = self._updates + 1, 0

    def number_of(self, optimizer: Any) -> int:
        """Returns the number of an optimizer, which it gets when it steps, unless another one makes it step."""
        number = super().number_of(optimizer)
        if number < 0 and optimizer in self._made and not self._stepping:
            self.loop.optimizers = [*self.loop.optimizers, optimizer]
            self.name_parameters()
            return len(self.loop.optimizers) - 1
        return number

    def zero_grad(self, run: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs `zero_grad` of an optimizer, which it may do for one that steps it, or of a module."""
        self.add("zero_grad", super().number_of(owner))
        return run(owner, *args, **kwargs)

    def scaler(self, kind: str, run: Callable[..., Any], owner: GradScaler, *args: Any, **kwargs: Any) -> Any:
        """Runs a method of a scaler."""
        if not owner.is_enabled():
            return run(owner, *args, **kwargs)
        self.loop.scaler = owner
        index = self.number_of(unwrapped(args[0])) if args and isinstance(args[0], Optimizer) else -1
        self.add(kind, index)
        if kind == "scale":
            value = run(owner, *args, **kwargs)
            self.step.scale = owner.get_scale()  # which is made with the first loss
            return value
        if kind == "unscale" and index >= 0:
            own = {self.names[id(each)]: each for each in parameters_of(self.loop.optimizers[index])}
            now = {name: each.grad for name, each in own.items() if each.grad is not None}
            change = change_of(index, self.step.gradients, now, self.step.scale, self.step.events[-1].line)
            self.step.changes += [change] if change else []
        return run(owner, *args, **kwargs)

    def _schedule(self, run: Callable[..., Any], scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
        """Runs the step of a scheduler: not the first one, in its making, and not of one within another."""
        if self._scheduling or not getattr(scheduler, "_step_count", 1):
            return run(scheduler, *args, **kwargs)
        if not any(each is scheduler for each in self.loop.schedulers):
            self.loop.schedulers = [*self.loop.schedulers, scheduler]
        self.add("scheduler", next(at for at, each in enumerate(self.loop.schedulers) if each is scheduler))
        self._scheduling = True
        try:
            return run(scheduler, *args, **kwargs)
        finally:
            self._scheduling = False

    def _iterate(self, run: Callable[..., Any], loader: Any) -> Any:
        """Makes an iterator of a data loader."""
        with suppress(TypeError):  # of an `IterableDataset` without length
            self.step.iterators.append((len(loader), users_line()))
        return run(loader)

    # ---- the model, its inputs and its losses

    def _call(self, run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Calls a module; calls inside of it are not watched."""
        if self._inside or self._is_elsewhere() or within_backward():
            return run(module, *args, **kwargs)
        if self._updates >= UPDATES or self._calls >= MOST_CALLS:
            self._finish()
        self._inside = True
        try:
            if not torch.is_grad_enabled() or not any(each.requires_grad for each in module.parameters()):
                return run(module, *args, **kwargs)
            self._calls += 1
            return self._call_trained(run, module, args, kwargs)
        finally:
            self._inside = False

    def _call_trained(self, run: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a module that is trained, and keeps its inputs."""
        self._begin_step()
        if not any(each is module for each in self._called):
            self._called.append(module)
        given = tensors_of(args, "inputs") | tensors_of(kwargs, "inputs")
        given = {name: each for name, each in given.items() if not each.requires_grad}
        self._numbers += sum(each.numel() for each in given.values())
        if self._numbers <= MOST_NUMBERS:
            self.step.add_call(module, given, users_line())
        if current_ranks().distributed:
            self._script.untraced = "several ranks train"
            return run(module, *args, **kwargs)
        self._open_region(module, given)
        if not isinstance(self._losses, Tracing):
            return run(module, *args, **kwargs)
        numerics = self._script.numerics
        with running(module) as self._losses.modules:
            numerics.modules = self._losses.modules
            out = run(module, *args, **kwargs)
        self._losses.predicted(module, args, out)
        return out

    def _open_region(self, module: nn.Module, given: dict[str, Tensor]) -> None:
        """Begins to trace: whole before the first backward pass, later only the losses."""
        if isinstance(self._losses, Tracing):
            self._losses.add(module, given)
        if self._losses is not None:
            return
        if self._script.traced is None:
            self._script.note_precision(module)
            self._losses = Tracing(module, Named(given), outside="targets")
            self._script.traced = self._losses.traced
            self._script.functions = self._region.enter_context(recorded_calls(bare_loop(module)))
            self._region.enter_context(self._script.numerics)
        else:
            self._losses = LossCalls()
        self._region.enter_context(self._losses)

    def _close_region(self) -> None:
        """Ends it, and keeps the targets."""
        self._region.close()
        if isinstance(self._losses, Tracing):
            self.step.add_targets([each.target for each in self._losses.traced.uses])
        elif self._losses is not None:
            self.step.add_targets(self._losses.targets)
        self._losses = None

    def _name_model(self) -> None:
        """Finds the model, once: what holds all parameters of the modules called, and of optimizers of others."""
        if self._named:
            return
        self._named = True
        found: dict[int, Tensor] = {id(each): each for module in self._called for each in module.parameters()}
        called = {*found}
        for optimizer in self._made:
            own = parameters_of(optimizer)
            if called.isdisjoint(map(id, own)):
                found |= {id(each): each for each in own}
        model = model_of([*found.values()]) if found else nn.Module()
        try:
            self.loop.model = innermost(model)
        except ConfigError:  # the older FSDP
            self.loop.model = model
        self._script.ties = split_ties(self.loop.model)
        self.name_parameters()

    def name_parameters(self) -> None:
        """Names the parameters, and tensors of the model that PyTorch does not see."""
        super().name_parameters()
        hidden = hidden_tensors(self.loop.model)
        self.parameters |= hidden
        self.names |= {id(each): name for name, each in hidden.items()}

    def _add_idle_optimizers(self) -> None:
        """Adds optimizers that have not stepped, and hold parameters of the model that no other one holds."""
        held = {id(each) for optimizer in self.loop.optimizers for each in parameters_of(optimizer)}
        free = {id(each) for each in self.loop.model.parameters()} - held
        idle = [each for each in self._made if not free.isdisjoint(map(id, parameters_of(each)))]
        self.loop.optimizers = [*self.loop.optimizers, *idle]


def _kinds_of(kind: type[Any]) -> set[type[Any]]:
    """Returns all classes that inherit from a class."""
    return {each for child in kind.__subclasses__() for each in (child, *_kinds_of(child))}


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether a step is given a closure."""
    return any(callable(each) for each in (*args, *kwargs.values()))
