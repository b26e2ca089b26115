"""What the experiments promise, as far as a test can afford it."""

import json

from tests.runs import command


def test_resnet_digits_reaches_98_percent(tmp_path):
    done = command("experiment=resnet_digits", "wandb=disabled", "device=cpu", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["final"]["val/accuracy"] >= 0.98
