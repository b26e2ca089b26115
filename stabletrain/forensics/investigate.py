"""Investigates one incident: gathers the evidence on copies, within a time budget, and names the cause."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch.optim import Optimizer

from stabletrain.forensics.agreement import NotInvestigated, one_line_of
from stabletrain.forensics.diagnosis.cause_table import Diagnosis
from stabletrain.forensics.diagnosis.evidence import Evidence, RunSettings
from stabletrain.forensics.facts import Damage, Outcome, same_bits
from stabletrain.forensics.probes.state import damaged, drift, last_move, update_length
from stabletrain.forensics.subject import Subject
from stabletrain.forensics.trace.origin import Origin, find_origin
from stabletrain.forensics.trace.recorder import OpRecord

T = TypeVar("T")

MAX_TRACED_BACK = 12
"""Maximum number of operations traced back from the origin."""

REDUCTIONS = ("var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm", "mean", "sum")
"""Reductions: operations that compute one number from many."""

ZERO_PRESERVING = (
    *("sqrt", "rsqrt", "reciprocal", "add", "sub", "mul", "div", "pow", "clamp", "clamp_min", "maximum", "clone"),
    *("expand", "view", "_unsafe_view", "unsqueeze", "squeeze", "transpose", "t", "permute", "_to_copy", "detach"),
    *("alias", "slice", "select", "reshape", "copy"),
)
"""Operations whose result is 0 because their input was 0."""


@dataclass(frozen=True)
class IncidentRequest:
    """Asks a handler to explain a step.

    Attributes:
        kind: `nonfinite`, `spike`, `bad_data`, `state`, `recheck` or `update` for a step whose update was withheld or
            undone; `loss_scale` for an alarm that gradients vanish.
        optimizer: the live optimizer; only read. None if its moments are not whole.
        limits: the guard's limits of loss and gradient norm.
        classes: last dimension of the logits; None if unknown.
        tick: number of steps that the run has executed with this one; None if unknown.
    """

    kind: str
    optimizer: Optimizer | None = None
    limits: tuple[float, float] = (math.inf, math.inf)
    classes: int | None = None
    tick: int | None = None


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


def investigate(subject: Subject, request: IncidentRequest, setting: RunSettings) -> Findings:
    """Investigates a step. Never raises because of the model, and changes no live state.

    On several ranks, only what `subject.requests` runs communicates. It raises NotInvestigated if a rank has failed.

    Args:
        request: `limits` and `tick` are not read; the limits of `setting` count.
    """
    began, kind = time.monotonic(), request.kind
    assert subject.reading is not None
    # With sharded weights the ranks run the update together, so none may leave it out for its time limit.
    attempt = Checks(math.inf if kind == "update" else subject.deadline)
    found = Evidence(kind, subject.reading, part=subject.part, loss_known=subject.loss_known, setting=setting)
    if kind == "state":  # the checksums named the tensors; the step's own numbers come from these and show nothing more
        found = replace(found, damage=[Damage(what, name, words) for what, name, words in subject.changes])
    elif kind == "recheck":  # two computations were compared, and a third: a replay would show nothing more
        found = replace(found, recheck=subject.recheck)
    elif kind == "update":  # the forward and backward pass were finite: only the optimizer's step is run again
        found = with_update(subject, found, request.optimizer, attempt)
    else:
        found = with_step(subject, found, request, attempt)
    diagnosis = subject.diagnose(found)
    if diagnosis.cause == "loss_scale_collapse":  # seen as non-finite gradients at first
        found = replace(found, kind="loss_scale")
    gap = [subject.gap] if subject.gap and kind != "update" else []  # the optimizer's step has none
    return Findings(found, diagnosis, time.monotonic() - began, [*gap, *attempt.failures])


class Checks:
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
            self.failures.append(f"{what}: {one_line_of(error)}")
            return otherwise


def with_update(subject: Subject, found: Evidence, optimizer: Optimizer | None, attempt: Checks) -> Evidence:
    """Adds the evidence from the state before the step, and from running the optimizer's step again."""
    older = attempt("older state", subject.older, None)
    damage = attempt("state before the step", lambda: damaged(subject.model, subject.buffers, optimizer, older), [])
    found = replace(found, damage=damage)
    if subject.update is None:
        attempt.failures.append("the optimizer's step: it cannot be run again")
        return found
    failures = len(attempt.failures)
    fault = attempt("the optimizer's step", subject.update, None)
    ran = len(attempt.failures) == failures
    return replace(found, update=fault, update_ran=ran, origin=None if fault is None else fault.origin)


