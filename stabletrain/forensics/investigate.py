"""Investigates one incident: gathers the evidence on copies, within a time budget, and names the cause."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from stabletrain.forensics.agreement import NotInvestigated
from stabletrain.forensics.diagnosis.cause_table import Diagnosis
from stabletrain.forensics.diagnosis.diagnose import diagnose
from stabletrain.forensics.diagnosis.evidence import Evidence, LargestInput, RunSettings
from stabletrain.forensics.probes.fp8_casts import FORMATS, fp8_casts
from stabletrain.forensics.probes.samples import bad_samples, find_culprits, named
from stabletrain.forensics.probes.state import damaged, drift, overlong, staleness
from stabletrain.forensics.probes.underflow import underflow
from stabletrain.forensics.replay import VARIANTS, Outcome, perform, replay, replays, same_bits
from stabletrain.forensics.repro import Repro
from stabletrain.forensics.trace.origin import Origin, find_origin
from stabletrain.forensics.trace.recorder import OpRecord, Trace
from stabletrain.forensics.trace.values import is_float, tensors
from stabletrain.monitors.probe import Probe
from stabletrain.stability.precision.kernels import ieee_kernels

SOFTMAXES = ("aten._softmax", "aten._safe_softmax")
"""Softmax operations of attention. The log-softmax of a loss is excluded: it reads the model's logits."""


class Scores(TorchDispatchMode):
    """Records the largest finite value that a softmax reads, whichever code implements the attention.

    Attributes:
        largest: that value; NaN if no softmax ran.
        fp8: whether an operation wrote fp8 values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = math.nan
        self.fp8 = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs the operation unchanged."""
        if str(getattr(func, "overloadpacket", func)) in SOFTMAXES:
            scores = next(iter(tensors(args)))
            if is_float(scores) and scores.numel():
                # masked entries are -inf or very small, and must not count
                top = float(torch.where(torch.isfinite(scores), scores, -math.inf).max())
                self.largest = top if math.isnan(self.largest) else max(self.largest, top)
        out = func(*args, **(kwargs or {}))
        self.fp8 |= isinstance(out, Tensor) and out.dtype in FORMATS
        return out


T = TypeVar("T")

NEAR = 12
"""Maximum number of operations traced back from the origin."""

SUMS = ("var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm", "mean", "sum")
"""Reductions: operations that compute one number from many."""

CARRIERS = (
    *("sqrt", "rsqrt", "reciprocal", "add", "sub", "mul", "div", "pow", "clamp", "clamp_min", "maximum", "clone"),
    *("expand", "view", "_unsafe_view", "unsqueeze", "squeeze", "transpose", "t", "permute", "_to_copy", "detach"),
    *("alias", "slice", "select", "reshape", "copy"),
)
"""Operations whose result is 0 because their input was 0."""


@dataclass(frozen=True)
class Findings:
    """The evidence of an incident and its diagnosis.

    Attributes:
        seconds: duration of the investigation.
        failures: what could not be checked, and why.
    """

    evidence: Evidence
    diagnosis: Diagnosis
    seconds: float
    failures: list[str]


