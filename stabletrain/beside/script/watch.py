"""Notices what a script trains, and attaches a guard to it (`Guard.attach`).

| what | noticed when |
|---|---|
| an optimizer | it is made or copied, when PyTorch prepares its `step` |
| its model | the script calls a module that holds its parameters, in training mode, with gradients |
| a `GradScaler` | it steps an optimizer |

The model is the outermost module that is called, just before it runs: so it may be compiled or wrapped by DDP after the
optimizer was made, and no hook is traced by the compiler. If a call of a module holds only a part of the parameters,
the model is found or made (`model.py`), and the calls of its parts are recorded. An optimizer that steps before any
such call is guarded from this step on. After the first step of each optimizer, calls of modules are not watched.
"""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import distributed_c10d
from torch.optim import Optimizer

from stabletrain.beside.script.model import model_of
from stabletrain.beside.script.updates import CheckedUpdates
from stabletrain.errors import ConfigError
from stabletrain.guard.attach import notice_steps, replace_method
from stabletrain.guard.gradients import unwrapped
from stabletrain.guard.guard import Guard
from stabletrain.guard.loop_guard import guard_of
from stabletrain.guard.reports import LOG
from stabletrain.parallel.loop import innermost, wrappers
from stabletrain.parallel.ranks import current_ranks

MEETING = timedelta(minutes=1)
"""How long a rank waits for the others at its first step. The ranks of DDP have just met when they made it."""

CALLS_ITS_CLOSURE = "its step runs the closure itself"

NOT_AVERAGED = "several ranks train, and the model is not wrapped by DDP or FSDP2: their verdicts could differ"

OTHERS_UNGUARDED = "other ranks were not started by stabletrain run"


