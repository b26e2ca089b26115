"""What happened in a run, from its `events.jsonl`: incidents, skips, rollbacks.

Events are never cut back: a run that was continued from a checkpoint runs some steps again and tells of them again. An
event with the same `tick`, the number of steps executed, is the same event, and the newest telling counts.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stabletrain.compare.reading.columns import blocks


@dataclass
class Happened:
    """A run's events.

    Attributes:
        incidents: mappings with step, kind, cause, verdict, fix (a list) and path (relative to the run's folder; None
            where nothing could be written), in their order.
        skips: the steps whose update was withheld, but for fp16's routine overflow, in their order.
        rollbacks: how many.
    """

    incidents: list[dict[str, Any]] = field(default_factory=list)
    skips: list[int] = field(default_factory=list)
    rollbacks: int = 0


def read_events(folder: Path) -> Happened:
    """The events of the run in `folder`.

    Raises:
        OSError: its `events.jsonl` is there and cannot be read.
    """
    told: dict[tuple[str, Any], dict[str, Any]] = {}
    for lines, _ in blocks(folder / "events.jsonl"):
        for line in lines:
            if isinstance(line, dict) and isinstance(line.get("step"), int) and line.get("event") in KINDS:
                told[line["event"], line.get("tick", line["step"])] = line
    found = Happened()
    for (event, _), line in told.items():
        if event == "incident":
            found.incidents.append(incident(folder, line))
        elif event == "rollback":
            found.rollbacks += 1
        elif line.get("kind") != "overflow":
            found.skips.append(line["step"])
    return found


KINDS = ("incident", "skip", "rollback")
"""Events that are looked at."""


def incident(folder: Path, line: dict[str, Any]) -> dict[str, Any]:
    """An incident as it is compared; its kind (nonfinite, spike, loss_scale) stands in its own folder."""
    path = line.get("path") if isinstance(line.get("path"), str) else None
    return {
        "step": line["step"],
        "kind": None if path is None else kind_of(folder / path / "diagnosis.json"),
        "cause": line.get("cause"),
        "verdict": line.get("verdict"),
        "fix": line.get("fix") if isinstance(line.get("fix"), list) else [],
        "path": path,
    }


def kind_of(file: Path) -> str | None:
    """The kind that a diagnosis names; None where it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("kind") if isinstance(found, dict) else None