def investigate(
    repro: Repro,
    kind: str,
    *,
    classes: int | None,
    optimizer: Optimizer | None,
    setting: RunSettings,
) -> Findings:
    """Investigates a step. Never raises because of the model, and changes no live state.

    On several ranks, only the first call of `repro.older` communicates. It raises NotInvestigated if a rank has failed.

    Args:
        kind: as in `Evidence`.
        classes: last dimension of the logits; None if unknown.
        optimizer: the live optimizer, with its moments from before the step; only read.
    """
    began = time.monotonic()
    assert repro.reading is not None
    attempt = Attempts(repro.deadline)
    found = Evidence(kind, repro.reading, part=repro.part, setting=setting)
    # Cheapest first: bad samples explain the incident without any replay.
    samples = attempt("samples", lambda: bad_samples(repro.batch, repro.tools.sanitizer.vocab_size, classes), [])
    found = replace(found, samples=samples)
    if not samples and kind == "loss_scale":
        found = replace(found, underflow=attempt("small gradients", lambda: underflow(repro), None))
    refuted = kind == "loss_scale" and (found.underflow is None or not found.underflow.real)
    if not samples and not refuted:  # otherwise the cause is known or the alarm was false
        older = attempt("older state", lambda: None if repro.older is None else repro.older(), None)
        found = run_again(repro, found, optimizer, older, attempt)
        found = measure_sizes(repro, found, optimizer, older, classes, attempt)
    diagnosis = diagnose(found)
    if diagnosis.cause == "loss_scale_collapse":  # seen as non-finite gradients at first
        found = replace(found, kind="loss_scale")
    return Findings(found, diagnosis, time.monotonic() - began, attempt.failures)


