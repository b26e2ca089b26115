"""Says from PyTorch's flight recorder in which collective ranks wait, and which rank never came.

The recorder keeps the last 2000 collectives of a process. With NCCL, PyTorch writes them to a file of each rank when a
collective times out. A rank whose collective has failed, or whose device waits for a lost rank, writes them itself; for
gloo, nothing else does. The files lie in the run folder, and begin with `TORCH_FR_DUMP_TEMP_FILE`.

Format: `FlightRecorder.hpp` of PyTorch, versions 2.x of the dump, as pickle (PyTorch's own files) or as JSON.
"""

import atexit
import io
import json
import os
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from stabletrain.parallel.ranks import Ranks

FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables with the beginning of the files' names, the newer one first. PyTorch reads them when it writes."""

SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Variables with the number of collectives that are kept."""

DEFAULTS = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""Other variables of the recorder, and the values that it needs."""

KEPT = 2000
"""Number of collectives that a rank keeps, PyTorch's own default."""

FOLDER = "collectives"
"""Folder within the run folder."""

LATE = 1.0
"""Seconds after the first rank from which on a rank has come late."""

LARGEST = 1 << 28
"""Maximum size of a file in bytes; a larger one is not read."""


_CHOSEN: list[str] = []
"""The places that `record_to` has chosen itself, of the runs in this process."""


# ---- recording


def record_to(folder: Path, ranks: Ranks, *, cards: bool) -> None:
    """Lets PyTorch write the records of this process below the run folder, unless the user has set another place.

    Does nothing for one process. Removes this rank's files of an earlier start.

    Args:
        folder: the run folder.
        ranks: this process among those of the run.
        cards: whether NCCL connects the ranks, so that PyTorch may write files by itself.
    """
    if not ranks.distributed:
        return
    if not any(os.environ.get(name) for name in SIZE_VARIABLES):
        os.environ[SIZE_VARIABLES[0]] = str(KEPT)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if prefix() in ("", *_CHOSEN):
        _CHOSEN.append(f"{folder.resolve() / FOLDER}/start-{ranks.restarts + 1}-rank-")
        os.environ[FILE_VARIABLES[0]] = _CHOSEN[-1]
    with suppress(OSError):  # a record helps after a failure, and must not cause one
        if cards:
            Path(prefix()).parent.mkdir(parents=True, exist_ok=True)  # PyTorch does not create it
            if ranks.is_main:
                atexit.register(remove_if_empty)
        for file in files_of(ranks.rank):
            file.unlink(missing_ok=True)


def remove_if_empty() -> None:
    """Removes the records' folder if no rank has written any."""
    if (place := Path(prefix()).parent).name == FOLDER:
        with suppress(OSError):
            place.rmdir()


def prefix() -> str:
    """Returns the beginning of the files' names, to which the rank is added; empty if it is not set."""
    return next((value for name in FILE_VARIABLES if (value := os.environ.get(name))), "")


def files_of(rank: int) -> tuple[Path, Path]:
    """Returns the file that PyTorch writes for a rank, and the one that the rank writes itself."""
    return Path(f"{prefix()}{rank}"), Path(f"{prefix()}{rank}.json")


def has_timed_out(ranks: Ranks) -> bool:
    """Whether PyTorch has written the record of this rank, as it does when a collective of NCCL times out."""
    return bool(prefix()) and files_of(ranks.rank)[0].exists()


def write(ranks: Ranks) -> None:
    """Writes the record of this rank; nothing if there is none."""
    if not prefix():
        return
    with suppress(Exception):  # private functions of PyTorch, and a disk that may be full
        from torch._C import _distributed_c10d as functions
        from torch.distributed import distributed_c10d as c10d

        names = ("_dump_fr_trace", "_dump_nccl_trace")  # of gloo and of NCCL
        dumps = [loaded(vars(functions)[name]()) for name in names if name in vars(functions)]
        if not any(dump.get("entries") for dump in dumps):
            return
        # gloo's own record does not say which ranks form which group.
        known = {name: {"ranks": str(c10d.get_process_group_ranks(g))} for g, name in c10d._world.pg_names.items()}
        dumps.append({"pg_config": known})
        own = files_of(ranks.rank)[1]
        own.parent.mkdir(parents=True, exist_ok=True)
        part = own.with_suffix(".part")
        part.write_text(json.dumps(dumps))
        part.replace(own)


