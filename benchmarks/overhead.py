"""The overhead of a guarded run: the defaults against a hand-written loop, and against the usual NaN tools.

    python benchmarks/overhead.py --json overhead.json
    python benchmarks/overhead.py --clock cpu                    on a machine shared with other work
    python benchmarks/overhead.py --others                       against Lightning's and transformers' trainers

All kinds use the same model, batch shapes, precision, optimizer and clipping:

    bare            bare.py, the reference: 1
    bare again      a second bare loop; its ratio shows the measurement's resolution
    off             the loop of train.py with guard=off monitors=none wandb=disabled
    defaults        guard=rollback with its snapshots, monitors=default, metrics.jsonl and W&B offline, forensics on
    monitors=full   the same with monitors=full
    finite hooks    bare, with hooks that check every module's output and its gradient
    anomaly mode    bare, under torch.autograd.set_detect_anomaly

A turn is one step (on a GPU ten, to keep the launch queue full); a round is one turn of each kind. `step` is the median
of the rounds' ratios. `whole` is the total time over bare's total time: 100 steps contain one monitor inspection, two
snapshots and ten log lines, but no evaluation and no checkpoint (recovery.py). Further rows give the cost of a monitor
inspection and of a snapshot alone, in steps. On a GPU, also checks that an ordinary step never waits for the device.
"""

import contextlib
import copy
import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bare import BareLoop, adamw, sgd
from finite_hooks import finite_hooks
from guarded_loop import guarded_of
from jobs import SIZES, Rounds, built
from measuring import (
    Budget,
    Clock,
    command_line,
    head,
    in_turns,
    machine,
    modes,
    quartiles,
    ratios,
    row,
    save,
    silence,
    whole,
)
from others import Others, beside, check_installed
from targets import judged
from waiting import waiting

from stabletrain.errors import ConfigError
from stabletrain.machine import hardware
from stabletrain.records import Batch

OURS = {
    "off": ("guard=off",),
    "defaults": ("monitors=default", "wandb=offline"),
    "monitors=full": ("monitors=full", "wandb=offline"),
}
"""This project's runs, as overrides of a bare `train.py` without checkpoints."""

OPTIMIZERS = {"adamw": (adamw, 1e-3), "sgd": (sgd, 0.1)}
"""How bare.py builds an optimizer, and the peak learning rate for all kinds."""

FEWER = 4
"""Hooks and anomaly mode run in one of this many rounds only: their cost is large enough to show."""

READY = 8
"""Prepared batches for the bare loop."""


@dataclass(frozen=True)
class Kind:
    """What one turn executes: a step, inside a context."""

    step: Callable[[], object]
    within: Callable[[], AbstractContextManager] = contextlib.nullcontext


@dataclass(frozen=True)
class Found:
    """The measurements on one model.

    Attributes:
        turn: the steps of a round.
        seconds: per step, by kind and round.
        bare: the bare loop's in the same rounds.
        done: inspections and snapshots by each run in each round.
        waits_for: see `waiting`.
    """

    turn: int
    seconds: dict[str, list[float]]
    bare: dict[str, list[float]]
    done: dict[str, dict[str, list[int]]]
    waits_for: str


def optimizer_of(overrides: Sequence[str]) -> str:
    """Returns AdamW for a GPT, SGD for a ResNet."""
    return "sgd" if any(each.startswith("model=resnet") for each in overrides) else "adamw"


def started(folder: Path, overrides: Sequence[str], names: Collection[str] = OURS) -> dict[str, Rounds]:
    """Builds this project's runs of those names, each in its own folder, all from the same weights."""
    kind = optimizer_of(overrides)
    shared = (
        *overrides,
        f"optimizer={kind}",
        f"optimizer.lr={OPTIMIZERS[kind][1]}",
        "warmup=linear",
        "warmup.steps=50",
        "log_every=10",
    )
    return {name: Rounds(built(folder / name, (*shared, *OURS[name]))) for name in names}


