"""Trains many small runs with random faults at random steps, and inspects what each leaves behind.

    python -m tests.reliability.campaign --runs 200 --seed 0
    python -m tests.reliability.campaign --clean 20

Every run must end finished, or halted with a reason. Nothing non-finite may remain in its weights, its moments or a
checkpoint marked healthy; a healthy checkpoint must verify; the guard must not act before the first fault; and a
finished run's loss must be within `BOUND` of the progress of the same setting without faults. Finite damage that shows
in no loss and no gradient is counted as `silent`: a guard that watches losses and gradients cannot detect it.
"""

import argparse
import contextlib
import io
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path

import torch

from stabletrain.beside.faults.plan import KINDS
from stabletrain.checkpoint.reader import Checkpoint, UnusableCheckpoint, verify
from stabletrain.config.checks import check
from stabletrain.errors import TrainingHalted
from stabletrain.records import TrainState
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.reliability.commands import command
from tests.runs import TINY_GPT, TINY_RESNET, composed

STEPS = 100
BOUND = 0.5
"""Allowed shortfall of a faulty run, as a share of the clean run's improvement in validation loss."""

OFTEN = [
    f"steps={STEPS}",
    "warmup.steps=5",
    "eval_every=50",
    "log_every=50",
    "checkpoint.every=10",
    "guard=rollback",
    "guard.window=20",
    "guard.patience=4",
    "guard.healthy_after=5",
    "guard.snapshot_every=10",
    "guard.skip_batches=4",
    "guard.lr_steps=10",
]
"""A guard with short windows, so that it acts within a hundred steps."""

MODELS = {
    "gpt": [*TINY_GPT, "batch_size=16"],
    "resnet": [*TINY_RESNET, "model.depth=8", "optimizer=sgd", "batch_size=16"],
}
PRECISIONS = ("fp32", "bf16", "fp16")
SKIPS = ("bad_data", "nonfinite", "spike", "overflow")
EVENTS = ("spike", "rollback", "alarm", "halt")
"""Events that a run without faults must not have, besides skips other than fp16's overflows."""


@dataclass(frozen=True)
class Setting:
    """A training setup."""

    model: str
    precision: str
    fused: bool
    seed: int

    @property
    def overrides(self) -> list[str]:
        """The overrides of the command line."""
        fused = f"optimizer.fused={str(self.fused).lower()}"
        return [*MODELS[self.model], *OFTEN, f"precision={self.precision}", fused, f"seed={self.seed}"]


SETTINGS = [
    Setting(model, precision, fused, seed)
    for model in MODELS
    for precision in PRECISIONS
    for fused in (True, False)
    for seed in (0, 1)
]
"""Settings for runs with faults: few, so that they can share the clean runs they are compared with."""


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        setting, faults: what was run.
        status, reason: as in `run.json`; `crashed` if the run ended with an error.
        val_loss, clean: final loss in nats, of this run and of the run without faults.
        skipped, rollbacks: as counted by the guard.
        corrupted: tensors that hold NaN or Inf but must not.
        lost: whether no healthy checkpoint that verifies is left.
        worse: whether the run finished further from the clean run than `BOUND` allows.
        silent: finite weights or moments above a thousand times the clean run's maximum.
        false_alarms: the guard's actions before the first fault.
    """

    setting: Setting
    faults: list[dict]
    status: str = ""
    reason: str | None = None
    val_loss: float = math.nan
    clean: float = math.nan
    skipped: dict[str, int] = field(default_factory=dict)
    rollbacks: int = 0
    corrupted: list[str] = field(default_factory=list)
    lost: bool = False
    worse: bool = False
    silent: list[str] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def kinds(self) -> list[str]:
        """The kinds of its faults; `clean` if there are none."""
        return [fault["kind"] for fault in self.faults] or ["clean"]

    @property
    def bad(self) -> bool:
        """Whether something happened that must not."""
        ended = self.status == "finished" or (self.status == "halted" and bool(self.reason))
        return not ended or self.lost or self.worse or bool(self.corrupted) or bool(self.false_alarms)


@dataclass(frozen=True)
class Clean:
    """A setting's result without faults: its first and last loss, and the largest magnitude in each tensor."""

    first: float
    last: float
    largest: dict[str, float]