# ---- which module a collective belongs to


class Sharded(NamedTuple):
    """A group of parameters that FSDP gathers together.

    Attributes:
        name: its module's; empty for the model itself.
        size: elements of each rank's shard, with padding.
        shards: number of ranks that hold a part.
        gathered: what each rank contributes when the weights are gathered: elements, or bytes if some are gathered in
            another precision than others; `size` if None.
    """

    name: str
    size: int
    shards: int
    gathered: int | None = None


@dataclass(frozen=True)
class Names:
    """The modules of a model by the sizes of their collectives.

    Attributes:
        sharded: in the order in which the model uses them.
        parameters: names and numbers of elements of all whole parameters, in the model's order.
    """

    sharded: Sequence[Sharded] = ()
    parameters: Sequence[tuple[str, int]] = ()

    def of(self, entry: "Entry", before: Sequence["Entry"]) -> str:
        """Returns ` of <module>` for a collective; empty if its size fits none.

        Args:
            entry: the collective.
            before: those before it in its group, on the same rank, the oldest first.
        """
        found = [each for each in self.sharded if fits(entry, each)]
        if len(found) == 1:
            return f" of {found[0].name or 'the modules outside of blocks'}"
        if found:
            number = position(entry, before, found, self.sharded)
            if number is None:
                return f" of one of {found[0].name} to {found[-1].name}"
            return f" of {found[number].name}"
        return self.of_run(entry.size) if entry.operation == "all_reduce" else ""

    def of_run(self, size: int) -> str:
        """Returns the only run of parameters with together this many elements, as a bucket of DDP is; else empty."""
        ends, total, found = {0: 0}, 0, []
        for number, (_, count) in enumerate(self.parameters, 1):
            total += count
            if (first := ends.get(total - size)) is not None:
                found.append((self.parameters[first][0], self.parameters[number - 1][0]))
            ends[total] = number
        if len(found) != 1:
            return ""
        first, last = found[0]
        return f" of {first}" if first == last else f" of {first} to {last}"


_NAMES = [Names()]


