"""Records every operation of an optimizer's step, and which parameter each belongs to.

Non-finite values are followed as in `recorder.py`. Each record also holds the parameters whose tensors it was computed
from, the zeros among its inputs, and its source code. An operation on a list of tensors (`_foreach_div_`,
`_fused_adamw_`) is run and recorded for each element of the list by itself.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stabletrain.forensics.trace.callers import StepCallers
from stabletrain.forensics.trace.recorder import Call, Source, Trace, arguments_before, tensors_modified, tensors_read
from stabletrain.forensics.trace.values import dense, is_float, leaves, measure, tensors, unscaled


class Label(NamedTuple):
    """A tensor that a step may write.

    `parameter`, `gradient` or the name of a moment, with the parameter's name; `buffer` with its name; or `attribute`,
    with the name of the optimizer's attribute that holds it.
    """

    what: str
    parameter: str


class Content(NamedTuple):
    """What an input or an output holds: number of elements, and of those that are exactly 0; its place in memory."""

    numel: int
    zeros: int
    place: int


@dataclass(frozen=True, slots=True)
class Detail:
    """More about an operation of an optimizer than an `OpRecord` holds.

    Attributes:
        text: its expression in the source code; empty if unknown.
        name: of the operation on one tensor, such as `div` for `aten._foreach_div_`.
        parameters: names of the parameters whose tensors it was computed from.
        numbers: its arguments that are Python numbers, in order.
        reads, writes: content of its inputs and outputs.
    """

    text: str
    name: str
    parameters: frozenset[str]
    numbers: tuple[float, ...]
    reads: tuple[Content, ...]
    writes: tuple[Content, ...]


class UpdateTrace(Trace):
    """Records the operations of an optimizer's step inside `with trace:`.

    Attributes:
        details: of each record, in the same order.
        labels: the known tensors, by place.
        fused: arguments of the first fused operation that made non-finite values, from before it ran; None if none did.
    """

    def __init__(self, model: nn.Module, known: Iterable[tuple[Tensor, Label]]) -> None:
        super().__init__(model)
        self._callers = self._step = StepCallers()
        self.details: list[Detail] = []
        self.labels: dict[int, Label] = {}
        self.fused: tuple[int, tuple, dict] | None = None
        self._spans: dict[int, list[tuple[int, int, int]]] = {}  # storage -> first and last byte, and place
        self._parameters: dict[int, frozenset[str]] = {}  # place -> what its values were computed from
        self._paused = False
        for tensor, label in known:
            self.label_before(tensor, label)

    def label_before(self, tensor: Tensor, label: Label) -> None:
        """Labels a tensor; many may share one storage, as gradients in the buckets of DDP do."""
        if not dense(tensor).numel():
            return
        key, (begin, end) = super()._place(tensor), byte_range(tensor)
        spans = self._spans.setdefault(key, [])
        place = next((p for b, e, p in spans if (b, e) == (begin, end)), -1 - len(self.labels))
        if place not in self.labels:
            spans.append((begin, end, place))
        self.labels.setdefault(place, label)

    def label_new(self, tensor: Tensor, label: Label) -> None:
        """Labels a tensor that the step has made, such as a moment."""
        self.labels.setdefault(self._place(tensor), label)

    def sources_of(self, tensor: Tensor) -> frozenset[Source]:
        """Returns where the non-finite values in a tensor began."""
        return self._from.get(self._place(tensor), frozenset())

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Records nothing inside."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs the operation, element by element if it takes lists, and records it."""
        kwargs = kwargs or {}
        if self._paused or getattr(func, "namespace", "") == "profiler":
            return func(*args, **kwargs)
        op = str(getattr(func, "overloadpacket", func))
        grad, results = torch.is_grad_enabled(), []
        parts = list_elements(op, args, kwargs)
        # One element at a time: the arguments that an operation modifies are copied to explain its result.
        for part_args, part_kwargs in parts or [(args, kwargs)]:
            results.append(self._run(func, op, grad, part_args, part_kwargs, listed=parts is not None))
        if parts is None:
            return results[0]
        return [each for result in results for each in result] if results[0] is not None else None

    def _run(self, func: Any, op: str, grad: bool, args: tuple, kwargs: dict, *, listed: bool) -> Any:
        """Runs and records one operation."""
        with torch.no_grad():
            single = single_op(op, args, kwargs) if listed else None
            named, one_args, one_kwargs = (func, args, kwargs) if single is None else single
            reads = tensors_read(named, op, one_args, one_kwargs)
            inputs = tuple(measure(tensor) for tensor in reads)
            contents = tuple(self._content(tensor) for tensor in reads)
            touched = {self._place(tensor) for tensor in tensors((one_args, one_kwargs))}
            before = arguments_before(named, one_args, one_kwargs)
            numbers = tuple(float(each) for each in scalars((one_args, one_kwargs)))
        out = func(*args, **kwargs)
        with torch.no_grad():
            writes = list(tensors(out)) or tensors_modified(func, args, kwargs)
            self._record(Call(named, op, grad, *before), reads, inputs, touched, writes)
            self._detail(op, contents, numbers, writes)
            bad = any(not values.finite for values in self.records[-1].outputs)
            if self.fused is None and bad and "_fused_" in op:
                self.fused = len(self.records) - 1, *before
        return out

    def _detail(self, op: str, reads: tuple[Content, ...], numbers: tuple[float, ...], writes: list[Tensor]) -> None:
        """Adds the details of the newest record, and the parameters that its outputs were computed from."""
        after = tuple(self._content(tensor) for tensor in writes)
        parameters = frozenset[str]().union(*(self._parameters_of(each.place) for each in (*reads, *after)))
        for each in after:
            self._parameters[each.place] = parameters
        name = op.rpartition(".")[2].removeprefix("_foreach_").rstrip("_")
        self.details.append(Detail(self._step.text, name, parameters, numbers, reads, after))

    def _parameters_of(self, place: int) -> frozenset[str]:
        """The parameters that the values at a place belong to: a parameter's own tensors belong to it alone."""
        if place in self.labels:
            return frozenset({self.labels[place].parameter})
        return self._parameters.get(place, frozenset())

    def _content(self, tensor: Tensor) -> Content:
        values = dense(unscaled(tensor))
        zeros = int((values == 0).sum()) if is_float(values) and values.dtype.itemsize > 1 else 0
        return Content(values.numel(), zeros, self._place(tensor))

    def _place(self, tensor: Tensor) -> int:
        """Identifies the known tensor that contains this one; otherwise this tensor's storage."""
        key = super()._place(tensor)
        if key not in self._spans:
            return key
        begin, end = byte_range(tensor)
        inside = [place for first, last, place in self._spans[key] if first <= begin and end <= last]
        return inside[0] if inside else key


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one behind its last."""
    values = dense(tensor)
    reach = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    begin, width = int(values.storage_offset()), values.element_size()
    return begin * width, (begin + (int(reach) + 1 if values.numel() else 0)) * width


def scalars(value: Any) -> Iterator[float]:
    """The Python numbers in arguments; booleans do not count."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, int | float) and not isinstance(leaf, bool))


