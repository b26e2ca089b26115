"""Measures every cast to fp8 in a replay of a step, and replays the step without fp8.

e4m3 ends at 448 and e5m2 at 57344. Each has about 2^18 and 2^32 between its largest and its smallest number, and a
tensor is scaled before the cast so that it fits. Three things can go wrong:

    saturated    |x s| is above the largest number: PyTorch 2.12 rounds to the largest, 2.11 to NaN; e5m2 to Inf
    flushed      |x s| is below half of the smallest number, and becomes 0
    nonfinite    finite values become NaN or Inf

Values are lost in healthy steps too. So the step is replayed without fp8, and with each override that could help: only
if such a replay is normal are the casts to blame (`diagnosis/causes.py`).

Source: Micikevicius et al., arXiv 2209.05433, table 1; outliers, arXiv 2409.12517.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from stabletrain.forensics.facts import Outcome
from stabletrain.forensics.replay import inputs_of
from stabletrain.forensics.repro import Repro
from stabletrain.forensics.rerun import RerunResult, outcome_of
from stabletrain.forensics.trace.callers import Caller, Callers
from stabletrain.forensics.trace.values import dense, is_scaled_fp8, storage, tensors
from stabletrain.stability.precision.fp8_linear import Fp8Linears, fp8_layers, to_bf16_

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}

FLUSHED_SHARE = 0.5
"""Share of a tensor's values that are flushed to 0, above which a cast has lost the tensor."""

SATURATED_SHARE = 0.01
"""Share of saturated values above which the scale is too large. The largest value alone is no sign of it."""

ROUNDING = 1 / 16
"""Relative difference that rounding to fp8, or of a scale, can make; more is a saturated value."""

MAX_LISTED = 8
"""Maximum number of casts to list."""

RECENT_OPS = 16
"""Number of recent operations among which the scaling of a cast's input is looked for."""


@dataclass(frozen=True)
class Cast:
    """The loss of one tensor in casts to fp8; the worst one over several micro-batches.

    Attributes:
        module: dotted path of the module.
        source: `file:line` of the code that casts, or that calls the layer.
        tensor: `input`, `weight` or `grad_output`.
        format: `e4m3` or `e5m2`.
        scale: factor of the tensor before the cast; the smallest of several, or Inf if one is; NaN if unknown.
        absmax: largest magnitude before the scaling; NaN if the scale is unknown.
        flushed, saturated, nonfinite: shares of the finite values other than 0, in [0, 1].
    """

    module: str
    source: str
    tensor: str
    format: str
    scale: float
    absmax: float
    flushed: float
    saturated: float
    nonfinite: float

    @property
    def loss(self) -> float:
        """The largest of the three shares; 1 if the scale is infinite, which turns every 0 into NaN."""
        return 1.0 if math.isinf(self.scale) else max(self.flushed, self.saturated, self.nonfinite)


@dataclass(frozen=True)
class Fp8Casts:
    """The casts of a step, and replays that tell whether they did harm.

    Attributes:
        casts: those that lost the most, worst first.
        without: the step replayed without fp8: layers in bf16, other casts left out.
        tried: the step replayed with an override, by the override.
    """

    casts: tuple[Cast, ...] = ()
    without: Outcome = field(default_factory=Outcome)
    tried: Mapping[str, Outcome] = field(default_factory=dict)

    @property
    def clipped(self) -> list[Cast]:
        """The casts that saturate, or give NaN or Inf."""
        return [cast for cast in self.casts if cast.saturated > SATURATED_SHARE or cast.nonfinite > 0]

    @property
    def lost(self) -> list[Cast]:
        """The casts that flush most values to 0."""
        return [cast for cast in self.casts if cast.flushed > FLUSHED_SHARE]


def fp8_casts(repro: Repro) -> Fp8Casts | None:
    """Measures the casts to fp8 in a replay of the step; None if there are none."""
    inputs = inputs_of(repro).with_plain_objective()
    with Casts(inputs.model) as watching:
        inputs.run()
    if not watching.worst:
        return None
    found = Fp8Casts(tuple(watching.worst[:MAX_LISTED]))
    if not found.clipped and not found.lost:
        return found
    without = replay_changed(repro, lambda model: [to_bf16_(layer) for layer in fp8_layers(model).values()], NoCasts())
    tried = {override: replay_changed(repro, change) for override, change in candidates(repro, found)}
    return replace(found, without=without, tried=tried)


def candidates(repro: Repro, found: Fp8Casts) -> list[tuple[str, Callable[[nn.Module], Any]]]:
    """The overrides that could help, and how each changes a copy of the model."""
    precision, layers = repro.tools.precision, fp8_layers(repro.model)
    if not isinstance(precision, Fp8Linears):
        return []
    listed: list[tuple[str, Callable[[nn.Module], Any]]] = []
    names = dict.fromkeys(cast.module for cast in [*found.clipped, *found.lost] if cast.module in layers)
    if precision.recipe == "tensorwise":
        rowwise = replace(precision, recipe="rowwise")
        listed.append(("precision.recipe=rowwise", lambda model: rowwise.convert([*fp8_layers(model).values()])))
    if names and len(names) < len(layers):
        override = f"precision.bf16_modules=[{','.join([*precision.bf16_modules, *names])}]"
        listed.append((override, lambda model: [to_bf16_(model.get_submodule(name)) for name in names]))
    return listed


