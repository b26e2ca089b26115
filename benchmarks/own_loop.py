"""What `Guard` costs in a training loop of the user's own: its own time over a plain step's, and paired.

    OMP_NUM_THREADS=1 python benchmarks/own_loop.py --precision fp32,bf16 --rounds 100
    OMP_NUM_THREADS=1 python benchmarks/own_loop.py --clock cpu                     on a machine shared with others

The plain loop is bare.py. The guarded one is the same loop with `guard.step` in place of backward, clipping and update,
once with `Guard(max_norm=1.0)`, once with `rollback=True` as well, and once (`checked`) with each update checked, as
that of an optimizer that is not proven to stay finite. `attached` is the plain loop itself, with `Guard.attach`; with
`--traced` also while every step is traced. The last rows are of a model of one layer, whose step takes 0.1 ms: what the
guard adds to a step is then its fixed cost on the host. Own time is measured as in own_time.py: what lies
outside forward, backward and the optimizer, minus the same of the plain loop, over the plain step. `overhead.py
--others` shows the guarded loop beside Lightning's and transformers' tools.
"""

import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from bare import BareLoop
from guarded_loop import AttachedLoop, guarded_of
from jobs import SIZES
from measuring import command_line, head, in_turns, machine, modes, quartiles, ratios, row, save, silence
from overhead import OPTIMIZERS, bare_of, optimizer_of, started
from own_time import Parts
from targets import judged
from torch import nn

from stabletrain.machine import hardware
from stabletrain.records import Batch

KINDS: dict[str, dict[str, Any]] = {
    "guard": {},
    "rollback": {"rollback": True},
    "checked": {"checked": True},
    "attached": {"kind": AttachedLoop},
}
"""Arguments of each guard."""

MINI = {
    "GPT 6 x 384, 8 x 256 tokens": ("model=gpt_mini", "data=random_tokens", "data.block_size=256", "batch_size=8"),
}
"""Measured besides the sizes of the other benchmarks."""

TRACED = {"kind": AttachedLoop, "traced": True}


def measured(
    folder: Path, overrides: tuple[str, ...], rounds: int, kind: str, *, bf16: bool, kinds: dict[str, Any] = KINDS
) -> dict[str, Any]:
    """Measures one model; returns the seconds of each part, loop and round, and the loops."""
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[kind]
    run, optimizer = started(folder, overrides, ("off",))["off"], optimizer_of(overrides)
    loops: dict[str, BareLoop] = {name: bare_of(run, optimizer, bf16=bf16) for name in ("bare", "bare again")}
    batches = [run.job.data.load(step).to(run.job.device) for step in range(8)]
    loops |= {
        name: guarded_of(loops["bare"], batches, OPTIMIZERS[optimizer], folder / name, **options)
        for name, options in kinds.items()
    }
    run.close()
    parts = {name: Parts(loop.model, loop.optimizer, clock) for name, loop in loops.items()}
    rest: dict[str, list[float]] = {name: [] for name in loops}

    def turn(name: str, number: int) -> float:
        with parts[name].timed():
            loops[name]()
        if number >= 0:
            rest[name].append(parts[name].seconds["rest"])
        return sum(parts[name].seconds.values())

    taken = in_turns({name: lambda number, name=name: turn(name, number) for name in loops}, rounds)
    return {"rest": rest, "seconds": taken, "loops": loops}


STEPS = 20
"""Steps of a model of one layer in a row: one alone is too short for a clock."""


def fixed_cost(folder: Path, rounds: int, kind: str) -> dict[str, list[float]]:
    """Returns the milliseconds of a step of a model of one layer, for each loop and round."""
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[kind]
    drawn = torch.Generator().manual_seed(0)
    batches = [Batch(torch.randn(8, 16, generator=drawn), torch.randint(16, (8,), generator=drawn)) for _ in range(8)]
    model, (make, lr) = nn.Linear(16, 16), OPTIMIZERS["adamw"]
    bare = BareLoop(model, batches, make(model, lr), bf16=False)
    loops = {"bare": bare}
    for name, options in KINDS.items():
        loops[name] = guarded_of(bare, batches, OPTIMIZERS["adamw"], folder / name, **options)

    def turn(name: str) -> float:
        began = clock()
        for _ in range(STEPS):
            loops[name]()
        return 1e3 * (clock() - began) / STEPS

    return in_turns({name: lambda number, name=name: turn(name) for name in loops}, rounds, warm_up=10)


def main() -> None:
    """Measures GPTs and a ResNet, and prints one row for each, guard and precision."""
    parser = command_line(__doc__, 100)
    parser.add_argument("--only", default="", help="measure only models whose name contains this")
    parser.add_argument("--traced", action="store_true", help="measure steps that are traced while they run, too")
    parser.add_argument("--tiny", action="store_true", help="tiny models, only to check that it runs")
    asked = parser.parse_args()
    kinds = {**KINDS, "traced": TRACED} if asked.traced else KINDS
    device = hardware.choose_device("cpu")
    print(f"{machine(device)}, {asked.clock} time, {asked.rounds} rounds")
    print(head("model", "guard", "bare step", "own over step", "paired", "quartiles", "bare again"))
    results, values = [], {}
    for name, overrides in (SIZES["tiny"] if asked.tiny else SIZES["cpu"] | MINI).items():
        for mode in modes(asked.precision, device) if asked.only in name else ():
            chosen = (*overrides, "device=cpu", f"precision={mode}", "compile=false")
            with tempfile.TemporaryDirectory() as folder, silence():
                found = measured(Path(folder), chosen, asked.rounds, asked.clock, bf16=mode == "bf16", kinds=kinds)
            bare = found["seconds"]["bare"]
            again = quartiles(ratios(found["seconds"]["bare again"], bare))[0]
            for kind in kinds:
                own = 1 + (mean(found["rest"][kind]) - mean(found["rest"]["bare"])) / mean(bare)
                middle, low, high = quartiles(ratios(found["seconds"][kind], bare))
                cells = (f"{1e3 * mean(bare):.1f} ms", f"**{own:.4f}**", f"{middle:.3f}", f"{low:.3f} - {high:.3f}")
                print(row(f"{name}, {mode}", kind, *cells, f"{again:.3f}"), flush=True)
                results.append({"model": name, "precision": mode, "guard": kind, "own": own, "paired": middle})
                key = "own_loop/resnet" if "ResNet" in name else "own_loop/gpt"
                if kind in ("guard", "rollback"):
                    values[key] = max(own, values.get(key, 0.0))
    if asked.only in "one layer":
        with tempfile.TemporaryDirectory() as folder, silence():
            taken = fixed_cost(Path(folder), asked.rounds, asked.clock)
        print("\n" + head("one layer", "step, ms", "fixed cost of a step, ms", "quartiles"))
        for kind, found in taken.items():
            more, low, high = quartiles([mine - bare for mine, bare in zip(found, taken["bare"], strict=True)])
            print(row(kind, f"{quartiles(found)[0]:.3f}", f"**{more:.3f}**", f"{low:.3f} - {high:.3f}"), flush=True)
            results.append({"model": "one layer", "guard": kind, "fixed_ms": more})
    print("\n" + judged(values, device, "own_loop/"))
    save(asked.json, device, results, values)


if __name__ == "__main__":
    main()