def name_collectives(model: Any) -> None:
    """Remembers the names and sizes of a model's parameters, after it was sharded."""
    from torch.distributed.fsdp import FSDPModule

    from stabletrain.parallel.gathered import gathered_dtype
    from stabletrain.parallel.shards import shards_of

    modules = dict(model.named_modules())
    owners = [name for name, module in modules.items() if isinstance(module, FSDPModule)]
    shards: dict[str, list[tuple[int, Any]]] = {name: [] for name in owners}
    whole, ranks = [], 1
    for name, parameter in model.named_parameters():
        mine = [owner for owner in owners if not owner or name.startswith(f"{owner}.")]
        if not mine or not hasattr(parameter, "placements"):
            whole.append((name, parameter.numel()))
            continue
        ranks = shards_of(parameter)
        rows, *rest = parameter.shape or (1,)
        shards[max(mine, key=len)].append((-(-rows // ranks) * prod(rest), gathered_dtype(parameter)))
    _NAMES[0] = Names([sharded(name, own, ranks) for name, own in shards.items() if own], whole)


def sharded(name: str, shards: Sequence[tuple[int, Any]], ranks: int) -> Sharded:
    """Returns what FSDP gathers together, from sizes and dtypes of a rank's shards.

    FSDP sends shards of more than one dtype as bytes.
    """
    size = sum(count for count, _ in shards)
    if len({dtype for _, dtype in shards}) == 1:
        return Sharded(name, size, ranks, size)
    return Sharded(name, size, ranks, sum(count * dtype.itemsize for count, dtype in shards))


def fits(entry: "Entry", group: Sharded) -> bool:
    """Whether a collective may be the all-gather of a group's weights or the reduction of its gradients.

    Between the copies of HSDP, each rank's part of the gradients is reduced.
    """
    if entry.operation == "all_gather":
        return entry.size == (group.size if group.gathered is None else group.gathered)
    if entry.operation == "all_reduce" and entry.size == group.size:
        return True
    return entry.operation in ("reduce_scatter", "all_reduce") and entry.size == group.size * group.shards


def position(
    entry: "Entry", before: Sequence["Entry"], same: Sequence[Sharded], every: Sequence[Sharded]
) -> int | None:
    """Returns which of the modules of one size a collective belongs to, counted within its forward or backward pass.

    A model uses its blocks in order, and their gradients come in the opposite order. The recorded frames of Python say
    which pass it is. None if the count is not known.
    """
    root = next((each for each in every if not each.name), None)
    if entry.backward is None or root is None or root in same:
        return None
    gathers = [each for each in before if each.operation == "all_gather"]
    starts = [each.seq for each in gathers if fits(each, root) and each.backward is False]
    if not starts:
        return None
    forward = [each for each in gathers if fits(each, same[0]) and each.backward is False]
    if not entry.backward:
        number = sum(each.seq > starts[-1] for each in forward)
    else:
        if not forward:
            return None
        reduces = entry.operation != "all_gather"
        past = [each for each in before if each.seq > forward[-1].seq and each.backward and fits(each, same[0])]
        number = len(same) - 1 - sum((each.operation != "all_gather") == reduces for each in past)
    return number if 0 <= number < len(same) else None


# ---- reading


class Entry(NamedTuple):
    """One collective that a rank has recorded.

    Attributes:
        seq: its number within its group; the same on all ranks.
        operation: such as `all_gather`.
        size: number of elements that the rank contributes.
        state: `scheduled`, `started` or `completed`. gloo leaves it at `scheduled`.
        retired: whether it has ended, or failed.
        created: when it was called, in ns since 1970.
        backward: whether FSDP called it in the backward pass; None if the frames do not say.
    """

    seq: int
    operation: str
    size: int
    state: str
    retired: bool
    created: int
    backward: bool | None

    @property
    def done(self) -> bool:
        """Whether it has completed. One of gloo that has failed looks as if it had."""
        return self.state == "completed" or (self.state == "scheduled" and self.retired)


class Harmless(pickle.Unpickler):
    """Reads dicts, lists, strings and numbers, and refuses everything that would import or call something."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuses.

        Raises:
            pickle.UnpicklingError: always.
        """
        raise pickle.UnpicklingError(f"{module}.{name}")


def loaded(content: bytes) -> Any:
    """Returns the content of a record, pickled by PyTorch or in JSON.

    Raises:
        ValueError: it is neither, or is damaged.
    """
    try:
        return json.loads(content) if content[:1] in b"[{" else Harmless(io.BytesIO(content)).load()
    except Exception as error:  # damaged bytes raise errors of many kinds
        raise ValueError("no record of collectives") from error


Group = tuple[str, str]
"""Backend and name of a process group."""


@dataclass(frozen=True)
class Record:
    """What one rank has recorded.

    Attributes:
        entries: of each group, by number. Point-to-point messages are left out.
        members: of each group by its name, as far as they are known.
    """

    entries: Mapping[Group, Mapping[int, Entry]]
    members: Mapping[str, frozenset[int]]


def read(rank: int) -> Record | None:
    """Reads what a rank has recorded; None if it has written nothing that can be read."""
    dumps: list[Any] = []
    for file in files_of(rank):
        with suppress(OSError, ValueError):
            if file.stat().st_size <= LARGEST:
                content = loaded(file.read_bytes())
                contents = content if isinstance(content, list) else [content]
                dumps += [each for each in contents if isinstance(each, dict)]
    try:
        found = parsed(dumps)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):  # another version's format
        return None
    return found if found.entries else None


def parsed(dumps: Iterable[Mapping[str, Any]]) -> Record:
    """Returns the content of a rank's dumps.

    Raises:
        AttributeError, KeyError, TypeError, ValueError, IndexError: they have another form.
    """
    entries: dict[Group, dict[int, Entry]] = {}
    members: dict[str, frozenset[int]] = {}
    for dump in dumps:
        for name, config in dump.get("pg_config", {}).items():
            members[str(name)] = frozenset(map(int, config["ranks"].strip("[]").replace(",", " ").split()))
        for each in dump.get("entries", []):
            if each.get("is_p2p"):
                continue
            backend, _, operation = each["profiling_name"].rpartition(":")
            of_group = entries.setdefault((backend, str(each["process_group"][0])), {})
            size = sum(prod(map(int, shape)) for shape in each["input_sizes"])
            operation = operation.strip("_").removesuffix("_base").removesuffix("_into_tensor")
            seq, created = int(each["collective_seq_id"]), int(each["time_created_ns"])
            entry = Entry(seq, operation, size, each["state"], bool(each.get("retired")), created, passed(each))
            if of_group and seq < next(
                reversed(of_group)
            ):  # the recorder outlives a group: here a later one of this name begins
                of_group.clear()
            of_group.setdefault(entry.seq, entry)  # coalesced collectives have one number: the first stands for all
    return Record(entries, members)


def passed(entry: Mapping[str, Any]) -> bool | None:
    """Returns whether FSDP called a collective in the backward pass, from its frames; None if they do not say."""
    names = {str(frame["name"]) for frame in entry.get("frames", [])}
    if names & {"pre_backward", "_pre_backward", "post_backward", "_root_post_backward_final_callback"}:
        return True
    return False if names & {"pre_forward", "_pre_forward"} else None


# ---- what the records show


def explanation(ranks: Ranks, patience: float) -> str:
    """Says in one sentence in which collective ranks wait, and which never came; empty if the records do not show it.

    Waits up to `patience` seconds for the records of the other ranks.
    """
    if not prefix() or read(ranks.rank) is None:
        return ""
    records: dict[int, Record] = {}
    end = time.monotonic() + patience
    while True:
        for rank in range(ranks.world_size):
            if rank not in records and (record := read(rank)) is not None:
                records[rank] = record
        if len(records) == ranks.world_size or time.monotonic() >= end:
            break
        time.sleep(0.5)
    return explained(records, ranks.world_size, _NAMES[0])


class Stuck(NamedTuple):
    """A collective that does not complete.

    Attributes:
        group: its process group.
        seq: its number.
        waiting: the ranks that have called it.
        missing: the ranks of the group that have recorded others, but not this one.
        silent: the ranks of the group that have left no record.
    """

    group: Group
    seq: int
    waiting: list[int]
    missing: list[int]
    silent: list[int]


def explained(records: Mapping[int, Record], world_size: int, names: Names = Names()) -> str:
    """Says in one sentence what the records of all ranks show; empty if they show no collective that waits.

    Args:
        records: by rank; some may be missing.
        world_size: number of ranks.
        names: of the modules.
    """
    found = [each for each in (stuck(group, records, world_size) for group in groups(records)) if each is not None]
    if not found:
        return ""
    waits = {rank for each in found for rank in each.waiting}
    # If rank 5 never came to one collective because it waits in another, the other one is the cause.
    first = min(found, key=lambda each: (not each.missing, bool(waits & {*each.missing}), not each.silent))
    calls = {rank: call(records[rank], first.group, first.seq, names) for rank in first.waiting}
    kinds = {what: [rank for rank in first.waiting if calls[rank] == what] for what in dict.fromkeys(calls.values())}
    number = f"collective {first.seq}"
    where = " and ".join(f"{listed(some)} in {what}" for what, some in kinds.items())
    verb = "waits" if len(first.waiting) == 1 else "wait"
    if len(kinds) > 1:
        return f"the ranks do not agree on {number}: {where}"
    said = [f"{listed(first.waiting)} {verb} in {next(iter(kinds))} ({number})"]
    for rank in first.missing[:1]:
        last = last_of(records[rank], first.group)
        done = f": its last was {call(records[rank], first.group, last, names)} (collective {last})" if last else ""
        said.append(f"{listed(first.missing)} never came{done if len(first.missing) == 1 else ''}")
    if first.silent:
        said.append(f"{listed(first.silent)} {'has' if len(first.silent) == 1 else 'have'} left no record")
    began = {rank: records[rank].entries[first.group][first.seq].created / 1e9 for rank in first.waiting}
    late = [rank for rank in first.waiting if began[rank] - min(began.values()) > LATE]
    if late and first.group[0] == "gloo":
        rest = [rank for rank in first.waiting if rank not in late]
        seconds = max(began.values()) - min(began.values())
        said[0] = f"{listed(rest)} waited in {next(iter(kinds))} ({number})"
        said.insert(1, f"{listed(late)} came {seconds:.0f} s later")
    if len(said) == 1:
        said.append("all have come, so the connection between them has failed")
    return "; ".join(said)


def groups(records: Mapping[int, Record]) -> list[Group]:
    """Returns every process group in the records."""
    return [*dict.fromkeys(group for record in records.values() for group in record.entries)]


def stuck(group: Group, records: Mapping[int, Record], world_size: int) -> Stuck | None:
    """Returns the first collective of a group that does not complete; None if the records show none."""
    known = [record.members[group[1]] for record in records.values() if group[1] in record.members]
    everyone = range(world_size) if group[1] == "0" else ()  # the default group's name
    members = sorted({*everyone, *frozenset().union(*known), *(r for r in records if group in records[r].entries)})
    here = {rank: records[rank].entries.get(group, {}) for rank in members if rank in records}
    last = {rank: max(entries, default=0) for rank, entries in here.items()}
    silent = [rank for rank in members if rank not in records]
    open_ = [entry.seq for entries in here.values() for entry in entries.values() if not entry.done]
    if group[0] == "gloo":
        # A collective that has failed looks as if it were done. A rank writes its record when one has failed: its
        # newest one, of whichever group.
        open_ += [last[rank] for rank in here if newest(records[rank]) == (group, last[rank])]
    elif len({*last.values()}) > 1:  # the hosts run ahead of their devices: what is still open says more
        open_ = [seq for seq in open_ if seq <= min(last.values()) + 1]
    if not open_:
        return None
    seq = min(open_)
    waiting = [rank for rank, entries in here.items() if seq in entries]
    return Stuck(group, seq, waiting, [rank for rank in here if last[rank] < seq], silent)


def newest(record: Record) -> tuple[Group, int]:
    """Returns group and number of the collective that a rank called last over gloo."""
    calls = [
        (entry.created, group, seq)
        for group, entries in record.entries.items()
        if group[0] == "gloo"
        for seq, entry in entries.items()
    ]
    _, group, seq = max(calls)
    return group, seq


def last_of(record: Record, group: Group) -> int:
    """Returns the number of a rank's last collective in a group; 0 if there is none."""
    return max(record.entries.get(group, {}), default=0)


def call(record: Record, group: Group, seq: int, names: Names) -> str:
    """Returns what a rank called, such as `all_gather of blocks.7`."""
    entries = record.entries[group]
    before = [entries[number] for number in sorted(entries) if number < seq]
    return f"{entries[seq].operation}{names.of(entries[seq], before)}"


def listed(ranks: Sequence[int]) -> str:
    """Returns `rank 3`, or `ranks 0-4, 6`."""
    spans: list[list[int]] = [[ranks[0], ranks[0]]]
    for before, each in pairwise(ranks):
        if each == before + 1:
            spans[-1][1] = each
        else:
            spans.append([each, each])
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
