"""How the benchmarks measure: their command line, a clock that waits for the device, turns, ratios, where results go.

What is compared takes turns in one process, round by round, so that what else the machine does falls on all alike. Each
round gives one ratio. Their median says what an ordinary step costs, and leaves out what happens now and then; the sum
of all rounds over the sum of the reference's, `whole`, has that in it, and every disturbance as well.
"""

import argparse
import contextlib
import io
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from stabletrain.machine import hardware


def command_line(about: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that the benchmarks share; `rounds` is the default of `--rounds`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--precision", default="fp32,bf16", help="modes, separated by commas: auto, fp32, tf32, bf16")
    parser.add_argument("--rounds", type=int, default=rounds, help="pairs")
    parser.add_argument(
        "--clock", default="wall", choices=["wall", "cpu"], help="cpu: this process's time, on a shared CPU"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser


def modes(asked: str, device: torch.device) -> list[str]:
    """The precisions that `--precision` names; `auto` is bf16 where the device computes in it, and else fp32."""
    auto = "bf16" if hardware.has_bf16(device) else "fp32"
    return [auto if mode == "auto" else mode for mode in asked.split(",")]


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

    def now(self) -> float:
        """The time when the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._now()

    def seconds(self, work: Callable[[], object]) -> float:
        """How long `work` takes, until the device has done it."""
        start = self.now()
        work()
        return self.now() - start


def in_turns(kinds: Mapping[str, Callable[[int], float]], rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """What each kind gave in each round; it is told the round's number, below 0 in `warm_up` rounds that do not count.

    The order is drawn anew every second round, and turned round in the one after it: no kind always comes first, nor
    always after the same other one.
    """
    found: dict[str, list[float]] = {name: [] for name in kinds}
    order, drawn = [*kinds], random.Random(0)
    for number in range(warm_up + rounds):
        if number % 2:
            order.reverse()
        else:
            drawn.shuffle(order)
        for name in order:
            value = kinds[name](number - warm_up)
            if number >= warm_up:
                found[name].append(value)
    return found


def ratios(taken: Sequence[float], reference: Sequence[float]) -> list[float]:
    """One ratio a round."""
    return [a / b for a, b in zip(taken, reference, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and lower and upper quartile; of a single value, that."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def whole(taken: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """The sum of all rounds over the sum of the reference's, and the quartiles of that ratio if other rounds of its
    kind had come (the paired bootstrap of Efron 1979, 1,000 times)."""
    pairs = np.array([taken, reference])
    drawn = np.random.default_rng(0).integers(pairs.shape[1], size=(1000, pairs.shape[1]))
    again = pairs[:, drawn].sum(axis=-1)
    total = pairs.sum(axis=-1)
    low, high = np.quantile(again[0] / again[1], (0.25, 0.75))
    return float(total[0] / total[1]), float(low), float(high)


def head(*columns: str) -> str:
    """The first two lines of a Markdown table."""
    return f"{row(*columns)}\n{'|---' * len(columns)}|"


def row(*cells: object) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


@contextlib.contextmanager
def silence() -> Generator[None, None, None]:
    """Within it a run says nothing."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


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


def save(
    path: Path | None,
    device: torch.device,
    results: list[dict[str, Any]],
    targets: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Writes the results, with what they were measured on and what they say of `targets.py`, if a path was given."""
    if path:
        about = {**hardware.describe(device), "host": platform.machine(), "torch": torch.__version__}
        told = {"machine": about, "results": results, "targets": dict(targets)}
        path.write_text(json.dumps(told, indent=1) + "\n")
