"""Run folders as a sweep leaves them, without training: a few distinct metrics files, hard-linked into any number of
folders.
"""

import json
import os
import random
from pathlib import Path

DISTINCT = 24
"""Number of distinct metrics files; a run uses the one of its number modulo this."""

STANDING = [
    *("train/loss", "train/ce", "train/zloss", "grad/norm", "clip/coef", "lr", "precision/loss_scale"),
    *("guard/skipped", "clip/fraction", "guard/skip_rate", "spike/score", "spike/grad_norm_score"),
    *("guard/applied", "guard/rollbacks", "tokens_per_s", "memory/peak_gb"),
]
"""Metrics on every line of a real run."""

LOOKS = [
    f"monitors/{name}/blocks.{block}" for name in ("attn_logit_max", "headroom", "grad_norm") for block in range(6)
]
"""Metrics that the monitors add to every hundredth line."""

CONFIG = """\
steps: {steps}
batch_size: 4
seed: {seed}
optimizer:
  _target_: stabletrain.stability.optimizers.adamw.AdamW
  lr: {rate}
  betas:
  - 0.9
  - 0.95
qknorm:
  _target_: stabletrain.stability.qknorm.NoQKNorm
guard:
  _target_: stabletrain.guard.RollbackGuard
  sigma: 6.0
  window: 128
model:
  _target_: stabletrain.models.gpt.GPT
  n_layer: 6
  qknorm: ${{qknorm}}
"""


def metrics(lines: int, seed: int) -> str:
    """Returns the text of a `metrics.jsonl`: `lines` steps, with an evaluation every hundred."""
    draw = random.Random(seed)
    written = []
    for step in range(1, lines + 1):
        names = STANDING + (LOOKS if step % 100 == 0 else [])
        line = {"step": step, "time": 1.8e9 + step, **{name: draw.random() * 3 for name in names}, "tick": step}
        if draw.random() < 0.01:
            line |= {"grad/norm": "NaN", "guard/applied": 0}
        written.append(json.dumps(line))
        if step % 100 == 0:
            written.append(json.dumps({"step": step, "time": 1.8e9 + step, "tick": step, "val/loss": draw.random()}))
    return "\n".join(written) + "\n"


def swept(number: int) -> tuple[float, str, int]:
    """Returns a run's learning rate, stability option and seed."""
    return (1e-3, 1e-2, 1e-1)[number % 3], ("none", "qknorm")[number // 3 % 2], number // 6


def sweep(folder: Path, runs: int, lines: int) -> None:
    """Writes `runs` run folders whose metrics are hard links to `DISTINCT` files of `lines` steps."""
    folder.mkdir(parents=True)
    files = []
    for number in range(DISTINCT):
        files.append(folder / f".metrics-{number}")
        files[-1].write_text(metrics(lines, number))
    for number in range(runs):
        rate, arm, seed = swept(number)
        run = folder / str(number)
        (run / ".hydra").mkdir(parents=True)
        (run / ".hydra" / "config.yaml").write_text(CONFIG.format(steps=lines, seed=seed, rate=rate))
        (run / "run.json").write_text(json.dumps(record(rate, arm, seed)))
        os.link(files[number % DISTINCT], run / "metrics.jsonl")
        skip = {"event": "skip", "step": 7, "tick": 7, "kind": "nonfinite", "time": "2026-01-01T00:00:00.000+00:00"}
        (run / "events.jsonl").write_text(json.dumps(skip) + "\n")


def record(rate: float, arm: str, seed: int) -> dict:
    """Returns a `run.json` of realistic size."""
    return {
        "id": f"{arm}-{rate}-{seed}",
        "status": "finished",
        "reason": None,
        "choices": {"stability": arm, "qknorm": "layernorm" if arm == "qknorm" else "none", "model": "gpt_nano"}
        | {f"group_{number}": "default" for number in range(18)},
        "hardware": {"device": "cpu", "name": "cpu", "precision": "bf16"} | {f"fact_{n}": "x" * 20 for n in range(12)},
        "versions": {f"package_{number}": "1.2.3" for number in range(9)},
        "overrides": [f"stability={arm}", f"optimizer.lr={rate}", f"seed={seed}"],
        "command": "python train.py -m " + "x" * 100,
        "final": {"val/loss": 1.5, "seconds": 100.0, "tokens_per_s": 1e4, "guard/rollbacks": 0},
    }
