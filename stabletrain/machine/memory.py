"""Host memory, free and total, from the kernel and this process's control groups; and how running out is noticed."""

import math
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

CGROUPS = Path("/sys/fs/cgroup")
"""Where Linux mounts control groups."""

FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By version of control groups: the files of limit and usage, and the line of `memory.stat` with reclaimable bytes."""


def free_host_memory(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> float:
    """Returns how many bytes of host memory this process can still use; inf if unknown.

    This is the machine's available memory, or the rest of a control group's limit (Slurm, containers) if that is less.
    Other processes of the machine or the group may use the same bytes.
    """
    free = meminfo(proc, "MemAvailable")  # without swapping
    return min(free, *(free_in_group(folder, version) for folder, version in groups(proc, cgroups)), math.inf)


def host_memory(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> float:
    """Returns how many bytes of host memory this process could use if no other process used any; inf if unknown.

    This is the least of the machine's memory, the limits of its control groups, and its own (`ulimit -v`, `ulimit -d`).
    """
    own = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    limits = [float(limit) for limit in own if limit != resource.RLIM_INFINITY]
    return min(meminfo(proc, "MemTotal"), *limits, *(limit_of(*group) for group in groups(proc, cgroups)), math.inf)


def meminfo(proc: Path, name: str) -> float:
    """Returns an entry of `/proc/meminfo` in bytes; inf if unknown."""
    with suppress(OSError, StopIteration, ValueError):
        lines = (proc / "meminfo").read_text().splitlines()
        return 1024.0 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])
    return math.inf


def groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, int]]:
    """Yields the folders of this process's memory control groups, innermost first, each with its version."""
    with suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, version = (cgroups / "memory", 1) if controllers else (cgroups, 2)
            folder = root / path.lstrip("/")
            yield from ((each, version) for each in (folder, *folder.parents) if each.is_relative_to(root))


def limit_of(folder: Path, version: int) -> float:
    """Returns a control group's limit in bytes; inf if it has none."""
    with suppress(OSError, ValueError):  # the root group has no limit, and "max" is no number
        return float(int((folder / FILES[version][0]).read_text()))
    return math.inf


def free_in_group(folder: Path, version: int) -> float:
    """Returns the rest of a control group's limit, in bytes; inf without a limit."""
    _, usage, reclaimable = FILES[version]
    try:
        left = limit_of(folder, version) - int((folder / usage).read_text())
    except (OSError, ValueError):
        return math.inf
    with suppress(OSError, ValueError):  # cached files count as usage, but are dropped when memory is needed
        lines = (folder / "memory.stat").read_text().splitlines()
        left += sum(int(line.split()[1]) for line in lines if line.startswith(f"{reclaimable} "))
    return max(left, 0.0)


OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""Parts of the messages of errors that say that memory did not suffice, but have no class of their own."""


def within_memory(act: Callable[[], T]) -> T | None:
    """Returns the result of `act`; None if there was not enough memory for it, on the device or on the host."""
    try:
        return act()
    except (torch.OutOfMemoryError, MemoryError):
        return None
    except RuntimeError as error:  # of the CPU's allocator, of cuBLAS and cuDNN
        if any(part in str(error) for part in OUT_OF_MEMORY):
            return None
        raise
