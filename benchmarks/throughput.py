"""Training speed: tokens or images per second, MFU, memory, the parts of a step, and ratios to plain PyTorch.

    python benchmarks/throughput.py --json throughput.json
    python benchmarks/throughput.py --sizes gpt_mini --precision bf16 --compile

    stabletrain            the run of `train.py`: guard=rollback, monitors=default, W&B offline, data through the run's
                           own loader
    stabletrain, compiled  the same with compile=true; `compile, s` is the extra time to build it and take the first
                           steps
    plain fp32             bare.py on the same model in fp32, eager, with prepared batches: the reference, 1
    plain bf16             the same under autocast, if the run is in bf16
    recipe                 torchvision's reference recipe on the same model (ResNet-18; recipe.py), in fp32, its default
    recipe --amp           the same with its mixed precision, on a GPU

The kinds alternate in one process, step by step (on a GPU ten steps). `speed` is the median over the rounds of the
reference's time over the kind's own. Rates use the median time. Memory is the peak beyond what the other kinds hold; on
a CPU it is that of the whole process, before the other kinds are built. parts.py defines the parts of a step. `making`
is the time to make a batch on its own thread, relative to a step: the loop waits for data only if it is above 1.
"""

import copy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bare import BareLoop, adamw, sgd
from jobs import built
from made_data import pictures
from measuring import (
    Budget,
    Clock,
    command_line,
    head,
    in_turns,
    machine,
    modes,
    most_memory,
    quartiles,
    ratios,
    row,
    save,
    silence,
)
from parts import PARTS, Parted
from recipe import Recipe
from sizes import SIZES, USUAL, overrides_of
from targets import judged

from stabletrain.machine import hardware
from stabletrain.trainer.history import UNITS

WARM_UP = 3
READY = 4


@dataclass
class Measured:
    """The measurements of one kind on one size; None or empty if not available."""

    what: str
    seconds: list[float] = field(default_factory=list)
    memory: int | None = None
    built: float = 0.0
    first: float = 0.0
    rate: float = 0.0
    mfu: float | None = None
    speed: list[float] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    making: float | None = None
    compile: float | None = None


