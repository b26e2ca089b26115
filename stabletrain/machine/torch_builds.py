"""Which GPUs a build of PyTorch can run on, and which build to install for the others. Does not import torch.

A build holds machine code for some compute capabilities (`sm_80`), and may hold intermediate code (PTX, `compute_90`).
Machine code runs on GPUs of the same major version whose minor version is not lower. The driver compiles PTX for every
newer GPU. Names that end in `a` are for exactly one capability. (NVIDIA, CUDA C++ Programming Guide, "Compute
Capabilities".)

| build, for x86 | compute capabilities |
|---|---|
| for CUDA 12.6, PyTorch 2.11 to 2.14 | 5.0, 6.0, 7.0 (V100), 7.5, 8.0, 8.6, 9.0 |
| all others since 2.11, the default build too | 7.5 (T4) and newer |

(pytorch/pytorch `RELEASE.md`; #172352 and #175253 for 2.11, #190385 for 2.15)
"""

import re
from collections.abc import Sequence

OLDEST_CAPABILITY = (5, 0)
"""The lowest compute capability in a build of PyTorch 2.11 or newer."""

DEFAULT_CAPABILITY = (7, 5)
"""The lowest compute capability in the default builds."""

LEGACY_PACKAGES = '"torch<2.15" torchvision --index-url https://download.pytorch.org/whl/cu126'
"""Arguments of `pip install` for GPUs below that: PyTorch 2.14 for CUDA 12.6."""

ARCHITECTURE = re.compile(r"(?P<kind>sm|compute)_(?P<major>\d+)(?P<minor>\d)(?P<suffix>[af]?)")


def can_run(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Returns whether a build can run on a GPU.

    Args:
        capability: the GPU's compute capability, such as `(7, 0)`.
        architectures: as `torch.cuda.get_arch_list` returns them. Without any known name the answer is True: builds for
            a CPU have none, and those for AMD have other names.
    """
    known = [found for each in architectures if (found := ARCHITECTURE.fullmatch(each))]
    return not known or any(covers(found, capability) for found in known)


def covers(found: re.Match, capability: tuple[int, int]) -> bool:
    """Returns whether the code for one architecture runs on a GPU."""
    built_for = int(found["major"]), int(found["minor"])
    if found["suffix"] == "a":
        return built_for == capability
    same_major = found["kind"] == "sm" or found["suffix"] == "f"
    return built_for <= capability and (built_for[0] == capability[0] or not same_major)


def install_command(capability: tuple[int, int]) -> str:
    """Returns the command that installs a build for a GPU; empty if there is none."""
    if capability < OLDEST_CAPABILITY:
        return ""
    packages = LEGACY_PACKAGES if capability < DEFAULT_CAPABILITY else "torch torchvision"
    return f"pip install --upgrade --force-reinstall {packages}"  # pip takes the same version for CUDA 13 as installed


def refusal(card: str, capability: tuple[int, int], architectures: Sequence[str], version: str) -> str:
    """Returns why a build cannot run on a GPU, and what to do.

    Args:
        card: the GPU's name.
        capability: its compute capability.
        architectures: those of the build.
        version: PyTorch's version, such as `2.15.0+cu130`.
    """
    major, minor = capability
    command = install_command(capability)
    fix = f"install a build that has it: {command}" if command else "no build of PyTorch 2.11 or newer has it"
    return (
        f"{card} has compute capability {major}.{minor}, which this PyTorch ({version}) is not compiled for: it has "
        f"{', '.join(architectures)}; {fix}; or train on the CPU with device=cpu"
    )
