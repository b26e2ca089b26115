"""What can be said of a script whose first updates were watched (`stabletrain run --check`).

There is no `make()`, so nothing is run again but the optimizer's step and autograd functions, on copies. All else is
said of what was seen. What needs a fresh loop is not checked.
"""

import copy
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from stabletrain.beside.preflight.data import Targets, data_of, key_of, of_input
from stabletrain.beside.preflight.finding import Finding, listed
from stabletrain.beside.preflight.functions import Call, check_call
from stabletrain.beside.preflight.headroom import Numerics, headroom_of
from stabletrain.beside.preflight.loop import Loop, nothing_changed
from stabletrain.beside.preflight.network import in_eval_mode
from stabletrain.beside.preflight.optimizer import check_optimizer, sample_of
from stabletrain.beside.preflight.order import LeftOver, misused
from stabletrain.beside.preflight.recording import RecordedStep, parameters_of
from stabletrain.beside.preflight.report import Report
from stabletrain.beside.preflight.schedulers import schedulers
from stabletrain.beside.preflight.structure import groups, passed, updated_twice
from stabletrain.beside.preflight.tracing import LOSSES, Named, Traced, target_of
from stabletrain.beside.preflight.untrained import Gradients
from stabletrain.beside.preflight.while_scaled import Change, of_changes, wrongly_unscaled
from stabletrain.guard.gradients import BareTensors

FRESH = "it needs a loop that can be made anew, which a script cannot: use stabletrain.Guard.check(make)"

FEWEST = 3
"""Steps with the same batch from which on it is no accident."""


class LossCalls(TorchFunctionMode):
    """Keeps what loss functions are given as targets; runs all functions unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Runs a function."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = target_of(name, args, kwargs) if name in LOSSES else None
        if isinstance(target, Tensor):
            self.targets.append(target.detach())
        return func(*args, **kwargs)


@dataclass
class ScriptStep(RecordedStep):
    """A step of a script: from the first backward pass after an update to the next such one.

    Attributes:
        inputs: of the modules called, by name; copies on the CPU.
        targets: of the losses, in their order; copies on the CPU.
        calls_made: number of calls of such modules.
        line: of the user's code that makes the first of them; empty if none was seen.
        iterators: for each iterator of a data loader that was made, the loader's length and the line.
        scale: the loss scale; 0 if no loss was scaled.
        changes: of gradients while they are scaled.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    targets: list[Tensor] = field(default_factory=list)
    calls_made: int = 0
    line: str = ""
    iterators: list[tuple[int, str]] = field(default_factory=list)
    scale: float = 0.0
    changes: list[Change] = field(default_factory=list)

    def add_call(self, module: nn.Module, inputs: Mapping[str, Tensor], line: str) -> None:
        """Adds the inputs of a module; names of a second call have the module's class and a number."""
        self.line, self.calls_made = self.line or line, self.calls_made + 1
        start = f"{type(module).__name__} {self.calls_made} " if self.calls_made > 1 else ""
        self.inputs |= {f"{start}{name}": each.detach().to("cpu", copy=True) for name, each in inputs.items()}

    def add_targets(self, targets: Sequence[Tensor]) -> None:
        """Adds the targets of losses."""
        self.targets += [each.to("cpu", copy=True) for each in targets]

    @property
    def updates(self) -> bool:
        """Whether an optimizer has stepped."""
        return bool(self.calls("updated"))

    def targets_by_row(self) -> list[Tensor]:
        """Returns the targets with those of a row of the inputs in a row, where they were flattened."""
        rows = next((len(each) for each in self.inputs.values() if each.ndim), 0)
        return [each.reshape(rows, -1) if rows and each.numel() % rows == 0 else each for each in self.targets]


