"""The data of the charts: each run's curves as short lists of numbers, and the marks of skips, rollbacks and halts.

Numbers are rounded to six significant digits. NaN and infinities are null in a curve, and each gets its own mark, so
that they are never hidden.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from stabletrain.beside.comparison.groups import mean_of
from stabletrain.beside.comparison.pictures import FAR
from stabletrain.beside.comparison.reading.columns import Curve, not_finite, thin
from stabletrain.beside.comparison.reading.run import Run, split_losses
from stabletrain.stored.json_files import read_words

PANELS: list[dict[str, Any]] = [
    {
        "title": "Training loss",
        "names": ["train/loss"],
        "far": FAR,
        "smooth": True,
        "marks": True,
    },
    {"title": "Validation loss", "names": ["val/loss", "averaging/val_loss"], "far": FAR, "dots": True},
    {"title": "Validation accuracy", "names": ["val/accuracy", "averaging/val_accuracy"], "dots": True},
    {"title": "Gradient norm", "names": ["grad/norm"], "log": True, "smooth": True, "signals": ["grad_norm"]},
    {
        "title": "Spike score",
        "note": "Fraction of steps so far whose loss, or gradient norm, was a spike. A skipped spike counts in both.",
        "names": ["spike/score", "spike/grad_norm_score"],
        "floor": 0,
    },
    {
        "title": "Attention logits: upper bound max|q| max|k| / √d",
        "names": ["monitors/attn_logit_bound", "monitors/attn_logit_max"],
        "log": True,
        "signals": ["attention_bound", "attention_logits"],
        "lines": [{"y": 1e4, "text": "10,000: runs above it diverged in arXiv 2309.14322"}],
    },
    {
        "title": "fp16 headroom (bits)",
        "note": "How many times the largest activation can still double before it overflows in fp16.",
        "names": ["monitors/headroom_min"],
        "signals": ["headroom"],
        "lines": [{"y": 0, "text": "0: overflow in fp16"}],
    },
    {
        "title": "Margin of the update",
        "note": "How many times as long the update could be before the loss of its own batch rises.",
        "names": ["monitors/update_margin"],
        "signals": ["update_margin"],
        "log": True,
        "dots": True,
        "lines": [{"y": 1, "text": "1: the update itself raises the loss"}],
    },
    {
        "title": "Smallest variance in a norm, over eps",
        "names": ["monitors/norm_variance_min"],
        "signals": ["norm_variance"],
        "log": True,
        "lines": [{"y": 1, "text": "1: the norm no longer normalises"}],
    },
    {"title": "Loss scale", "names": ["precision/loss_scale"], "log": True, "signals": ["loss_scale"]},
    {"title": "Fraction of steps that were clipped", "names": ["clip/fraction"], "floor": 0},
    {"title": "Learning rate", "names": ["lr"], "log": True},
    {
        "title": "Throughput (units per second)",
        "names": ["tokens_per_s", "images_per_s", "samples_per_s"],
        "floor": 0,
        "smooth": True,
    },
]
"""The charts over steps: title, metrics, axis, and a note for the reader.

A chart with `marks` shows all marks; one with `signals` the forecasts about these signals. `far`: see `pictures.FAR`.
"""

LOSS = "train/loss"

NAMES = [name for panel in PANELS for name in panel["names"]]

MOST_SKIPS = 200
"""Maximum number of crosses per run; more would hide its line."""

WHOLE_STRETCHES = 4
"""Number of rolled-back stretches that are drawn with as many points as a curve; more of them share these points."""

MOST_FORECASTS = 20
"""Maximum number of forecasts per run that are drawn: the first ones."""


def panels(runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the charts for which at least one run has a curve, with the metrics that exist."""
    there = {name for run in runs for name in run["curves"]}
    found = []
    for panel in PANELS:
        names = [name for name in panel["names"] if name in there]
        if names:
            found.append({**panel, "names": names})
    return found


