"""Free memory of the host: the machine's, or what a control group leaves of it."""

import math

import pytest
import torch

from stabletrain.machine.memory import free_host_memory, host_memory, within_memory

KIB = 1024


@pytest.fixture
def machine(tmp_path):
    """A machine with 1000 KiB available, whose process is in a control group; returns the two folders."""

    def made(cgroup, *, v1=False, **groups):
        proc, root = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable:   1000 kB\n")
        (proc / "self" / "cgroup").write_text(cgroup)
        for path, (limit, usage, cached) in groups.items():
            folder = root / ("memory" if v1 else "") / path.replace("_", "/")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
            (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{usage}\n")
            name = "total_inactive_file" if v1 else "inactive_file"
            (folder / "memory.stat").write_text(f"anon 5\n{name} {cached}\n")
        return proc, root

    return made


def test_without_a_limit_it_is_what_the_machine_has_available(machine):
    assert free_host_memory(*machine("0::/job\n", job=("max", 7, 0))) == 1000 * KIB


def test_a_limit_of_the_group_counts_and_its_cached_files_are_free(machine):
    assert free_host_memory(*machine("0::/job\n", job=(500, 450, 30))) == 80


def test_a_limit_of_an_outer_group_counts_too(machine):
    """As in Slurm, where the step's group has no limit and the job's has one."""
    folders = machine("0::/job/step\n", job=(500, 450, 0), job_step=("max", 10, 0))
    assert free_host_memory(*folders) == 50


def test_the_older_kind_of_control_group_is_read_as_well(machine):
    folders = machine("4:cpu,memory:/job\n1:pids:/other\n0::/\n", v1=True, job=(500, 450, 30))
    assert free_host_memory(*folders) == 80


def test_more_than_the_limit_leaves_nothing(machine):
    assert free_host_memory(*machine("0::/job\n", job=(500, 600, 0))) == 0


def test_the_memory_in_all_is_the_machines_or_the_least_limit(machine, monkeypatch):
    folders = machine("0::/job/step\n", job=(500, 450, 0), job_step=("max", 10, 0))
    assert host_memory(*folders) == 500
    assert host_memory(folders[0], folders[1] / "none") == 4000 * KIB
    monkeypatch.setattr("resource.getrlimit", lambda kind: (300, -1))
    assert host_memory(*folders) == 300


def test_without_any_of_these_files_nothing_is_known(tmp_path):
    assert free_host_memory(tmp_path, tmp_path) == math.inf


TOO_LITTLE = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: you tried to"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
]


@pytest.mark.parametrize("error", [*TOO_LITTLE, RuntimeError("a shape"), ValueError("out of memory")], ids=repr)
def test_only_too_little_memory_is_no_error(error):
    def act():
        raise error

    if error in TOO_LITTLE:
        assert within_memory(act) is None
    else:
        with pytest.raises(type(error)):
            within_memory(act)
    assert within_memory(lambda: 3) == 3


def test_what_this_machines_allocator_says_is_too_little_memory():
    assert within_memory(lambda: torch.empty(2**46)) is None
