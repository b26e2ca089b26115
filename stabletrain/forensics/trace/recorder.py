"""Records every operation of a forward and backward pass, and follows non-finite values from their sources.

The record of an operation holds no tensors: only its module, its source line (for a backward operation, the line of
its forward operation), and the magnitudes of the values it read and wrote. Non-finite values are followed from tensor
to tensor by their storage, so the trace knows which sources reached the loss or a gradient.

A source is an operation where non-finite values begin, by accident or on purpose:

    producer   read finite values and wrote non-finite ones
    revealed   read an intended Inf, such as a mask, and produced NaN: inf - inf, 0 * inf
    written    wrote Inf or NaN as a constant: masked_fill(..., -inf), full, where, padding
    unwritten  allocated memory without writing to it: empty
    given      was the first to read values that were non-finite before the trace: data, weights, a mask in a buffer

The last three are harmless by themselves. Comparisons and isfinite have no floating-point output, so they are not
sources. A cast, copy or view of Inf has read it, so it is not a source either.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from stabletrain.buffers import is_huge, is_measured
from stabletrain.checkpoint.tree import map_tensors
from stabletrain.forensics.trace.arithmetic import Finding, explain_nonfinite
from stabletrain.forensics.trace.callers import Callers
from stabletrain.forensics.trace.values import (
    Values,
    is_float,
    leaves,
    local,
    measure,
    storage,
    tensors,
    unmeasured,
    whole,
)

UNWRITTEN = {
    f"aten.{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_")
}
"""Operations that allocate memory and write nothing: its content is not a result."""

CONSTANTS = {
    f"aten.{name}" for name in ("full", "full_like", "new_full", "scalar_tensor", "lift_fresh", "fill", "fill_")
}
"""Operations that write one number everywhere."""

OVERWRITES = {"aten.copy_", "aten.fill_", "aten.zero_"}
"""Operations that overwrite their first argument without reading it."""

ACCIDENTS = ("producer", "revealed")


class Source(NamedTuple):
    """Where non-finite values began: the index of a record, and the kind of source."""

    record: int
    how: str


class Call(NamedTuple):
    """An operation, its name, whether gradients were enabled, and its arguments from before it ran."""

    func: Any
    op: str
    grad: bool
    args: tuple
    kwargs: dict

    @property
    def writes_in_place(self) -> bool:
        """Whether it modifies an argument."""
        schema = getattr(self.func, "_schema", None)
        return schema is not None and schema.is_mutable


def source_kind(call: Call, place: int, inputs: Sequence[Values], output: Values, sources: frozenset[Source]) -> str:
    """The kind of source for output number `place`, as listed in the module's docstring; empty if it is none."""
    # Besides the result, attention returns a logsumexp, which is -Inf for a fully masked row, and padding.
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


