"""Reads points back from figures, and the same points from `metrics.jsonl`."""

import json
import math
import re

import numpy as np
import pytest

from stabletrain.tracking.metrics import read_jsonl


def logged(folder, name):
    """Returns a metric as logged, without rolled-back lines: step to value. The loss is that of the applied steps."""
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if name in line and not line.get("rolled_back")]
    if name == "train/loss":
        lines = [line for line in lines if line.get("guard/applied", 1)]
    return {line["step"]: float(line[name]) for line in lines}


def mean_and_deviation(folders, name):
    """Returns mean and standard deviation of a metric at the steps that all runs have logged."""
    each = [logged(folder, name) for folder in folders]
    steps = sorted(set.intersection(*({*known} for known in each)))
    values = np.array([[known[step] for step in steps] for known in each])
    means, deviations = values.mean(axis=0), values.std(axis=0, ddof=1)
    return dict(zip(steps, means, strict=True)), dict(zip(steps, deviations, strict=True))


def page_data(html):
    """Returns the data of a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def assert_points(x, y, known, what=""):
    """Checks that each point is a logged one, that the last one is the last logged, and that gaps are not finite."""
    assert len(x) == len(y) > 0, what
    for step, value in zip(x, y, strict=True):
        if value is None or not math.isfinite(value):
            assert not math.isfinite(known[step]), (what, step)
        else:
            assert value == pytest.approx(known[step], rel=1e-5), (what, step)
    assert x[-1] == max(known), what


def assert_curves(data, folder):
    """Checks all curves of a run in the data of a page; returns their names."""
    for name, curve in data["curves"].items():
        assert_points(curve["x"], curve["y"], logged(folder, name), f"{folder.name} {name}")
    return {*data["curves"]}
