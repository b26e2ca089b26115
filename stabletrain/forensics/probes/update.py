"""Names what makes an optimizer's step non-finite, by running the step again from the state before it.

Loss, gradients and state were finite, so the fault is the optimizer's own: one of its operations, or one of its
settings. The step runs under a recorder (`trace/update_recorder.py`). The first operation that made a non-finite value
from finite ones is to blame, if the value reached a parameter or a moment.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.buffers import buffers_of
from stabletrain.forensics.probes.update_reason import (
    Reason,
    Root,
    Size,
    dtype_name,
    explain,
    from_outside,
    root_of,
    tensor_name,
)
from stabletrain.forensics.trace.origin import BLAME_ORDER, Origin, origin_of_record
from stabletrain.forensics.trace.recorder import Source
from stabletrain.forensics.trace.update_recorder import Label, UpdateTrace
from stabletrain.forensics.trace.values import dense, is_float, leaves, local, tensors
from stabletrain.guard.checks.copies import put_back_after
from stabletrain.guard.checks.written import containers, kept_outside, parts_of, tensors_in, update_is_finite
from stabletrain.machine.compiling import uncompiled

MAX_LISTED = 8
"""Maximum number of tensors to list."""

DECAYS = ("alpha", "rho")
"""Names of decay rates besides betas: of RMSprop and Adadelta."""

FUSED = ("aten._fused_adam_", "aten._fused_adamw_")
"""Kernels whose arithmetic PyTorch's own code repeats, one operation at a time."""


class BadSetting(NamedTuple):
    """A number of a parameter group with which no step is finite.

    Attributes:
        group: index in `optimizer.param_groups`.
        key: such as `lr`, or `betas[1]`.
        words: the fault, in words.
    """

    group: int
    key: str
    value: float
    words: str


@dataclass(frozen=True)
class UpdateFault:
    """Why an optimizer's step is not finite.

    Attributes:
        optimizer: name of its class.
        parameter: name in the model of the parameter whose value is not finite; on several ranks, by this rank's part.
        tensor: which of its tensors: `parameter`, or the name of a moment.
        dtype: of that tensor, such as `float16`.
        group: index of its parameter group.
        settings: the group's numbers by key, such as `lr`, `eps`, `betas[0]`.
        broken: the tensors that are not finite after the step, in words, in the model's order; at most 8.
        count: number of such tensors.
        why: the key that selects a fix: one of `nonfinite_rules.py`; or `zero_eps`, `lost_eps` (0 in its format),
            `flushed` (a product is), `second_moment` (overflow), `zero_number`, `constant`, `unwritten`; or `untraced`
            if no operation on tensors shows where the value began.
        reason: the same in words, with numbers.
        origin: the operation to blame, with direction `update`; None if there is none.
        text: the source code of the operation; empty if unknown.
        divisor: the source code of what is 0; empty if nothing is, or if it is unknown.
        root: the tensor from before the step that was 0, or too large; None if unknown.
        zero_weights: names of the model's matrices whose elements are all 0: behind them, gradients are 0.
        fused: whether the operation is a fused kernel, whose arithmetic was repeated with single operations.
        bad_settings: numbers in the groups that are not finite, or out of their range.
    """

    optimizer: str
    parameter: str
    tensor: str
    dtype: str
    group: int
    settings: Mapping[str, float]
    broken: Sequence[str]
    count: int
    why: str
    reason: str
    origin: Origin | None = None
    text: str = ""
    divisor: str = ""
    root: Root | None = None
    zero_weights: Sequence[str] = ()
    fused: bool = False
    bad_settings: Sequence[BadSetting] = ()

    @property
    def index(self) -> int:
        """Number of the operation in the step; infinite if there is none."""
        return 1 << 62 if self.origin is None else self.origin.index

    def as_dict(self) -> dict[str, Any]:
        """The fault as a mapping, for the diagnosis, without the origin; non-finite numbers stay floats."""
        simple = ("optimizer", "parameter", "tensor", "dtype", "group", "settings", "broken", "count", "text")
        return {key: getattr(self, key) for key in simple} | {
            "root": None if self.root is None else self.root._asdict(),
            "bad_settings": [each._asdict() for each in self.bad_settings],
        }