class Attempts:
    """Runs checks until a deadline, and records those that fail instead of raising.

    Attributes:
        failures: what could not be checked, and why.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self.failures: list[str] = []

    def __call__(self, what: str, check: Callable[[], T], otherwise: T) -> T:
        """Returns the result of `check`; `otherwise` if the deadline has passed or `check` raises."""
        if time.monotonic() >= self._deadline:
            self.failures.append(f"{what}: the time limit was reached")
            return otherwise
        try:
            return check()
        except NotInvestigated:  # all ranks have agreed to stop here
            raise
        except Exception as error:  # a user's model may raise anything
            self.failures.append(f"{what}: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}")
            return otherwise


def run_again(
    repro: Repro, found: Evidence, optimizer: Optimizer | None, older: Mapping[str, Any] | None, attempt: Attempts
) -> Evidence:
    """Adds the evidence from replays: corrupt state, the operation to blame, culprit samples."""
    damage = attempt("state before the step", lambda: damaged(repro.model, repro.buffers, optimizer, older), [])
    origin, makers = (None, [])
    if found.kind == "nonfinite":
        origin, makers = attempt("trace of the operations", lambda: trace(repro), (None, []))
    outcomes = replays(repro)
    if origin is not None and origin.dtype == "float16" and outcomes["fp32"].finite is False:
        deeper, made_of = attempt("trace of the operations in fp32", lambda: trace(repro, "fp32"), (None, []))
        if deeper is not None and deeper.dtype != "float16":  # it fails in every format; fp16 only failed first
            origin, makers = deeper, made_of
    found = replace(found, damage=damage, origin=origin, makers=makers, outcomes=outcomes)
    # Two equal replays that differ from the step point to the hardware; two different ones, to nondeterminism.
    if outcomes["same"].bitwise_equal_to_reading is False:
        found = replace(found, repeats=attempt("second replay", lambda: repeats(repro, outcomes["same"]), None))
    if older:
        way = attempt("change of the weights", lambda: drift(repro.model, optimizer, older, repro.step), None)
        found = replace(found, drift=way)
    if found.kind == "nonfinite":
        found = replace(found, culprits=attempt("culprit samples", lambda: find_culprits(repro), None))
    return found


def measure_sizes(
    repro: Repro,
    found: Evidence,
    optimizer: Optimizer | None,
    older: Mapping[str, Any] | None,
    classes: int | None,
    attempt: Attempts,
) -> Evidence:
    """Adds the sizes of activations, logits, inputs and moments, on this state and on an older one."""
    sizes = attempt("activations and logits", lambda: sizes_of(repro, None, classes), {})
    before = attempt("activations on the older state", lambda: sizes_of(repro, older, classes), {}) if older else {}
    found = replace(found, largest_input=attempt("largest input", lambda: largest_input(repro), None))
    if optimizer is not None:
        found = replace(found, overlong=attempt("optimizer moments", lambda: overlong(optimizer), math.nan))
    if sizes.get("monitors/fp8") and found.kind in ("spike", "nonfinite"):
        found = replace(found, fp8=attempt("casts to fp8", lambda: fp8_casts(repro), None))
    stale = math.nan
    if found.kind == "spike" and optimizer is not None:
        stale = attempt("second moments", lambda: gradient_staleness(repro, optimizer), math.nan)
    return replace(found, sizes=sizes, before=before, staleness=stale)


def trace(repro: Repro, variant: str = "same") -> tuple[Origin | None, list[str]]:
    """Returns the operation to blame in a replay, and the operations that computed its divisor."""
    take = VARIANTS[variant](repro)
    # Use the whole logits, not chunks: the trace tells forward from backward by their order.
    tools = replace(take.tools, objective=take.tools.objective.plain)
    tracing = Trace(take.model)
    with tracing, ieee_kernels() if variant == "fp32" else contextlib.nullcontext():
        perform(take.model, take.batches, tools, repro.step)
    origin = find_origin(tracing)
    if origin is None:
        return None, []
    return origin, divisor_history(tracing.records, origin.index)


def divisor_history(records: Sequence[OpRecord], index: int) -> list[str]:
    """Names the operations that computed a record's last input: the divisor, or the argument of the root.

    Goes backwards through the elementwise and shape operations in `CARRIERS`. Stops at the first reduction, and
    includes the operation before that. For sqrt(mean(x^2)) the result is sqrt, mean and pow.
    """
    found: list[str] = []
    waiting = [writer for writer in records[index].writers[-1:] if writer is not None]
    while waiting and len(found) < NEAR:
        record = records[waiting.pop(0)]
        name = record.op.removeprefix("aten.").rstrip("_")
        found.append(record.op)
        if name in SUMS:
            found += [records[writer].op for writer in record.writers[:1] if writer is not None]
            break
        if name in CARRIERS:
            waiting += [writer for writer in record.writers if writer is not None and writer < index]
    return found


def repeats(repro: Repro, first: Outcome) -> bool | None:
    """Whether a second replay gives the same bits as the first; None if either did not run."""
    second = replay(repro, "same")
    if first.loss is None or first.grad_norm is None or second.loss is None or second.grad_norm is None:
        return None
    return same_bits(first.loss, second.loss) and same_bits(first.grad_norm, second.grad_norm)


def sizes_of(repro: Repro, older: Mapping[str, Any] | None, classes: int | None) -> dict[str, float]:
    """The monitors' metrics on the first micro-batch, with the step's weights or those of an older state."""
    model, probe = repro.copy_model(), Probe()
    if older is not None:
        model.load_state_dict(older["model"])
    batch = repro.to_micro_batches(repro.batch)[0]
    batch = repro.tools.sanitizer.safe(batch, classes or torch.iinfo(torch.int64).max)
    with Scores() as scores, contextlib.suppress(RuntimeError):
        found = probe.forward(model, batch, repro.tools.precision)
        return found | {"monitors/softmax_max": scores.largest, "monitors/fp8": float(scores.fp8)}
    return {}


def largest_input(repro: Repro) -> LargestInput | None:
    """The sample with the largest input, compared with another batch; None if inputs are not floating point."""
    inputs = repro.batch.inputs
    if repro.fresh is None or not inputs.is_floating_point() or not inputs.numel():
        return None
    sizes = inputs.abs().flatten(1).amax(1) if inputs.ndim > 1 else inputs.abs()
    index = int(sizes.argmax())
    sample = {"index": index, **named(repro.batch, index)}
    return LargestInput(sample, float(sizes[index]), float(repro.fresh().inputs.abs().amax()))


def gradient_staleness(repro: Repro, optimizer: Optimizer) -> float:
    """Compares this step's gradients with the optimizer's second moments; see `staleness`."""
    model = repro.copy_model()
    perform(model, repro.to_micro_batches(repro.batch), repro.replay_tools(), repro.step)
    return staleness(repro.model, [parameter.grad for parameter in model.parameters()], optimizer)
