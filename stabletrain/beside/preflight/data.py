"""The data: repeated batches, ranks with the same ones, constant, ignored or impossible targets, unscaled inputs.

Each check proves what it says by counts over an epoch, or over its first batches if it is long. Which of a batch's
tensors are targets is seen in a call of the loss (`tracing`).
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stabletrain.beside.preflight.finding import Finding, Verdict, listed
from stabletrain.beside.preflight.loop import Loop, Maker
from stabletrain.beside.preflight.tracing import BINARY, SHARES, Input, Pick, Traced, Use, tensors_of, trace

BATCHES, RANKS, UNKNOWN = 32, 4, 8
"""Most batches and ranks that are looked at, and how many batches if the length of an epoch is unknown."""

TRACED, LARGE = (8, 2), 10**6
"""Most batches of a rank with which the loss is called, for a model below LARGE parameters and for one above."""

MOST_VALUES = 2**27
"""Most numbers that are read of a rank's batches: half a GiB in fp32."""

CHANCE = 1e-6
"""What would be as rare as this by chance is not taken for chance."""

DISTINCT = 4
"""Rows in a batch from which on two equal batches are no accident, even if the data have some equal rows."""

MANY = 1024
"""Number of targets from which on one value for all is wrong, even if not the whole epoch was seen."""

FAR = 30
"""How far inputs are from zero mean and unit spread to be called a fault. Images in bytes are 100 or more, data that
are only not standardized, such as images between 0 and 1, are below 3."""

ENOUGH = 16
"""Fewest numbers of which mean and spread are judged."""

MARKS = 3
"""Equal numbers far from all others from which on they are no accident."""

DARK = 1 / 255
"""Spread of inputs that are called too small: that of images between 0 and 1 which were divided by 255 once more."""


@dataclass(frozen=True)
class Targets:
    """A tensor of the batch that holds targets.

    Attributes:
        name: its place in the batch, such as `batch[1]`.
        classes: number of classes; 0 if the targets are no class numbers.
        ignored: the class number that the loss leaves out; None if there is none.
        compared: whether predictions are compared with them alone; not so if another part of the loss has constant
            targets that it makes itself, as that of a GAN has, or if they are compared with a derivative.
        alone: whether the loss has no other targets; rows without these may be there for the others.
        one_hot: whether the loss makes them one-hot itself; then a label out of range raises no error.
        function: the loss function, if it is given something that is made of the tensor; else empty.
        line: of the user's code that passes them to the loss.
    """

    name: str
    classes: int = 0
    ignored: int | None = None
    compared: bool = True
    alone: bool = True
    one_hot: bool = False
    function: str = ""
    line: str = ""

    @property
    def words(self) -> str:
        """What they are called in a text."""
        return f"targets of {self.function}, made of {self.name}" if self.function else f"targets in {self.name}"


@dataclass
class Column:
    """Counts of one tensor of a rank's batches. A value that is ignored does not count.

    Attributes:
        ignored: see `Targets`.
        rows: number of rows.
        empty: rows of which all values are ignored.
        constant: rows of which all values are the same, by this value.
        total: number of values.
        labels: number of values by class; of integers only.
    """

    ignored: int | None = None
    rows: int = 0
    empty: int = 0
    constant: Counter[float] = field(default_factory=Counter)
    total: int = 0
    labels: Counter[int] = field(default_factory=Counter)

    @property
    def kept(self) -> int:
        """Number of class numbers that are not ignored."""
        return self.labels.total()

    @property
    def only(self) -> float | None:
        """The one value of all rows; None if there are several, or none."""
        [value, *others] = [*self.constant] or [None]
        return None if others or self.constant.total() + self.empty < self.rows else value

    def add(self, tensor: Tensor) -> None:
        """Adds a batch's tensor, `[rows, ...]`."""
        if tensor.is_complex() or not tensor.numel():
            return
        values = tensor.detach().reshape(len(tensor) if tensor.ndim else 1, -1)
        values = values if self.ignored is None else values.long()
        self.rows, self.total = self.rows + len(values), self.total + values.numel()
        low, high = values.amin(1), values.amax(1)
        if self.ignored is not None:
            kept = values != self.ignored
            bounds = torch.iinfo(values.dtype)
            low = values.masked_fill(~kept, bounds.max).amin(1)
            high = values.masked_fill(~kept, bounds.min).amax(1)
            self.empty += int((~kept.any(1)).sum())
            values = values[kept]
        self.constant.update([each + 0 for each in low[low == high].tolist()])  # -0.0 + 0 is 0.0
        if not values.is_floating_point() and values.dtype != torch.bool:
            self.labels.update(dict(zip(*(each.tolist() for each in values.unique(return_counts=True)), strict=True)))