def bare_of(run: Rounds, kind: str, *, bf16: bool) -> BareLoop:
    """Returns a bare loop on a copy of the run's current model, with the first of its batches."""
    make, lr = OPTIMIZERS[kind]
    batches: list[Batch] = [run.job.data.load(step).to(run.job.device) for step in range(READY)]
    model = copy.deepcopy(run.job.state.model)
    return BareLoop(model, batches, make(model, lr), bf16=bf16)


def measured(
    folder: Path,
    overrides: Sequence[str],
    rounds: int,
    turn: int,
    clock: Clock,
    *,
    bf16: bool = False,
    until: float = math.inf,
) -> Found:
    """Measures every kind on one model, `turn` steps at a time; no round begins after the time `until`."""
    runs, kind = started(folder, overrides), optimizer_of(overrides)
    bare, again, other = (bare_of(runs["off"], kind, bf16=bf16) for _ in range(3))
    if "compile=true" in overrides:  # hooks and anomaly mode stay eager: they break the graph at every module
        bare.model.compile()
        again.model.compile()
    kinds = {
        "bare": Kind(bare),
        "bare again": Kind(again),
        **{name: Kind(run) for name, run in runs.items()},
    }
    dear = {
        "bare": Kind(bare),
        "finite hooks": Kind(other, lambda: finite_hooks(other.model, backward=True)),
        "anomaly mode": Kind(other, lambda: torch.autograd.set_detect_anomaly(True)),
    }

    done = {name: {what: [0] * rounds for what in run.done} for name, run in runs.items()}

    def timed(name: str, each: Kind, number: int) -> float:
        before = dict(runs[name].done) if name in runs else {}
        with each.within():
            seconds = clock.seconds(lambda: [each.step() for _ in range(turn)]) / turn
        for what, count in before.items() if number >= 0 else ():
            done[name][what][number] = runs[name].done[what] - count
        return seconds

    taken = in_turns({name: partial(timed, name, each) for name, each in kinds.items()}, rounds, until=until)
    rounds = len(taken["bare"])
    done = {name: {what: counts[:rounds] for what, counts in each.items()} for name, each in done.items()}
    dear_rounds = max(rounds // FEWER, 2)
    fewer = in_turns({name: partial(timed, name, each) for name, each in dear.items()}, dear_rounds, 1, until)
    reference = fewer.pop("bare")
    against = dict.fromkeys(taken, taken["bare"]) | dict.fromkeys(fewer, reference)
    found = Found(turn, {**taken, **fewer}, against, done, waiting(runs["defaults"]))
    for run in runs.values():
        run.close()
    return found


def fits(folder: Path, overrides: Sequence[str], rounds: int, turn: int, clock: Clock, *, bf16: bool = False) -> Found:
    """Measures other trainers, whose turns are whole fits of `turn` steps."""
    runs, kind = started(folder, overrides, ("defaults",)), optimizer_of(overrides)
    run, (make, lr) = runs["defaults"], OPTIMIZERS[kind]
    bare = bare_of(run, kind, bf16=bf16)
    others = Others(
        run.job.state.model,
        [run.job.data.load(step).to(run.job.device) for step in range(READY)],
        lambda model: make(model, lr),
        bf16=bf16,
        steps=turn,
        clock=clock,
        folder=folder,
    )
    guarded = guarded_of(bare, others.batches, OPTIMIZERS[kind], folder / "guarded")
    taken = in_turns(beside(bare, run, guarded, others), rounds, warm_up=1)
    run.close()
    return Found(turn, taken, dict.fromkeys(taken, taken["bare"]), {}, "unknown")


def show(workload: str, mode: str, found: Found) -> list[dict[str, Any]]:
    """Prints one model's rows and returns them for the JSON."""
    results = []
    for what, taken in found.seconds.items():
        bare = found.bare[what]
        ordinary, total = quartiles(ratios(taken, bare)), whole(taken, bare)
        cells = [f"{1000 * quartiles(bare)[0]:.1f} ms", "", "1", ""]
        if what != "bare":
            cells = [f"{ordinary[0]:.3f}", "{1:.3f} - {2:.3f}".format(*ordinary)]
            cells += [f"{total[0]:.3f}", "{1:.3f} - {2:.3f}".format(*total)]
        print(row(workload, mode, what, *cells), flush=True)
        numbers = {"step": ordinary, "whole": total, "seconds": taken, "bare": bare, "done": found.done.get(what, {})}
        results.append({"workload": workload, "precision": mode, "what": what, **numbers, "waits_for": found.waits_for})
    for name, done in found.done.items():
        for what, counts in done.items():
            others = [sum(each) - count for *each, count in zip(*done.values(), counts, strict=True)]
            if extra := beyond_a_step(found.seconds[name], counts, others):
                middle, low, high = (found.turn * steps for steps in quartiles(extra))
                cells = (f"{middle:.2f} steps", f"{low:.2f} - {high:.2f}", f"{len(extra)} of them", "")
                print(row(workload, mode, f"{name}: a {what.removesuffix('s')}", *cells), flush=True)
    return results


def beyond_a_step(taken: Sequence[float], counts: Sequence[int], others: Sequence[int]) -> list[float]:
    """Returns the extra time per step, in steps, of rounds with an event over the median of rounds without any.

    Rounds in which `others` happened too are left out if there are rounds without them.
    """
    rounds = [*zip(taken, counts, others, strict=True)]
    ordinary = [seconds for seconds, count, other in rounds if not count and not other]
    if not ordinary:
        return []
    step = statistics.median(ordinary)
    alone = [seconds / step - 1 for seconds, count, other in rounds if count and not other]
    return alone or [seconds / step - 1 for seconds, count, _ in rounds if count]


def main() -> None:
    """Measures every model of the device, prints the table, and writes the JSON."""
    parser = command_line(__doc__, 0)
    parser.set_defaults(precision="auto")
    parser.add_argument("--turn", type=int, help="steps per turn; default 1, on a GPU 10")
    parser.add_argument("--only", default="", help="measure only models whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="tiny models, only to check that it runs")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile for the bare loop and this project's runs"
    )
    parser.add_argument("--others", action="store_true", help="compare with fits by Lightning and transformers")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
    device = hardware.choose_device(asked.device)
    clock = Clock(device, asked.clock)
    if asked.others:
        check_installed()
    turn = asked.turn or (20 if asked.others else 10 if device.type == "cuda" else 1)
    rounds = asked.rounds or (5 if asked.others else 100 // turn)
    print(f"{machine(device)}, {asked.clock} time, {rounds} rounds of {turn} steps")
    print(head("workload", "precision", "what", "step", "quartiles", "whole", "quartiles"))
    results, budget = [], Budget(asked.budget)
    sizes = SIZES["tiny" if asked.tiny else device.type]
    todo = [(name, mode) for name in sizes if asked.only in name for mode in modes(asked.precision, device)]
    for number, (name, mode) in enumerate(todo):
        if not budget.begins(f"{name}, {mode}"):
            continue
        chosen = (*sizes[name], f"device={device}", f"precision={mode}", f"compile={str(asked.compile).lower()}")
        measure = fits if asked.others else partial(measured, until=budget.share(len(todo) - number))
        with tempfile.TemporaryDirectory() as folder, silence():
            found = measure(Path(folder), chosen, rounds, turn, clock, bf16=mode == "bf16")
        results += show(name, mode, found)
        save(asked.json, device, results)
    waits = {each["waits_for"] for each in results} - {"nothing", "unknown"}
    values = {}
    for each in results:
        if each["what"] == "defaults" and not asked.others:
            model = "overhead/resnet" if "ResNet" in each["workload"] else "overhead/gpt"
            values[model] = max(each["whole"][0], values.get(model, 0.0))
    if device.type == "cuda":
        print("an ordinary step waits for the device: " + ("; ".join(sorted(waits)) or "no"))
        values["overhead/waits"] = len(waits)
    print("\n" + judged(values, device, "overhead/"))
    save(asked.json, device, results, values, budget)
    sys.exit(1 if waits else 0)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"overhead.py: {error}")
