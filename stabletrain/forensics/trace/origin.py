"""The origin: the first operation whose non-finite values reached the loss or a gradient, and what led up to it.

Of all sources in a trace those count that reached an end: the loss if it is not finite, else a gradient. An accident
comes before what was there on purpose, the earlier before the later: with a masked -Inf and a real overflow in one sum,
the overflow is to blame.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from stabletrain.forensics.trace.callers import OUTSIDE
from stabletrain.forensics.trace.recorder import ACCIDENTS, OpRecord, Source, Trace
from stabletrain.forensics.trace.values import Values
from stabletrain.monitors.module_groups import blocks, place

RANKS = {"producer": 0, "revealed": 0, "unwritten": 1, "written": 2, "given": 3}


class Link(NamedTuple):
    """How large the values of one part of the model were.

    Attributes:
        module: a block, or a part of the model outside of the blocks; `objective` outside of the model.
        direction: `forward`: of its output. `backward`: the largest of its gradients.
        dtype: of those values.
        absmax: their largest magnitude.
    """

    module: str
    direction: str
    dtype: str
    absmax: float


@dataclass(frozen=True)
class Origin:
    """The operation to blame.

    Attributes:
        module, op, direction, source: see `OpRecord`.
        node: the autograd node, of a backward operation.
        dtype: of the output that is not finite.
        inputs, outputs: of the operation.
        how: the kind of source, as `recorder.py` lists them.
        why: a key for rules: `overflow`, `log_of_zero`, ... (see `nonfinite_rules.py`); else the kind of source.
        reason: the arithmetic in words.
        should_have_been: absmax of the exact result; not finite if there is none, None if nobody could compute it.
        in_fp32: absmax of the result in fp32.
        chain: sizes through the model, in the order of computing, up to the operation.
        index: the operation's number in the trace.
    """

    module: str
    op: str
    direction: str
    source: str
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
        """What a diagnosis holds of it; a number that is not finite stays one."""
        simple = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {key: [values.as_dict() for values in simple[key]] for key in ("inputs", "outputs")}
        return simple | tensors | {"chain": [link._asdict() for link in self.chain]}


def find_origin(trace: Trace) -> Origin | None:
    """The operation to blame; None if loss and gradients are finite.

    A trace without a backward pass ends in its last output. Gradients that `torch.autograd.grad` hands out arrive
    nowhere; then the first accident of the backward pass is taken.
    """
    source = blamed(trace)
    if source is None:
        return None
    record = trace.records[source.record]
    why, reason = words(trace, source)
    finding = record.finding if source.how in ACCIDENTS else None
    bad = next((v for v in record.outputs if not v.finite), next((v for v in record.inputs if not v.finite), None))
    return Origin(
        module=record.module,
        op=record.op,
        direction=record.direction,
        source=record.source,
        node=record.node,
        dtype=(bad or record.outputs[0]).dtype,
        inputs=record.inputs,
        outputs=record.outputs,
        how=source.how,
        why=why,
        reason=reason,
        should_have_been=None if finding is None else finding.should_have_been,
        in_fp32=None if finding is None else finding.in_fp32,
        chain=chain(trace, record),
        index=record.index,
    )


def blamed(trace: Trace) -> Source | None:
    """The source to blame: of the loss if that is not finite, else of the gradients, in the first such micro-batch."""
    ends = [end for end in trace.ends if end.part == trace.ends[0].part]
    ends = [end for end in ends if end.loss] or ends
    reached = frozenset[Source]().union(*(end.sources for end in ends))
    backward = [record for record in trace.records if record.direction == "backward"]
    if not reached and not backward:
        reached = trace.last
    if not reached and not trace.saw_leaves:
        reached = frozenset(Source(record.index, record.how) for record in backward if record.how in ACCIDENTS)
    return min(reached, key=lambda source: (RANKS[source.how], source.record)) if reached else None


def words(trace: Trace, source: Source) -> tuple[str, str]:
    """Key and reason."""
    record = trace.records[source.record]
    if source.how in ACCIDENTS:
        finding = record.finding
        why, reason = (
            ("unknown", "its arithmetic was not looked into") if finding is None else (finding.why, finding.reason)
        )
        return why, reason + whence(trace, record)
    if source.how == "given":
        return "given", "it read values that were not finite before the step began: data, weights or buffers"
    if source.how == "unwritten":
        return "unwritten", "it made memory that nothing wrote to before it was read (torch.empty)"
    return "written", "it wrote Inf or NaN as a constant, and that reached the loss or a gradient"


def whence(trace: Trace, record: OpRecord) -> str:
    """Where the Inf came from that an operation made NaN of."""
    if not record.sources:
        return ""
    first = min(record.sources)
    if first.how == "written":
        writer = trace.records[first.record]
        return f"; the Inf was written as a constant by {writer.op} at {writer.source}"
    return "; the Inf was there before the step began" if first.how == "given" else ""


def chain(trace: Trace, origin: OpRecord) -> tuple[Link, ...]:
    """Sizes through the model in the origin's micro-batch: outputs block by block, then gradients, up to the origin."""
    among = blocks(trace.model)
    here = [r for r in trace.records[: origin.index + 1] if r.part == origin.part and not r.recomputed]
    forward = [record for record in here if record.direction == "forward"]
    backward = [record for record in here if record.direction == "backward"]

    def where(record: OpRecord) -> str:
        return place(record.module, among)

    return links(forward, where, last) + links(backward, where, largest)


def links(
    records: Sequence[OpRecord], where: Callable[[OpRecord], str], chosen: Callable[[list[Values]], Values]
) -> tuple[Link, ...]:
    """One link for each part of the model, in the order in which the parts end."""
    found: dict[str, tuple[str, list[Values]]] = {}
    for record in records:
        name = where(record)
        values = [value for value in record.outputs[:1] if value.absmax is not None]
        before_the_model = name == OUTSIDE and not found and record.direction == "forward"
        if name and values and not before_the_model:
            found[name] = (record.direction, [*found.pop(name, ("", []))[1], *values])
    return tuple(
        Link(name, direction, chosen(values).dtype, chosen(values).absmax or 0.0)
        for name, (direction, values) in found.items()
    )


def last(values: list[Values]) -> Values:
    """The last: a part's output is what its last operation gives."""
    return values[-1]


def largest(values: list[Values]) -> Values:
    """The largest; one that is not finite before all others."""
    return max(values, key=lambda value: (not value.finite, value.absmax or 0.0))
