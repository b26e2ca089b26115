"""Says why an operation of an optimizer gave NaN or Inf, from the zero or the large value that it read back to a tensor
from before the step: a gradient, a moment or a parameter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from stabletrain.forensics.trace.arithmetic import DTYPE_NAMES
from stabletrain.forensics.trace.recorder import Source
from stabletrain.forensics.trace.update_recorder import Content, Label, UpdateTrace

READS_ZERO = ("zero_over_zero", "division_by_zero", "zero_to_negative_power", "log_of_zero")
"""Keys of `nonfinite_rules.py` whose operation read a 0."""

PRODUCTS = ("mul", "addcmul", "pow", "square")
LOWER_BOUNDS = ("clamp_min", "clamp", "maximum")

SECOND_MOMENTS = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "v", "vt", "nu", "sum", "second_moment", "moment2"}
"""Common names of second moments; and every name that begins with the first of them, or with `exp_avg_sq_`."""

FIRST_MOMENTS = {"exp_avg", "momentum_buffer", "m", "mu", "momentum"}

MAX_TRACED_BACK = 64
"""Maximum number of operations that are followed back."""


class Size(NamedTuple):
    """A tensor before the step: its numbers of elements, zeros, rows and rows of zeros, and its largest value."""

    numel: int
    zeros: int
    rows: int
    zero_rows: int
    largest: float


class Root(NamedTuple):
    """The tensor from before the step that the value to blame was computed from.

    Attributes:
        what: `parameter`, `gradient`, or the name of a moment.
        parameter: its parameter's name in the model.
        zeros: share of its elements that are exactly 0, in [0, 1].
        largest: magnitude of its largest element.
    """

    what: str
    parameter: str
    zeros: float
    largest: float


@dataclass(frozen=True)
class Reason:
    """Why a value is not finite: a key, words, and the tensor that it was computed from; None if unknown.

    Attributes:
        divisor: the source code of what is 0; empty if nothing is, or if it is unknown.
    """

    why: str
    words: str
    root: Root | None = None
    divisor: str = ""


@dataclass
class ZeroOrigin:
    """Where a 0 came from.

    Attributes:
        roots: tensors from before the step that are 0, with their zeros.
        eps: the number that was added to keep it from being 0, or the least value it was limited to; None if none was.
        dtype: in which it was added.
        lost: the tensor whose product is too small for its format, its largest value and the format; None if none is.
    """

    roots: list[tuple[Label, Content]]
    eps: float | None = None
    dtype: str = ""
    lost: tuple[Label | None, float, str] | None = None


def explain(trace: UpdateTrace, source: Source, before: Mapping[Label, Size]) -> Reason:
    """Explains a source of non-finite values; `before` measures the tensors from before the step."""
    record, detail = trace.records[source.record], trace.details[source.record]
    code = f"`{detail.text}`" if detail.text else record.op
    if source.how == "unwritten":
        return Reason("unwritten", f"{code} allocated memory that was read before anything was written to it")
    if from_outside(trace, source):
        return Reason("untraced", f"the values in {code} came from outside of PyTorch's operations, such as numpy")
    if source.how == "written":
        bad = [number for number in detail.numbers if not math.isfinite(number)]
        return Reason("constant", f"{code} computed with the number {bad[0] if bad else 'Inf or NaN'}")
    finding = record.finding
    if finding is None:
        return Reason("unknown", f"{code} gave values that are not finite")
    if finding.why in READS_ZERO:
        return explain_zero(trace, source.record, before)
    if finding.why in ("overflow", "exp_overflow"):
        return explain_overflow(trace, source.record, before)
    roots = ancestors(trace, source.record)
    computed_from = f", computed from {tensor_name(roots[0])}" if roots else ""
    return Reason(finding.why, f"{code}: {finding.reason}{computed_from}", root_of(roots[0], before) if roots else None)


def from_outside(trace: UpdateTrace, source: Source) -> bool:
    """Whether no operation on tensors made the values: numpy did, or other code that shares memory with tensors."""
    return source.how == "given" or trace.records[source.record].op == "aten.lift_fresh"


def explain_zero(trace: UpdateTrace, index: int, before: Mapping[Label, Size]) -> Reason:
    """Explains an operation that read a 0: a divisor, or the argument of a root or a logarithm."""
    record, detail = trace.records[index], trace.details[index]
    finding = record.finding
    assert finding is not None
    code = f"{finding.reason} in `{detail.text}`" if detail.text else finding.reason
    at = next((i for i in reversed(range(len(detail.reads))) if detail.reads[i].zeros), None)
    if at is None or (detail.name == "div" and len(detail.reads) == 1):
        return Reason("zero_number", f"{code}: the number that it divides by is 0")
    read, writer = detail.reads[at], record.writers[at]
    text = "" if writer is None else trace.details[writer].text
    label = trace.labels.get(read.place)
    name = tensor_name(label) if label is not None else f"`{text}`" if text else "its argument"
    zero = trace_zero(trace, writer, read)
    parts, why = [], finding.why
    if zero.eps is not None and zero.eps == 0:
        why, parts = "zero_eps", ["eps=0"]
    elif zero.eps is not None and float(torch.tensor(zero.eps, dtype=getattr(torch, zero.dtype))) == 0:
        why, parts = "lost_eps", [f"eps={zero.eps:g} is 0 in {dtype_name(zero.dtype)}"]
    roots = sorted(zero.roots, key=lambda root: order_of(root[0]))
    root = root_of(roots[0][0], before, roots[0][1]) if roots else None
    if zero.lost is not None:
        root = None if zero.lost[0] is None else root_of(zero.lost[0], before)
        parts.append(flushed_in_words(*zero.lost))
        why = why if why == "lost_eps" else "flushed"
    elif roots and (roots[0][0] != label or parts):
        parts.append(zeros_in_words(*roots[0], before))
    some = "" if read.zeros == read.numel else f" in {read.zeros} of {read.numel} values"
    because = f": {', and '.join(parts)}" if parts else ""
    return Reason(why, f"{code}: {name} is 0{some}{because}", root, "" if label is not None else text)


def trace_zero(trace: UpdateTrace, writer: int | None, content: Content) -> ZeroOrigin:
    """Follows a 0 back to where it came from."""
    zero, waiting, seen = ZeroOrigin([]), [(writer, content)], set[int]()
    while waiting and len(seen) < MAX_TRACED_BACK:
        index, read = waiting.pop(0)
        label = trace.labels.get(read.place)
        if index is None:
            if label is not None:
                zero.roots.append((label, read))
            continue
        if index in seen:
            continue
        seen.add(index)
        record, detail = trace.records[index], trace.details[index]
        added = detail.name in ("add", "sub", *LOWER_BOUNDS) and len(detail.reads) == 1 and detail.numbers
        if added and zero.eps is None and record.outputs:
            zero.eps, zero.dtype = detail.numbers[0], record.outputs[0].dtype
        factors = detail.reads[-2:] if detail.name == "addcmul" else detail.reads
        if detail.name in PRODUCTS and factors and not any(each.zeros for each in factors) and 0 not in detail.numbers:
            sizes = [values.absmax or 0.0 for values in record.inputs[-len(factors) :]]
            named = trace.labels.get(factors[-1].place) or next(iter(ancestors(trace, index)), None)
            zero.lost = named, max(sizes), record.outputs[0].dtype
            continue
        for writes, each in zip(record.writers, detail.reads, strict=True):
            if each.zeros:
                waiting.append((writes, each))
    return zero


def explain_overflow(trace: UpdateTrace, index: int, before: Mapping[Label, Size]) -> Reason:
    """Explains a result that is too large for its format."""
    record, detail = trace.records[index], trace.details[index]
    finding = record.finding
    assert finding is not None
    code = f" in `{detail.text}`" if detail.text else ""
    roots = ancestors(trace, index)
    root = root_of(roots[0], before) if roots else None
    factors = detail.reads[-2:]
    squared = (
        detail.name == "square"
        or (detail.name == "pow" and detail.numbers == (2,))
        or (detail.name in ("mul", "addcmul") and len(factors) == 2 and factors[0].place == factors[1].place)
    )
    sizes = [values.absmax for values in record.inputs[-len(factors) :] if values.absmax is not None]
    if not squared or not sizes or root is None:
        computed_from = f", computed from {tensor_name(roots[0])}" if roots else ""
        return Reason("overflow", f"{finding.reason}{code}{computed_from}", root)
    format_, dtype = dtype_name(record.outputs[0].dtype), getattr(torch, record.outputs[0].dtype)
    made = trace.labels.get(detail.writes[0].place)
    what = "a square" if made is None or made.what in ("gradient", "parameter") else tensor_name(made)
    whose = tensor_name(roots[0])
    largest = f"an element of {whose}, {max(sizes):.4g}, squared is above {torch.finfo(dtype).max:.4g}"
    return Reason("second_moment", f"{what} overflowed {format_}: {largest}{code}", root)


def ancestors(trace: UpdateTrace, index: int) -> list[Label]:
    """The tensors from before the step that an operation's inputs were computed from; gradients first."""
    found, seen, waiting = list[Label](), set[int](), [index]
    while waiting and len(seen) < MAX_TRACED_BACK:
        at = waiting.pop(0)
        if at in seen:
            continue
        seen.add(at)
        record, detail = trace.records[at], trace.details[at]
        for writer, read in zip(record.writers, detail.reads, strict=True):
            label = trace.labels.get(read.place)
            if writer is not None:
                waiting.append(writer)
            elif label is not None and label not in found:
                found.append(label)
    return sorted(found, key=order_of)


