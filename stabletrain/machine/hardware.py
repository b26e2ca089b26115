"""What the machine is and can do: device, card, threads, and whether bf16 and TF32 are real here."""

import os
import platform
from functools import cache

import torch

from stabletrain.errors import ConfigError


def pick(wanted: str) -> torch.device:
    """The device for `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ConfigError: it is not there, or no device is called so.
    """
    if wanted == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, index = wanted.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError(f"device={wanted} is not a device: use auto, cpu, cuda or cuda:0")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise ConfigError(f"device={wanted}: this machine has {count} CUDA devices; use device=auto or device=cpu")
    return torch.device("cuda", int(index or 0))


@cache
def cpu_flags() -> frozenset[str]:
    """The CPU's feature flags as Linux names them; empty elsewhere."""
    try:
        with open("/proc/cpuinfo") as lines:
            return frozenset(next(line for line in lines if line.startswith("flags")).split(":")[1].split())
    except (OSError, StopIteration):
        return frozenset()


def has_bf16(device: torch.device) -> bool:
    """Whether bf16 arithmetic is in the hardware: compute capability >= 8.0, or AVX512-BF16 or AMX on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool({"avx512_bf16", "amx_bf16"} & cpu_flags())


def has_tf32(device: torch.device) -> bool:
    """Whether the device has TF32: NVIDIA's compute capability >= 8.0."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def bf16_reason(device: torch.device) -> str:
    """One line on why `has_bf16` says what it says."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        verdict = "has bf16" if has_bf16(device) else "has no bf16"
        return f"{name(device)} (compute capability {major}.{minor}) {verdict}"
    if "amx_bf16" in cpu_flags():
        return "this CPU has AMX"
    return "this CPU has AVX512-BF16" if has_bf16(device) else "this CPU has no bf16 instructions"


def name(device: torch.device) -> str:
    """The card's product name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def threads() -> str:
    """`2 threads`: how many PyTorch computes with on the CPU."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"


def describe(device: torch.device) -> dict:
    """What `run.json` and W&B record of the machine: plain JSON values, memory in GiB."""
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
