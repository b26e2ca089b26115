"""Finds the origin: the first operation whose non-finite values reached the loss or a gradient, and its history.

If loss and gradients are finite, it is the operation that left a value that is not finite, or huge, in a buffer.

A source counts only if its values reached an end: the loss if it is not finite, otherwise a gradient. Accidents are
blamed before intended non-finite values, and earlier operations before later ones. For example, if a sum contains both
a masked -Inf and a real overflow, the overflow is blamed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from torch import nn

from stabletrain.forensics.trace.arithmetic import Finding
from stabletrain.forensics.trace.callers import OUTSIDE_MODEL
from stabletrain.forensics.trace.recorder import ACCIDENTS, OpRecord, Source, Trace
from stabletrain.forensics.trace.values import Values
from stabletrain.monitors.module_groups import blocks, place

BLAME_ORDER = {"producer": 0, "revealed": 0, "unwritten": 1, "written": 2, "given": 3}

SAME_VALUES = {f"aten.{name}" for name in ("_to_copy", "view", "unsqueeze", "squeeze", "expand", "clone", "alias")}
"""Operations that change the format or the shape of a tensor."""

MASKED = (
    "log_softmax gives -Inf for logits that are -Inf, and the loss reads it: label smoothing covers every class, also "
    "masked ones, or a target is a masked class"
)


class Link(NamedTuple):
    """Largest magnitude in one part of the model: a block, a module outside the blocks, or `objective`.

    `forward` means the part's output, `backward` the largest of its gradients.
    """

    module: str
    direction: str
    dtype: str
    absmax: float


@dataclass(frozen=True)
class Origin:
    """The operation to blame.

    Attributes:
        module, op, direction, source, called_from: see `OpRecord`.
        node: the autograd node, for a backward operation.
        dtype: of the non-finite output.
        inputs, outputs: of the operation.
        how: the kind of source, as listed in `recorder.py`.
        why: the key that rules use: `overflow`, `log_of_zero`, ... (see `nonfinite_rules.py`), or the kind of source.
        reason: the arithmetic in words.
        should_have_been: absmax of the result recomputed in fp64, which may be non-finite; None if unknown.
        in_fp32: absmax of the result in fp32.
        chain: magnitudes through the model, in order of computation, up to the operation.
        index: number of the operation in the trace.
    """

    module: str
    op: str
    direction: str
    source: str
    called_from: str
    node: str
    dtype: str
    inputs: tuple[Values, ...]
    outputs: tuple[Values, ...]
    how: str
    why: str
    reason: str
    should_have_been: float | None
    in_fp32: float | None
    chain: tuple[Link, ...]
    index: int

    def as_dict(self) -> dict[str, Any]:
        """The origin as a mapping, for the diagnosis; non-finite numbers stay floats."""
        simple = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {key: [values.as_dict() for values in simple[key]] for key in ("inputs", "outputs")}
        return simple | tensors | {"chain": [link._asdict() for link in self.chain]}


def find_origin(trace: Trace) -> Origin | None:
    """Returns the operation to blame; None if loss, gradients and buffers are finite.

    Without a backward pass, the trace ends at its last output. Gradients from `torch.autograd.grad` reach no parameter;
    then the first accident of the backward pass is blamed.
    """
    source = blamed(trace)
    if source is None:
        return origin_of_buffer(trace)
    if (masked := masked_logits(trace, source)) is not None:
        return origin_at(trace, Source(masked.index, source.how), "masked_logits", MASKED + inf_origin(trace, masked))
    return origin_at(trace, source, *reason_of(trace, source))


def origin_at(trace: Trace, source: Source, why: str, reason: str) -> Origin:
    """Returns the origin at the source's operation, for this reason, with the magnitudes that led up to it."""
    record = trace.records[source.record]
    finding = record.finding if source.how in ACCIDENTS else None
    return replace(origin_of_record(record, source.how, why, reason, finding), chain=chain(trace, record))


def origin_of_record(record: OpRecord, how: str, why: str, reason: str, finding: Finding | None) -> Origin:
    """Returns the origin at an operation, without what led up to it; `finding` is None if its arithmetic is unknown."""
    bad = next((v for v in record.outputs if not v.finite), next((v for v in record.inputs if not v.finite), None))
    return Origin(
        module=record.module,
        op=record.op,
        direction=record.direction,
        source=record.source,
        called_from=record.called_from,
        node=record.node,
        dtype=(bad or record.outputs[0]).dtype,
        inputs=record.inputs,
        outputs=record.outputs,
        how=how,
        why=why,
        reason=reason,
        should_have_been=None if finding is None else finding.should_have_been,
        in_fp32=None if finding is None else finding.in_fp32,
        chain=(),
        index=record.index,
    )


def masked_logits(trace: Trace, source: Source) -> OpRecord | None:
    """Returns the log-softmax that turned masked logits, -Inf on purpose, into a loss of Inf; None if there is none."""
    if source.how not in ("written", "given") or not any(end.loss and source in end.sources for end in trace.ends):
        return None
    among = [record for record in trace.records[source.record :] if source in record.sources]
    among = [r for r in among if r.op == "aten._log_softmax" and r.direction == "forward" and not r.outputs[0].nan]
    return among[0] if among else None


