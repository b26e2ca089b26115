"""The machine: device, threads, support for bf16 and TF32, peak memory, and model FLOPs utilization (MFU).

    MFU = units per second * FLOPs per unit / (peak FLOP/s of a GPU * GPUs)

FLOPs are those the model needs: three times the matrix products of a forward pass. For a decoder that is 6 N + 12 L d T
per token, with N the parameters of its matrices (PaLM, arXiv 2204.02311, appendix B). Recomputation, as in activation
checkpointing, is not counted. Peaks are the vendors' dense figures. If the peak is unknown, as on a CPU, there is no
MFU.
"""

import copy
import os
import platform
import re
import resource
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from stabletrain.errors import ConfigError, WrongCard
from stabletrain.machine import torch_builds


def choose_device(wanted: str, local_rank: int = 0, local_world_size: int = 1) -> torch.device:
    """Returns the device for `auto`, `cpu`, `cuda` or `cuda:N`. A GPU becomes this process's current one.

    `auto` and `cuda` mean the rank's own GPU, whose index is the local rank.

    Args:
        wanted: the key `device`.
        local_rank: the rank's number on its machine.
        local_world_size: number of ranks on this machine.

    Raises:
        ConfigError: the name is not a device, the machine does not have it, there are more ranks than GPUs, or
            PyTorch's build cannot run on it.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", wanted):
        raise ConfigError(f"device={wanted} is not a device: use auto, cpu, cuda or cuda:0")
    kind, _, index = wanted.partition(":")
    count = torch.cuda.device_count() if kind != "cpu" and torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not count):
        return torch.device("cpu")
    if int(index or 0) >= count:
        raise ConfigError(
            f"device={wanted}: this machine has {devices(count)}{visible_devices()}; use device=auto or device=cpu"
        )
    if local_world_size > count:
        raise ConfigError(f"device={wanted}: {too_many(local_world_size, count)}")
    device = torch.device("cuda", int(index or local_rank))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch says here in 20 lines what `check_build` says in one
        try:
            torch.cuda.set_device(device)
            capability = torch.cuda.get_device_capability(device)
        except RuntimeError as error:  # another process has it for itself, or the driver does not work
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"device={wanted}: CUDA cannot use {device} ({reason}); try device=cpu") from error
    check_build(wanted, device, capability)
    return device


def too_many(ranks: int, count: int) -> str:
    """Returns the message for more ranks on a machine than GPUs."""
    cards = f"{count} visible CUDA device{'s' if count > 1 else ''}{visible_devices()}"
    return (
        f"{ranks} ranks on this machine, but {cards}: each rank needs its own; use torchrun "
        f"--nproc_per_node={count}, or make all GPUs of the machine visible to every rank "
        "(with Slurm: one task per node, as slurm/job.sh does), or use device=cpu"
    )


def devices(count: int) -> str:
    """Returns a number of GPUs in words."""
    return f"{count} CUDA device{'' if count == 1 else 's'}"


def visible_devices() -> str:
    """Returns the environment variable that hides GPUs, in brackets; empty if it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"


def check_build(wanted: str, device: torch.device, capability: tuple[int, int]) -> None:
    """Raises WrongCard if PyTorch was not compiled for a GPU of this compute capability."""
    architectures = torch.cuda.get_arch_list()
    if not torch_builds.can_run(capability, architectures):
        reason = torch_builds.refusal(name(device), capability, architectures, torch.__version__)
        raise WrongCard(f"device={wanted}: {reason}")


@cache
def cpu_flags() -> frozenset[str]:
    """Returns the CPU's feature flags as Linux names them; empty on other systems."""
    try:
        with open("/proc/cpuinfo") as lines:
            return frozenset(next(line for line in lines if line.startswith("flags")).split(":")[1].split())
    except (OSError, StopIteration):
        return frozenset()


def has_bf16(device: torch.device) -> bool:
    """Returns whether bf16 is supported in hardware: compute capability >= 8.0, or AVX512-BF16 or AMX on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool({"avx512_bf16", "amx_bf16"} & cpu_flags())


def has_tf32(device: torch.device) -> bool:
    """Returns whether the device supports TF32: an NVIDIA GPU of compute capability >= 8.0."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def has_fp8(device: torch.device) -> bool:
    """Returns whether the device multiplies in fp8: an NVIDIA GPU of compute capability >= 8.9."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def fp8_reason(device: torch.device) -> str:
    """Returns one line with the reason for `has_fp8`'s answer."""
    if device.type != "cuda":
        return "a CPU has no fp8"
    return f"{card(device)} has {'' if has_fp8(device) else 'no '}fp8"


def bf16_reason(device: torch.device) -> str:
    """Returns one line with the reason for `has_bf16`'s answer."""
    if device.type == "cuda":
        return f"{card(device)} has {'' if has_bf16(device) else 'no '}bf16"
    if "amx_bf16" in cpu_flags():
        return "this CPU has AMX"
    return "this CPU has AVX512-BF16" if has_bf16(device) else "this CPU has no bf16 instructions"