class Bench:
    """One size: its kinds are built one after the other, then take turns."""

    def __init__(self, name: str, folder: Path, device: torch.device, mode: str, clock: Clock, turn: int) -> None:
        self.size, self.device, self.mode, self.clock, self.turn = SIZES[name], device, mode, clock, turn
        self.folder, self.overrides = folder, overrides_of(self.size, folder, device, mode)
        self.kinds: dict[str, Callable[[int], float]] = {}
        self.found: dict[str, Measured] = {}
        self.runs: dict[str, Parted] = {}

    def add(self, what: str, make: Callable[[], Callable[[], object]]) -> None:
        """Builds a kind, takes its first steps, and records their time and memory."""
        found = self.found[what] = Measured(what)
        card = self.device.type == "cuda"
        before = torch.cuda.memory_allocated(self.device) if card else 0
        wall, made = Clock(self.device), []
        with most_memory(self.device) as most:
            found.built = wall.seconds(lambda: made.append(make()))
            step = made[0]
            found.first = sum(wall.seconds(step) for _ in range(WARM_UP))
        if most and (card or len(self.found) == 1):
            found.memory = most[0] - before
        self.kinds[what] = lambda _: self.clock.seconds(lambda: [step() for _ in range(self.turn)]) / self.turn

    def run_of(self, what: str, compiled: bool) -> Callable[[], object]:
        """Builds this project's run."""
        run = Parted(built(self.folder / what, (*self.overrides, f"compile={str(compiled).lower()}")))
        self.runs[what] = run
        return run

    def plain(self, *, bf16: bool) -> Callable[[], object]:
        """Builds the bare loop on a copy of the model."""
        job = self.runs["stabletrain"].job
        model = copy.deepcopy(job.state.model)
        batches = [job.data.load(step).to(self.device) for step in range(READY)]
        optimizer = adamw(model, 1e-3) if self.size.vocab_size else sgd(model, 0.1)
        return BareLoop(model, batches, optimizer, bf16=bf16)

    def recipe(self, workers: int, *, amp: bool) -> Callable[[int], float]:
        """Builds the recipe on a copy of the model; it times itself because its workers load batches ahead."""
        held = pictures(50_000 if self.device.type == "cuda" else 2_000, 32, 10, "recipe")
        recipe = Recipe(
            copy.deepcopy(self.runs["stabletrain"].job.state.model),
            held.pixels,
            held.labels.tolist(),
            size=32,
            batch_size=self.size.batch[self.device.type],
            device=self.device,
            workers=workers,
            amp=amp,
        )
        return lambda number: recipe.seconds(self.turn) if number >= 0 else 0.0

    def measure(self, rounds: int, until: float) -> list[Measured]:
        """Takes the turns and computes the results; no round begins after the time `until`."""
        job = self.runs["stabletrain"].job
        units = job.data.load(0).targets.numel()
        taken = in_turns(self.kinds, rounds, 1, until)
        for what, seconds in taken.items():
            found = self.found.setdefault(what, Measured(what))
            middle = quartiles(seconds)[0]
            found.seconds, found.rate = seconds, units / middle
            found.speed = ratios(taken["plain fp32"], seconds)
            if what in self.runs:
                run = self.runs[what]
                found.mfu = job.monitoring.usage.metrics(found.rate).get("throughput/mfu")
                found.shares = run.shares(max(rounds // 2, 3))
                number = job.state.step + 1000
                found.making = self.clock.seconds(partial(job.data.load, number)) / middle
                if "compiled" in what:
                    plainly = self.found["stabletrain"]
                    found.compile = found.built + found.first - plainly.built - plainly.first
        for run in self.runs.values():
            run.close()
        return [*self.found.values()]


def measured(name: str, mode: str, device: torch.device, clock: Clock, asked: Any, until: float) -> list[Measured]:
    """Measures everything about one size; no round begins after the time `until`."""
    with tempfile.TemporaryDirectory() as folder, silence():
        bench = Bench(name, Path(folder), device, mode, clock, asked.turn)
        bench.add("stabletrain", lambda: bench.run_of("stabletrain", compiled=False))
        if asked.compile:
            bench.add("stabletrain, compiled", lambda: bench.run_of("stabletrain, compiled", compiled=True))
        bench.add("plain fp32", lambda: bench.plain(bf16=False))
        if mode == "bf16":
            bench.add("plain bf16", lambda: bench.plain(bf16=True))
        if name == "resnet18":
            bench.kinds["recipe"] = bench.recipe(asked.workers, amp=False)
            if device.type == "cuda":
                bench.kinds["recipe --amp"] = bench.recipe(asked.workers, amp=True)
        return bench.measure(asked.rounds, until)


def show_speed(name: str, mode: str, unit: str, found: list[Measured]) -> None:
    """Prints a size's rows of the first table."""
    for each in found:
        middle, low, high = quartiles(each.speed)
        mfu = "" if each.mfu is None else f"{each.mfu:.1%}"
        memory = "" if each.memory is None else f"{each.memory / 1e9:.2f}"
        compiling = "" if each.compile is None else f"{each.compile:.1f}"
        rate = f"{each.rate:,.0f} {unit}/s"
        cells = (rate, f"{middle:.2f}", f"{low:.2f} - {high:.2f}", mfu, memory, compiling)
        print(row(f"{name}, {mode}", each.what, *cells), flush=True)


def reached(name: str, mode: str, device: torch.device, found: list[Measured]) -> dict[str, float]:
    """Returns the values of the targets that a size provides."""
    by_name = {each.what: each for each in found}
    ours = [each for each in found if each.what.startswith("stabletrain")]
    best = min(ours, key=lambda each: quartiles(each.seconds)[0])
    values = {"throughput/data": max(each.shares["data"] for each in ours)}
    if name == "gpt_mini" and mode == "bf16" and device.type == "cpu" and hardware.has_bf16(device):
        values["throughput/gpt_mini"] = quartiles(best.speed)[0]
    if name == "gpt2" and mode == "bf16" and best.mfu is not None:
        values["throughput/gpt2_mfu"] = best.mfu
    if "recipe" in by_name and device.type == "cuda":
        values["throughput/resnet18"] = quartiles(ratios(by_name["recipe"].seconds, best.seconds))[0]
    return values


def main() -> None:
    """Measures the requested sizes, prints the tables, and writes the JSON."""
    parser = command_line(__doc__, 0)
    parser.set_defaults(precision="auto")
    parser.add_argument(
        "--sizes", help=f"of {', '.join(SIZES)}, separated by commas; default on a CPU {USUAL['cpu']}, on a GPU all"
    )
    parser.add_argument(
        "--compile", action="store_true", default=None, help="measure compiled runs too; always on a GPU"
    )
    parser.add_argument("--turn", type=int, help="steps per turn; default 1, on a GPU 10")
    parser.add_argument("--workers", type=int, help="the recipe's loader processes; default: threads, at most 16")
    asked = parser.parse_args()
    device = hardware.choose_device(asked.device)
    card = device.type == "cuda"
    asked.turn, asked.rounds = asked.turn or (10 if card else 1), asked.rounds or 10
    asked.compile = card if asked.compile is None else asked.compile
    asked.workers = min(torch.get_num_threads(), 16) if asked.workers is None else asked.workers
    names = (asked.sizes or USUAL[device.type]).split(",")
    if unknown := [name for name in names if name not in SIZES]:
        sys.exit(f"--sizes={','.join(unknown)} is unknown: choose from {', '.join(SIZES)}")
    print(f"{machine(device)}, {asked.clock} time, {asked.rounds} rounds of {asked.turn} steps")
    print(head("size", "what", "rate", "speed", "quartiles", "MFU", "memory, GB", "compile, s"))
    results, shares, values, budget = [], [], {}, Budget(asked.budget)
    todo = [(name, mode) for name in names for mode in modes(asked.precision, device)]
    for number, (name, mode) in enumerate(todo):
        if not budget.begins(f"{name}, {mode}"):
            continue
        unit, until = UNITS["tok" if SIZES[name].vocab_size else "img"], budget.share(len(todo) - number)
        found = measured(name, mode, device, Clock(device, asked.clock), asked, until)
        show_speed(name, mode, unit, found)
        results += [{"size": name, "precision": mode, "unit": unit, **vars(each)} for each in found]
        shares += [(f"{name}, {mode}", each) for each in found if each.shares]
        for target, value in reached(name, mode, device, found).items():
            values[target] = max(value, values.get(target, 0.0)) if target == "throughput/data" else value
        save(asked.json, device, results, values)
    print("\n" + head("size", "what", *PARTS, "making"))
    for name, each in shares:
        print(row(name, each.what, *(f"{each.shares[part]:.1%}" for part in PARTS), f"{each.making:.1%}"))
    print("\n" + judged(values, device, "throughput/"))
    save(asked.json, device, results, values, budget)


if __name__ == "__main__":
    main()
