"""What a look of the monitors costs: its time against that of the training step it looks at, in pairs.

    python benchmarks/monitors.py --json monitors.json

A round times one step without a look and one with it, in turns first; (with - without) / without is the look, in steps.
Divided by `monitors.every` it is the share of a run that watching takes. The median and the quartiles are printed.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from workloads import WORKLOADS, plain_tools

from stabletrain.machine import hardware
from stabletrain.records import Batch, TrainState
from stabletrain.stability.guard import SkipGuard
from stabletrain.stability.optimizers import AdamW
from stabletrain.step import commit, compute
from stabletrain.watch.monitors import FullMonitors, Monitors

KINDS = {"default": Monitors(every=1), "full": FullMonitors(every=1, hessian_iterations=10, hessian_samples=4)}


def measured(make: Callable, mode: str, device: torch.device, monitors: Monitors, rounds: int) -> list[float]:
    """Looks in steps, one a round."""
    torch.manual_seed(0)
    model, inputs, targets = make()
    model, batch = model.to(device), Batch(inputs.to(device), targets.to(device))
    tools = plain_tools(mode, device, SkipGuard(max_consecutive=100))
    state = TrainState(model, AdamW(1e-4, [0.9, 0.95], 1e-8, 0.1)(model))

    def step(*, looking: bool) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        computed = compute(state, [batch], tools)
        if looking:
            monitors.before(model, state.optimizer, batch, tools.precision)
        reading = commit(state, computed, tools).wait()
        if looking:
            monitors.after(model, state.optimizer, reading.applied)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for looking in (False, True):
        step(looking=looking)  # warms up
    ratios = []
    for number in range(rounds):
        order = (False, True) if number % 2 else (True, False)
        taken = {looking: step(looking=looking) for looking in order}
        ratios.append(taken[True] / taken[False] - 1)
    return ratios


def main() -> None:
    """Measures every workload of the device, prints the table, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--precision", default="fp32,bf16", help="modes, separated by commas: fp32, tf32, bf16")
    parser.add_argument("--rounds", type=int, default=9, help="pairs")
    parser.add_argument("--json", type=Path, help="file for the results")
    asked = parser.parse_args()
    device = hardware.pick(asked.device)
    print(f"{hardware.name(device)}, {hardware.threads()}, torch {torch.__version__}")
    print(f"| {'workload':30} | precision | monitors | a look, in steps | quartiles |")
    print("|---|---|---|---|---|")
    results = []
    for name, make in WORKLOADS[device.type].items():
        for mode in asked.precision.split(","):
            for kind, monitors in KINDS.items():
                ratios = measured(make, mode, device, monitors, asked.rounds)
                low, middle, high = statistics.quantiles(ratios, n=4)
                print(f"| {name:30} | {mode} | {kind} | {middle:.2f} | {low:.2f} - {high:.2f} |", flush=True)
                results.append({"workload": name, "precision": mode, "monitors": kind, "steps": ratios})
    if asked.json:
        about = {**hardware.describe(device), "host": platform.machine(), "torch": torch.__version__}
        asked.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
