"""This machine's GPU, and whether this build of PyTorch can run on it: a matrix product on the device.

    python benchmarks/card.py --device cuda

Exits with 1 if it cannot.
"""

import argparse
import sys

import torch

from stabletrain.errors import StabletrainError
from stabletrain.machine import hardware


def about(device: torch.device) -> str:
    """Returns one line: the GPU, its compute capability, and the capabilities that the build has code for."""
    if device.type != "cuda":
        return f"{hardware.name(device)}, torch {torch.__version__}"
    major, minor = torch.cuda.get_device_capability(device)
    built_for = ", ".join(torch.cuda.get_arch_list())
    return f"{hardware.name(device)}, capability {major}.{minor}; torch {torch.__version__} has code for {built_for}"


def product(device: torch.device) -> float:
    """Returns the sum of the elements of a product of two 64 x 64 matrices of ones, computed on the device: 64^3."""
    ones = torch.ones(64, 64, device=device)
    return float((ones @ ones).sum())


def main() -> None:
    """Prints the device, and computes on it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    asked = parser.parse_args()
    try:
        device = hardware.choose_device(asked.device)
        print(about(device))
        found = product(device)
    except (StabletrainError, RuntimeError) as error:
        sys.exit(f"card.py: {error}")
    if found != 64**3:
        sys.exit(f"card.py: a product of ones is {found:g}, not {64**3}: the card computes wrongly")


if __name__ == "__main__":
    main()
