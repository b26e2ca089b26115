"""`compile=true`: the compiled model trains, resumes, and keeps the names of its parameters."""

import json

from safetensors import safe_open

from tests.runs import TINY_GPT, command

CHOSEN = [
    *TINY_GPT,
    "compile=true",
    "steps=4",
    "eval_every=2",
    "checkpoint.every=2",
    "log_every=1",
    "hydra.run.dir=run",
]


def test_a_compiled_run_trains_and_its_checkpoint_has_the_plain_names(tmp_path):
    done = command(*CHOSEN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    final = json.loads((tmp_path / "run" / "run.json").read_text())["final"]
    plain = command(*CHOSEN, "compile=false", "hydra.run.dir=plain", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    reference = json.loads((tmp_path / "plain" / "run.json").read_text())["final"]
    assert abs(final["val/loss"] - reference["val/loss"]) < 0.02
    names = []
    for run in ("run", "plain"):
        with safe_open(tmp_path / run / "checkpoints" / "step-00000004" / "model.safetensors", "pt") as opened:
            names.append(sorted(opened.keys()))
    assert names[0] == names[1]