def card(device: torch.device) -> str:
    """Returns the GPU's product name and compute capability."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{name(device)} (compute capability {major}.{minor})"


def name(device: torch.device) -> str:
    """Returns the GPU's product name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def threads() -> str:
    """Returns how many CPU threads PyTorch uses, e.g. `2 threads`."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"


def load_and_cores() -> tuple[float, int]:
    """Returns the load average of the last minute (0 if unknown), and the number of cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        return os.getloadavg()[0], cores
    except (AttributeError, OSError):  # Windows, and some containers
        return 0.0, cores


def device_memory(device: torch.device) -> int:
    """Returns the bytes of a card's memory; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def describe(device: torch.device) -> dict:
    """Returns what `run.json` and W&B record about the machine: plain JSON values, memory in GiB."""
    facts = {
        "device": str(device),
        "name": name(device),
        "host": platform.node(),
        "os": platform.platform(),
        "cpu": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_bf16": has_bf16(torch.device("cpu")),
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        facts |= {
            "memory_gib": round(card.total_memory / 2**30, 1),
            "capability": f"{card.major}.{card.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


PEAKS = {
    r"V100-SXM2-\d+GB$": {"fp32": 15.7, "half": 125.0},
    r"A100-SXM4-\d+GB$": {"fp32": 19.5, "tf32": 156.0, "half": 312.0},
    r"H100 80GB HBM3$": {"fp32": 67.0, "tf32": 494.5, "half": 989.0, "fp8": 1979.0},
    r"H200$": {"fp32": 67.0, "tf32": 494.5, "half": 989.0, "fp8": 1979.0},
}
"""Dense peak in TFLOP/s, by the end of PyTorch's name of the GPU. PCIe, NVL and MIG variants are not listed."""

PEAK_KINDS = {"fp32": "fp32", "tf32": "tf32", "fp16": "half", "bf16": "half", "bf16_params": "half", "fp8": "fp8"}
"""Which peak applies to each precision. A card without fp8 emulates it, and has no peak for it."""


def peak_flops(card: str, precision: str) -> float | None:
    """Returns the dense peak of a GPU in FLOP/s for an option of `precision`; None if unknown."""
    for name, peaks in PEAKS.items():
        if re.search(name, card):
            peak = peaks.get(PEAK_KINDS.get(precision, ""))
            return None if peak is None else peak * 1e12
    return None


def meta_copy(model: nn.Module) -> nn.Module:
    """Returns a copy of a model on the meta device: its forward pass gives shapes, and takes no memory or time."""
    memo: dict[int, Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        empty = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def flops_per_sample(model: nn.Module, inputs: Tensor) -> float | None:
    """Returns the training FLOPs of one sample: three times the products of its forward pass, as PyTorch counts them.

    Runs a copy of the model on the meta device, so nothing is computed. None if the model cannot run there.

    Args:
        model: whole, and not compiled; it is not modified.
        inputs: `[1, ...]`, a batch of one sample.
    """
    from torch.utils.flop_counter import FlopCounterMode

    try:
        model_copy = meta_copy(model).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model_copy(inputs.to("meta"))
    except Exception:  # a user's model may read values, or be impossible to copy
        return None
    return 3.0 * counter.get_total_flops() or None


@dataclass(frozen=True)
class Usage:
    """Memory and FLOPs that a run uses.

    Attributes:
        device: where the model lives.
        flops_per_unit: training FLOPs per token or image; None if unknown.
        peak: FLOP/s of all GPUs together; None if unknown.
    """

    device: torch.device
    flops_per_unit: float | None = None
    peak: float | None = None

    def facts(self, units: str) -> dict[str, float]:
        """Returns the known FLOPs for `run.json`; `units` is the plural, e.g. `tokens`."""
        if self.flops_per_unit is None or self.peak is None:
            return {}
        return {f"flops_per_{units.removesuffix('s')}": self.flops_per_unit, "peak_flops": self.peak}

    def metrics(self, rate: float) -> dict[str, float]:
        """Returns `memory/peak_gb` (1e9 bytes) and `throughput/mfu` (a fraction) at `rate` units per second."""
        found = {"memory/peak_gb": round(peak_bytes(self.device) / 1e9, 4)}
        if self.flops_per_unit is not None and self.peak is not None:
            found["throughput/mfu"] = rate * self.flops_per_unit / self.peak
        return found


def peak_bytes(device: torch.device) -> int:
    """Returns the peak memory since `reset_peak`: of tensors on a GPU; resident size of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError), open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux this includes the parent process's
    return highest if sys.platform == "darwin" else highest * 1024


def reset_peak(device: torch.device) -> None:
    """Resets the peak, so that each of several runs in one process has its own. On a CPU, only Linux can reset it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError), open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
