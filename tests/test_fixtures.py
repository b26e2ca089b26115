"""Run folders of an earlier commit still work: they can be resumed, sampled, replayed, compared and diagnosed.

`fixtures/README.md` says what they are and how they were made. Other CPUs' kernels round differently, so numbers are
compared with a tolerance; `tests/tools/checkouts.py` compares two checkouts on one machine bit by bit.
"""

import json
import runpy
import shutil
import sys

import pytest

from stabletrain.cli.commands import main as stabletrain
from stabletrain.config import moved
from stabletrain.tracking.metrics import read_jsonl
from tests.parallel import launches
from tests.runs import ROOT

FIXTURES = ROOT / "tests" / "fixtures"
EXPECTED = FIXTURES / "expected"
CONTINUED = json.loads((EXPECTED / "continued.json").read_text())
NUMBERS = ("step", "train/loss", "grad/norm", "lr", "val/loss")
CLOSE = 1e-3
"""Relative tolerance for differences between machines and between PyTorch versions."""

SIGNS = 1e-2
"""Relative tolerance if a user's clipping takes gradients' signs: PyTorch 2.11 and 2.15 differed by 7e-4."""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A copy of the fixtures as the working folder, as it was for the recorded runs."""
    copy = shutil.copytree(FIXTURES, tmp_path / "runs", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(copy)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.syspath_prepend(str(copy / "plugin"))
    yield copy
    sys.modules.pop("mine", None)


def train(monkeypatch, *arguments):
    """Runs `python train.py` in this process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return end.value.code


def told(capsys, *arguments):
    """Returns what `stabletrain ...` prints."""
    capsys.readouterr()
    assert stabletrain([*arguments]) == 0
    return capsys.readouterr().out