def order_of(label: Label) -> int:
    """Gradients come first: a moment is 0 because they are."""
    return {"gradient": 0, "parameter": 1}.get(label.what, 2)


def root_of(label: Label, before: Mapping[Label, Size], content: Content | None = None) -> Root:
    """Returns the known numbers of a tensor from before the step."""
    size = before.get(label)
    zeros, numel = (0, 1) if size is None else (size.zeros, size.numel)
    if content is not None and size is None:
        zeros, numel = content.zeros, content.numel
    return Root(label.what, label.parameter, zeros / max(numel, 1), math.nan if size is None else size.largest)


def zeros_in_words(label: Label, content: Content, before: Mapping[Label, Size]) -> str:
    """Says how much of a tensor is 0."""
    size = before.get(label) or Size(content.numel, content.zeros, 0, 0, math.nan)
    if size.zeros == size.numel:
        return f"{tensor_name(label)} is exactly zero"
    if size.zero_rows and size.zero_rows * (size.numel // size.rows) == size.zeros:
        be = "is" if size.zero_rows == 1 else "are"
        return f"{size.zero_rows} of {size.rows} rows of {tensor_name(label)} {be} exactly zero"
    be = "is" if size.zeros == 1 else "are"
    return f"{size.zeros} of {size.numel} elements of {tensor_name(label)} {be} exactly zero"


def flushed_in_words(label: Label | None, largest: float, dtype: str) -> str:
    """Says that a product is too small for its format."""
    least = torch.finfo(getattr(torch, dtype)).smallest_normal * torch.finfo(getattr(torch, dtype)).eps
    what = "a product of values" if label is None else f"a product of {tensor_name(label)}, whose values are"
    return f"{what} up to {largest:.4g}, is below the smallest {dtype_name(dtype)} number, {least:.3g}"


def tensor_name(label: Label) -> str:
    """Names a tensor."""
    what, of = label
    if what == "parameter":
        return of
    if what == "buffer":
        return f"buffer {of}"
    if what == "attribute":
        return f"the optimizer's {of}"
    if what == "gradient":
        return f"the gradient of {of}"
    if what in SECOND_MOMENTS or what.startswith("exp_avg_sq"):
        return f"the second moment ({what}) of {of}"
    return f"the first moment ({what}) of {of}" if what in FIRST_MOMENTS else f"'{what}' of {of}"


def dtype_name(dtype: str) -> str:
    """`fp16` for `float16`."""
    return DTYPE_NAMES.get(dtype, dtype)
