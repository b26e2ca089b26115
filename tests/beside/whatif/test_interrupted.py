"""A healing run that is interrupted anywhere and resumed ends as one that was not: bits, metrics, and steps spent."""

import json
import os
import signal

import pytest

import stabletrain
from stabletrain.beside.whatif import healing
from stabletrain.beside.whatif.plan import plan
from stabletrain.tracking.metrics import read_jsonl
from tests.beside.whatif import interrupted
from tests.beside.whatif.test_healing import HALTS
from tests.once import once
from tests.reliability.ends import everything, metrics
from tests.runs import ROOT, python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUN = [*HALTS, "guard.escalate=whatif", "guard.whatif_steps=260", "hydra.run.dir=run"]


def end(folder):
    """The last checkpoint without times, the metrics, and how the run was healed."""
    found = everything(max((folder / "checkpoints").glob("step-*")))
    lines = [line for line in read_jsonl(folder / "events.jsonl") if line["event"] in ("heal", "unhealed")]
    return (
        found,
        metrics(folder),
        [{key: line[key] for key in ("arm", "arms", "steps", "to", "tick")} for line in lines],
    )


def uninterrupted(place):
    """Trains the run in a folder."""
    place.mkdir()
    trained(place)


def trained(place, *more, plan=plan):
    """Trains the run in a folder, in this process, in which Hydra keeps what it read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(healing, "plan", plan)
        stabletrain.train([*RUN, *more])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return end(once(tmp_path_factory, "healing_whole", uninterrupted) / "run")


def cut_off(place, sent, moment):
    """Runs the run in a folder until the signal ends it."""
    words = ["-m", interrupted.__name__, sent, moment, "all", *RUN]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return python(*words, cwd=place, PYTHONPATH=path, FEW_ARMS="1")


MOMENTS = [("SIGTERM", "arm:30"), ("SIGKILL", "install:1"), ("SIGKILL", "stop:2"), ("SIGTERM", "cost:2")]
"""In an arm, in the middle of the change to the winner, after the halt, and between two arms."""


@pytest.mark.parametrize(("sent", "moment"), MOMENTS)
def test_a_healing_run_that_is_interrupted_comes_to_the_same_end(whole, tmp_path, monkeypatch, sent, moment):
    cut = cut_off(tmp_path, sent, moment)
    assert cut.returncode == (75 if sent == "SIGTERM" else -signal.SIGKILL), cut.stderr
    status = json.loads((tmp_path / "run" / "run.json").read_text())["status"]
    assert sent == "SIGKILL" or status == "preempted"
    if sent == "SIGTERM":  # it stops at once, and not when all arms are over
        assert not [*tmp_path.glob("run/whatif/*/healing.json")]
    tries = []
    try_arms = healing.Healer._try
    monkeypatch.setattr(healing.Healer, "_try", lambda self, *given: tries.append(1) or try_arms(self, *given))
    trained(tmp_path, "resume=auto", plan=interrupted.judge_few)
    assert end(tmp_path / "run") == whole
    assert len(tries) == (0 if moment == "install:1" else 1), "what `healing.json` says is not found out again"


def test_another_setting_that_is_typed_after_a_halt_takes_the_place_of_the_fixes(tmp_path):
    cut = cut_off(tmp_path, "SIGKILL", "halt:1")
    assert cut.returncode == -signal.SIGKILL, cut.stderr
    trained(tmp_path, "resume=auto", "optimizer.lr=0.003")
    kinds = {line["event"]: line for line in read_jsonl(tmp_path / "run" / "events.jsonl")}
    assert kinds["unhealed"]["why"] == "resumed with other settings"
    assert "heal" not in kinds
    assert not (tmp_path / "run" / "whatif").exists()