@dataclass
class Shard:
    """What was seen of a rank's batches.

    Attributes:
        batches: of each a number that is equal if it has the same rows, in any order; and how many distinct rows and
            rows it has.
        rows: how often each row comes, by a number for it.
        overlaps: of each batch but the first, how many of its first rows are the last ones of the batch before, in
            their order.
        columns: by name of the tensor.
        integers: of each batch a number for each row's integers alone: labels, lengths, tokens; empty without any.
        floats: of the first batch the other numbers of each row, `[rows, numbers]`; None without any.
    """

    batches: list[tuple[int, int, int]] = field(default_factory=list)
    rows: Counter[int] = field(default_factory=Counter)
    overlaps: list[int] = field(default_factory=list)
    columns: dict[str, Column] = field(default_factory=dict)
    integers: list[list[int]] = field(default_factory=list)
    floats: Tensor | None = None

    @property
    def again(self) -> float:
        """Share of the rows that came before."""
        return 1 - len(self.rows) / self.rows.total() if self.rows else 0.0


def check(make: Maker) -> list[Finding]:
    """Checks the data of a loop."""
    loop = make()
    first = _batch(loop, 0, 0)
    size = sum(each.numel() for each in tensors_of(first).values())
    if not size:
        return [Finding("data", "not checked", "the batches hold no tensors")]
    ranks, line = min(max(loop.ranks, 1), RANKS), line_of(loop.batch)
    count = min(loop.epoch or UNKNOWN, BATCHES, max(MOST_VALUES // size, 2))
    whole = count == loop.epoch
    traced = trace(loop, first)
    picks = [*_of_picks(make, loop, traced, count), *_of_shares(make, loop, traced, count)]
    found = data_of(
        [_batches(loop, rank, count) for rank in range(ranks)],
        [each for use in traced.uses if (each := _targets(use, traced, first)) is not None],
        epoch=loop.epoch,
        line=line,
    )
    found = [*picks, *(each for each in found if not picks or each.verdict != "passed")]
    if traced.error is None:
        size = sum(each.numel() for each in loop.model.parameters())
        found += _of_made_targets(loop, traced, ranks, min(count, TRACED[size >= LARGE]), loop.epoch)
    elif not any(each.verdict == "fault" for each in found):  # such as for a label that is out of range
        error = traced.error
        found.append(Finding("data", "not checked", f"the loss failed with {type(error).__name__}: {error}"))
    found += [each for value in traced.inputs for each in of_input(value)]
    aims = {source for use in traced.uses for source in use.sources}
    given = {name: each for name, each in tensors_of(first).items() if name not in aims}
    found += [each for name, values in given.items() for each in of_marks(name, values, line)]
    wrong = any(each.verdict == "fault" for each in found)
    if not wrong and whole and count > 1 and key_of(_batch(loop, count, 0)) == key_of(first):
        text = f"the second epoch begins with the same batch as the first, after {count} batches: their order is fixed"
        fix = "shuffle in each epoch, with DistributedSampler by set_epoch(epoch)"
        found.append(Finding("data", "note", text, ("batch",), line, fix))
    return [each for each in found if each.verdict != "passed"] if wrong else found


def data_of(
    ranks: Sequence[Iterable[Any]], targets: Sequence[Targets] = (), epoch: int = 0, line: str = ""
) -> list[Finding]:
    """Checks batches that are given; calls no model, and changes nothing.

    Args:
        ranks: the first batches of each rank, in their order, at most of one epoch.
        targets: the batch's tensors that hold targets.
        epoch: number of batches after which the data begin anew; 0 if unknown.
        line: of the user's code that makes the batches.

    Returns:
        What is wrong or unusual; or that nothing was found.
    """
    shards = [_shard(batches, {each.name: each.ignored for each in targets}) for batches in ranks]
    whole = epoch > 0 and all(len(each.batches) >= epoch for each in shards)
    found = [*_repeated(shards, epoch, line), *_same_on_ranks(shards, line)]
    names = [name for name in shards[0].columns if all(name in shard.columns for shard in shards)] if shards else []
    by_name = {each.name: each for each in targets}
    for name in names:
        if name in by_name:
            found += of_targets([shard.columns[name] for shard in shards], by_name[name], whole)
    inputs = [name for name in names if name not in by_name]
    found += _of_inputs([[shard.columns[name] for name in inputs] for shard in shards], inputs, line)
    if not found:
        rows = sum(each.rows.total() for each in shards)
        batches = sum(len(each.batches) for each in shards)
        ranks = f", of {len(shards)} ranks" if len(shards) > 1 else ""
        text = f"{batches} batches with {rows} rows looked at{ranks}"
        found = [Finding("data", "passed", text)]
    return found


def _batch(loop: Loop, step: int, rank: int) -> Any:
    """Returns a batch; a loop of one rank may have a `batch` that takes only the step."""
    return loop.batch(step, rank) if loop.ranks > 1 else loop.batch(step)


def _batches(loop: Loop, rank: int, count: int) -> Generator[Any, None, None]:
    """Gives a rank's first batches."""
    for step in range(count):
        yield _batch(loop, step, rank)


def line_of(function: Callable[..., Any]) -> str:
    """Returns where a function is written, `file:line`; empty if that is not known."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


# ---- batches


def _shard(batches: Iterable[Any], ignored: dict[str, int | None]) -> Shard:
    """Reads a rank's batches."""
    shard = Shard()
    before: list[int] = []
    for batch in batches:
        rows = _rows(batch)
        if shard.batches:
            shard.overlaps.append(_overlap(before, rows) if rows else 0)
        before = rows
        tensors = [each for each in tensors_of(batch).values() if each.ndim and each.numel()]
        shard.integers.append(_rows([each for each in tensors if not each.is_floating_point()]))
        if not shard.batches:
            floats = [each.detach().float().cpu() for each in tensors if each.is_floating_point()]
            parts = [each.reshape(len(each), -1) for each in floats if len(each) == len(rows)]
            shard.floats = torch.cat(parts, 1) if parts else None
        shard.batches.append((hash(tuple(sorted(rows))), len(set(rows)), len(rows)))
        shard.rows.update(rows)
        for name, tensor in tensors_of(batch).items():
            if name not in shard.columns:
                shard.columns[name] = Column(ignored.get(name))
            shard.columns[name].add(tensor)
    return shard


def _rows(batch: Any) -> list[int]:
    """Returns a number for each row of a batch; equal rows have equal ones."""
    tensors = [each for each in tensors_of(batch).values() if each.ndim and each.numel()]
    if not tensors:
        return []
    parts = []
    for tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        if len(tensor) == len(tensors[0]):
            parts.append([row.tobytes() for row in tensor.reshape(len(tensor), -1).view(torch.uint8).numpy()])
    return [hash(row) for row in zip(*parts, strict=True)]


def _overlap(before: list[int], rows: list[int]) -> int:
    """Returns how many of a batch's first rows are the last ones of the batch before, in their order, and distinct."""
    for start, row in enumerate(before):
        count = len(before) - start
        if row == rows[0] and before[start:] == rows[:count]:
            return count if len({*rows[:count]}) == count else 0
    return 0


def key_of(batch: Any) -> int:
    """Returns a number that is equal for batches of the same rows, in any order."""
    return hash(tuple(sorted(_rows(batch))))


def _telling(batches: Sequence[tuple[int, int, int]], of: int) -> bool:
    """Whether equal batches are no accident: they have several distinct rows, or they are many of those seen."""
    if any(distinct >= DISTINCT and 2 * distinct > rows for _, distinct, rows in batches):
        return True
    return (
        len(batches) >= DISTINCT
        and 2 * len(batches) >= of
        and not all(rows > distinct for _, distinct, rows in batches)
    )


def _repeated(shards: list[Shard], epoch: int, line: str) -> list[Finding]:
    """Finds batches that come more than once within an epoch of a rank."""
    for rank, shard in enumerate(shards):
        first: dict[int, int] = {}
        again = []
        for step, (key, *_) in enumerate(shard.batches):
            if key in first:
                again.append((step, first[key]))
            first.setdefault(key, step)
        if not again or not _telling([shard.batches[step] for step, _ in again], len(shard.batches)):
            continue
        step, earlier = again[0]
        text = f"{len(again)} of {len(shard.batches)} batches within an epoch repeat an earlier one"
        text += f" (batch {step} has the rows of batch {earlier}"
        text += f", on rank {rank})" if len(shards) > 1 else ")"
        period = len(first)
        if not epoch and all(now - before == period for now, before in again[:period]) and again[0][0] == period:
            text = f"the data begin anew after {period} batches, or the first {period} come again and again"
            return [Finding("data", "note", text, ("batch",), line, "say in `epoch` after how many batches they do")]
        fix = "make one iterator per epoch (not `next(iter(loader))` in each step), and give each worker its own part"
        return [Finding("data", "fault", f"{text}: the data are not gone through", ("batch",), line, fix)]
    for rank, shard in enumerate(shards):
        # Several distinct rows in the same order, from each batch to the next, are no chance. The last may be shorter.
        rows = [rows for _, _, rows in shard.batches]
        if len(rows) < 3 or any(
            min(DISTINCT, size) > each for size, each in zip(rows[1:], shard.overlaps, strict=True)
        ):
            continue
        text = f"each batch begins with the last {shard.overlaps[0]} of the {rows[0]} rows of the one before"
        text += f", on rank {rank}: " if len(shards) > 1 else ": "
        text += f"{len(shard.rows)} distinct rows in the {sum(rows)} of {len(rows)} batches"
        # An epoch goes through each row once. Without epochs a window of the latest rows may be meant.
        fix = "begin each batch where the one before ends: rows[step * size : (step + 1) * size]"
        return [Finding("data", "fault" if epoch else "note", text, ("batch",), line, fix)]
    share = max((shard.again for shard in shards), default=0.0)
    if share >= 0.5:
        text = f"{share:.0%} of the rows come more than once within an epoch: few distinct rows, or repeated ones"
        return [Finding("data", "note", text, ("batch",), line, "check how rows are drawn")]
    return []


def _same_on_ranks(shards: list[Shard], line: str) -> list[Finding]:
    """Finds batches, or rows, that two ranks have both."""
    fix = "give each rank its own part: DistributedSampler(data, num_replicas=world_size, rank=rank), or data[rank::n]"
    for rank, shard in enumerate(shards):
        for other in range(rank):
            theirs = {key: step for step, (key, *_) in reversed([*enumerate(shards[other].batches)])}
            both = [(step, theirs[each[0]]) for step, each in enumerate(shard.batches) if each[0] in theirs]
            if both and _telling([shard.batches[step] for step, _ in both], len(shard.batches)):
                step, at = both[-1]
                text = f"{len(both)} of {len(shard.batches)} batches of rank {rank} are batches of rank {other} too"
                text += f" (its batch {step} is batch {at} there): the data are not divided among the ranks"
                return [Finding("data", "fault", text, ("batch", "rank"), line, fix)]
            # Rows that are drawn with replacement, or come twice in the data, come twice on one rank as well.
            shared = len(shard.rows.keys() & shards[other].rows.keys())
            share = shared / max(len(shard.rows), 1)
            if shared >= 2 * DISTINCT and share >= 0.25 and share > 10 * max(shard.again, shards[other].again):
                text = f"{shared} of {len(shard.rows)} rows of rank {rank} come on rank {other} too, though each comes"
                text += " once on a rank: the data are not divided among the ranks"
                return [Finding("data", "fault", text, ("batch", "rank"), line, fix)]
            if found := _same_integers(shard, shards[other]):
                verdict, count = found
                text = f"all {count} rows of rank {rank} have the integers (labels, lengths, tokens) of those of rank "
                text += f"{other} at the same place, and other numbers beside them"
                if verdict == "fault":
                    text += (
                        ", which are far nearer to those of that row than of any other: the data are not divided among "
                    )
                    text += "the ranks, and noise or an augmentation differs"
                return [Finding("data", verdict, text, ("batch", "rank"), line, fix)]
    return []


def _same_integers(one: Shard, two: Shard) -> tuple[Verdict, int] | None:
    """Says whether two ranks have rows with the same integers at the same places, and of how many rows; None if not.

    They may be meant, as other images of the same words. It is certain that rows are the same if most of their integers
    come once on a rank, and if their other numbers are at least twice as near to each other as to those of any other
    row: those of two rows of one class are not.
    """
    both = [*zip(one.integers, two.integers, strict=False)]
    if len(both) < 2 or any(not ours or ours != theirs for ours, theirs in both):
        return None
    # By chance a row has the integers of another row of its batch as often as two rows of a batch do, and if the order
    # is fixed, as that of classes may be, as often as rows at the same place of different batches.
    chance = 1.0
    for step, (ours, _) in enumerate(both):
        others = [other for at, (other, _) in enumerate(both) if at != step]
        pairs = [(a, b) for other in others for a, b in zip(ours, other, strict=False)]
        ordered = sum(a == b for a, b in pairs) / len(pairs) if pairs else 0.0
        mixed = sum(count**2 for count in Counter(ours).values()) / len(ours) ** 2
        chance *= max(ordered, mixed) ** len(ours)
    if chance >= CHANCE:
        return None
    count = sum(len(ours) for ours, _ in both)
    distinct = len({each for ours, _ in both for each in ours})
    certain = False
    if one.floats is not None and two.floats is not None and one.floats.shape == two.floats.shape:
        apart = torch.cdist(one.floats, two.floats)
        others = apart.clone().fill_diagonal_(math.inf).amin(1)
        certain = 2 * distinct > count and bool((2 * apart.diagonal() < others).all())
    return "fault" if certain else "note", count


def _of_inputs(columns: list[list[Column]], names: list[str], line: str) -> list[Finding]:
    """Finds inputs that are all 0, or that are constant on one rank: all of them, as a mask alone may well be."""
    if not names:
        return []
    fix = "look at where the batches are read and filled"
    if all(column.only == 0 for shard in columns for column in shard):
        return [Finding("data", "fault", f"all inputs ({listed(names)}) are 0", tuple(names), line, fix)]
    by_name = [_of_one_rank([shard[place] for shard in columns]) for place in range(len(names))]
    if not all(by_name):
        return []
    text = f"all values of the inputs ({listed(names)}) are {by_name[0]}"
    return [Finding("data", "fault", text, (*names, "rank"), line, fix)]


# ---- targets


def of_targets(columns: Sequence[Column], targets: Targets, whole: bool) -> list[Finding]:
    """Checks the targets of each rank.

    Args:
        columns: one for each rank.
        targets: what they are.
        whole: whether the columns hold an epoch.
    """
    place, line = (targets.name,), targets.line
    alone = _of_one_rank(columns)
    if alone:
        text = f"all {targets.words} are {alone}"
        fix = "check that each rank's part is read whole, and shuffle before it is divided"
        return [Finding("data", "fault", text, (*place, "rank"), line, fix)]
    if found := _of_labels(columns, targets, whole):
        return found
    total, rows = sum(each.total for each in columns), sum(each.rows for each in columns)
    empty = sum(each.empty for each in columns)
    value = columns[0].only
    if value is not None and all(each.only == value for each in columns) and total - empty >= 2 * DISTINCT:
        certain = targets.compared and (whole or total >= MANY)
        text = f"all of the {total} {targets.words} that count are {value:g}: there is nothing to learn from them"
        fix = "look at where the targets are read: a wrong column, an inverted mask, an integer division"
        return [Finding("data", "fault" if certain else "note", text, place, line, fix)]
    if targets.ignored is None or total < 2 * rows:  # labels of whole rows may be missing on purpose
        return []
    kept = sum(each.kept for each in columns)
    fix = "look at how the targets are masked, and at where long rows are cut off"
    text = f"{total - kept} of {total} {targets.words} are ignored"
    if 4 * empty >= 3 * rows:
        # Each such row is computed and gives no gradient: no mask is made for that.
        text += f" (ignore_index={targets.ignored}), and {empty} of {rows} rows have no target at all"
        return [Finding("data", "fault" if targets.alone else "note", text, place, line, fix)]
    return [Finding("data", "note", text, place, line, fix)] if 20 * kept < total else []


def _of_one_rank(columns: Sequence[Column]) -> str:
    """Describes a rank all of whose rows have one value, or none, where those of the other ranks have not; or empty."""
    for rank, column in enumerate(columns):
        others = [each for each in columns if each is not column]
        rows = sum(each.rows for each in others)
        if not rows or not column.rows:
            continue
        if column.empty == column.rows:
            same, telling, says = sum(each.empty for each in others), column.rows, "ignored"
        elif column.only is not None:
            same = sum(each.constant[column.only] + each.empty for each in others)
            telling, says = column.rows - column.empty, f"{column.only:g}"
        else:
            continue
        if (same / rows) ** telling < CHANCE:
            text = f"{says} on rank {rank}, in {column.rows} rows, but only in {same} of {rows} rows of the other"
            return f"{text} ranks: this rank's part of the data is missing, or was not mixed"
    return ""


def _of_labels(columns: Sequence[Column], targets: Targets, whole: bool) -> list[Finding]:
    """Finds labels that are no class, or shifted by one."""
    labels: Counter[int] = sum((each.labels for each in columns), Counter())
    classes, place, line = targets.classes, (targets.name,), targets.line
    if not classes or not labels:
        return []
    low, high = min(labels), max(labels)
    outside = sum(count for label, count in labels.items() if not 0 <= label < classes)
    text = f"labels ({targets.words}) are {low} to {high}, and the head has {classes} classes (0 to {classes - 1})"
    if outside:
        text += f": {outside} of {labels.total()} are out of range"
        if targets.one_hot:
            text += "; made one-hot, they are rows of 0 and have no loss"
        # A label beyond the last class may be one that is left out on purpose, but not if all labels are shifted.
        certain = not targets.one_hot or not labels[0]
        shift = "subtract 1 from the labels" if low >= 1 else "check the labels and the size of the head"
        return [Finding("data", "fault" if certain else "note", text, place, line, shift)]
    # Of classes that are all seen DISTINCT times or more, none is missing by chance. Tokens are not judged: the first
    # one of a vocabulary is often kept for padding, and the last ones for nothing.
    rows, total = sum(each.rows for each in columns), sum(each.total for each in columns)
    if not whole or total > rows or classes < 2:
        return []
    if not labels[0] and all(labels[label] >= DISTINCT for label in range(1, classes)) and targets.ignored != 0:
        text += ": no label is 0, and all others occur; they begin at 1, and the head has one class too many"
        return [Finding("data", "fault", text, place, line, "subtract 1 from the labels, and from the head's size")]
    ignored = sum(each.empty for each in columns)
    seen = all(labels[label] >= DISTINCT for label in range(classes - 1))
    if targets.ignored == -1 and not labels[classes - 1] and seen and ignored >= DISTINCT:
        text += f": no label is {classes - 1}, and {ignored} of {rows} are -1, which is ignored; they begin at -1"
        return [Finding("data", "fault", text, place, line, "do not subtract 1 from labels that begin at 0")]
    return []


def _targets(use: Use, traced: Traced, batch: Any) -> Targets | None:
    """Returns which tensor of the batch holds the targets of a loss; None if they are made from it in the loss."""
    if len(use.sources) != 1:
        return None
    given = tensors_of(batch)[use.sources[0]]
    one_hot = not use.raw and _one_hot_of(use, given)
    if not use.raw and not one_hot:
        return None
    ignored, alone = None if one_hot else use.ignored, len(traced.uses) == 1
    return Targets(use.sources[0], use.classes, ignored, _compared(use, traced), alone, one_hot, line=use.line)


def _compared(use: Use, traced: Traced) -> bool:
    """Whether predictions are compared with these targets, and with no constant ones that the loss makes itself."""
    made = [each.target for each in traced.uses if not each.sources and each.target.numel()]
    return use.predicts and not any(bool((each == each.flatten()[0]).all()) for each in made)


def _one_hot_of(use: Use, labels: Tensor) -> bool:
    """Whether targets are rows of 0 and a 1 where the label says."""
    target = use.target
    if (
        not use.classes
        or use.ignored is not None
        or target.ndim != 2
        or labels.is_floating_point()
        or labels.numel() != len(target)
    ):
        return False
    labels = labels.reshape(-1, 1)
    return bool(torch.equal(target != 0, labels == torch.arange(use.classes, device=labels.device)))


def _of_made_targets(loop: Loop, traced: Traced, ranks: int, count: int, epoch: int) -> list[Finding]:
    """Checks targets that the loss makes from the batch, such as the next tokens; calls it with a few batches."""
    made = [number for number, use in enumerate(traced.uses) if use.sources and not use.raw]
    first = _batch(loop, 0, 0)
    made = [each for each in made if _targets(traced.uses[each], traced, first) is None]
    columns = {each: [Column(traced.uses[each].ignored) for _ in range(ranks)] for each in made}
    for rank in range(ranks if made else 0):
        for step in range(count):
            batch = _batch(loop, step, rank)
            rows = len(next(each for each in tensors_of(batch).values() if each.ndim))
            uses = trace(loop, batch).uses
            for number in made:
                if number < len(uses):
                    target = uses[number].target
                    columns[number][rank].add(target.reshape(rows, -1) if target.numel() % rows == 0 else target)
    found = []
    for number in made:
        use = traced.uses[number]
        # Silence has no letters: rows without targets of a CTC loss may be meant.
        name, alone = listed([*use.sources]), len(traced.uses) == 1 and use.function != "ctc_loss"
        targets = Targets(name, use.classes, use.ignored, _compared(use, traced), alone, False, use.function, use.line)
        found += of_targets(columns[number], targets, whole=count == epoch)
    return found


# ---- targets that are shares


def _of_shares(make: Maker, loop: Loop, traced: Traced, count: int) -> list[Finding]:
    """Finds targets that are meant to be shares and are none, in the first batches of a rank."""
    if found := [*_of_binary(make, traced, _batch(loop, 0, 0)), *_of_sums(traced)]:
        return found
    names = {each.sources[0] for each in traced.uses if each.raw and each.function in BINARY}
    for step in range(1, count if names and traced.error is None else 0):
        batch = _batch(loop, step, 0)
        if any(bool(_no_share(each).any()) for name, each in tensors_of(batch).items() if name in names):
            return _of_binary(make, trace(make(), batch), batch)
    return []


def _no_share(values: Tensor) -> Tensor:
    """Returns which numbers are not in 0..1; rounding in bf16 is 0.004."""
    return (values < -0.01) | (values > 1.01)


def _of_binary(make: Maker, traced: Traced, batch: Any) -> list[Finding]:
    """Finds targets of a binary cross-entropy that are not in 0..1, in one batch."""
    wrong = [each for each in traced.uses if each.function in BINARY and each.sources and _no_share(each.target).any()]
    if not wrong:
        return []
    # The loss may leave them out by a mask: then it is the same if they are moved to the nearest number in 0..1.
    given, inside = trace(make(), batch), trace(make(), batch, bounded=True)
    fails = given.error is not None
    if fails == (inside.error is not None) and (fails or given.loss == inside.loss or math.isnan(inside.loss)):
        return []
    use, names = wrong[0], listed([*wrong[0].sources])
    low, high = float(use.target.min()), float(use.target.max())
    text = (
        f"targets of {use.function} ({names}) are {low:.4g} to {high:.4g}, and {int(_no_share(use.target).sum())} of "
    )
    text += f"{use.target.numel()} are not in 0 to 1: "
    text += "it fails" if fails else "the loss falls without end as predictions grow, right or wrong"
    fix = "make them 0 and 1: (targets + 1) / 2 for -1 and 1; divide bytes by 255"
    return [Finding("data", "fault", text, use.sources, use.line, fix)]


def _of_sums(traced: Traced) -> list[Finding]:
    """Finds targets that are shares of classes and have another sum than 1, which may be meant as weights."""
    for use in traced.uses:
        target = use.target
        if use.function not in SHARES or not use.sources or not target.is_floating_point() or not target.numel():
            continue
        if not bool((target >= 0).all()):  # logarithms, or weights such as advantages
            continue
        sums = [target.float().sum(dim) for dim in {min(1, target.ndim - 1), target.ndim - 1}]
        # Rows of 0 are left out. 1 % is rounding in bf16.
        off = [each[(each != 0) & ((each - 1).abs() > 0.01)] for each in sums]
        if target.ndim and all(each.numel() for each in off):
            text = f"targets of {use.function} ({listed([*use.sources])}) are shares of classes, and have the sum "
            text += f"{float(off[0].min()):.4g} to {float(off[0].max()):.4g} in {off[0].numel()} of {sums[0].numel()}"
            text += " places, not 1: each counts as much more or less in the loss"
            fix = "divide them by their sum, or use binary_cross_entropy_with_logits for labels that go together"
            return [Finding("data", "note", text, use.sources, use.line, fix)]
    return []


# ---- numbers that pick a place


def _of_picks(make: Maker, loop: Loop, traced: Traced, count: int) -> list[Finding]:
    """Finds class numbers and the like that are no place in what they pick from, in the first batches of a rank."""
    found = _of_picks_in(make, traced, _batch(loop, 0, 0))
    limits: dict[str, int] = {}
    for pick in traced.picks:
        if pick.raw:
            limits[pick.source] = min(pick.size, limits.get(pick.source, pick.size))
    if found or not limits or traced.error is not None:
        return found
    for step in range(1, count):
        batch = _batch(loop, step, 0)
        tensors = tensors_of(batch)
        if any(_outside(tensors[name], size) for name, size in limits.items() if name in tensors):
            return _of_picks_in(make, trace(make(), batch), batch)
    return []


def _outside(index: Tensor, size: int) -> bool:
    return bool(((index < 0) | (index >= size)).any())


def _of_picks_in(make: Maker, traced: Traced, batch: Any) -> list[Finding]:
    """Finds numbers that are no place, in one batch."""
    wrong = [each for each in traced.picks if _outside(each.index, each.size)]
    if wrong and traced.error is not None:
        last = wrong[-1]
        beyond = bool(((last.index < -last.size) | (last.index >= last.size)).any())
        # -1 is a place for some functions: then the error is another one.
        fails = beyond if last.function == "__getitem__" else last.function != "take_along_dim"
        return [_not_a_place(last, "fault", f"and {last.function} fails")] if fails else []
    if not wrong:
        return []
    # The loss may leave out by a mask what these numbers pick: then it is the same if they pick something else.
    loss, moved = trace(make(), batch).loss, trace(make(), batch, moved=True).loss
    if loss == moved or math.isnan(loss) or math.isnan(moved):
        return []
    pick = next((each for each in wrong if each.among_classes), wrong[0])
    # As a place in a sequence or a table, -1 may be meant: the last token, a row for what is unknown.
    return [_not_a_place(pick, "fault" if pick.among_classes else "note", "and are counted from the other end")]


def _not_a_place(pick: Pick, verdict: Verdict, does: str) -> Finding:
    """Says which numbers are no place."""
    outside = int(((pick.index < 0) | (pick.index >= pick.size)).sum())
    what = "labels" if pick.among_classes or pick.function == "one_hot" else "numbers"
    among = "classes" if what == "labels" else "rows"
    text = f"{what} ({pick.source}) are {int(pick.index.min())} to {int(pick.index.max())}, and pick from {pick.size} "
    text += f"{among} (0 to {pick.size - 1}): {outside} of {pick.index.numel()} are out of range, {does}"
    fix = "check how the numbers are made, and the size of the head or the table; leave out by a mask what has no label"
    return Finding("data", verdict, text, (pick.source,), pick.line, fix)


# ---- inputs


def of_input(given: Input) -> list[Finding]:
    """Checks the scale of what a layer with weights gets of the batch, which the weights may make up for."""
    value, weight = given.value.float(), given.weight.float()
    name = f"inputs ({listed([*given.sources])})"
    places = tuple(each for each in (*given.sources, given.module) if each)

    def fault(text: str, fix: str) -> list[Finding]:
        return [Finding("data", "fault", text, places, given.line, fix)]

    if not value.isfinite().all():
        return fault(f"{name} are not finite", "look for missing values in the data")
    columns, norms = _columns(value, weight, given.by_column)
    sizes = columns.square().mean(0).sqrt()
    if len(norms) == len(sizes) > 2:
        parts = sizes * norms
        largest = int(parts.argmax())
        usual = float(parts[parts > 0].median()) if bool(parts.any()) else 0.0
        if float(sizes[largest]) >= FAR and float(parts[largest]) > 100 * usual:
            column = columns[:, largest]
            text = f"column {largest} of the {name} has mean {float(column.mean()):.4g} and spread"
            text += f" {float(column.std(correction=0)):.4g}: the first layer sees {float(parts[largest] / usual):.0f}"
            text += " times more of it than of a usual column"
            return fault(text, "standardize it: subtract the mean, divide by the spread")
    used = value[value != 0]  # of sparse inputs most are 0
    if len(used) < ENOUGH:
        return []
    mean, spread, size = float(value.mean()), float(value.std(correction=0)), float(used.square().mean().sqrt())
    seen = float(weight.reshape(len(weight), -1).norm(dim=1).mean())  # what the layer makes of a size of 1
    text = f"{name} have mean {mean:.4g} and spread {spread:.4g}"
    if size >= FAR and size * seen >= FAR / 3:
        whole = bool((value == value.round()).all()) and float(value.min()) >= 0 and float(value.max()) <= 255
        if whole:
            return fault(f"{text}, as bytes have", "divide by 255, subtract the mean, divide by the spread")
        return fault(f"{text}, far from 0 and 1", "standardize them: subtract the mean, divide by the spread")
    if given.part:  # a few columns may be small or constant on purpose
        return []
    if 0 < FAR * spread < abs(mean):
        fix = "standardize them once, with the mean and spread of these numbers"
        return fault(f"{text}: nearly constant, {abs(mean) / spread:.0f} times the spread from 0", fix)
    if 0 < size < DARK and size * seen < 0.01:
        return fault(f"{text}: too small for the first layer", "divide by their own spread, once")
    return []


def of_marks(name: str, values: Tensor, line: str) -> list[Finding]:
    """Notes a number that comes again and again, far from all others: a mark of missing values.

    Args:
        name: of the batch's tensor.
        values: its values.
        line: of the user's code that makes the batches.
    """
    if not values.is_floating_point():
        return []
    values = values.detach().float().flatten()
    values = values[values.isfinite()]
    for mark in (values.min(), values.max()) if len(values) >= ENOUGH else ():
        others = values[values != mark]
        count = len(values) - len(others)
        if not MARKS <= count <= len(values) // 2:  # else it is the usual number
            continue
        # Its distance from the next number is many times what lies between all others.
        width, gap = float(others.max() - others.min()), float((others - mark).abs().min())
        if 0 < FAR * width < gap:
            text = f"{count} of {len(values)} numbers in {name} are {float(mark):g}, and all others are "
            text += f"{float(others.min()):.4g} to {float(others.max()):.4g}: if it marks missing values, means and "
            text += "spreads must leave it out, and the model must not take it for a number"
            fix = "replace it by the mean of the others, and give the model a column that says where values are missing"
            return [Finding("data", "note", text, (name,), line, fix)]
    return []


def _columns(value: Tensor, weight: Tensor, last: bool) -> tuple[Tensor, Tensor]:
    """Returns the input's columns (channels), `[values, columns]`, and the norm of the weights of each."""
    if last or value.ndim < 3:
        return value.reshape(-1, value.shape[-1]), weight.reshape(-1, weight.shape[-1]).norm(dim=0)
    return value.transpose(0, 1).flatten(1).T, weight.transpose(0, 1).flatten(1).norm(dim=1)