def arguments_before(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments before the operation runs; those that it modifies in place are copied."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return args, kwargs
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    names = [argument.name for argument in schema.arguments]

    def kept(value: Any, write: bool) -> Any:
        return map_tensors(lambda tensor: tensor.clone(), value) if write else value

    by_name = dict(zip(names, written, strict=True))
    copied = tuple(kept(value, write) for value, write in zip(args, written, strict=False))
    return copied, {name: kept(value, by_name.get(name, False)) for name, value in kwargs.items()}


def arguments(func: Any, args: tuple, kwargs: dict) -> list[tuple[Any, Any]]:
    """The arguments of an operation, each with its entry in the schema."""
    entries = getattr(getattr(func, "_schema", None), "arguments", [])
    values = {entry.name: value for entry, value in zip(entries, args, strict=False)} | kwargs
    return [(entry, values[entry.name]) for entry in entries if entry.name in values]


def tensors_modified(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that an operation modifies: in place, in a list (`_foreach_add_`), or as `out=`."""
    known = arguments(func, args, kwargs)
    return [*tensors([value for entry, value in known if entry.alias_info is not None and entry.alias_info.is_write])]


def tensors_read(func: Any, op: str, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that an operation reads; not those that it only writes."""
    outs = {entry.name for entry, _ in arguments(func, args, kwargs) if entry.is_out}
    taken = args[1:] if op.replace("_foreach_", "") in OVERWRITES else args
    return list(tensors((taken, {key: value for key, value in kwargs.items() if key not in outs})))


MAX_EXPLAINED = 64
"""Maximum number of sources whose arithmetic is explained; only the first ones matter."""


class End(NamedTuple):
    """A non-finite loss or gradient: its micro-batch, whether it is the loss, and where its values began."""

    part: int
    loss: bool
    sources: frozenset[Source]


class BufferEnd(NamedTuple):
    """A buffer of the model that was finite before the pass and is not any more, or holds huge values.

    Attributes:
        name, dtype, absmax: of the buffer.
        record: the first operation after which it was so.
        sources: where its non-finite values began; empty if the operation writes it without saying so (BatchNorm).
    """

    name: str
    dtype: str
    absmax: float
    record: int
    sources: frozenset[Source]


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One operation.

    Attributes:
        index: the operation's number in the trace.
        module: dotted path in the model; empty for the model itself, `objective` outside it.
        direction: `forward` or `backward`. Operations recomputed by activation checkpointing are forward.
        op: the operation's name without overload, such as `aten.exp`.
        node: the autograd node that runs it, such as `SqrtBackward0`; empty in the forward pass.
        source: `file:line` of the code that called it; a backward operation has the line of its forward operation.
        called_from: `file:line` in the user's own code, if `source` is in a library; else empty.
        inputs, outputs: tensors read and written, in order.
        writers: for each input, the record that wrote it last; None if it existed before the trace.
        how: the kind of source; empty if the operation is not a source.
        sources: where the non-finite values among its inputs began.
        finding: explains a non-finite result in numbers; set only for the sources `producer` and `revealed`.
        part: number of the micro-batch, from 0.
        recomputed: whether activation checkpointing recomputed it.
    """

    index: int
    module: str
    direction: str
    op: str
    node: str
    source: str
    called_from: str
    inputs: tuple[Values, ...]
    outputs: tuple[Values, ...]
    writers: tuple[int | None, ...]
    how: str
    sources: frozenset[Source]
    finding: Finding | None
    part: int
    recomputed: bool


class Trace(TorchDispatchMode):
    """Records the operations inside `with trace:`: forward, objective and `backward()` of one or more micro-batches.

    The trace modifies nothing itself, but the pass does: use a copy of the model. Gradients must come from
    `backward()`, which accumulates them in parameters.

    Attributes:
        model: the traced model; `OpRecord.module` names its modules.
        records: the operations, in order.
        ends: every non-finite loss and gradient, in order of computation.
        last: sources of the last floating-point output, which is the end if there is no backward pass.
        saw_leaves: whether a gradient reached a parameter.
        buffer_ends: buffers that the pass has damaged, in order of computation; known when the trace has ended.
        filled: for records that read a row of -Inf only, the record that completed it: a second mask, for example.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.records: list[OpRecord] = []
        self.ends: list[End] = []
        self.last = frozenset[Source]()
        self.saw_leaves = False
        self.buffer_ends: list[BufferEnd] = []
        self.filled: dict[int, int] = {}
        self._filled_rows: dict[int, int] = {}  # storage -> record that completed a row of -Inf in it
        self._finite_buffers: dict[str, Tensor] = {}  # buffers that are finite when the trace begins
        self._finite_places: dict[int, Tensor] = {}  # the same by storage
        self._damaged: dict[int, int] = {}  # storage -> first operation after which such a buffer was not finite
        self._callers = Callers(model)
        self._places: dict[int, StorageWeakRef] = {}  # keeps the numbers of storages unique after they are freed
        self._from: dict[int, frozenset[Source]] = {}  # storage -> sources of the non-finite values in it
        self._writers: dict[int, int] = {}  # storage -> last record that wrote to it
        self._part, self._in_backward, self._explained = 0, False, 0

    @property
    def accidents(self) -> list[OpRecord]:
        """The records of accidents (`producer`, `revealed`), whether or not their values reached an end."""
        return [record for record in self.records if record.how in ACCIDENTS]

    def __enter__(self) -> "Trace":
        """Begins the trace."""
        self._finite_buffers = {name: tensor for name, tensor in self.model.named_buffers() if is_finite_buffer(tensor)}
        self._finite_places = {self._place(tensor): tensor for tensor in self._finite_buffers.values()}
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
        """Ends the trace, and looks at the buffers."""
        result = super().__exit__(exc_type, exc_val, exc_tb)
        for name, tensor in self.model.named_buffers():
            if name not in self._finite_buffers or is_finite_buffer(tensor):
                continue
            key = self._place(tensor)
            record = self._damaged.get(key, self._writers.get(key))
            if record is not None:
                values = measure(tensor)
                size = math.nan if values.absmax is None else values.absmax
                self.buffer_ends.append(BufferEnd(name, values.dtype, size, record, self._from.get(key, frozenset())))
        self.buffer_ends.sort(key=lambda end: end.record)
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs the operation unchanged and records it."""
        kwargs, grad = kwargs or {}, torch.is_grad_enabled()
        op = str(getattr(func, "overloadpacket", func))
        # Measure the inputs first: the operation may write into them.
        with torch.no_grad():
            reads = tensors_read(func, op, args, kwargs)
            inputs = tuple(measure(tensor) for tensor in reads)
            touched = {self._place(tensor) for tensor in tensors((args, kwargs))}
            before = arguments_before(func, args, kwargs)
            filled = self._completed(reads, inputs)
        out = func(*args, **kwargs)
        with torch.no_grad():
            for key in touched & self._finite_places.keys():
                if not is_finite_buffer(self._finite_places[key]):
                    self._damaged.setdefault(key, len(self.records))
            writes = list(tensors(out)) or tensors_modified(func, args, kwargs)
            self._record(Call(func, op, grad, *before), reads, inputs, touched, writes)
            self._follow_rows(op, filled, writes)
        return out

    def _completed(self, reads: list[Tensor], inputs: tuple[Values, ...]) -> list[int | None]:
        """The records that completed the rows of -Inf in what an operation reads; None for one before the trace."""
        full = [self._place(each) for each, values in zip(reads, inputs, strict=True) if has_full_row(each, values)]
        return [self._filled_rows.get(key) for key in full if key in self._filled_rows or key not in self._writers]

    def _follow_rows(self, op: str, filled: list[int | None], writes: list[Tensor]) -> None:
        """Records which operation completed the rows of -Inf in what the newest operation wrote."""
        record = self.records[-1]
        completed = filled[0] if filled else record.index
        if completed is None or op in CONSTANTS:
            return
        if filled:
            self.filled[record.index] = completed
        for tensor, values in zip(writes, record.outputs, strict=True):
            if has_full_row(tensor, values):
                self._filled_rows[self._place(tensor)] = completed

    def _record(
        self, call: Call, reads: list[Tensor], inputs: tuple[Values, ...], touched: set[int], writes: list[Tensor]
    ) -> None:
        node, index = torch._C._current_autograd_node(), len(self.records)
        makes = call.grad and any(tensor.requires_grad for tensor in reads) and any(map(is_float, writes))
        caller = self._callers.of(node, reads, makes)
        if self._in_backward and node is None:  # the next micro-batch begins
            self._part += 1
        self._in_backward = node is not None
        keys = [self._place(tensor) for tensor in reads]
        writers = tuple(self._writers.get(key) for key in keys)
        sources = self._sources(call.op, index, keys, inputs)
        outputs = unmeasured(writes) if call.op in UNWRITTEN else tuple(measure(tensor) for tensor in writes)
        hows, finding = [source.how for source in sources if source.record == index], None
        for place, (tensor, values) in enumerate(zip(writes, outputs, strict=True)):
            how = self._follow(call, place, tensor, values, inputs, sources, touched)
            hows.append(how)
            if how in ACCIDENTS and finding is None and self._explained < MAX_EXPLAINED:
                self._explained += 1
                finding = explain_nonfinite(call.func, call.args, call.kwargs, place, tensor, node_name(node))
        if outputs and outputs[-1].absmax is not None:
            self.last = frozenset() if outputs[-1].finite else self._from[self._place(writes[-1])]
        self.saw_leaves |= caller.leaf
        if (caller.leaf or caller.seed) and sources:
            self.ends.append(End(self._part, caller.seed, sources))
        self.records.append(
            OpRecord(
                index=index,
                module=caller.place.module,
                direction="backward" if caller.backward else "forward",
                op=call.op,
                node=node_name(node) if caller.backward else "",
                source=caller.place.source,
                called_from=caller.place.called_from,
                inputs=inputs,
                outputs=outputs,
                writers=writers,
                how=next((how for how in reversed(hows) if how in ACCIDENTS), next(filter(None, reversed(hows)), "")),
                sources=sources,
                finding=finding,
                part=self._part,
                recomputed=caller.recomputed,
            )
        )

    def _place(self, tensor: Tensor) -> int:
        """Identifies the storage of a tensor."""
        key = storage(tensor)._cdata
        if key not in self._places:
            self._places[key] = StorageWeakRef(storage(tensor))
        return key

    def _sources(self, op: str, index: int, keys: list[int], inputs: tuple[Values, ...]) -> frozenset[Source]:
        """Where the non-finite inputs of an operation began; the operation itself if no record wrote them."""
        how = "written" if op == "aten.lift_fresh" else "given"  # torch.tensor(inf) calls lift_fresh
        found = frozenset[Source]()
        for key, values in zip(keys, inputs, strict=True):
            if not values.finite:
                found |= self._from.setdefault(key, frozenset({Source(index, how)}))
        return found

    def _follow(
        self,
        call: Call,
        place: int,
        tensor: Tensor,
        values: Values,
        inputs: tuple[Values, ...],
        sources: frozenset[Source],
        touched: set[int],
    ) -> str:
        """Records the new content of an output's storage; returns the kind of source, empty if none."""
        key, index = self._place(tensor), len(self.records)
        if key in touched and not call.writes_in_place:  # a view
            return ""
        self._writers[key] = index
        partly = key in touched and not whole(tensor)
        if call.op in UNWRITTEN:
            self._from[key] = frozenset({Source(index, "unwritten")})
            return "unwritten"
        if values.finite:
            if not partly:
                self._from.pop(key, None)
            return ""
        how = source_kind(call, place, inputs, values, sources)
        there = self._from.get(key, frozenset()) if partly else frozenset()
        self._from[key] = there | (frozenset({Source(index, how)}) if how else sources)
        return how


def has_full_row(tensor: Tensor, values: Values) -> bool:
    """Returns whether a row of the last dimension, with several entries, holds -Inf only."""
    if values.finite or tensor.layout != torch.strided or values.dtype.startswith("float8"):
        return False
    tensor = local(tensor)
    several = tensor.ndim > 0 and tensor.shape[-1] > 1 and tensor.is_floating_point()
    return several and bool(torch.isneginf(tensor).all(-1).any())


def is_finite_buffer(buffer: Tensor) -> bool:
    """Returns whether a buffer is judged by the guard and has only finite values that are not huge."""
    return is_measured(buffer) and not is_huge(buffer)


def node_name(node: Any) -> str:
    """The name of an autograd node; empty if None."""
    return "" if node is None else node.name()