def close(found, expected, rel=CLOSE):
    """Checks that two mappings have the same keys and close numbers."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == (pytest.approx(value, rel=rel) if isinstance(value, float) else value), (key, expected)


def same_as_recorded(folder, name):
    """Checks that the metrics after a resume equal those that the earlier commit wrote."""
    expected = CONTINUED[name]
    found = read_jsonl(folder / "metrics.jsonl")[-len(expected) :]
    for line, recorded in zip(found, expected, strict=True):
        close({key: line[key] for key in NUMBERS if key in line}, recorded, SIGNS if name == "plugin_run" else CLOSE)


@pytest.mark.beside(when=lambda name: name == "rollback")
@pytest.mark.parametrize("name", ["one_process", "rollback"])
def test_a_run_goes_on(place, monkeypatch, name):
    steps = CONTINUED[name][-1]["step"]
    assert train(monkeypatch, f"resume={name}", f"steps={steps}") == 0
    same_as_recorded(place / name, name)
    assert any(event["event"] == "resume" for event in read_jsonl(place / name / "events.jsonl"))


@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_with_one(place, monkeypatch):
    assert train(monkeypatch, "resume=fsdp", "steps=20", "parallel=auto") == 0
    same_as_recorded(place / "fsdp", "fsdp_by_one")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_of_two_ranks_goes_on_with_two(place):
    done = launches.trained(2, "resume=fsdp", "steps=20", cwd=place)
    assert done.returncode == 0, done.stderr[-3000:]
    same_as_recorded(place / "fsdp", "fsdp")


def test_a_run_of_a_users_own_model_data_and_clipping_goes_on(place, monkeypatch):
    assert train(monkeypatch, "resume=plugin_run", "steps=20", "--trust") == 0
    same_as_recorded(place / "plugin_run", "plugin_run")
    record = json.loads((place / "plugin_run" / "run.json").read_text())
    assert [record["choices"][group] for group in ("model", "data", "clipping")] == ["mine"] * 3


@pytest.mark.beside
def test_a_users_script_compares_runs(place, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["table.py", "sweep"])
    capsys.readouterr()
    exec((place / "plugin" / "table.py").read_text(), {})
    assert capsys.readouterr().out == (EXPECTED / "table.csv").read_text()


@pytest.mark.beside
@pytest.mark.slow
def test_a_sweep_runs_what_is_missing_and_nothing_else(place, monkeypatch, capsys):
    before = json.loads((place / "sweep" / "3" / "run.json").read_text())
    shutil.rmtree(place / "sweep" / "3")
    assert train(monkeypatch, "resume=sweep") == 0
    assert capsys.readouterr().out.count("(before)") == 3
    after = json.loads((place / "sweep" / "3" / "run.json").read_text())
    assert after["overrides"] == before["overrides"]
    assert after["final"]["val/loss"] == pytest.approx(before["final"]["val/loss"], rel=CLOSE)


@pytest.mark.usefixtures("place")
def test_text_is_sampled(capsys):
    typed = ["sample", "one_process", "--prompt", "the", "--tokens", "20", "--temperature", "0"]
    assert told(capsys, *typed) == (EXPECTED / "sample.txt").read_text()


@pytest.mark.beside(when=lambda file: file.startswith("compare"))
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("file", "typed"),
    {
        "compare.txt": "compare sweep --wide",
        "compare_each.txt": "compare one_process rollback incident fsdp --each --wide --sort steps",
        "diagnose.txt": "diagnose incident",
    }.items(),
)
def test_stored_runs_read_as_they_did(capsys, file, typed):
    assert told(capsys, *typed.split()) == (EXPECTED / file).read_text()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("override", ["softmax=sink", "attention_gate=sigmoid"])
def test_a_part_newer_than_the_incident_is_tried(capsys, override):
    assert f"with {override}" in told(capsys, "replay", "incident/incidents/step-00000002", override)


@pytest.mark.usefixtures("place")
def test_a_group_newer_than_the_incident_that_acts_in_no_step_is_refused_as_such(capsys):
    assert stabletrain(["replay", "incident/incidents/step-00000002", "averaging=ema"]) == 2
    assert "averaging=ema does not affect one step's forward and backward" in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_an_incident_is_replayed(capsys):
    found = json.loads(told(capsys, "replay", "incident/incidents/step-00000002", "--json"))
    expected = json.loads((EXPECTED / "replay.json").read_text())
    assert found.keys() >= expected.keys(), "later versions add keys"
    assert found["verdict"] == "reproduced"
    assert found["then"] == expected["then"]
    close(found["now"], expected["now"])


MADE_UP = {
    "stabletrain.long_gone": "stabletrain.stability",
    "stabletrain.ancient.model": "stabletrain.models.gpt",
    "stabletrain.ancient.data.Words": "stabletrain.data.text.Text",
}
"""Targets that have moved: with a package, with a module, and a class."""


@pytest.fixture
def old_paths(place, monkeypatch):
    """The stored files with targets that no longer exist, and a table that maps them to today's."""
    for old, new in MADE_UP.items():
        monkeypatch.setitem(moved.MOVED, old, new)
        for file in [*place.rglob("*.yaml"), *place.rglob("step.json")]:
            file.write_text(file.read_text().replace(new, old))
    return place


@pytest.mark.slow
def test_stored_targets_that_moved_are_found(old_paths, monkeypatch, capsys):
    assert "stabletrain.long_gone.clipping" in (old_paths / "one_process" / ".hydra" / "config.yaml").read_text()
    assert told(capsys, "sample", "one_process", "--prompt", "the", "--tokens", "20", "--temperature", "0")
    again = told(capsys, "replay", "incident/incidents/step-00000002", "precision=bf16")
    assert "with precision=bf16" in again
    assert stabletrain(["replay", "incident/incidents/step-00000002", "precision=fp32"]) == 2
    assert "changes nothing: the run used the same values" in capsys.readouterr().err, (
        "the option of today is not another"
    )
    assert train(monkeypatch, "resume=plugin_run", "steps=20", "--trust") == 0
    same_as_recorded(old_paths / "plugin_run", "plugin_run")