def with_step(subject: Subject, found: Evidence, request: IncidentRequest, attempt: Checks) -> Evidence:
    """Adds the evidence from the batch, and from running the step again, cheapest first."""
    # Bad samples explain the incident without any replay. So does the check of an alarm that proves to be false.
    found = replace(found, samples=attempt("samples", lambda: subject.bad_samples(request.classes), []))
    if found.samples:
        return found
    if found.kind == "loss_scale":
        found = replace(found, underflow=attempt("small gradients", subject.underflow, None))
        if found.underflow is None or not found.underflow.real:
            return found
    older = attempt("older state", subject.older, None)
    found = with_replays(subject, found, request.optimizer, older, attempt)
    return with_sizes(subject, found, request, older, attempt)


def with_replays(
    subject: Subject, found: Evidence, optimizer: Optimizer | None, older: Mapping[str, Any] | None, attempt: Checks
) -> Evidence:
    """Adds the evidence from replays: corrupt state, the operation to blame, culprit samples."""
    damage = attempt("state before the step", lambda: damaged(subject.model, subject.buffers, optimizer, older), [])
    origin, divisor_ops = (None, [])
    if found.kind == "nonfinite":
        origin, divisor_ops = attempt("trace of the operations", lambda: origin_of(subject), (None, []))
    outcomes = {variant: subject.replay(variant) for variant in subject.variants}
    if origin is not None and origin.dtype == "float16" and outcomes["fp32"].finite is False:
        deeper, deeper_ops = attempt("trace of the operations in fp32", lambda: origin_of(subject, "fp32"), (None, []))
        if deeper is not None and deeper.dtype != "float16":  # it fails in every format; fp16 only failed first
            origin, divisor_ops = deeper, deeper_ops
    found = replace(found, damage=damage, origin=origin, divisor_ops=divisor_ops, outcomes=outcomes)
    # Two equal replays that differ from the step point to the hardware; two different ones, to nondeterminism.
    if outcomes["same"].bitwise_equal_to_reading is False:
        found = replace(found, repeats=attempt("second replay", lambda: replays_agree(subject, outcomes["same"]), None))
    if older:
        way = attempt("change of the weights", lambda: drift(subject.model, optimizer, older, subject.step), None)
        found = replace(found, drift=way)
    elif optimizer is not None:
        found = replace(found, drift=attempt("the last update", lambda: last_move(optimizer), None))
    if found.kind == "nonfinite":
        found = replace(found, culprits=attempt("culprit samples", subject.culprits, None))
    return found


def with_sizes(
    subject: Subject, found: Evidence, request: IncidentRequest, older: Mapping[str, Any] | None, attempt: Checks
) -> Evidence:
    """Adds the sizes of activations, logits, inputs and moments, on this state and on an older one."""
    optimizer, classes = request.optimizer, request.classes
    sizes = attempt("activations and logits", lambda: subject.sizes(None, classes), {})
    before = attempt("activations on the older state", lambda: subject.sizes(older, classes), {}) if older else {}
    found = replace(found, largest_input=attempt("largest input", subject.largest_input, None))
    if optimizer is not None:
        found = replace(found, update_length=attempt("optimizer moments", lambda: update_length(optimizer), math.nan))
    if sizes.get("monitors/fp8") and found.kind in ("spike", "nonfinite"):
        found = replace(found, fp8=attempt("casts to fp8", subject.fp8_casts, None))
    stale = math.nan
    if found.kind == "spike" and optimizer is not None:
        stale = attempt("second moments", lambda: subject.staleness(optimizer), math.nan)
    return replace(found, sizes=sizes, before=before, staleness=stale)


def origin_of(subject: Subject, variant: str = "same") -> tuple[Origin | None, list[str]]:
    """Returns the operation to blame in a replay, and the operations that computed its divisor."""
    tracing = subject.trace(variant)
    origin = find_origin(tracing)
    if origin is None:
        return None, []
    return origin, divisor_history(tracing.records, origin.index)


def divisor_history(records: Sequence[OpRecord], index: int) -> list[str]:
    """Names the operations that computed a record's last input: the divisor, or the argument of the root.

    Goes backwards through the elementwise and shape operations in `ZERO_PRESERVING`. Stops at the first reduction, and
    includes the operation before that. For sqrt(mean(x^2)) the result is sqrt, mean and pow.
    """
    found: list[str] = []
    waiting = [writer for writer in records[index].writers[-1:] if writer is not None]
    while waiting and len(found) < MAX_TRACED_BACK:
        record = records[waiting.pop(0)]
        name = record.op.removeprefix("aten.").rstrip("_")
        found.append(record.op)
        if name in REDUCTIONS:
            found += [records[writer].op for writer in record.writers[:1] if writer is not None]
            break
        if name in ZERO_PRESERVING:
            waiting += [writer for writer in record.writers if writer is not None and writer < index]
    return found


def replays_agree(subject: Subject, first: Outcome) -> bool | None:
    """Whether a second replay gives the same bits as the first; None if either did not run."""
    second = subject.replay("same")
    if first.loss is None or first.grad_norm is None or second.loss is None or second.grad_norm is None:
        return None
    return same_bits(first.loss, second.loss) and same_bits(first.grad_norm, second.grad_norm)
