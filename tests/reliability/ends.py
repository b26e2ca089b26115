"""The end of a run, for bitwise comparison with another run's."""

import json
from pathlib import Path

from safetensors import safe_open

from stabletrain.tracking.metrics import read_jsonl

CLOCK = {"time", "seconds", "tokens_per_s", "images_per_s", "memory/peak_gb", "throughput/mfu"}
"""Metrics that differ between two equal runs; the last one is logged on a GPU only."""


def everything(checkpoint: Path) -> dict:
    """Returns a checkpoint's content, except times: tensors as bytes, the rest as JSON."""
    state = json.loads((checkpoint / "state.json").read_text())
    for name in ("seconds", "lost_seconds"):
        state["training"]["parts"]["history"].pop(name)
    tensors = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):  # several for a sharded run
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensors[f"{file.relative_to(checkpoint)}:{name}"] = opened.get_tensor(name).numpy().tobytes()
    return {"step": checkpoint.name, "state": state, "tensors": tensors, "names": sorted(tensors)}


def metrics(folder: Path) -> list[dict]:
    """Returns the lines of `metrics.jsonl` without times."""
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in read_jsonl(folder / "metrics.jsonl")]


def difference(whole: Path, cut: Path) -> str:
    """Returns the first difference between the ends of two runs; empty if there is none."""
    one, other = (everything(max((folder / "checkpoints").glob("step-*"))) for folder in (whole, cut))
    for key in ("step", "state", "names"):
        if one[key] != other[key]:
            return f"{key}: {one[key]} against {other[key]}"
    for name in one["names"]:
        if one["tensors"][name] != other["tensors"][name]:
            return f"{name} differs"
    if metrics(whole) != metrics(cut):
        return "metrics.jsonl differs"
    return ""
