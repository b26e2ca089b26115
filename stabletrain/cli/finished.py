"""A run that is over: whether a command would only repeat it, and its result in one line."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stabletrain.config.arguments import parse_arguments, recorded_arguments
from stabletrain.tracking.run_folder import RunFolder

FINAL_STATUSES = ("finished", "halted")
"""Statuses of a run that has a result."""


def finished_run(
    folder: Path, overrides: Sequence[str], steps: int, statuses: Sequence[str] = FINAL_STATUSES, changed: bool = False
) -> dict[str, Any] | None:
    """Returns the `run.json` of a completed run with exactly these overrides in a folder, else None.

    Args:
        folder: the run folder.
        overrides: the overrides that the run must have.
        steps: the number of steps that a finished run must have taken.
        statuses: the statuses that count as completed.
        changed: whether a finished run with other overrides counts too.
    """
    record = RunFolder(folder).read()
    if record.get("status") not in statuses or not record.get("id"):
        return None
    same = recorded_arguments(folder).identity() == parse_arguments([*overrides]).identity()
    if not same and not (changed and record["status"] == "finished"):
        return None
    if record["status"] == "finished" and record.get("final", {}).get("steps", 0) < steps:
        return None
    return record


def result(record: Mapping[str, Any]) -> str:
    """Returns `val loss 2.311`, plus the accuracy, skipped steps, rollbacks and healings if there are any."""
    final = record.get("final", {})
    loss = final.get("val/loss")
    words = [f"val loss {loss:.3f}" if isinstance(loss, float) else "val loss -"]
    if "val/accuracy" in final:
        words.append(f"accuracy {100 * final['val/accuracy']:.2f} %")
    skipped = sum(
        final.get(f"guard/skipped_{kind}", 0) for kind in ("bad_data", "nonfinite", "spike", "recheck", "update")
    )
    words += [f"{skipped} skipped"] if skipped else []
    for name in ("rollback", "healing"):
        if count := final.get(f"guard/{name}s", 0):
            words.append(f"{count} {name}{'s' if count > 1 else ''}")
    return ", ".join(words)


def loss_of(record: Mapping[str, Any]) -> float:
    """Returns the final validation loss of a finished run; infinity for any other run."""
    loss = record.get("final", {}).get("val/loss", math.inf) if record.get("status") == "finished" else math.inf
    return loss if isinstance(loss, float) and not math.isnan(loss) else math.inf
