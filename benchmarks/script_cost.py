"""What `stabletrain run` costs a script: paired steps of the same script, with and without it.

    OMP_NUM_THREADS=1 python benchmarks/script_cost.py --rounds 100
    OMP_NUM_THREADS=1 python benchmarks/script_cost.py --clock cpu                  on a machine shared with others

Two scripts: an MLP whose steps are short, so that everything beside the step shows, and a transformer. Both use AdamW
and `clip_grad_norm_`. The second loop without the guard shows the resolution.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Clock, command_line, head, in_turns, machine, quartiles, ratios, row, save
from torch import nn

from stabletrain.beside.script.start import start, stop
from stabletrain.machine import hardware


def mlp() -> nn.Module:
    """Returns the model of short steps."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def transformer() -> nn.Module:
    """Returns the model of longer steps: 8 tokens of 64 numbers, four blocks of width 256."""
    block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Linear(64, 256), nn.TransformerEncoder(block, 4, enable_nested_tensor=False), nn.Linear(256, 10)
    )


SCRIPTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MLP 64-128-128-10, batch 32": (mlp, (32, 64), 20),
    "transformer 4 x 256, 8 x 64 tokens": (transformer, (8, 64, 64), 1),
}
"""For each script its model, the shape of its inputs, and the number of steps that are timed together."""


def loop_of(make: Callable[[], nn.Module], shape: tuple[int, ...], device: torch.device) -> Callable[[], None]:
    """Returns the step of a script."""
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = torch.randn(shape, device=device), torch.randint(10, shape[:-1], device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step()
    return step


def measured(folder: Path, name: str, rounds: int, clock: Clock, device: torch.device) -> dict[str, list[float]]:
    """Measures a script; returns the seconds of a step for each loop and round."""
    make, shape, together = SCRIPTS[name]
    loops = {kind: loop_of(make, shape, device) for kind in ("plain", "plain again")}
    start(folder=str(folder))
    try:
        loops["run"] = loop_of(make, shape, device)
    finally:
        stop()

    def turn(kind: str, number: int) -> float:
        return clock.seconds(lambda: [loops[kind]() for _ in range(together)]) / together

    return in_turns({kind: partial(turn, kind) for kind in loops}, rounds)


def main() -> None:
    """Measures both scripts, and prints a row for each."""
    parser = command_line(__doc__, 100)
    chosen = parser.parse_args()
    device = hardware.choose_device(chosen.device)
    results: list[dict[str, Any]] = []
    print(machine(device), head("script", "step", "run over plain", "more a step", "plain again"), sep="\n\n")
    for name in SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            taken = measured(Path(folder), name, chosen.rounds, Clock(device, chosen.clock), device)
        (ratio, low, high), plain = quartiles(ratios(taken["run"], taken["plain"])), quartiles(taken["plain"])[0]
        again = quartiles(ratios(taken["plain again"], taken["plain"]))[0]
        more = quartiles([a - b for a, b in zip(taken["run"], taken["plain"], strict=True)])[0]
        shown = f"{ratio:.2f} ({low:.2f} - {high:.2f})"
        print(row(name, f"{1e3 * plain:.2f} ms", shown, f"{1e3 * more:.2f} ms", f"{again:.2f}"), flush=True)
        results.append({"script": name, "seconds": taken})
    save(chosen.json, device, results)


if __name__ == "__main__":
    main()