def update_fault(model: nn.Module, optimizer: Optimizer, run_update: Callable[[], Any]) -> UpdateFault | None:
    """Runs an optimizer's step again and returns why its result is not finite, as `trace_update`; puts everything back.

    Raises:
        Exception: the step is not finite and cannot be recorded, for example with tensors of another library's class.
    """
    try:
        with put_back_after(model, optimizer):
            return trace_update(model, optimizer, run_update)
    except Exception:
        with put_back_after(model, optimizer):
            run_update()
            if update_is_finite(model, optimizer):
                return None
        raise


def trace_update(model: nn.Module, optimizer: Optimizer, run_update: Callable[[], Any]) -> UpdateFault | None:
    """Runs an optimizer's step and returns why its result is not finite; None if parameters and moments are finite.

    The step changes live parameters, moments and counters: the caller puts them back, in `run_update` or afterwards.
    With sharded parameters all ranks must call it together, because the step may communicate.

    Args:
        model: names the parameters; with its values from before the step.
        optimizer: with its state from before the step, and with the gradients that the step was given: unscaled,
            clipped.
        run_update: calls `optimizer.step()`.
    """
    subject = OptimizerBefore(model, optimizer)
    tracing = UpdateTrace(model, subject.before)
    found: list[tuple[Label, Tensor]] = []
    wrong: list[Label] = []

    def look(*_: Any) -> None:
        with tracing.paused(), torch.no_grad():
            sources.clear()
            found[:], wrong[:] = subject.broken(), subject.numbers()
            for label, tensor in found:  # while they are there: `run_update` may put the old ones back
                tracing.label_new(tensor, label)
                sources[label] = tracing.sources_of(tensor)

    sources: dict[Label, frozenset[Source]] = {}
    # A hook sees the values before `run_update` can put the old ones back. An optimizer of another class has no hooks.
    add = getattr(optimizer, "register_step_post_hook", None)
    try:
        hook = None if add is None else add(look)
    except AttributeError:  # its constructor did not call PyTorch's
        hook = None
    try:
        with uncompiled(), tracing:
            run_update()
    finally:
        if hook is not None:
            hook.remove()
    if not found and not wrong:
        look()
    if found:
        return subject.fault(tracing, found, sources)
    return subject.number_fault(wrong) if wrong else None


