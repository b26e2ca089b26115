"""What the named fix saves: from the state kept at the alarm, on with the fix, with nothing, and with a wrong fix.

A run keeps its state at the first alarm (`forecast.action=checkpoint`). "Nothing" is the run itself; the other arms
resume from the kept checkpoint with its overrides, in the same process and on the same batches.
"""

import contextlib
import io
import json
import multiprocessing
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stabletrain.config.checks import check
from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.reliability.foresight.cases import Case, all_cases, ordered
from tests.reliability.foresight.events import LAST, break_of
from tests.reliability.foresight.record import reduced
from tests.reliability.foresight.runs import one_thread
from tests.reliability.foresight.store import COMMITTED
from tests.runs import composed

FILE = COMMITTED / "acts.jsonl"
"""The results, one run a line."""

KEEPING = ("checkpoint=default", "checkpoint.every=1000000", "forecast.action=checkpoint")

UNWATCHED = ("monitors=none", "forecast=off")
"""Of the arms: they measure nothing but losses."""

WRONG = ("zloss=palm", "clipping.max_norm=0.5")
"""Overrides that do not remove a cause; the first that the alarm does not name is used."""


def act(case: Case) -> dict[str, Any]:
    """Runs a case and its arms.

    Returns:
        `case`; `alarm`, the step of the first alarm, None without one; `signal`, `fix`, `wrong`; and for each arm
        (`nothing`, `fix`, `wrong`) the final training loss and the step at which it broke, or why it was refused.
    """
    with tempfile.TemporaryDirectory() as place:
        first = Path(place) / "nothing"
        found: dict[str, Any] = {
            "case": case.name,
            "alarm": None,
            "nothing": outcome(case, (*case.overrides, *KEEPING), first),
        }
        events = [event for event in read_events(first) if event["event"] == "forecast"]
        if not events:
            return found
        alarm = events[0]
        kept = first / "checkpoints" / f"step-{alarm['step']:08d}"
        fix = alarm["fix"][0] if alarm["fix"] else None
        wrong = next(each for each in WRONG if each != fix and each not in case.overrides)
        found |= {"alarm": alarm["step"], "signal": alarm["signal"], "fix": fix, "wrong": wrong}
        for arm, override in (("fix", fix), ("wrong", wrong)):
            if override is not None:
                plain = [each for each in case.overrides if not each.startswith("monitors.")]
                overrides = (*plain, *UNWATCHED, f"resume={kept}", *override.split())
                before = lines_until(first, alarm["step"])
                found[f"{arm}_arm"] = outcome(case, overrides, Path(place) / arm, before)
        return found


def outcome(case: Case, overrides: Sequence[str], folder: Path, before: Sequence[dict] = ()) -> dict[str, Any]:
    """Trains, and returns `final` and `broke`; or `refused`, why the fix cannot be applied by a resume."""
    quiet = io.StringIO()
    with (
        contextlib.redirect_stdout(quiet),
        contextlib.redirect_stderr(quiet),
        composed(*ordered(tuple(overrides))) as cfg,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            check(cfg)
            train(build(cfg, folder))
        except TrainingHalted:
            pass
        except ConfigError as error:
            return {"refused": str(error)[:300]}
    recording = reduced(case, [*before, *read_jsonl(folder / "metrics.jsonl")])
    losses = recording["stepwise"][-LAST:, 0]
    return {
        "final": float(losses.mean()) if np.isfinite(losses).all() else None,
        "broke": break_of(recording, case.steps),
    }


def lines_until(folder: Path, step: int) -> list[dict[str, Any]]:
    """Returns a run's metrics up to a step."""
    return [line for line in read_jsonl(folder / "metrics.jsonl") if line["step"] <= step]


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Returns a run's events."""
    file = folder / "events.jsonl"
    return read_jsonl(file) if file.exists() else []


def act_all(names: Sequence[str], processes: int, file: Path = FILE) -> int:
    """Acts on the runs that have no result yet, and appends their results; returns the number of runs that failed."""
    done = {found["case"] for found in read_acts(file)}
    missing = [case for case in all_cases() if case.name in names and case.name not in done]
    failed = 0
    with multiprocessing.get_context("spawn").Pool(processes) as pool, file.open("a") as lines:
        for number, (name, found) in enumerate(pool.imap_unordered(act_one, missing), 1):
            if isinstance(found, str):
                failed += 1
            else:
                lines.write(json.dumps(found) + "\n")
                lines.flush()
            print(f"{number}/{len(missing)} {name} {found if isinstance(found, str) else ''}", flush=True)
    return failed


def read_acts(file: Path = FILE) -> list[dict[str, Any]]:
    """Returns the results so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def act_one(case: Case) -> tuple[str, dict[str, Any] | str]:
    """Acts on one run in a worker; returns its name, and its result or the error."""
    one_thread()
    try:
        return case.name, act(case)
    except Exception as error:  # one run must not end the campaign
        return case.name, f"{type(error).__name__}: {error}"[:300]
