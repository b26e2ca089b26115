"""Runs one case in this process, and returns its recording."""

import contextlib
import io
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stabletrain.config.checks import check
from stabletrain.errors import TrainingHalted
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.reliability.finite.cases import Case
from tests.reliability.finite.watch import Alarmed, Lengths, Watched, digest
from tests.runs import composed

SAID = ("skip", "restore", "rollback", "alarm", "halt", "divergence", "state_changed", "distrust")
"""Events that count as seen."""

LAST = 3
"""The final loss is the mean of this many last evaluations."""


def record(case: Case) -> dict[str, Any]:
    """Trains a case without output, and returns its recording.

    Returns:
        the case's fields, `status`, `reason`; `series`, a list for each quantity, one number per executed step;
        `val`, `[tick, loss]` of each evaluation; `events`, `[tick, event, kind]`; `final`; the weights' `digest`; and
        `seconds` of CPU time.
    """
    quiet, began = io.StringIO(), time.process_time()
    status, reason = "finished", None
    with (
        tempfile.TemporaryDirectory() as place,
        contextlib.redirect_stdout(quiet),
        contextlib.redirect_stderr(quiet),
        composed(*case.overrides) as cfg,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        folder = Path(place) / "run"
        check(cfg)
        run = build(cfg, folder)
        kind = Alarmed if case.mode == "alarm" else Watched
        watched = kind(run.tools.guard, Lengths(run.state))
        run.tools = replace(run.tools, guard=watched)
        try:
            train(run)
        except TrainingHalted as halt:
            status, reason = "halted", str(halt)
        metrics = [line for line in read_jsonl(folder / "metrics.jsonl") if "val/loss" in line]
        events = folder / "events.jsonl"
        said = said_in(read_jsonl(events) if events.exists() else [])
    # What the watched guard only would have done stands in `watched.events`.
    said = sorted([*watched.events, *said], key=lambda event: event[0])
    val = [[line["tick"], float(line["val/loss"])] for line in metrics]
    return {
        **case.fields,
        "status": status,
        "reason": reason,
        "final": final(val),
        "val": val,
        "events": said,
        "digest": digest(run.state),
        "seconds": round(time.process_time() - began, 2),
        "series": watched.series,
    }


def said_in(events: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    """Returns what was seen, as `[tick, event, kind]`; fp16's routine overflows are left out."""
    found = []
    for event in events:
        if event["event"] in SAID and event.get("kind") != "overflow":
            found.append([event.get("tick", event["step"]), event["event"], event.get("kind", "")])
    return found


def final(val: list[list[float]]) -> float:
    """Returns the mean of the last evaluations."""
    last = [loss for _, loss in val[-LAST:]]
    return round(sum(last) / len(last), 6) if last else float("nan")


def crashed(case: Case, error: Exception) -> dict[str, Any]:
    """Returns the recording of a case that raised an error."""
    reason = f"{type(error).__name__}: {error}"
    empty = {"val": [], "events": [], "digest": "", "seconds": 0.0, "series": {}}
    return {**case.fields, "status": "crashed", "reason": reason, "final": float("nan"), **empty}
