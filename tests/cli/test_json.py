"""`--json`: each command prints the shape that `docs/reference/json.md` documents, as strict JSON and nothing else."""

import itertools
import math
import re

import pytest

from stabletrain.cli.commands import main
from tests.beside.comparison.written import write
from tests.runs import TINY_GPT, composed
from tests.shapes import differences, sections, shape, strict

pytestmark = pytest.mark.beside  # the run with an incident has a fault


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run that has an incident, a run with looks of its monitors, and a sweep in which a run broke."""
    from stabletrain.trainer.build import build
    from stabletrain.trainer.loop import train

    folder = tmp_path_factory.mktemp("runs")
    quiet = ["checkpoint=off", "monitors=none", "steps=3", "guard=skip", "precision=fp32", "report=false"]
    with composed(*TINY_GPT, *quiet, "faults=activation", "faults.at=[2]") as cfg:
        train(build(cfg, folder / "trained"))
    looks = [
        {
            "step": step,
            "train/loss": 5 - step / 500,
            "lr": 0.3,
            "monitors/attn_logit_max/blocks.0": 10 * 2 ** (step / 100),
        }
        for step in range(25, 800, 25)
    ]
    write(folder / "looked", ["optimizer.lr=0.3"], lines=looks, status="running")
    for number, (rate, seed) in enumerate(itertools.product((0.1, 0.2), (0, 1))):
        loss = [1.0, 1.1, math.nan, math.inf][number]
        write(folder / "sweep" / str(number), [f"optimizer.lr={rate}", f"seed={seed}", f"qknorm=q{seed}"], loss)
    write(folder / "sweep" / "4", ["optimizer.lr=0.1", "seed=3"], lines=[], status="running")
    return folder


TABLE = [
    pytest.param("diagnose", "trained", id="diagnose"),
    pytest.param("replay", "trained/incidents/step-00000003", id="replay"),
    pytest.param("status", "sweep", id="status"),
    pytest.param("compare", "sweep", id="compare"),
    pytest.param("compare", "trained", id="compare of one run"),
    pytest.param("forecast", "looked", id="forecast"),
]
"""Command, and the folder in `runs` that it is run on. `tests/beside/whatif/test_command.py` has `whatif`."""


@pytest.mark.parametrize(("command", "folder"), TABLE)
def test_what_a_command_prints_has_the_documented_shape(runs, tmp_path, monkeypatch, capsys, command, folder):
    monkeypatch.chdir(tmp_path)
    assert main([command, str(runs / folder), "--json"]) == 0
    found = strict(capsys.readouterr().out)
    assert found
    assert not [*differences(found, shape(command))]


@pytest.mark.parametrize("command", ["compare", "status"])
def test_what_is_not_finite_is_a_word_and_what_is_missing_is_null(runs, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    assert main([command, str(runs / "sweep"), "--json"]) == 0
    losses = {run["run"]: run["val_loss"] for run in strict(capsys.readouterr().out)["runs"]}
    assert losses == {"0": 1.0, "1": 1.1, "2": "NaN", "3": "Infinity", "4": None}


@pytest.mark.parametrize("command", ["diagnose", "replay", pytest.param("compare")])
def test_a_failure_prints_one_line_of_error_and_no_json(tmp_path, capsys, command):
    assert main([command, str(tmp_path / "nothing"), "--json"]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("stabletrain: ")
    assert seen.err.count("\n") == 1


def test_every_command_that_has_the_option_is_documented(capsys):
    def printed(*typed):
        with pytest.raises(SystemExit, match="0"):
            main([*typed, "--help"])
        return capsys.readouterr().out

    names = re.findall(r"^    (\S+)", printed(), re.M)
    have = {name for name in names if name not in ("command", "train", "run") and "--json" in printed(name)}
    assert {"diagnose", "replay", "compare", "forecast", "whatif"} <= have
    assert {heading.split()[0] for heading in sections()} == have


def test_a_difference_from_the_shape_is_found():
    wanted = {
        "a": "number | null",
        "b": [{"c": "string"}],
        "d | null": {"<key>": "integer"},
        "e": "'x' | 'y'",
        "f": "as b",
    }
    value = {"a": "NaN", "b": [{"c": "s"}], "d": None, "e": "x", "f": []}
    assert not [*differences(value, wanted)]
    wrong = {"a": True}, {"b": [{"c": 1}]}, {"b": [{}]}, {"d": {"k": 1.5}}, {"e": "z"}, {"f": [{"c": None}]}, {"g": 1}
    for each in wrong:
        assert len([*differences(value | each, wanted)]) == 1, each
    assert [*differences({}, wanted)] == [f".{key} is missing" for key in "abdef"]
