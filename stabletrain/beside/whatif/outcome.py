"""How an arm ended, read from its run folder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.runs import read_run
from stabletrain.beside.whatif.arms import Arm
from stabletrain.beside.whatif.job import NOT_FINITE
from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.data.order import position
from stabletrain.stored.json_files import read_words
from stabletrain.stored.run_files import run_record_or_empty
from stabletrain.tracking.metrics import read_jsonl

REFUSED = "refused.txt"
"""In an arm's folder: why its run could not be built."""

MANY_SKIPS = 0.01
"""Share of skipped steps above which the trouble has come back. One skip is never enough: it changes nothing."""


@dataclass(frozen=True)
class StartFacts:
    """What the outcomes need to know of the state that an arm started from.

    Attributes:
        step, tick: steps done, and executed, by then.
        seconds: training time by then.
        skipped: data positions `[start, stop)` that were skipped by then.
        first_loss: mean loss of the run's first updates; NaN at step 0.
    """

    step: int
    tick: int
    seconds: float
    skipped: Sequence[Sequence[int]]
    first_loss: float = math.nan


def start_facts(checkpoint: Checkpoint) -> StartFacts:
    """Returns the facts of a checkpoint."""
    tree = checkpoint.load()
    history: Mapping[str, Any] = tree["parts"]["history"]
    first = [loss for loss in history.get("first_losses", []) if math.isfinite(loss)]
    return StartFacts(
        tree["step"],
        tree.get("tick", tree["step"]),
        float(history.get("seconds", 0.0)),
        tree["skipped"],
        sum(first) / len(first) if first else math.nan,
    )


@dataclass(frozen=True)
class Outcome:
    """How an arm ended.

    Attributes:
        arm: the arm.
        folder: its run folder.
        step: the last step.
        broke: why it ended early; empty if it did not.
        skips: steps that the guard skipped, without fp16's routine overflows.
        rollbacks: rollbacks.
        forecasts: signals that the forecast has named since the start.
        losses: of the applied steps with a finite loss, by the position of the batch in the data; nats per target,
            without z-loss.
        val_loss: at the last step, in nats per target; NaN if it was not evaluated.
        seconds: per executed step; NaN if not known.
        run: as `stabletrain compare` reads it.
    """

    arm: Arm
    folder: Path
    step: int
    broke: str
    skips: int
    rollbacks: int
    forecasts: tuple[str, ...]
    losses: dict[int, float]
    val_loss: float
    seconds: float
    run: Run | None = None

    @property
    def came_back(self) -> str:
        """What shows that the trouble came back; empty if nothing does."""
        parts = []
        if self.rollbacks:
            parts.append(f"{self.rollbacks} rollback{'s' if self.rollbacks > 1 else ''}")
        if self.skips > max(1.0, MANY_SKIPS * len(self.losses)):
            parts.append(f"{self.skips} skips")
        return ", ".join(parts)

    @property
    def reason(self) -> str:
        """Why it broke, without the step."""
        return self.broke.removeprefix(f"step {self.step}: ")

    def after(self, place: int) -> dict[int, float]:
        """Returns the losses of the batches from a position of the data on."""
        return {each: loss for each, loss in self.losses.items() if each >= place}


def is_over(folder: Path, stop: int) -> bool:
    """Whether the arm in a folder has reached a step, or has ended for good before it."""
    record = run_record_or_empty(folder)
    status, done = record.get("status"), record.get("final", {}).get("steps")
    if status in ("halted", "finished") or str(record.get("reason") or "").startswith(NOT_FINITE):
        return True
    return status == "preempted" and isinstance(done, int) and done >= stop


def read_outcome(arm: Arm, folder: Path, start: StartFacts, until: int) -> Outcome:
    """Reads how an arm ended. An arm whose run could not be built is one that broke before its first step.

    Args:
        arm: the arm.
        folder: its run folder.
        start: of the state from which it started.
        until: the last step whose losses count: the arm may have gone on with a later round.
    """
    if (folder / REFUSED).exists():
        reason = read_words(folder / REFUSED).strip()
        return Outcome(arm, folder, start.step, reason, 0, 0, (), {}, math.nan, math.nan)
    run = read_run(folder)
    final, reason = run.record.get("final", {}), str(run.record.get("reason") or "")
    broke = reason if run.status in ("halted", "failed") or reason.startswith(NOT_FINITE) else ""
    # An arm may have gone on with a later round; its place in this one must stay when the what-if is called again.
    step = min(int(final.get("steps", run.steps)), until)
    steps, values = run.curve("val/loss", -1)
    at_end = values[steps == step]
    ticks = final.get("ticks", start.tick) - start.tick
    spent = final.get("seconds", math.nan) - start.seconds
    return Outcome(
        arm,
        folder,
        step,
        broke,
        len(run.skips),
        run.rollbacks,
        tuple(dict.fromkeys(str(each["signal"]) for each in run.forecasts)),
        losses_by_batch(run, skipped_spans(folder, start), until),
        float(at_end[-1]) if len(at_end) else math.nan,
        spent / ticks if ticks > 0 else math.nan,
        run,
    )


def skipped_spans(folder: Path, start: StartFacts) -> list[tuple[int, int]]:
    """Returns the data positions `[start, stop)` that an arm has skipped, also by rollbacks."""
    found = [(int(first), int(last)) for first, last in start.skipped]
    for line in read_jsonl(folder / "events.jsonl"):
        if line.get("event") == "rollback" and line.get("skipped"):
            found.append((int(line["skipped"][0]), int(line["skipped"][1])))
    return list(dict.fromkeys(found))


def losses_by_batch(run: Run, skipped: Sequence[tuple[int, int]], until: int) -> dict[int, float]:
    """Returns the losses of the applied steps up to `until`, by the position of their batch in the data.

    A rollback skips data only from its own position on, so the ranges of all rollbacks give the position of every step
    that was not rolled back.
    """
    name = "train/ce" if len(run.curve("train/ce")[0]) else "train/loss"
    steps, losses = run.curve(name, -1)
    at, applied = run.curve("guard/applied", -1)
    gone = np.isin(steps, at[applied == 0]) | ~np.isfinite(losses) | (steps > until)
    return {
        position(int(step) - 1, skipped): float(loss) for step, loss in zip(steps[~gone], losses[~gone], strict=True)
    }