def chart_data(run: Run, points: int) -> dict[str, Any]:
    """Returns a run's `curves` by metric, the `abandoned` (rolled-back) stretches of its loss, and its marks.

    A curve has at most `points` points. The marks are `skips`, `rollbacks`, `healings`, `forecasts` and `halt`.
    The curve of the loss may be empty if there are marks: a run that was halted early may have logged no applied step.
    """
    curves = {name: as_lists(run.curve(name), points) for name in NAMES if len(run.curve(name)[0])}
    for name in ("precision/loss_scale", "clip/fraction"):  # a constant is not worth a chart
        if name in curves and len({*curves[name]["y"]}) == 1:
            del curves[name]
    stretches = run.abandoned(LOSS)
    share = min(points, WHOLE_STRETCHES * points // max(len(stretches), 1))  # else the page would grow with them
    skips: list[list[float | None]] = []
    halt = {"step": run.steps, "reason": run.problem or "by the guard"} if run.status == "halted" else None
    if run.skips or run.lowest("guard/applied") == 0:  # fp16's routine overflows are no skips
        applied, withheld = run.applied_and_skipped_losses()
        curves[LOSS] = as_lists(applied, points)
        skips = skip_marks(run, withheld, stretches)
    elif halt:
        curves.setdefault(LOSS, as_lists(run.curve(LOSS), points))
    return {
        "curves": curves,
        "abandoned": [[listed["x"], listed["y"]] for listed in (as_lists(each, share) for each in stretches)],
        "skips": skips,
        "rollbacks": rollback_marks(run, stretches),
        "healings": [
            [each["step"], f"halted: {each['reason']}; went on from step {each['to']:,} with {each['arm']}"]
            for each in run.healings
        ],
        "forecasts": forecast_marks(run),
        "halt": halt,
    }


def mean_data(runs: Sequence[Run], points: int) -> dict[str, Any]:
    """Returns the mean curves of some runs by metric: `x`, `y`, and `band`: `y` less and plus one standard deviation.

    Only metrics that all of the runs have logged have a curve. That of the loss is over the steps that all applied.
    """
    known = [run.curves([*NAMES, "guard/applied"]) for run in runs]  # reads each file once
    known = [curves | {LOSS: split_losses(curves)[0]} for curves in known]
    found = {}
    for name in NAMES:
        if not all(name in curves for curves in known):
            continue
        steps, mean, deviation = mean_of([curves[name] for curves in known])
        if len(steps):
            drawn = as_lists((steps, mean), points)
            at = np.searchsorted(steps, drawn["x"])
            edges = (mean[at] - deviation[at], mean[at] + deviation[at])
            found[name] = drawn | {"band": [[rounded(value) for value in edge.tolist()] for edge in edges]}
    return found


def skip_marks(run: Run, withheld: Curve, stretches: list[Curve]) -> list[list[float | None]]:
    """Returns step and loss of the skips; the loss is None if it was not logged or is not finite."""
    known: dict[int, float] = {}
    for steps, losses in (*stretches, withheld):
        known.update(zip(steps.tolist(), losses.tolist(), strict=True))
    marks = [
        [step, rounded(known.get(step) if math.isnan(loss) else loss)]
        for step, loss in zip(run.skips, run.skip_losses, strict=True)
    ]
    if len(marks) <= MOST_SKIPS:
        return marks
    incidents = {one["step"] for one in run.incidents}  # an incident is drawn at the loss of its skipped step
    every = -(-len(marks) // MOST_SKIPS)
    return [mark for number, mark in enumerate(marks) if number % every == 0 or mark[0] in incidents]


def rollback_marks(run: Run, stretches: list[Curve]) -> list[int]:
    """Returns the last step of each rolled-back stretch, without the stretches that ended with a healing."""
    ticks = [int(tick[-1]) for _, tick in run.abandoned("tick") if len(tick)]
    marks = [int(steps[-1]) for steps, _ in stretches if len(steps)]
    if not run.healings or len(ticks) != len(marks):
        return marks
    healed = {max((tick for tick in ticks if tick <= each["tick"]), default=0) for each in run.healings}
    return [step for step, tick in zip(marks, ticks, strict=True) if tick not in healed]


def forecast_marks(run: Run) -> list[dict[str, Any]]:
    """Returns step, signal and text of the first forecasts; `to` is the interval of the crossing, None if unknown."""
    marks = []
    for one in run.forecasts[:MOST_FORECASTS]:
        ends = [one[name] for name in ("low", "high")]
        known = all(isinstance(end, int | float) and math.isfinite(end) for end in ends)
        marks.append({**{name: one[name] for name in ("step", "signal", "text")}, "to": ends if known else None})
    return marks


def as_lists(curve: Curve, points: int) -> dict[str, Any]:
    """Returns a curve as lists `x` and `y`, and in `bad` step and word where it stops being finite."""
    steps, values = thin(curve, max(points, 8))
    words = not_finite((steps, values))
    listed: dict[str, Any] = {"x": steps.tolist(), "y": [rounded(value) for value in values.tolist()]}
    return listed | ({"bad": words[:50]} if words else {})


def rounded(value: float | None) -> float | None:
    """Rounds to six significant digits; None if the value is missing or not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def incident_rows(run: Run, above: Path) -> list[dict[str, Any]]:
    """Returns a run's incidents, each with a link from a page in `above` to its report, if that exists."""
    return [
        {
            **{name: one.get(name) for name in ("step", "kind", "cause", "verdict")},
            "fix": [str(fix) for fix in one.get("fix") or []],
            "link": link(run.folder / one["path"] / "report.md", above) if one.get("path") else None,
        }
        for one in run.incidents
    ]


def link(file: Path, above: Path) -> str | None:
    """Returns a link to `file` from a page in the folder `above`; None if the file does not exist."""
    if not file.is_file():
        return None
    return quote(os.path.relpath(file.absolute(), above.absolute()).encode("utf-8", "surrogateescape"))


def sample(run: Run, most: int = 4000) -> str | None:
    """Returns up to `most` characters of the text that the finished model generated; None if there is none."""
    if run.status != "finished":
        return None
    try:
        text = read_words(run.folder / "sample.txt")
    except OSError:
        return None
    return text[:most] or None
