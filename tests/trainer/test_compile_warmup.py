"""`compile=true`: the compiled model trains, its checkpoint has the plain names, a step is replayed bit for bit.

The runs are in processes of their own, because the tests' shape checks cannot be traced, and with `CI` set, because
PyTorch is stricter then.
"""

import json
import shutil
import subprocess
import sys

import pytest
from safetensors import safe_open

from tests.devices import CARD
from tests.runs import TINY_GPT, command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"),
]

CHOSEN = [
    *TINY_GPT,
    "steps=7",
    "eval_every=4",
    "checkpoint.every=4",
    "log_every=1",
    "warmup=none",
    "guard=skip",
    "faults=learning_rate",
    "faults.at=[4]",
    "faults.factor=3e3",
    "report=false",
]
"""A run in which one update is far too large: the steps after it are spikes with finite losses."""

RUNS = {"compiled": ["compile=true"], "chunks": ["compile=true", "loss_chunk=5"], "plain": ["compile=false"]}
WHERE = {"cpu": ["device=cpu"], "cuda": ["device=cuda", "determinism=strict"]}
"""On a GPU only `strict` promises bitwise equal results."""


@pytest.fixture(scope="module", params=["cpu", CARD])
def place(request, tmp_path_factory):
    """The folder that holds the runs."""
    place = tmp_path_factory.mktemp("runs")
    for name, chosen in RUNS.items():
        typed = [*CHOSEN, *WHERE[request.param], *chosen, f"hydra.run.dir={name}"]
        done = command(*typed, cwd=place, timeout=800, CI="true")
        assert done.returncode == 0, done.stderr
        assert ("compile  on, in " in done.stdout) == (name != "plain")
    return place


def test_a_compiled_run_trains_and_its_checkpoint_has_the_plain_names(place):
    losses, names = [], []
    for run in RUNS:
        lines = [json.loads(line) for line in (place / run / "metrics.jsonl").read_text().splitlines()]
        losses.append(next(line["val/loss"] for line in lines if line["step"] == 4 and "val/loss" in line))
        with safe_open(place / run / "checkpoints" / "step-00000004" / "model.safetensors", "pt") as opened:
            names.append(sorted(opened.keys()))
    assert max(losses) - min(losses) < 0.02
    assert names[0] == names[1] == names[2]
    hardware = json.loads((place / "compiled" / "run.json").read_text())["hardware"]
    assert hardware["compiled"] is True
    assert hardware["compile_seconds"] > 0


@pytest.mark.parametrize("run", ["compiled", "chunks"])
def test_a_compiled_step_is_replayed_with_the_same_bits_in_the_run_and_from_its_folder(place, run):
    incident = place / run / "incidents" / "step-00000006"
    same = json.loads((incident / "diagnosis.json").read_text())["replays"]["same"]
    assert same["finite"] is True
    assert same["bitwise_equal_to_reading"] is True
    replay = [sys.executable, "-m", "stabletrain.cli.commands", "replay", str(incident), "--json"]
    done = subprocess.run(replay, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["same_bits"] is True