class Watch:
    """Watches a process.

    Args:
        options: as for `Guard.attach`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self._watched: WeakKeyDictionary[Optimizer, WatchedOptimizer] = WeakKeyDictionary()
        self._waiting: list[WatchedOptimizer] = []  # those that have not stepped yet
        self._names: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        self._run_module, self._call = nn.Module.__call__, self._watched_call()

    def install(self) -> None:
        """Begins to watch."""
        self._undo.append(replace_function(Optimizer, "_patch_step_function", self._preparing_step))
        self._undo.append(replace_function(GradScaler, "step", self._scaled_stepping))

    def remove(self) -> None:
        """Ends it. Guards that are attached stay."""
        self._waiting.clear()
        self._watch_calls(False)
        while self._undo:
            self._undo.pop()()

    def notice(self, optimizer: Optimizer) -> None:
        """Notices an optimizer."""
        if optimizer not in self._watched:
            self._watched[optimizer] = WatchedOptimizer(self, optimizer)
            self.wait_for(self._watched[optimizer])

    def wait_for(self, watched: "WatchedOptimizer") -> None:
        """Waits until a model of the optimizer is called."""
        self._waiting.append(watched)
        self._watch_calls(True)

    def forget(self, watched: "WatchedOptimizer") -> None:
        """Ends the watch for the model of an optimizer."""
        if watched in self._waiting:
            self._waiting.remove(watched)
        if not self._waiting:
            self._watch_calls(False)

    def name_of(self, model: nn.Module) -> str:
        """Returns a name for the guard of a model; empty if nothing else is trained."""
        if not self._names and len(self._watched) == 1:
            return ""
        kind = name = type(innermost(model)).__name__
        number = 1
        while name in self._names:
            number += 1
            name = f"{kind} {number}"
        self._names.add(name)
        return name

    def tell(self, text: str) -> None:
        """Shows a line, once for all ranks."""
        if (dist.get_rank() if distributed() else current_ranks().rank) == 0:
            LOG.warning("%s", text)

    # ---- what is replaced

    def _preparing_step(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what prepares an optimizer's `step`, which PyTorch does for each that is made or copied."""

        @functools.wraps(inner)
        def prepare(optimizer: Optimizer) -> None:
            inner(optimizer)
            self.notice(optimizer)

        return prepare

    def _scaled_stepping(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the new step of scalers, which makes a scaler known to the optimizer's guard."""

        @functools.wraps(inner)
        def step(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            watched = self._watched.get(unwrapped(optimizer)) if scaler.is_enabled() else None
            if watched is not None and watched.begins_with(scaler):
                return scaler.step(optimizer, *args, **kwargs)
            return inner(scaler, optimizer, *args, **kwargs)

        return step

    def _watched_call(self) -> Callable[..., Any]:
        """Returns the call of a module that is noticed. Calls inside of it are not watched."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._watch_calls(False)
            try:
                self._notice_call(module)
                return self._run_module(module, *args, **kwargs)
            finally:
                self._watch_calls(True)

        return call

    def _watch_calls(self, watch: bool) -> None:
        """Begins or ends to watch the calls of modules."""
        if watch and self._waiting:
            nn.Module.__call__ = self._call  # ty: ignore[invalid-assignment]
        elif nn.Module.__call__ is self._call:
            nn.Module.__call__ = self._run_module

    @torch._disable_dynamo
    def _notice_call(self, module: nn.Module) -> None:
        """Notices that a module is called."""
        if module.training and torch.is_grad_enabled():
            held = {id(parameter) for parameter in module.parameters()}
            for watched in [*self._waiting]:
                watched.notice_call(module, held)


class WatchedOptimizer:
    """An optimizer of the script, which gets a guard before its first step.

    Args:
        watch: of the process.
    """

    def __init__(self, watch: Watch, optimizer: Optimizer) -> None:
        self._watch, self._optimizer = watch, ref(optimizer)
        self._attached: ref[Any] | None = None  # a guard holds its optimizer, which nothing here may keep alive
        self._settled, self._stepped = False, False  # `_settled`: it has a guard, or cannot have one
        self._outgrown = False  # the optimizer holds a parameter now that is not in the guard's model
        self._recorded: list[nn.Module] = []
        self._scalers: WeakSet[GradScaler] = WeakSet()
        notice_steps(optimizer, self._before_step)

    @property
    def _guard(self) -> Any:
        """The guard, which lives as long as the optimizer has its step; None if there is none."""
        return None if self._attached is None else self._attached()

    def notice_call(self, module: nn.Module, held: set[int]) -> None:
        """Notices that the script calls a module.

        Args:
            module: is about to run, in training mode, with gradients.
            held: the `id` of each of its parameters.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            self._watch.forget(self)
            return
        trained = {id(parameter) for parameter in parameters_of(optimizer)}
        if trained.isdisjoint(held) or not can_train(optimizer):
            return
        if not self._settled:
            self._settle(optimizer, module if trained <= held else None)
        if self._guard is not None and not any(module is each for each in self._recorded):
            self._recorded.append(module)
            self._guard.record_calls_of(module)

    def begins_with(self, scaler: GradScaler) -> bool:
        """Makes a scaler that steps the optimizer known to its guard; returns whether it was not known before."""
        optimizer = self._optimizer()
        if optimizer is not None and not self._settled and can_train(optimizer):
            self._settle(optimizer)
        if self._guard is None or scaler in self._scalers:
            return False
        self._scalers.add(scaler)
        self._guard.use_scaler(scaler)
        return True

    def _before_step(self) -> bool:
        """Guards or names the optimizer, at the latest at its first step; returns whether `step` is a new one."""
        optimizer = self._optimizer()
        if self._outgrown:
            self._watch_again()
            return False
        if not self._stepped:
            if optimizer is None or not can_train(optimizer):
                return False
            if not self._settled:
                self._settle(optimizer)
                return True  # the guard's step comes here again
            self._stepped = True
            self._watch.forget(self)
            self._recorded.clear()
        guard = self._guard
        if guard is None or optimizer is None or guard_of(optimizer) is not guard:
            return False
        return not guard.stepping  # the script calls a `step` that it has taken before

    def _find(self, find: Callable[[], bool]) -> bool:
        """Finds the trained parameters as the guard does; the script may have added some that are not in its model."""
        try:
            return find()
        except ConfigError:
            self._outgrown = True
            return False

    def _watch_again(self) -> None:
        """Detaches the guard after the present step; the next one gets another model and another guard."""
        self._guard.detach()
        self._settled = self._stepped = self._outgrown = False
        self._scalers.clear()
        self._watch.wait_for(self)

    def _settle(self, optimizer: Optimizer, model: nn.Module | None = None) -> None:
        """Attaches a guard, or says why there is none.

        Args:
            model: the module that is called, if it holds all parameters.
        """
        self._settled = True
        if guard_of(optimizer) not in (
            None,
            self._guard,
        ):  # the script has made one itself, as the callbacks for libraries do
            self._watch.forget(self)
            return
        model = model_of(parameters_of(optimizer)) if model is None else model
        if reason := why_not(model):
            self._watch.tell(f"{named(optimizer)} is not guarded: {reason}")
            return
        try:
            guard = Guard.attach(model, optimizer, name=self._watch.name_of(model), **self._watch.options)
        except Exception as error:  # whatever the model is, the script goes on as without the guard
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            self._only_check(model, optimizer, f"{kind}{error}")
            return
        self._attached = ref(guard)
        self._recorded.append(model)
        trained = guard._loop.trained
        vars(trained)["find"] = functools.partial(self._find, trained.find)
        if not type(optimizer).step.__module__.startswith("torch.optim."):
            replace_method(optimizer, "step", functools.partial(self._without_closure, model))

    def _without_closure(self, model: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step of an optimizer that is not PyTorch's: what it does with a closure is not known."""

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            if closure is None:
                return inner(*args, **kwargs)
            self._guard.detach()
            self._attached = None
            self._only_check(model, optimizer, CALLS_ITS_CLOSURE)
            return optimizer.step(closure, *args, **kwargs)

        if hasattr(inner, "_wrapped_by_lr_sched"):  # see `LoopRecorder`
            step._wrapped_by_lr_sched = True  # ty: ignore[missing-attribute]
        return step

    def _only_check(self, model: nn.Module, optimizer: Optimizer, reason: str) -> None:
        """Checks only whether updates are finite, and says so."""
        try:
            CheckedUpdates(model, optimizer, self._watch.tell)
        except Exception as error:
            self._watch.tell(f"{named(optimizer)} is not guarded: {reason} ({type(error).__name__}: {error})")
            return
        self._watch.tell(f"{named(optimizer)}: steps are not judged, only undone if not finite: {reason}")


def replace_function(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Replaces a function of a class by `make(function)`; returns a function that undoes this."""
    inner = vars(owner)[name]
    setattr(owner, name, make(inner))
    return functools.partial(setattr, owner, name, inner)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of an optimizer; none before it is complete."""
    groups = getattr(optimizer, "param_groups", ())
    return [parameter for group in groups for parameter in group["params"]]


def can_train(optimizer: Optimizer) -> bool:
    """Returns whether a parameter of an optimizer requires a gradient."""
    return any(parameter.requires_grad for parameter in parameters_of(optimizer))


def named(optimizer: Optimizer) -> str:
    """Returns a name for an optimizer."""
    parameters = parameters_of(optimizer)
    shapes = ", ".join(str(list(parameter.shape)) for parameter in parameters[:2])
    return f"{type(optimizer).__name__} of {len(parameters)} tensors ({shapes}{' ...' if len(parameters) > 2 else ''})"


def distributed() -> bool:
    """Whether this process trains together with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def why_not(model: nn.Module) -> str:
    """Returns why a guard could not agree with those of other ranks; empty if it can, or if there are none."""
    if not distributed():
        return ""
    if not wrappers(model) and not any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        return NOT_AVERAGED
    return "" if all_ranks_are_guarded() else OTHERS_UNGUARDED


@functools.cache
def all_ranks_are_guarded() -> bool:
    """Returns whether the script is guarded on all ranks, which then agree on each step.

    A library may have started the other ranks as `python script.py`. This rank would wait for their verdicts for ever.
    """
    store, key = distributed_c10d._get_default_store(), "stabletrain/run/"
    store.set(f"{key}{dist.get_rank()}", "guarded")
    try:
        store.wait([f"{key}{rank}" for rank in range(dist.get_world_size())], MEETING)
    except RuntimeError:  # a DistStoreError: some rank has not come
        store.set(f"{key}alone", "")  # one that comes later must not wait either
    return not store.check([f"{key}alone"])