def replay_changed(
    repro: Repro, change: Callable[[nn.Module], Any], around: contextlib.AbstractContextManager | None = None
) -> Outcome:
    """Replays the step on a copy of the model that `change` has changed. A user's own fp8 code may need fp8 tensors."""

    def run() -> RerunResult:
        inputs = inputs_of(repro)
        change(inputs.model)
        with around or contextlib.nullcontext():
            return inputs.run()

    return outcome_of(run, repro.deadline)


def cast_of(func: Any, args: tuple, out: Any) -> Tensor | None:
    """Returns the tensor that an operation casts to fp8; None for any other operation."""
    if not isinstance(out, Tensor) or is_scaled_fp8(out) or out.dtype not in FORMATS:
        return None
    source = args[1] if func.overloadpacket is torch.ops.aten.copy_ else args[0]
    return source if isinstance(source, Tensor) and source.is_floating_point() and source.dtype.itemsize > 1 else None


class NoCasts(TorchDispatchMode):
    """Leaves out casts to fp8: the values keep their dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs the operation, or copies the input of a cast."""
        out = func(*args, **(kwargs or {}))
        source = cast_of(func, args, out) if func.overloadpacket is torch.ops.aten._to_copy else None
        return out if source is None else source.clone()


class Casts(TorchDispatchMode):
    """Measures the casts to fp8 inside `with casts:`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._callers = Callers(model)
        self._weights = {storage(parameter)._cdata for parameter in model.parameters()}
        self._recent: deque[tuple[StorageWeakRef, Tensor | float | None, float]] = deque(maxlen=RECENT_OPS)
        self._all: list[tuple[StorageWeakRef, Cast]] = []

    @property
    def worst(self) -> list[Cast]:
        """The worst cast of each module and tensor, worst first."""
        worst: dict[tuple[str, str], Cast] = {}
        for _, one in sorted(self._all, key=lambda each: -each[1].loss):
            worst.setdefault((one.module, one.tensor), one)
        return [*worst.values()]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs the operation unchanged."""
        out, grad = func(*args, **(kwargs or {})), torch.is_grad_enabled()
        with torch.no_grad():
            node, reads = torch._C._current_autograd_node(), list(tensors((args, kwargs or {})))
            makes = grad and any(tensor.requires_grad for tensor in reads)
            caller = self._callers.of(node, reads, makes)
            self._name(reads)
            if (source := cast_of(func, args, out)) is not None:
                self._measure(source, out, caller)
            elif isinstance(out, Tensor) and out.is_floating_point() and not is_scaled_fp8(out):
                self._remember(str(func.overloadpacket).removeprefix("aten.").rstrip("_"), args, out)
        return out

    def _remember(self, name: str, args: tuple, out: Tensor) -> None:
        """Remembers how an operation scales or clips its input, since a cast may follow."""
        scale, clipped = self._scaling(args[0]) if args and isinstance(args[0], Tensor) else (None, 0.0)
        if name in ("mul", "div") and len(args) > 1 and isinstance(args[0], Tensor):
            factor: Any = args[1]
            if not isinstance(factor, Tensor) or factor.numel() < args[0].numel() or factor.numel() == 1:
                scale = factor if name == "mul" else 1 / factor
        elif name in ("clamp", "clip", "clamp_min", "clamp_max") and isinstance(args[0], Tensor):
            values = args[0]
            cut = values.isfinite() & ((values - out).abs() > ROUNDING * out.abs())
            clipped = float(cut.sum() / max(int((values != 0).sum()), 1))
        elif name not in ("_to_copy", "clone"):
            return
        self._recent.append((StorageWeakRef(storage(out)), scale, clipped))

    def _scaling(self, tensor: Tensor) -> tuple[Tensor | float | None, float]:
        """Returns a tensor's scale, and the share of its values that was clipped; None and 0 if unknown."""
        key = storage(tensor)._cdata
        return next(((scale, cut) for ref, scale, cut in reversed(self._recent) if ref.cdata == key), (None, 0.0))

    def _measure(self, source: Tensor, out: Tensor, caller: Caller) -> None:
        """Measures one cast."""
        before, after = source.double(), dense(out).float()
        there = before.isfinite() & (before != 0)
        count, largest = max(int(there.sum()), 1), torch.finfo(out.dtype).max
        scale, clipped = self._scaling(source)
        scales = torch.full((), math.nan) if scale is None else torch.as_tensor(scale).abs()
        least = math.inf if bool(scales.isinf().any()) else float(scales.min())
        passed = "grad_output" if caller.backward else "input"
        one = Cast(
            module=caller.place.module,
            source=caller.place.source,
            tensor="weight" if storage(source)._cdata in self._weights else passed,
            format=FORMATS[out.dtype],
            scale=least,
            absmax=float(before.abs().max()) / least if least and before.numel() else math.nan,
            flushed=float((there & (after == 0)).sum()) / count,
            saturated=max(clipped, float((there & (before.abs() > largest * (1 + ROUNDING))).sum()) / count),
            nonfinite=float((there & ~after.isfinite()).sum()) / count,
        )
        self._all.append((StorageWeakRef(storage(out)), one))

    def _name(self, reads: list[Tensor]) -> None:
        """Corrects which tensor each cast took: torchao's matrix product names its operands."""
        known = {storage(t)._cdata: t._gemm_input_role.value for t in reads if is_scaled_fp8(t)}  # ty: ignore[missing-attribute]
        for place in range(max(0, len(self._all) - RECENT_OPS), len(self._all) if known else 0):
            ref, one = self._all[place]
            self._all[place] = (ref, replace(one, tensor=known.get(ref.cdata, one.tensor)))
