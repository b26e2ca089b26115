"""Trains the runs of the first picture of README.md, and draws it: `python docs/held.py`.

A model with a bug makes a NaN (`examples/no_eps.py`). It is trained with `guard=off`, with the default guard, and with
the fix that the incident names; about a minute on two CPU cores. The runs are in `multirun/held`. What is drawn is
written to `evidence/held.json`, and `python docs/held.py --draw` draws it again. `tests/test_docs_held.py` compares.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from docs.pictures import STYLE, WIDTH, Picture, wrap
from stabletrain.tracking.metrics import read_jsonl

ROOT = Path(__file__).parents[1]

RUNS = ROOT / "multirun" / "held"

DATA = ROOT / "docs" / "evidence" / "held.json"

PICTURE = ROOT / "docs" / "evidence" / "held.svg"

COMMAND = "python train.py --config-dir examples/conf experiment=no_eps"

KINDS = {"off": "guard=off", "held": "", "fixed": "model.eps=1e-6"}
"""The runs, and what each adds to the command; nothing is the default guard."""

COLOURS = """
.curve { stroke: #2563b8; fill: none; stroke-width: 1.6; stroke-linejoin: round }
.axis { stroke: #b9c6d6; fill: none }
.skip { stroke: #c2410c; fill: none; stroke-width: 1.4; stroke-dasharray: 3 3 }
.lost { fill: #fbdada }
.fault { font-weight: 600; fill: #b42318 }
.fine { font-weight: 600; fill: #1c7a3c }
.mono { font: 11.5px ui-monospace, "SF Mono", Menlo, Consolas, monospace }
@media (prefers-color-scheme: dark) {
  .curve { stroke: #6ea8f7 }
  .axis { stroke: #43546a }
  .skip { stroke: #f2994a }
  .lost { fill: #4a2225 }
  .fault { fill: #ff9c94 }
  .fine { fill: #6fd08c }
}
"""

TITLE = "A run that dies of a NaN, the same run with the guard, and the cause"

ABOUT = (
    "Training loss in nats/byte of a small language model that divides by a standard deviation without an epsilon. "
    "Real runs with one seed; no fault is injected. Dashed: steps whose update was skipped."
)


def train() -> dict[str, Any]:
    """Trains the runs; returns what the picture shows of them."""
    shutil.rmtree(RUNS, ignore_errors=True)
    for name, more in KINDS.items():
        words = [*COMMAND.split()[1:], *more.split(), "log_every=1", "wandb=disabled", f"hydra.run.dir={RUNS / name}"]
        subprocess.run([sys.executable, *words], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    return {**{name: read(RUNS / name) for name in KINDS}, "incident": incident(RUNS / "held")}


def read(run: Path) -> dict[str, Any]:
    """Returns a run's losses, the steps that it skipped, and the state of its weights at the end."""
    lines = [line for line in read_jsonl(run / "metrics.jsonl") if "train/loss" in line]
    ends = [line["val/loss"] for line in read_jsonl(run / "metrics.jsonl") if "val/loss" in line]
    weights = load_file(max(run.glob("checkpoints/step-*")) / "model.safetensors").values()
    return {
        "losses": [as_json(line["train/loss"]) for line in lines],
        "skipped": [line["step"] for line in read_jsonl(run / "events.jsonl") if line["event"] == "skip"],
        "val": as_json(ends[-1]),
        "weights": sum(each.numel() for each in weights),
        "nan": sum(int(torch.isnan(each).sum()) for each in weights),
    }


def as_json(value: float) -> float | None:
    """Returns a number for JSON; None if it is not finite."""
    value = float(value)
    return round(value, 4) if abs(value) < float("inf") else None


def incident(run: Path) -> dict[str, Any]:
    """Returns what the first incident of a run says."""
    found = json.loads(min(run.glob("incidents/*/diagnosis.json")).read_text(encoding="utf-8"))
    return {
        **{key: found[key] for key in ("step", "cause", "confidence", "verdict")},
        "fix": found["fix"][0].replace(f"{ROOT}/", ""),
    }


# ---- drawing

FRAME = 268.0

GAP = 12.0

HIGH = 204.0
"""Height of a frame."""

LOSSES = (2.0, 6.0)
"""What the axes show; every loss is within."""


class Frames(Picture):
    """The picture, with colours of its own."""

    def svg(self) -> str:
        """Returns the picture as a file."""
        return super().svg().replace(STYLE, STYLE + COLOURS)

    def heading(self, number: int, x: float, words: str) -> None:
        """Writes what a frame shows."""
        self.text(x + 12, self.height + 22, f"{number}. {words}", "name")

    def curve(self, x: float, losses: Sequence[float | None], skipped: Sequence[int]) -> None:
        """Draws losses by step, up to the first that is not finite, and the steps that were skipped."""
        left, right, top, bottom = x + 28, x + FRAME - 12, self.height + 36, self.height + 142
        low, high = LOSSES

        def across(step: float) -> float:
            return left + (right - left) * step / len(losses)

        def up(loss: float) -> float:
            return bottom - (bottom - top) * (loss - low) / (high - low)

        for loss in (2, 4, 6):
            self.parts.append(f'<path d="M{left:g} {up(loss):g}H{right:g}" class="axis"/>')
            self.text(left - 6, up(loss) + 4, str(loss), "quiet", "end")
        self.text(left, bottom + 14, "step 1", "quiet")
        self.text(right, bottom + 14, f"{len(losses)}", "quiet", "end")
        lost = [step for step, loss in enumerate(losses, 1) if loss is None and step not in skipped]
        if lost:
            start = across(lost[0])
            self.parts.append(
                f'<rect x="{start:g}" y="{top:g}" width="{right - start:g}" height="{bottom - top:g}" class="lost"/>'
            )
            self.text((start + right) / 2, top + 34, f"from step {lost[0]}", "", "middle")
            self.text((start + right) / 2, top + 56, "loss NaN", "fault", "middle")
        for step in skipped:
            self.parts.append(f'<path d="M{across(step):.1f} {top:g}V{bottom:g}" class="skip"/>')
        points = [f"{across(step):.1f},{up(loss):.1f}" for step, loss in enumerate(losses, 1) if loss is not None]
        self.parts.append(f'<polyline points="{" ".join(points)}" class="curve"/>')


def draw(found: dict[str, Any]) -> str:
    """Returns the picture of what `train` returned."""
    picture = Frames(TITLE, ABOUT)
    picture.height += 4
    off, held, fixed, named = (found[key] for key in ("off", "held", "fixed", "incident"))
    first, second, third = (16 + number * (FRAME + GAP) for number in range(3))
    for x, kind in ((first, "bad"), (second, "good"), (third, "key")):
        picture.rect(x, picture.height, FRAME, HIGH, kind)
    low = picture.height + 176
    picture.heading(1, first, "guard=off")
    picture.curve(first, off["losses"], off["skipped"])
    picture.text(first + 12, low, f"{off['nan']:,} of {off['weights']:,} weights are NaN.", "fault")
    picture.text(first + 12, low + 17, "The run is lost.")
    picture.heading(2, second, "the default guard")
    picture.curve(second, held["losses"], held["skipped"])
    picture.text(second + 12, low, f"{held['nan']} of {held['weights']:,} weights are NaN.", "fine")
    picture.text(second + 12, low + 17, f"{len(held['skipped'])} updates skipped. Val loss {held['val']:.3f}.")
    picture.heading(3, third, "the incident")
    y = picture.height + 44
    says = f"step {named['step']}: {named['cause']} ({100 * named['confidence']:.0f}% sure): {named['verdict']}"
    for text in (says, f"fix: {named['fix']}"):
        for line in wrap(text, FRAME - 24, 7.1):
            picture.text(third + 12, y, line, "mono")
            y += 15
        y += 5
    picture.text(third + 12, low, "With model.eps=1e-6:", "fine")
    picture.text(third + 12, low + 17, f"{len(fixed['skipped'])} updates skipped. Val loss {fixed['val']:.3f}.")
    picture.height += HIGH
    assert third + FRAME + 16 <= WIDTH
    return picture.svg()


def main(typed: Sequence[str] | None = None) -> None:
    """Trains, if need be, and draws."""
    parser = argparse.ArgumentParser(prog="python docs/held.py", description=__doc__)
    parser.add_argument("--draw", action="store_true", help="draw again, without training")
    if not parser.parse_args(typed).draw:
        DATA.write_text(json.dumps(train(), indent=1) + "\n", encoding="utf-8")
    PICTURE.write_text(draw(json.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