# ---- faults


def at(draw: random.Random) -> list[int]:
    """Draws a step, excluding the first one and the last ones, whose effects could not be seen."""
    return [draw.randrange(1, STEPS - 10)]


def at_checkpoint(draw: random.Random) -> list[int]:
    return [10 * draw.randrange(1, STEPS // 10)]


def nonfinite(draw: random.Random) -> str:
    return draw.choice(["nan", "inf", "-inf"])


FAULTS = {
    "input": lambda d: {"at": at(d), "value": nonfinite(d)},
    "label": lambda d: {"at": at(d), "value": d.choice([10**6, -1, 256])},
    "ignored": lambda d: {"at": at(d)},
    "empty": lambda d: {"at": at(d)},
    "poison": lambda d: {"at": at(d), "length": d.randint(1, 8)},
    "activation": lambda d: {"at": at(d), "value": nonfinite(d)},
    "gradient": lambda d: {"at": at(d), "value": d.choice(["nan", "inf", 1e6])},
    "learning_rate": lambda d: {"at": at(d), "factor": d.choice([10.0, 100.0, 1000.0]), "length": d.randint(1, 8)},
    "bitflip": lambda d: {"at": at(d), "where": d.choice(["weight", "moment"]), "bit": d.randint(20, 31)},
    "disk_full": lambda d: {"at": at_checkpoint(d)},
    "wandb": lambda d: {"at": [0]},
    "kill": lambda d: {"at": at_checkpoint(d)},
}
"""Draws a random fault of each kind."""

BESIDE = [kind for kind in FAULTS if kind not in ("kill", "wandb")]
"""Kinds that can be a run's second fault."""


def plan(draw: random.Random, kind: str) -> list[dict]:
    """Draws a fault of this kind, and in three runs of ten a second one of any kind."""
    kinds = [kind] + ([draw.choice(BESIDE)] if draw.random() < 0.3 else [])
    return [{"kind": each, **FAULTS[each](draw), **seeded(draw, each)} for each in kinds]


def seeded(draw: random.Random, kind: str) -> dict:
    """Draws the seed of a fault kind that has one."""
    return {"seed": draw.randrange(10**6)} if "seed" in {each.name for each in fields(KINDS[kind])} else {}


def written(faults: Sequence[dict]) -> list[str]:
    """Returns the overrides of a fault plan."""
    if not faults:
        return []
    entries = [",".join(f"{key}:{value}" for key, value in fault.items()) for fault in faults]
    return ["faults=plan", f"faults.faults=[{','.join(f'{{{entry}}}' for entry in entries)}]".replace(" ", "")]


# ---- runs


def trained(folder: Path, overrides: Sequence[str]) -> TrainState:
    """Trains in this process without output; returns the final state, also if the run halted."""
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), composed(*overrides) as cfg:
        check(cfg)
        job = build(cfg, folder)
        with contextlib.suppress(TrainingHalted):
            train(job)
    return job.state


def killed(folder: Path, overrides: Sequence[str]) -> None:
    """Trains in separate processes, and resumes the run each time it is killed."""
    done = command(*overrides, f"hydra.run.dir={folder}", cwd=folder.parent)
    for _ in range(3):
        if done.returncode != -9:
            return
        done = command(f"resume={folder}", cwd=folder.parent)


@cache
def clean(setting: Setting) -> Clean:
    """Trains the setting without faults."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "clean"
        state = trained(folder, setting.overrides)
        losses = [line["val/loss"] for line in read_jsonl(folder / "metrics.jsonl") if "val/loss" in line]
        start = next(line["train/loss"] for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line)
        return Clean(start, losses[-1], {name: largest(value) for name, value in tensors(state).items()})


def tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Returns the floating-point weights, buffers and moments by name."""
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    found = dict(state.model.state_dict())
    for parameter, kept in state.optimizer.state.items():
        found |= {f"{names[parameter]}/{key}": value for key, value in kept.items()}
    return {name: value for name, value in found.items() if is_number(value)}


def is_number(value: object) -> bool:
    """Whether it is a tensor that could hold NaN."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def one(setting: Setting, faults: list[dict], *, guarded: bool = True) -> Outcome:
    """Trains with these faults and returns the result; without the guard, it shows that the campaign detects damage."""
    outcome, began = Outcome(setting, faults), time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        overrides = [*setting.overrides, *written(faults)]
        if not guarded:
            overrides = [override for override in overrides if not override.startswith("guard")] + ["guard=off"]
        state = None
        if any(fault["kind"] == "wandb" for fault in faults):
            overrides = ["wandb=offline" if override == "wandb=disabled" else override for override in overrides]
        try:
            if any(fault["kind"] == "kill" for fault in faults):
                killed(folder, overrides)
            else:
                state = trained(folder, overrides)
        except Exception as error:  # any exception is a finding
            outcome.reason = f"{type(error).__name__}: {error}"
        look(outcome, folder, state)
    outcome.seconds = round(time.monotonic() - began, 2)
    return outcome


def look(outcome: Outcome, folder: Path, state: TrainState | None) -> None:
    """Fills in what a run has left behind."""
    record = json.loads((folder / "run.json").read_text())
    final = record["final"] or {}
    known = clean(outcome.setting)
    outcome.status = "crashed" if outcome.reason else record["status"]
    outcome.reason = outcome.reason or record["reason"]
    outcome.val_loss, outcome.clean = float(final.get("val/loss", math.nan)), known.last
    outcome.skipped = {k.removeprefix("guard/skipped_"): n for k, n in final.items() if k.startswith("guard/skipped_")}
    outcome.rollbacks = int(final.get("guard/rollbacks", 0))
    finished = outcome.status == "finished"
    outcome.worse = finished and not outcome.val_loss <= known.last + BOUND * max(known.first - known.last, 0.0)
    healthy = []
    for path in sorted((folder / "checkpoints").glob("step-*")):
        outcome.corrupted += spoilt(path, healthy)
    outcome.lost = not healthy
    if finished and state is not None:
        live = tensors(state)
        outcome.corrupted += [f"at the end: {name}" for name, value in live.items() if not torch.isfinite(value).all()]
        limits = {name: 1e3 * max(value, 1e-3) for name, value in known.largest.items()}
        outcome.silent = [name for name, value in live.items() if limits[name] < largest(value) < math.inf]
    first = min((fault["at"][0] for fault in outcome.faults), default=sys.maxsize)
    outcome.false_alarms = [text for tick, text in alarms(folder) if tick <= first]


def spoilt(path: Path, healthy: list[Checkpoint]) -> list[str]:
    """Returns what is wrong with a checkpoint; appends it to `healthy` if it verifies and is marked healthy."""
    try:
        found = verify(path)
        tree = found.load()
    except UnusableCheckpoint as error:
        return [f"{path.name}: {error}"]
    if not found.healthy:
        return []
    healthy.append(found)
    judged = dict(tree["model"])
    for name, kept in tree["optimizer"]["state"].items():
        judged |= {f"{name}/{key}": value for key, value in kept.items()}
    bad = [name for name, value in judged.items() if is_number(value) and not value.isfinite().all()]
    return [f"{path.name}, called healthy: {name}" for name in bad]


def alarms(folder: Path) -> list[tuple[int, str]]:
    """Returns what the guard and the monitors did, each with the number of executed steps by then."""
    file, found = folder / "events.jsonl", []
    for event in read_jsonl(file) if file.exists() else []:
        if event["event"] == "restore":  # that step was taken again, so it was not skipped
            found = [each for each in found if each[0] != event["tick"] or not each[1].startswith("skip")]
        if event["event"] in EVENTS or (event["event"] == "skip" and event["kind"] != "overflow"):
            what = f"{event['event']} {event.get('kind', '')} at {event['step']}"
            found.append((event.get("tick", event["step"]), what))
    return found


def campaign(
    runs: int,
    seed: int,
    settings: Sequence[Setting] = SETTINGS,
    kinds: Sequence[str] = tuple(FAULTS),
    say: bool = False,
    together: int = 1,
) -> list[Outcome]:
    """Trains `runs` runs in random settings: cycles through the kinds of fault, `together` of them in each run."""
    draw, found = random.Random(seed), []
    for number in range(runs):
        setting, places = draw.choice(settings), range(number * together, (number + 1) * together)
        found.append(one(setting, [fault for place in places for fault in plan(draw, kinds[place % len(kinds)])]))
        if say or found[-1].bad:
            print(f"{number + 1}/{runs}", line(found[-1]), file=sys.stderr, flush=True)
    return found


def clean_runs(runs: int, seed: int) -> list[Outcome]:
    """Trains `runs` runs without faults, over both models and all precisions."""
    draw, found = random.Random(seed), []
    for number in range(runs):
        model, precision = list(MODELS)[number % 2], PRECISIONS[number // 2 % 3]
        found.append(one(Setting(model, precision, draw.random() < 0.7, 100 + number), []))
        if found[-1].bad:
            print(line(found[-1]), file=sys.stderr, flush=True)
    return found


# ---- report


def line(outcome: Outcome) -> str:
    """Formats a run in one line."""
    of, wrong = outcome.setting, []
    for name in ("corrupted", "lost", "worse", "silent", "false_alarms"):
        if value := getattr(outcome, name):
            wrong.append(f"{name.upper()} {value if isinstance(value, bool) else value[:3]}")
    return (
        f"{of.model} {of.precision} fused={of.fused} seed={of.seed} {outcome.faults}: {outcome.status} "
        f"{outcome.reason or ''} loss {outcome.val_loss:.3f} clean {outcome.clean:.3f} skipped {outcome.skipped} "
        f"rollbacks {outcome.rollbacks} {outcome.seconds:.1f}s {' '.join(wrong)}"
    )


def table(found: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Counts outcomes by kind of fault; a run with two kinds counts in both."""
    rows: dict[str, dict[str, int]] = {}
    for kind in [*FAULTS, "clean"]:
        runs = [outcome for outcome in found if kind in outcome.kinds]
        if not runs:
            continue
        rows[kind] = {
            "runs": len(runs),
            **{name: sum(outcome.skipped.get(name, 0) for outcome in runs) for name in SKIPS},
            "rollbacks": sum(outcome.rollbacks for outcome in runs),
            "finished": sum(outcome.status == "finished" for outcome in runs),
            "halted": sum(outcome.status == "halted" for outcome in runs),
            "crashed": sum(outcome.status not in ("finished", "halted") for outcome in runs),
            "corrupted": sum(bool(outcome.corrupted) for outcome in runs),
            "lost": sum(outcome.lost for outcome in runs),
            "worse": sum(outcome.worse for outcome in runs),
            "silent": sum(bool(outcome.silent) for outcome in runs),
            "false": sum(bool(outcome.false_alarms) for outcome in runs),
        }
    return rows


def rendered(rows: dict[str, dict[str, int]]) -> str:
    """Formats the table for printing."""
    names = list(next(iter(rows.values()), {}))
    lines = [f"{'fault':<14}" + "".join(f"{name:>11}" for name in names)]
    for kind, row in rows.items():
        lines.append(f"{kind:<14}" + "".join(f"{row[name]:>11}" for name in names))
    return "\n".join(lines)


def main() -> int:
    """Runs a campaign, prints its table, and returns 1 if something happened that must not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=0, help="runs with faults")
    parser.add_argument("--clean", type=int, default=0, help="runs without faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for every run and the table")
    parser.add_argument("--say", action="store_true", help="print a line for every run, not only for bad ones")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = campaign(chosen.runs, chosen.seed, say=chosen.say) + clean_runs(chosen.clean, chosen.seed)
    rows = table(found)
    print(rendered(rows))
    if chosen.json:
        chosen.json.write_text(json.dumps({"table": rows, "runs": [asdict(outcome) for outcome in found]}, indent=1))
    return 1 if any(outcome.bad for outcome in found) else 0


if __name__ == "__main__":
    sys.exit(main())
