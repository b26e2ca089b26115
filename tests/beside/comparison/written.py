"""Writes run folders by hand, for tests of what a comparison reads from them."""

import json
import math

AT_INIT = 5.5

SIX_RUNS = [
    # loss, status, stability, seed
    (2.5, "finished", "none", 0),
    (1.25, "finished", "qknorm", 0),
    (1.0, "halted", "zloss", 0),
    (1.1, "running", "full", 0),
    (1.75, "finished", "qknorm", 1),
]
"""And a sixth, whose record is damaged."""


def word(value):
    """Formats a float as in `metrics.jsonl`."""
    return "NaN" if math.isnan(value) else "Infinity" if value == math.inf else value


def write(folder, overrides=(), loss=2.0, status="finished", lines=None, events=(), **record):
    """Writes a run folder; without `lines`, a run of nine steps whose loss starts at `AT_INIT` and ends at `loss`."""
    folder.mkdir(parents=True)
    text = json.dumps({"status": status, "overrides": list(overrides), **record})
    (folder / "run.json").write_text(text)
    if lines is None:
        lines = [
            {"step": 1, "train/ce": AT_INIT},
            {"step": 1, "monitors/attn_logit_max": 3.0, "monitors/attn_logit_max/blocks.0": 3.0},
            {"step": 9, "train/ce": 0.1},
            {"step": 9, "val/loss": word(loss)},
        ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def six_runs(folder):
    """A sweep over `stability`, with two seeds of one option, and runs in other states; returns its folder."""
    for number, (loss, status, stability, seed) in enumerate(SIX_RUNS):
        write(
            folder / str(number),
            [f"stability={stability}", f"seed={seed}", "steps=9"],
            loss,
            status,
            hardware={"name": "NVIDIA H100 80GB HBM3", "precision": "bf16"},
            model={"parameters": 1_250_000},
        )
    (write(folder / "5") / "run.json").write_text("{")
    return folder