class OptimizerBefore:
    """An optimizer before its step: its tensors, with their names and contents.

    Attributes:
        before: the tensors and their labels.
        sizes: measurements of their contents.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.groups: dict[str, int] = {}
        self.parameters: list[tuple[str, Tensor]] = []
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                name = self.names.get(id(parameter), f"parameter {place} of group {number}")
                self.groups[name] = number
                self.parameters.append((name, parameter))
        order = {name: number for number, name in enumerate(self.names.values())}
        self.parameters.sort(key=lambda each: order.get(each[0], len(order)))
        gradients = [(p.grad, Label("gradient", name)) for name, p in self.parameters if p.grad is not None]
        self.before = [*self.tensors(), *gradients]
        with torch.no_grad():
            self.sizes = measure_sizes(self.before)
            self.zero_weights = zero_weights(model)
        self.bad_settings = bad_settings(optimizer.param_groups)
        self.settings = [group_numbers(group) for group in optimizer.param_groups]

    def tensors(self) -> Iterator[tuple[Tensor, Label]]:
        """Every tensor that the step may write: parameters with moments, then buffers, then other attributes."""
        seen = set[int]()
        labelled = (*self._of_parameters(), *self._others())
        for tensor, label in ((part, label) for whole, label in labelled for part in parts_of(whole)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor, label

    def _others(self) -> Iterator[tuple[Tensor, Label]]:
        """Frozen parameters, buffers, and tensors that the optimizer keeps outside of its state."""
        frozen = ((each, Label("parameter", name)) for name, each in self.model.named_parameters())
        # By their memory: a complex buffer is judged as a real tensor that shares it.
        judged = {each.data_ptr() for each in buffers_of(self.model).judged}
        named = self.model.named_buffers()
        buffers = ((each, Label("buffer", name)) for name, each in named if each.data_ptr() in judged)
        yield from (*frozen, *buffers)
        for name, value in kept_outside(self.optimizer).items():
            for tensor in [value] if isinstance(value, Tensor) else tensors_within(value):
                yield tensor, Label("attribute", name)

    def numbers(self) -> Iterator[Label]:
        """The numbers in the optimizer's state that are NaN: they are counted in Python."""
        for name, parameter in self.parameters:
            for key, value in state_items(self.optimizer, parameter):
                if isinstance(value, float) and math.isnan(value):
                    yield Label(str(key), name)

    def _of_parameters(self) -> Iterator[tuple[Tensor, Label]]:
        """The parameters and their moments, in the model's order."""
        held = leaves(vars(self.optimizer))
        wrapped = [each for each in held if hasattr(each, "param_groups") and hasattr(each, "state")]
        for name, parameter in self.parameters:
            yield parameter, Label("parameter", name)
            for optimizer in [self.optimizer, *wrapped]:
                for key, value in state_items(optimizer, parameter):
                    yield from ((tensor, Label(str(key), name)) for tensor in tensors(value))

    def broken(self) -> list[tuple[Label, Tensor]]:
        """The parameters and moments that are not finite now."""
        values = [(label, tensor) for tensor, label in self.tensors() if is_float(tensor) and dense(tensor).numel()]
        if not values:
            return []
        flags = [torch.isfinite(dense(tensor)).all() for _, tensor in values]
        return [each for each, fine in zip(values, read_scalars(flags), strict=True) if not fine]

    def fault(
        self,
        tracing: UpdateTrace,
        broken: Sequence[tuple[Label, Tensor]],
        sources: Mapping[Label, frozenset[Source]],
    ) -> UpdateFault:
        """Explains the tensors that are not finite after the step."""
        for tensor, label in [*self.tensors()]:
            tracing.label_new(tensor, label)  # moments that the step has made
        reached = frozenset[Source]().union(*sources.values())
        source = min(reached, key=lambda one: (BLAME_ORDER[one.how], one.record)) if reached else None
        mine = set[str]() if source is None else tracing.details[source.record].parameters
        labels = [label for label, _ in broken]
        hit = [label for label in labels if source in sources.get(label, ())] or labels
        own = [label for label in hit if label.parameter in mine] or hit
        name = min(mine) if own[0].what == "attribute" and mine else own[0].parameter
        # The tensor that the operation to blame wrote to, if it is one of the optimizer's.
        writes = () if source is None else tracing.details[source.record].writes
        written = next((tracing.labels[each.place] for each in writes if each.place in tracing.labels), None)
        which = next((label for label in own if label == written), own[0])
        tensor = next((tensor for label, tensor in broken if label == which), broken[0][1])
        reason, fused, inside = self._reason(tracing, source, which, tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        found = self._fault(which._replace(parameter=name), dtype, labels, reason)
        if source is None:
            return found
        record = tracing.records[source.record]
        finding = record.finding if inside is None else None
        origin = origin_of_record(record, source.how, reason.why, reason.words, finding)
        origin = replace(origin, module=name, direction="update")
        return replace(found, origin=origin, text=tracing.details[source.record].text, fused=fused)

    def number_fault(self, wrong: Sequence[Label]) -> UpdateFault:
        """Explains numbers in Python that are NaN after the step, although all tensors are finite."""
        words = "a number that is computed in Python, outside of tensors"
        reason = Reason("constant", f"{tensor_name(wrong[0])} is nan after the step: {words}")
        return self._fault(wrong[0], "float", wrong, reason)

    def _fault(self, label: Label, dtype: str, broken: Sequence[Label], reason: Reason) -> UpdateFault:
        """Returns the fault of a tensor or number, for this reason, without the operation to blame."""
        group = self.groups.get(label.parameter, 0)
        return UpdateFault(
            optimizer=type(self.optimizer).__name__,
            parameter=label.parameter,
            tensor=label.what,
            dtype=dtype,
            group=group,
            settings=self.settings[group] if group < len(self.settings) else {},
            broken=[tensor_name(each) for each in broken[:MAX_LISTED]],
            count=len(broken),
            why=reason.why,
            reason=reason.words,
            divisor=reason.divisor,
            root=reason.root,
            zero_weights=self.zero_weights,
            bad_settings=self.bad_settings or (betas_of_one(self.settings) if reason.why == "zero_number" else []),
        )

    def _reason(
        self, tracing: UpdateTrace, source: Source | None, label: Label, tensor: Tensor
    ) -> tuple[Reason, bool, UpdateTrace | None]:
        """Returns the reason, whether the operation is a fused kernel, and the trace of its arithmetic."""
        if source is None:
            unseen = "no operation on tensors shows where the value began: numpy, or a kernel outside PyTorch"
            return self._guess(label, tensor, unseen), False, None
        if from_outside(tracing, source):
            return self._guess(label, tensor, explain(tracing, source, self.sizes).words), False, None
        op = tracing.records[source.record].op
        if "_fused_" not in op:
            return explain(tracing, source, self.sizes), False, None
        inside = repeat_fused(self.model, tracing, source.record, label.parameter)
        if inside is None:
            unseen = f"{op} is one fused kernel, whose operations cannot be seen"
            return self._guess(label, tensor, unseen), True, None
        nested, first = inside
        reason = explain(nested, first, self.sizes)
        return replace(reason, words=f"inside the fused kernel {op}, {reason.words}"), True, nested

    def _guess(self, label: Label, tensor: Tensor, unseen: str) -> Reason:
        """The likely reason of a value that no operation shows, from the settings and the gradient."""
        gradient = Label("gradient", label.parameter)
        size = self.sizes.get(gradient)
        settings = self.settings[self.groups.get(label.parameter, 0)]
        hints = []
        eps = settings.get("eps")
        if eps is not None and float(torch.tensor(eps, dtype=tensor.dtype)) == 0:
            dtype = dtype_name(str(tensor.dtype).removeprefix("torch."))
            hints.append("eps=0" if eps == 0 else f"eps={eps:g} is 0 in {dtype}")
        if size is not None and size.zeros:
            all_of_it = size.zeros == size.numel
            some = (
                "is exactly zero" if all_of_it else f"has {size.zeros} of {size.numel} elements that are exactly zero"
            )
            hints.append(f"{tensor_name(gradient)} {some}")
        elif size is not None and size.largest**2 > torch.finfo(tensor.dtype).max:
            hints.append(
                f"an element of {tensor_name(gradient)}, {size.largest:.4g}, squared is above what it can hold"
            )
        likely = f"; {', and '.join(hints)}" if hints else ""
        root = root_of(gradient, self.sizes) if hints and size is not None else None
        return Reason("untraced", f"{tensor_name(label)} is not finite after the step: {unseen}{likely}", root)


def repeat_fused(model: nn.Module, tracing: UpdateTrace, index: int, name: str) -> tuple[UpdateTrace, Source] | None:
    """Repeats a fused kernel's arithmetic in fp32, one operation at a time.

    Returns its trace and where its first non-finite value began; None if it cannot be repeated, or is finite.
    """
    record = tracing.records[index]
    if record.op not in FUSED or tracing.fused is None or tracing.fused[0] != index:
        return None
    _, args, kwargs = tracing.fused
    lists = [[local(tensor).detach().float().clone() for tensor in value] for value in args[:6]]
    parameter = nn.Parameter(lists[0][0])
    parameter.grad = lists[1][0]
    state: dict[str, Tensor] = {"exp_avg": lists[2][0], "exp_avg_sq": lists[3][0], "step": lists[5][0].cpu() - 1}
    if lists[4]:
        state["max_exp_avg_sq"] = lists[4][0]
    scale = kwargs.get("grad_scale")
    if scale is not None:
        parameter.grad /= scale
    kind = torch.optim.AdamW if "adamw" in record.op else torch.optim.Adam
    again = kind([parameter], amsgrad=kwargs["amsgrad"], maximize=kwargs["maximize"], foreach=False, fused=False)
    numbers = {"lr": float(kwargs["lr"]), "betas": (kwargs["beta1"], kwargs["beta2"])}
    again.param_groups[0].update(numbers | {key: kwargs[key] for key in ("eps", "weight_decay")})
    again.state[parameter].update(state)
    known = [(parameter, "parameter"), (parameter.grad, "gradient"), *((value, key) for key, value in state.items())]
    nested = UpdateTrace(model, [(tensor, Label(what, name)) for tensor, what in known])
    with nested, suppress(ArithmeticError, RuntimeError):  # numbers in Python raise where the kernel's become NaN
        again.step()
    reached = frozenset[Source]().union(*(nested.sources_of(tensor) for tensor, _ in known))
    return (nested, min(reached, key=lambda one: (BLAME_ORDER[one.how], one.record))) if reached else None


def tensors_within(value: Any) -> list[Tensor]:
    """The tensors in a container and in those that it holds, but not those of a wrapped optimizer."""
    if hasattr(value, "param_groups"):
        return []
    return [tensor for _, held in containers(value, set()) for tensor in tensors_in(held)]


def state_items(optimizer: Any, parameter: Tensor) -> list[tuple[Any, Any]]:
    """The state of a parameter by name."""
    state = getattr(optimizer, "state", None)
    found = state.get(parameter) if isinstance(state, Mapping) else None
    return [*found.items()] if isinstance(found, Mapping) else []


def read_scalars(values: Sequence[Tensor]) -> list[Any]:
    """Reads scalars on the host, with one transfer per device."""
    found: dict[int, Any] = {}
    for device in {value.device for value in values}:
        here = [number for number, value in enumerate(values) if value.device == device]
        found |= zip(here, torch.stack([values[number] for number in here]).tolist(), strict=True)
    return [found[number] for number in range(len(values))]


def measure_sizes(known: Sequence[tuple[Tensor, Label]]) -> dict[Label, Size]:
    """Measures tensors, with one host read per device."""
    measured, kept = [], []
    for tensor, label in known:
        values = dense(tensor)
        if not is_float(values) or not values.numel() or values.is_complex():
            continue
        zero = values == 0
        rows = zero.flatten(1).all(1).sum() if values.ndim > 1 else zero.new_zeros((), dtype=torch.int64)
        numbers = [zero.sum().double(), rows.double(), values.abs().max().double()]
        measured.append(torch.stack(numbers))
        kept.append((label, values.numel(), values.shape[0] if values.ndim > 1 else 0))
    if not measured:
        return {}
    return {
        label: Size(numel, int(zeros), rows, int(zero_rows), largest)
        for (label, numel, rows), (zeros, zero_rows, largest) in zip(kept, read_scalars(measured), strict=True)
    }


def zero_weights(model: nn.Module) -> list[str]:
    """Names of the matrices whose elements are all 0, at most `MAX_LISTED`."""
    found = [(name, dense(p)) for name, p in model.named_parameters() if p.ndim > 1 and dense(p).numel()]
    flags = read_scalars([(values == 0).all() for _, values in found])
    return [name for (name, _), zero in zip(found, flags, strict=True) if zero][:MAX_LISTED]


def group_numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a parameter group by key."""
    found = {}
    for key, value in group.items():
        if key == "params":
            continue
        several = isinstance(value, list | tuple)
        for place, each in enumerate(value if several else [value]):
            scalar = isinstance(each, Tensor) and each.numel() == 1 and is_float(each)
            if (isinstance(each, int | float) and not isinstance(each, bool)) or scalar:
                found[f"{key}[{place}]" if several else key] = float(local(each) if scalar else each)
    return found


def bad_settings(groups: Sequence[Mapping[str, Any]]) -> list[BadSetting]:
    """The numbers that are not finite, betas and other decay rates outside [0, 1], and negative eps."""
    found = []
    for number, group in enumerate(groups):
        for key, value in group_numbers(group).items():
            if not math.isfinite(value):
                found.append(BadSetting(number, key, value, "not a finite number"))
            elif (key in DECAYS or key.startswith("beta")) and not 0 <= value <= 1:
                found.append(BadSetting(number, key, value, "outside [0, 1]"))
            elif key == "eps" and value < 0:
                found.append(BadSetting(number, key, value, "below 0"))
    return found


def betas_of_one(settings: Sequence[Mapping[str, float]]) -> list[BadSetting]:
    """The betas of exactly 1, which make the bias correction a division by 0."""
    return [
        BadSetting(number, key, value, "so the bias correction 1 - beta ** step is 0")
        for number, group in enumerate(settings)
        for key, value in group.items()
        if key.startswith("beta") and value == 1
    ]
