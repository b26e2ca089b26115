"""Sources: where non-finite values begin, and whether that was an accident.

    producer   it read finite values, and wrote others
    revealed   it read an Inf that was no accident (a mask's, say) and made NaN of it: inf - inf, 0 * inf
    written    it was handed Inf or NaN as a constant: masked_fill(..., -inf), full, where, padding
    unwritten  it made memory that nothing has written to: empty
    given      it was the first to read what was not finite before the trace began: data, weights, a mask kept as buffer

The last three do no harm by themselves. Comparisons and isfinite have no floating-point output, so they are none; a
cast, a copy or a view of Inf has read it, so it is none either.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from stabletrain.forensics.values import Values, copy, leaves

UNWRITTEN = {
    f"aten.{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_")
}
"""They make memory and write nothing: what stands in it is no result."""

OVERWRITES = {"aten.copy_", "aten.fill_", "aten.zero_"}
"""They read nothing of their first argument, whatever stands in it."""

ACCIDENTS = ("producer", "revealed")


class Source(NamedTuple):
    """Where non-finite values began: the number of a record, and how."""

    record: int
    how: str


class Call(NamedTuple):
    """An operation as it was called.

    Attributes:
        func, op: the operation, and its name.
        grad: whether autograd was listening.
        args, kwargs: as they were before it ran.
    """

    func: Any
    op: str
    grad: bool
    args: tuple
    kwargs: dict

    @property
    def writes_in_place(self) -> bool:
        """Whether it writes into what it is given."""
        schema = getattr(self.func, "_schema", None)
        return schema is not None and schema.is_mutable


def beginning(call: Call, place: int, inputs: Sequence[Values], output: Values, sources: frozenset[Source]) -> str:
    """How non-finite values begin in output number `place`, as the module's docstring lists it; empty if they do not.

    Of attention only the result counts: the logsumexp beside it is -Inf for a row that is masked whole, and padding.
    """
    if "_attention" in call.op and "backward" not in call.op and place > 0:
        return "" if sources else "written"
    numbers = [value for value in leaves((call.args, call.kwargs)) if isinstance(value, float)]
    constants = [number for number in numbers if not math.isfinite(number)]
    nan_read = any(values.nan for values in inputs) or any(map(math.isnan, constants))
    if output.nan and not nan_read and all(source.how not in ACCIDENTS for source in sources):
        return "revealed" if sources or constants else "producer"
    if sources:
        return ""
    return "written" if constants else "producer"


def kept(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments as they are before the operation: what it writes in place is copied."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return args, kwargs
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    names = [argument.name for argument in schema.arguments]
    copied = tuple(copy(value) if write else value for value, write in zip(args, written, strict=False))
    by_name = dict(zip(names, written, strict=True))
    return copied, {name: copy(value) if by_name.get(name) else value for name, value in kwargs.items()}
