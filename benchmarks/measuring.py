"""How the benchmarks measure: shared command line, a clock that synchronizes, alternating turns, ratios, output files.

The compared kinds alternate in one process, round by round, so other load on the machine affects all alike. Each round
gives one ratio. The median of the ratios is the cost of an ordinary step and ignores rare events. `whole`, the total
time over the reference's total time, includes the rare events, and every disturbance as well.
"""

import argparse
import contextlib
import io
import json
import math
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
from torch.optim import Optimizer

from stabletrain.machine import hardware


def command_line(about: str | None, rounds: int) -> argparse.ArgumentParser:
    """Returns a parser with the options that all benchmarks share; `rounds` is the default of `--rounds`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--precision", default="fp32,bf16", help="modes, separated by commas: auto, fp32, tf32, bf16")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds")
    parser.add_argument(
        "--clock", default="wall", choices=["wall", "cpu"], help="cpu: CPU time of this process, for shared machines"
    )
    parser.add_argument("--json", type=Path, help="file for the results; written anew after each model")
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="seconds: then no round begins, and no model; default: no limit"
    )
    return parser


class Budget:
    """The time that a benchmark may take, so that it ends by itself and what it has measured is written.

    Attributes:
        left_out: what was not begun because the time was over.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.left_out: list[str] = []

    def begins(self, what: str) -> bool:
        """Returns whether there is time left to begin; otherwise says what is left out."""
        if time.monotonic() < self._end:
            return True
        self.left_out.append(what)
        print(f"left out, no time: {what}", flush=True)
        return False

    def share(self, parts: int) -> float:
        """Returns when a part has used its share, if the time left is divided by `parts`; see `in_turns`."""
        now = time.monotonic()
        return now + (self._end - now) / parts


UNLIMITED = Budget(math.inf)


def modes(asked: str, device: torch.device) -> list[str]:
    """Returns the precisions named by `--precision`; `auto` is bf16 if the device computes in it, else fp32."""
    auto = "bf16" if hardware.has_bf16(device) else "fp32"
    return [auto if mode == "auto" else mode for mode in asked.split(",")]


def machine(device: torch.device) -> str:
    """Returns one line that names the device, threads and torch version."""
    return f"{hardware.name(device)}, {hardware.threads()}, torch {torch.__version__}"


class Clock:
    """Times work on a device.

    Args:
        device: synchronized with before the clock is read.
        kind: `wall`, or `cpu` for this process's CPU time, for machines shared with other work.
    """

    def __init__(self, device: torch.device, kind: str = "wall") -> None:
        self._device, self._now = device, {"wall": time.perf_counter, "cpu": time.process_time}[kind]

    def now(self) -> float:
        """Returns the time once the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._now()

    def seconds(self, work: Callable[[], object]) -> float:
        """Returns the seconds that `work` takes, including the device's work."""
        start = self.now()
        work()
        return self.now() - start


def time_updates(optimizer: Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Calls `before` and `after` around each step of an optimizer."""
    for call, register in ((before, optimizer.register_step_pre_hook), (after, optimizer.register_step_post_hook)):

        def hook(*_: object, call: Callable[[], None] = call) -> None:
            call()

        # The guard checks and copies whatever a step with a foreign hook writes; it knows that the profiler's write
        # nothing (`stability/optimizers/closed.py`).
        hook.__module__ = "torch.profiler"
        register(hook)


def in_turns(
    kinds: Mapping[str, Callable[[int], float]], rounds: int, warm_up: int = 3, until: float = math.inf
) -> dict[str, list[float]]:
    """Runs all kinds alternately and returns each kind's value in each round.

    Each kind is called with the round's number, which is negative in the `warm_up` rounds; their values are dropped.
    The order is shuffled every second round and reversed in the round after it, so no kind always runs first or always
    follows the same one. No round begins after the time `until` (`time.monotonic`), but at least one is taken.
    """
    found: dict[str, list[float]] = {name: [] for name in kinds}
    order, drawn = [*kinds], random.Random(0)
    for number in range(warm_up + rounds):
        if number > warm_up and time.monotonic() > until:
            break
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
    """Returns one ratio per round."""
    return [a / b for a, b in zip(taken, reference, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns median, lower and upper quartile; a single value three times."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def whole(taken: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Returns the ratio of total times, and its quartiles by the paired bootstrap (Efron 1979) with 1,000 resamples."""
    pairs = np.array([taken, reference])
    drawn = np.random.default_rng(0).integers(pairs.shape[1], size=(1000, pairs.shape[1]))
    again = pairs[:, drawn].sum(axis=-1)
    total = pairs.sum(axis=-1)
    low, high = np.quantile(again[0] / again[1], (0.25, 0.75))
    return float(total[0] / total[1]), float(low), float(high)


def head(*columns: str) -> str:
    """Returns the first two lines of a Markdown table."""
    return f"{row(*columns)}\n{'|---' * len(columns)}|"


def row(*cells: object) -> str:
    """Returns a line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


@contextlib.contextmanager
def silence() -> Generator[None, None, None]:
    """Context that suppresses stdout and stderr."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def most_memory(device: torch.device) -> Generator[list[int], None, None]:
    """Context that yields a list, filled on exit with the peak bytes in use inside it: of tensors on a GPU, else of the
    process.

    The list stays empty if the operating system does not report the peak (Linux does).
    """
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
    budget: Budget = UNLIMITED,
) -> None:
    """Writes the results, the machine, the values of the targets and what was left out to `path`, if one was given."""
    if path:
        about = {**hardware.describe(device), "host": platform.machine(), "torch": torch.__version__}
        told = {"machine": about, "results": results, "targets": dict(targets), "left_out": budget.left_out}
        path.write_text(json.dumps(told, indent=1) + "\n")
