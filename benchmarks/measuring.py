"""How the benchmarks measure: their command line, a clock that waits for the device, and where results go."""

import argparse
import contextlib
import json
import platform
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

from stabletrain.machine import hardware


def command_line(about: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that the benchmarks share; `rounds` is the default of `--rounds`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--precision", default="fp32,bf16", help="modes, separated by commas: fp32, tf32, bf16")
    parser.add_argument("--rounds", type=int, default=rounds, help="pairs")
    parser.add_argument(
        "--clock", default="wall", choices=["wall", "cpu"], help="cpu: this process's time, on a shared CPU"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser


def machine(device: torch.device) -> str:
    """What is measured on, in a line."""
    return f"{hardware.name(device)}, {hardware.threads()}, torch {torch.__version__}"


class Clock:
    """Times work on a device.

    Args:
        device: is waited for, where it does not work in step.
        kind: `wall`; or `cpu`, the time that this process had of the processor, for machines that others use as well.
    """

    def __init__(self, device: torch.device, kind: str = "wall") -> None:
        self._device, self._now = device, {"wall": time.perf_counter, "cpu": time.process_time}[kind]

    def seconds(self, work: Callable[[], object]) -> float:
        """How long `work` takes, until the device has done it."""
        start = self._now()
        work()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._now() - start


@contextlib.contextmanager
def most_memory(device: torch.device) -> Generator[list[int], None, None]:
    """Gives a list that holds, afterwards, the most bytes that were in use within: on a card by tensors, else by the
    process, where Linux counts them."""
    found: list[int] = []
    linux, card = Path("/proc/self/clear_refs"), device.type == "cuda"
    if card:
        torch.cuda.reset_peak_memory_stats(device)
    elif linux.exists():
        linux.write_text("5")
    yield found
    if card:
        found.append(torch.cuda.max_memory_allocated(device))
    elif linux.exists():
        lines = Path("/proc/self/status").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")]


def save(path: Path | None, device: torch.device, results: list[dict[str, Any]]) -> None:
    """Writes the results with what they were measured on, if a path was given."""
    if path:
        about = {**hardware.describe(device), "host": platform.machine(), "torch": torch.__version__}
        path.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