class Script:
    """What was seen of a script.

    Attributes:
        loop: the model, the optimizers that step, the schedulers and the scaler.
        step: that is recorded now.
        steps: those that have ended, without their gradients.
        traced: the first loss, with its targets and the inputs of the first layers; None if it could not be traced.
        untraced: why it could not be, in words.
        numerics: what was measured in the first forward pass.
        functions: the first call of each autograd function of the user's.
        made: all optimizers that the script has made, and the user's line that made each.
        ties: tied weights that were split before the first update; later they are different.
        fresh: a copy of each optimizer and its parameters from before its first step, by its number.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop, self.step = loop, ScriptStep()
        self.steps: list[ScriptStep] = []
        self.traced: Traced | None = None
        self.untraced = "no call of a module that is trained was seen"
        self.numerics = Numerics()
        self.functions: list[Call] = []
        self.fresh: dict[int, Loop | Exception] = {}
        self.left, self.seen = LeftOver(), Gradients()
        self.twice: dict[str, tuple[int, int]] = {}
        self.made: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        self.sparse: set[int] = set()  # `id` of parameters with sparse gradients
        self.ties: list[Finding] = []
        self._misused: list[Finding] = []
        self._scaled: list[Finding] = []

    def end_step(self) -> None:
        """Judges the gradients of the step, drops them, and begins a new one."""
        step, self.step = self.step, ScriptStep()
        if step.calls("backward") or step.updates:
            self.left.add(step, len(self.steps) + 1)
            self.seen.batches += 1
            for gradients in (step.gradients, *step.given.values()):
                self.seen.add(gradients)
            self.twice |= updated_twice(step)
            self._misused = self._misused or misused(self.loop, step)
            self._scaled = self._scaled or wrongly_unscaled(step, step.scale)
        step.gradients, step.left, step.given = {}, {}, {}  # they are large
        self.steps.append(step)

    def note_precision(self, module: nn.Module) -> None:
        """Notes the precision of a module that is about to be called."""
        parameters = [*module.parameters()]
        kind = parameters[0].device.type
        if parameters[0].dtype == torch.float16:
            self.loop.precision = "fp16_params"
        elif torch.is_autocast_enabled(kind):
            half = torch.get_autocast_dtype(kind) == torch.float16
            self.loop.precision = "fp16" if half else "bf16"

    # ---- the checks

    def structure(self) -> list[Finding]:
        """Checks parameters and groups, with the gradients that were seen, and the model by itself."""
        model, optimizers = self.loop.model, self.loop.optimizers
        line = self.made.get(optimizers[0], "") if len(optimizers) == 1 else ""
        found = [replace(each, line=line) for each in groups(model, optimizers, self.seen, self.twice)]
        found += [*self.ties, *self.without_gradient()]
        for number, step in enumerate(self.steps):
            when = f" from step {number + 1} on" if number else ""
            if step.calls("backward") and (modes := in_eval_mode(model, step.evaluating, when)):
                found += modes
                break
        return found or passed(model, optimizers)

    def without_gradient(self) -> list[Finding]:
        """Finds parameters that had no gradient in any step, or only zeros: a note, as other batches may use them."""
        held = {id(each) for optimizer in self.loop.optimizers for each in parameters_of(optimizer)}
        trained = {name for name, each in self.loop.parameters.items() if each.requires_grad and id(each) in held}
        unused = [name for name in self.loop.parameters if name in trained - self.seen.some]
        zero = [name for name in self.loop.parameters if name in trained & self.seen.some - self.seen.nonzero]
        found, where = [], f"in all {self.seen.batches} steps"
        if unused:
            text = f"no gradient {where}, as the losses do not use them: {listed(unused)} ({len(unused)} parameters)"
            fix = "use them in forward, or leave them out; requires_grad_(False) for what is not to be trained"
            found.append(Finding("structure", "note", text, tuple(unused), fix=fix))
        if zero:
            text = f"the gradient is exactly 0 {where}: {listed(zero)} ({len(zero)} parameters)"
            fix = (
                "look for a factor of 0, and for a ReLU whose inputs are all negative; natural for a bias before a norm"
            )
            found.append(Finding("structure", "note", text, tuple(zero), fix=fix))
        return found

    def order(self) -> list[Finding]:
        """Checks the order of each step's parts."""
        steps: list[RecordedStep] = [*self.steps]
        changes = [change for step in self.steps for change in step.changes]
        found = [*self._misused, *self.left.found(None), *schedulers(self.loop, steps, whole=False)]
        found += [*self._scaled, *of_changes(changes)]
        scaled = " and loss scale" if self.loop.scaler is not None else ""
        text = f"{sum(step.updates for step in self.steps)} updates: each begins without old gradients, and schedulers"
        return found or [Finding("order", "passed", f"{text}{scaled} are used once an update")]

    def data(self) -> list[Finding]:
        """Checks the inputs of the modules, and the targets of the losses."""
        steps = [step for step in self.steps if step.inputs or step.targets]
        if not steps:
            return [Finding("data", "not checked", self.untraced)]
        names = target_names(self.traced)
        batches = [Named(step.inputs | dict(zip(names, step.targets_by_row(), strict=False))) for step in steps]
        found, kept = self.repeated([step for step in steps if step.inputs]), {}
        for batch in batches:
            kept.setdefault(key_of(batch), batch)
        alone = len(self.loop.optimizers) == 1 and all(len(step.targets) <= 1 for step in steps)
        found += data_of([[*kept.values()]], targets_of(self.traced, alone=alone), line=steps[0].line)
        if self.traced is None:
            text = f"targets and the inputs of layers were not looked at: {self.untraced}"
            found.append(Finding("data", "not checked", text))
        else:
            found += [each for value in self.traced.inputs for each in of_input(value)]
        wrong = any(each.verdict in ("fault", "note") for each in found)
        return [each for each in found if not wrong or each.verdict != "passed"]

    def repeated(self, steps: Sequence[ScriptStep]) -> list[Finding]:
        """Finds steps with the inputs of an earlier one: for certain wrong if each takes a loader's first batch."""
        keys = [key_of(Named(step.inputs)) for step in steps]
        again = [at for at, key in enumerate(keys) if key in keys[:at]]
        if len(again) + 1 < FEWEST:
            return []
        step, earlier = again[-1], keys.index(keys[again[-1]])
        text = f"{len(again)} of {len(steps)} steps have the inputs of an earlier one (step {step + 1} those of step "
        text += f"{earlier + 1})"
        # The iterator for a step was made after the update before: it is among the calls of the step before.
        made = [[each for each in one.iterators if each[0] > 1] for one in self.steps[:-1]]
        if len(again) == len(steps) - 1 and len([each for each in made if each]) >= len(again):
            length, line = next(each for each in made if each)[0]
            text += f": each makes a new iterator of its data loader, of {length} batches, and takes its first batch"
            fix = "make the iterator once an epoch: `for batch in loader`, not `next(iter(loader))` in each step"
            return [Finding("data", "fault", text, ("batch",), line, fix)]
        text += ": right only if the whole data are one batch, or it is to be fitted alone"
        return [Finding("data", "note", text, ("batch",), steps[0].line, "look at how the batch of a step is chosen")]

    def optimizer(self) -> list[Finding]:
        """Takes special steps with copies of the optimizers."""
        failed = {index: each for index, each in self.fresh.items() if isinstance(each, Exception)}
        found = [
            Finding("optimizer", "not checked", f"optimizers.{index} cannot be copied: {type(error).__name__}: {error}")
            for index, error in failed.items()
        ]
        for index, fresh in self.fresh.items():
            if isinstance(fresh, Loop):
                used = copied(self.loop, index)
                if isinstance(used, Exception):
                    raise used
                names = used.parameters
                own = parameters_of(self.loop.optimizers[index])
                sparse: set[Tensor] = {names[self.loop.name_of(each)] for each in own if id(each) in self.sparse}
                found += check_optimizer(used, fresh, index, sparse)
        return found or [Finding("optimizer", "not checked", "no optimizer has stepped")]

    def gradient(self) -> list[Finding]:
        """Checks the user's own autograd functions against finite differences."""
        if not self.functions:
            return [Finding("gradient", "not checked", FRESH)]
        found = [each for each in map(check_call, self.functions) if each is not None]
        text = f"{listed([each.name for each in self.functions])}: backward is the gradient of forward"
        return found or [
            Finding("gradient", "passed", f"{text} ; the gradient of the loss itself was not checked, as {FRESH}")
        ]

    def headroom(self) -> list[Finding]:
        """Checks the range of weights and moments after the steps, and that of the first forward pass."""
        found = headroom_of(self.loop.model, self.loop.optimizers, self.loop.precision)
        if self.traced is None:
            text = f"the first forward pass was not watched: {self.untraced}"
            return [*found, Finding("headroom", "not checked", text)]
        found += self.numerics.found()
        wrong = [each for each in found if each.verdict != "passed"]
        return wrong or found