def list_elements(op: str, args: tuple, kwargs: dict) -> list[tuple[tuple, dict]] | None:
    """The arguments for each element of an operation on lists of tensors; None if it is another operation."""
    lists = op.startswith(("aten._foreach_", "aten._fused_adam", "aten._fused_sgd", "aten._fused_adagrad"))
    first = args[0] if args else None
    if not isinstance(first, list | tuple):  # _foreach_pow of one number
        first = next((each for each in args if isinstance(each, list | tuple)), None)
    if not lists or not first:
        return None
    number = len(first)

    def at(index: int, value: Any) -> Any:
        fits = isinstance(value, list | tuple) and len(value) == number
        return value[index : index + 1] if fits else value

    return [
        (tuple(at(i, value) for value in args), {key: at(i, value) for key, value in kwargs.items()})
        for i in range(number)
    ]


def single_op(op: str, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict] | None:
    """The operation on one tensor that an operation on lists of one element equals; None if there is none."""
    name = op.rpartition(".")[2].removeprefix("_foreach_")
    name = {"norm": "linalg_vector_norm"}.get(name, name)
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not op.startswith("aten._foreach_"):
        return None
    flat = tuple(value[0] if isinstance(value, list | tuple) else value for value in args)
    named = {key: value[0] if isinstance(value, list | tuple) else value for key, value in kwargs.items()}
    if name.rstrip("_") in ("addcdiv", "addcmul") and len(flat) > 3:
        flat, named = flat[:3], {**named, "value": flat[3]}
    try:
        overload = torch._C._jit_resolve_packet(f"aten::{name}", *flat, **named)
        return getattr(packet, overload), flat, named
    except (RuntimeError, AttributeError):
        return None
