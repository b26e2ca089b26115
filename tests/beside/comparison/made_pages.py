"""Writes small run folders without training, with everything that a page must show."""

import json
import math
import re
from pathlib import Path
from typing import Any

import yaml

NAMES = ("clip/fraction", "spike/score", "spike/grad_norm_score", "monitors/attn_logit_bound", "monitors/headroom_min")

SAMPLE = "def train(model):\n    </pre><script>document.title = 'taken'</script>\n"


def made(
    folder: Path,
    *overrides: str,
    level: float = 1.0,
    steps: int = 40,
    status: str = "finished",
    nan_at: int | None = None,
    incident: dict[str, Any] | None = None,
    rolled_back: tuple[int, int] | None = None,
    card: str = "cpu",
    pace: float = 1000.0,
    sample: str | None = None,
) -> Path:
    """Writes a run folder and returns it.

    Args:
        overrides: the command-line overrides.
        level: the level that the losses converge to.
        nan_at: a skipped step whose loss is NaN.
        incident: the fields of an incident, including `step`; its report is written too.
        rolled_back: first and last of the steps that were rolled back.
    """
    folder.mkdir(parents=True)
    lines = [line(step, level, steps, nan_at) for step in range(1, steps + 1)]
    if rolled_back:
        first, last = rolled_back
        gone = [{**line(step, level + 2, steps, None), "rolled_back": True} for step in range(first, last + 1)]
        lines[last:last] = gone
    for step in range(steps // 4, steps + 1, steps // 4):
        lines.append({"step": step, "time": 1.8e9 + step, "tick": step, "val/loss": level + 1 / step})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    events = [{"event": "skip", "step": nan_at, "tick": nan_at, "kind": "nonfinite"}] if nan_at else []
    if incident:
        path = folder / "incidents" / f"step-{incident['step']:08d}"
        path.mkdir(parents=True)
        (path / "report.md").write_text("# what happened\n")
        (path / "diagnosis.json").write_text('{"kind": "nonfinite"}')
        events.append({"event": "incident", "tick": incident["step"], "path": f"incidents/{path.name}", **incident})
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    (folder / "run.json").write_text(
        json.dumps(record(overrides, level, steps, status, card, pace) | {"id": str(folder)})
    )
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(tree(overrides), sort_keys=False))
    if sample is not None:
        (folder / "sample.txt").write_text(sample)
    return folder


def tree(overrides: tuple[str, ...]) -> dict[str, Any]:
    """The overrides as a configuration: nested, with values as they were meant."""
    found: dict[str, Any] = {}
    for key, _, value in (override.partition("=") for override in overrides):
        *above, name = key.split(".")
        below = found
        for part in above:
            below = below.setdefault(part, {})
        below[name] = yaml.safe_load(value) if value[:1].isalnum() else value
    return found


def line(step: int, level: float, steps: int, nan_at: int | None) -> dict[str, Any]:
    """A line of `metrics.jsonl`."""
    loss = level + 2 * math.exp(-step / 10) + 0.1 * math.sin(step)
    values = dict.fromkeys(NAMES, 0.1 * step)
    bad = step == nan_at
    return {
        "step": step,
        "time": 1.8e9 + step,
        "tick": step,
        "train/loss": "NaN" if bad else loss,
        "train/ce": "NaN" if bad else loss,
        "grad/norm": "NaN" if bad else 1.0 + 0.5 * math.sin(step),
        "lr": 0.01 * (1 - step / (steps + 1)),
        "guard/applied": 0 if bad else 1,
        "guard/rollbacks": 0,
        "tokens_per_s": 1000.0 + step,
        **values,
    }


def record(overrides: tuple[str, ...], level: float, steps: int, status: str, card: str, pace: float) -> dict[str, Any]:
    """A `run.json`."""
    final = {
        "val/loss": level + 1 / steps,
        "steps": steps,
        "seconds": 12.0,
        "tokens_per_s": pace,
        "guard/updates": steps,
    }
    return {
        "id": "abcdefgh",
        "status": status,
        "reason": None if status == "finished" else f"it is {status}",
        "choices": {"model": "gpt_nano", "precision": "bf16"},
        "hardware": {"device": "cpu", "name": card, "precision": "bf16"},
        "versions": {"python": "3.11.7", "torch": "2.15.0"},
        "overrides": list(overrides),
        "command": "python train.py -m",
        "final": final,
    }


def sweep(folder: Path) -> Path:
    """Two settings at three learning rates; one run is halted after an incident; the losses fall with the number."""
    number = 0
    for arm in ("none", "full"):
        for rate in ("0.001", "0.01", "0.1"):
            lost = arm == "none" and rate == "0.1"
            made(
                folder / str(number),
                f"stability={arm}",
                f"optimizer.lr={rate}",
                level=3.0 - 0.25 * number,
                status="halted" if lost else "finished",
                nan_at=20 if lost else None,
                incident={"step": 20, "cause": "lr_too_high", "verdict": "it climbs", "fix": ["optimizer.lr=0.01"]}
                if lost
                else None,
                rolled_back=(24, 30) if lost else None,
                card="NVIDIA H100" if arm == "full" else "cpu",
                pace={3: 4000.5, 4: 4000.25}.get(
                    number, 1000.0 * (number + 1)
                ),  # by their letters 4000.25 is the larger
                sample="some text\n" if number == 5 else None,
            )
            number += 1
    return folder


def text_of(html: str) -> str:
    """The words of a page, without its scripts, styles and tags."""
    return re.sub(r"<(script|style)\b.*?</\1>|<[^>]*>", " ", html, flags=re.DOTALL)