def report_of(script: Script) -> Report:
    """Returns what all checks say of a script."""
    found: list[Finding] = []
    began = time.perf_counter()
    checks: dict[str, Callable[[], list[Finding]]] = {
        "structure": script.structure,
        "order": script.order,
        "data": script.data,
        "optimizer": script.optimizer,
        "gradient": script.gradient,
        "headroom": script.headroom,
    }
    if not script.seen.batches:
        text = "the script has ended before its first update, or trains without a backward pass and an optimizer of "
        found = [Finding(name, "not checked", f"{text}PyTorch") for name in ("structure", "order", "optimizer")]
        checks = {name: check for name, check in checks.items() if name in ("data", "gradient", "headroom")}
    with nothing_changed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, check in checks.items():
            try:
                found += check()
            except Exception as error:  # of the user's code, or of the check
                found.append(Finding(name, "not checked", f"it failed with {type(error).__name__}: {error}"))
    found += [Finding(name, "not checked", FRESH) for name in ("resume", "accumulation")]
    return Report(found, time.perf_counter() - began)


def nothing_trained() -> Report:
    """Returns what is said of a script that has made no optimizer."""
    text = "no optimizer of PyTorch was made in this process; of processes that a script starts nothing is seen"
    return Report([Finding("structure", "not checked", text)])