def origin_of_buffer(trace: Trace) -> Origin | None:
    """Returns the operation that damaged a buffer, if loss and gradients are finite; None if there is none."""
    if not trace.buffer_ends:
        return None
    end = trace.buffer_ends[0]
    accidents = [source for source in end.sources if source.how in ACCIDENTS]
    reached = (
        f"it left {'NaN' if math.isnan(end.absmax) else f'values up to {end.absmax:.4g}'} in the buffer {end.name}"
    )
    if not accidents:
        source = min(end.sources, key=lambda source: source.record, default=Source(end.record, "written"))
        return origin_at(trace, source, "buffer", reached)
    source = min(accidents, key=lambda source: source.record)
    why, reason = reason_of(trace, source)
    return origin_at(trace, source, why, f"{reason}; {reached}")


def blamed(trace: Trace) -> Source | None:
    """Returns the source to blame in the first micro-batch with a non-finite loss or gradient, or None."""
    ends = [end for end in trace.ends if end.part == trace.ends[0].part]
    ends = [end for end in ends if end.loss] or ends
    reached = frozenset[Source]().union(*(end.sources for end in ends))
    backward = [record for record in trace.records if record.direction == "backward"]
    if not reached and not backward:
        reached = trace.last
    if not reached and not trace.saw_leaves:
        reached = frozenset(Source(record.index, record.how) for record in backward if record.how in ACCIDENTS)
    return min(reached, key=lambda source: (BLAME_ORDER[source.how], source.record)) if reached else None


def reason_of(trace: Trace, source: Source) -> tuple[str, str]:
    """Returns the key and the reason."""
    record = trace.records[source.record]
    if source.how in ACCIDENTS:
        finding = record.finding
        why, reason = (
            ("unknown", "its arithmetic was not analysed") if finding is None else (finding.why, finding.reason)
        )
        if why == "zero_over_zero" and is_mean(trace, record):
            return "mean_of_nothing", f"a sum over 0 items divided by their number: {reason}"
        return why, reason + inf_origin(trace, record)
    if source.how == "given":
        return "given", "it read data, weights or buffers that were non-finite before the step began"
    if source.how == "unwritten":
        return "unwritten", "it allocated memory (torch.empty) that was read before anything was written to it"
    return "written", "it wrote Inf or NaN as a constant, which reached the loss or a gradient"


def is_mean(trace: Trace, record: OpRecord) -> bool:
    """Whether a division divides a sum by the number of its items, as a mean over a mask does."""
    if record.direction != "forward" or len(record.writers) != 2:
        return False
    of_values, of_mask = (written_by(trace, writer) for writer in record.writers)
    if of_values is None or of_mask is None or {of_values.op, of_mask.op} != {"aten.sum"}:
        return False
    (maker,) = of_mask.writers  # None for a mask that is data
    read = [of_mask, *([] if maker is None else [trace.records[maker]])]
    return maker is None or any("float" not in each.inputs[0].dtype for each in read if each.inputs)


def written_by(trace: Trace, writer: int | None) -> OpRecord | None:
    """Returns the record that wrote a tensor, before casts and changes of shape; None if no record did."""
    while writer is not None and trace.records[writer].op in SAME_VALUES:
        writer = trace.records[writer].writers[0]
    return None if writer is None else trace.records[writer]


def inf_origin(trace: Trace, record: OpRecord) -> str:
    """Describes where an Inf came from, if the operation turned it into NaN."""
    if not record.sources:
        return ""
    if record.index in trace.filled and record.finding is not None and record.finding.why == "masked_row":
        writer = trace.records[trace.filled[record.index]]
        return f"; {writer.op} at {writer.source} completed the row"
    first = min(record.sources)
    if first.how == "written":
        writer = trace.records[first.record]
        return f"; the Inf was written as a constant by {writer.op} at {writer.source}"
    return "; the Inf was there before the step began" if first.how == "given" else ""


def chain(trace: Trace, origin: OpRecord) -> tuple[Link, ...]:
    """Returns the magnitudes that led up to the origin in its micro-batch: the parts' outputs, then their gradients."""
    among = blocks(trace.model)
    here = [r for r in trace.records[: origin.index + 1] if r.part == origin.part and not r.recomputed]
    forward = [record for record in here if record.direction == "forward"]
    backward = [record for record in here if record.direction == "backward"]
    return links(forward, among, last_output) + links(backward, among, largest_output)


def links(
    records: Sequence[OpRecord], among: dict[str, nn.Module], chosen: Callable[[list[Values]], Values]
) -> tuple[Link, ...]:
    """One link for each part of the model, in the order in which the parts finish."""
    found: dict[str, tuple[str, list[Values]]] = {}
    for record in records:
        name = place(record.module, among)
        values = [value for value in record.outputs[:1] if value.absmax is not None]
        before_the_model = name == OUTSIDE_MODEL and not found and record.direction == "forward"
        if name and values and not before_the_model:
            found[name] = (record.direction, [*found.pop(name, ("", []))[1], *values])
    return tuple(
        Link(name, direction, chosen(values).dtype, chosen(values).absmax or 0.0)
        for name, (direction, values) in found.items()
    )


def last_output(values: list[Values]) -> Values:
    """The last one: the output of a part's last operation is the part's output."""
    return values[-1]


def largest_output(values: list[Values]) -> Values:
    """The largest one; non-finite values come first."""
    return max(values, key=lambda value: (not value.finite, value.absmax or 0.0))
