"""Writes run folders by hand, for tests of what a comparison reads from them."""

import json
import math

AT_INIT = 5.5


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