# ---- parts


def bare_loop(model: nn.Module) -> Loop:
    """Returns a loop of which only the model is known."""

    def unknown(*_: Any) -> Any:
        raise RuntimeError("a script's loss and batches cannot be called")

    return Loop(model, [], unknown, unknown)


def copied(loop: Loop, index: int) -> Loop | Exception:
    """Returns a loop with a copy of an optimizer and its parameters alone, some of each kind if these are large.

    Hooks are not copied, nor what a scheduler has put in place of `step`, which steps the original. If it cannot be
    copied, the error is returned.
    """
    optimizer = loop.optimizers[index]
    parameters = parameters_of(optimizer)
    chosen = {id(parameters[number]): parameters[number] for number in sample_of(optimizer)}
    parts = {name: each for name, each in vars(optimizer).items() if name not in ("step", "zero_grad")}
    parts |= {name: type(each)() for name, each in parts.items() if name.endswith("_hooks")}
    kept = [[each for each in group["params"] if id(each) in chosen] for group in optimizer.param_groups]
    pairs = zip(optimizer.param_groups, kept, strict=True)
    parts["param_groups"] = [{**group, "params": params} for group, params in pairs]
    state = {each: optimizer.state[each] for each in chosen.values() if each in optimizer.state}
    parts["state"] = defaultdict(dict, state)
    found, memo = bare_loop(BareTensors(())), {}
    try:
        twin: Optimizer = object.__new__(type(optimizer))
        vars(twin).update(copy.deepcopy(parts, memo))
    except Exception as error:  # an attribute of the user's, or too little memory
        return error
    found.model._parameters.update({loop.name_of(each): memo[key] for key, each in chosen.items()})
    found.optimizers = [twin if at == index else each for at, each in enumerate(loop.optimizers)]
    return found


def target_names(traced: Traced | None) -> list[str]:
    """Returns a name for the targets of each loss."""
    uses = [] if traced is None else traced.uses
    return [f"{use.function} ({at + 1})" if at else use.function for at, use in enumerate(uses)]


def targets_of(traced: Traced | None, *, alone: bool) -> list[Targets]:
    """Returns which targets of the first losses come from the data, and are not made beside them.

    Args:
        traced: the first losses.
        alone: whether each step has one loss: constant targets may be right beside others, as in a GAN.
    """
    uses = [] if traced is None else [*zip(target_names(traced), traced.uses, strict=True)]
    return [
        Targets(name, use.classes, use.ignored, alone and use.predicts, alone, line=use.line)
        for name, use in uses
        if use.sources
    ]
