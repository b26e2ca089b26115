"""The results that the experiments promise, for those short enough to train in a test."""

import json

import pytest

from tests.runs import command

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("experiment", "accuracy"), [("resnet_digits", 0.98), ("nf_resnet_digits", 0.96)])
def test_a_resnet_reaches_its_accuracy_on_digits(tmp_path, experiment, accuracy):
    done = command(f"experiment={experiment}", "wandb=disabled", "device=cpu", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["final"]["val/accuracy"] >= accuracy
