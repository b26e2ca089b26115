"""The cost of determinism=strict: the time of a training step relative to determinism=seeded.

    python benchmarks/determinism.py --json determinism.json

A step is forward, loss, backward, gradient norms and a fused AdamW update, on random data. Each round times `--steps`
steps under both settings, back to back and in alternating order, so other load on the machine affects both alike.
Prints the median and quartiles of the rounds' ratios.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from stabletrain.machine import hardware
from stabletrain.machine.determinism import Seeded, Strict
from stabletrain.monitors.tensor_norms import measure
from stabletrain.records import Batch
from stabletrain.stability import precision
from stabletrain.stability.objective import CrossEntropy

sys.path.insert(0, str(Path(__file__).parent.parent))  # `tests` is not installed
from tests.workloads import WORKLOADS


def measured(
    make: Callable, mode: str, device: torch.device, steps: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Returns the seconds per step under seeded and under strict, one of each per round."""
    torch.manual_seed(0)
    model, inputs, targets = make()
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    objective, acting = CrossEntropy(), getattr(precision, mode)(device)
    acting.prepare()
    count = torch.tensor(targets.numel(), device=device)

    def timed(setting: Seeded, number: int) -> float:
        setting.prepare()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for step in range(number):
            setting.seed_step(0, step)
            optimizer.zero_grad(set_to_none=True)
            with acting.autocast():
                logits = model(inputs)
            objective(logits, Batch(targets, targets), count).total.backward()
            measure(model)
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / number

    pair = seeded, strict = Seeded(), Strict()
    for setting in pair:
        timed(setting, 3)  # warms up
    taken: dict[Seeded, list[float]] = {seeded: [], strict: []}
    for number in range(rounds):
        for setting in pair if number % 2 else pair[::-1]:
            taken[setting].append(timed(setting, steps))
    seeded.prepare()
    return taken[seeded], taken[strict]


def main() -> None:
    """Measures every workload of the device, prints the table, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--precision", default="fp32,bf16", help="modes, separated by commas: fp32, tf32, bf16")
    parser.add_argument("--steps", type=int, default=3, help="steps timed at once")
    parser.add_argument("--rounds", type=int, default=20, help="pairs")
    parser.add_argument("--json", type=Path, help="file for the results")
    asked = parser.parse_args()
    Strict().prepare()  # must be set before CUDA initializes
    device = hardware.choose_device(asked.device)
    print(f"{hardware.name(device)}, {hardware.threads()}, torch {torch.__version__}")
    print(f"| {'workload':30} | precision | seeded, ms | strict, ms | strict / seeded | quartiles |")
    print("|---|---|---|---|---|---|")
    results = []
    for name, make in WORKLOADS[device.type].items():
        for mode in asked.precision.split(","):
            seeded, strict = measured(make, mode, device, asked.steps, asked.rounds)
            ratios = [b / a for a, b in zip(seeded, strict, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            ms = [1000 * statistics.median(times) for times in (seeded, strict)]
            print(
                f"| {name:30} | {mode} | {ms[0]:.1f} | {ms[1]:.1f} | {middle:.3f} | {low:.3f} - {high:.3f} |",
                flush=True,
            )
            results.append(
                {
                    "workload": name,
                    "precision": mode,
                    "seeded_ms": ms[0],
                    "strict_ms": ms[1],
                    "ratio": middle,
                    "ratio_quartiles": [low, high],
                    "ratios": ratios,
                }
            )
    if asked.json:
        about = {**hardware.describe(device), "host": platform.machine(), "torch": torch.__version__}
        asked.json.write_text(json.dumps({"machine": about, "steps": asked.steps, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
