"""Runs one case in this process, and returns its recording: losses of every step, and the signals at every look."""

import contextlib
import io
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from stabletrain.config.checks import check
from stabletrain.errors import TrainingHalted
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.reliability.foresight.cases import Case
from tests.runs import composed

STEPWISE = ("train/loss", "grad/norm", "guard/applied")
"""Recorded for every step."""

LEFT_OUT = ("monitors/zero_grads", "monitors/grad_norm", "monitors/g_over_sqrt_v/", "monitors/attn_entropy/")
"""Of the looks' metrics, those that begin like this are not kept, to keep the recordings small."""

OF_THE_STEP = ("lr", "precision/loss_scale", "grad/norm", "train/loss")
"""Recorded at every look, beside `monitors/...`."""

Recording = dict[str, Any]
"""`case`, `status`, `reason`; `steps`, `looks` (step numbers), `names`; arrays `stepwise [step, 3]`, `signals [look,
name]`, fp32; `final`, the validation loss at the end."""


def record(case: Case) -> Recording:
    """Trains a case without output, and returns its recording; a run that halts or fails ends early."""
    quiet = io.StringIO()
    status, reason = "finished", ""
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
        try:
            train(build(cfg, folder))
        except TrainingHalted as halt:
            status, reason = "halted", str(halt)
        lines = read_jsonl(folder / "metrics.jsonl")
    return reduced(case, lines) | {"status": status, "reason": reason}


def reduced(case: Case, lines: list[dict[str, Any]]) -> Recording:
    """Returns the recording of a run's metrics."""
    steps = {int(line["step"]): line for line in lines if "train/loss" in line}
    looks = {step: line for step, line in steps.items() if any(name.startswith("monitors/") for name in line)}
    names = sorted({name for line in looks.values() for name in line if kept(name)})
    val = [float(line["val/loss"]) for line in lines if "val/loss" in line]
    return {
        "case": case.name,
        "final": val[-1] if val else float("nan"),
        "steps": np.array([*steps], np.int32),
        "looks": np.array([*looks], np.int32),
        "names": names,
        "stepwise": table(steps.values(), STEPWISE),
        "signals": table(looks.values(), names),
    }


def kept(name: str) -> bool:
    """Whether a look's metric is recorded."""
    return name in OF_THE_STEP or (name.startswith("monitors/") and not name.startswith(LEFT_OUT))


def table(lines: Any, names: Any) -> np.ndarray:
    """Returns fp32 `[line, name]`; NaN where a line lacks the metric."""
    return np.array([[float(line.get(name, "nan")) for name in names] for line in lines], np.float32)
