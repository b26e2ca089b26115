"""`stabletrain lr` as a user types it: the table, the JSON, what it leaves behind, and one message for bad input."""

import math
import re

import pytest

from stabletrain.beside.rate_finder import command, report, trials
from stabletrain.beside.rate_finder.peak import Trial, points
from stabletrain.beside.rate_finder.search import Search
from stabletrain.cli.commands import main
from tests.runs import ROOT, TINY_GPT
from tests.shapes import differences, shape, strict

TYPED = ["lr", *TINY_GPT, "precision=fp32", "--steps", "6"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Runs the command in an empty folder, and as a user without trusted records."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def made(table, **more):
    """A search whose second round ended with these losses by rate, one for each seed."""
    fine = [
        Trial(rate, seed, 40, 5.0, loss, 40, 1.5) for rate, losses in table.items() for seed, loss in enumerate(losses)
    ]
    return Search([Trial(2e-3, 0, 20, 5.0, 2.5, 20, 1.0)], fine, points(fine), **more)


def test_the_json_has_the_documented_shape_and_the_command_trains_at_the_rate(tmp_path, monkeypatch, capsys):
    load = trials.load_data

    def load_and_tell(*given):
        print("a remark of the user's data set")
        return load(*given)

    monkeypatch.setattr(trials, "load_data", load_and_tell)
    assert main([*TYPED, "--low", "2e-3", "--high", "3e-2", "--json", "optimizer.lr=1e-2"]) == 0
    seen = capsys.readouterr()
    found = strict(seen.out)
    assert not [*differences(found, shape("lr"))]
    assert found["command"].endswith(f"optimizer.lr={found['lr']:g}")
    assert found["command"].count("optimizer.lr") == 1
    tried = found["first_round"] + found["second_round"]
    assert found["first_round"][0]["lr"] == 1e-2
    assert found["steps"] == sum(each["done"] for each in tried)
    assert seen.err.count("\nlr ") + seen.err.startswith("lr ") == len(tried)
    assert not any((tmp_path / "work").iterdir())
    assert not (tmp_path / "state").exists()


def test_a_plug_in_model_and_data_are_found(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "tests/fixtures/plugin"))
    plugin = ["--config-dir", str(ROOT / "tests/fixtures/plugin/conf"), "data=mine", "model=mine"]
    quick = ["optimizer=sgd", "batch_size=8", "device=cpu", "eval_batches=2", "precision=fp32"]
    assert main(["lr", *plugin, *quick, "--steps", "6", "--low", "0.05", "--high", "0.2"]) == 0
    seen = capsys.readouterr()
    assert re.search(r"^peak     [\d.e-]+: the lowest loss is ", seen.out, re.M)
    assert "--config-dir" in seen.out.splitlines()[-1]


def test_an_interrupt_ends_at_once(monkeypatch):
    calls = []

    def interrupted(*given):
        calls.append(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(trials, "train_step", interrupted)
    assert main(TYPED) == 130
    assert len(calls) == 1


def test_if_no_rate_lowers_the_loss_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(command, "search", lambda *given: made({1e-3: [5.1], 2e-3: [math.inf]}))
    monkeypatch.setattr(command, "Trials", lambda *given, **more: type("Run", (), {"run": made({1e-3: [5.1]}).fine}))
    assert main(TYPED) == 1
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("stabletrain: the loss falls at none of the rates from 0.001 to 0.001 within 6 steps")


def test_ranks_are_refused(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(TYPED) == 2
    assert capsys.readouterr().err == "stabletrain: stabletrain lr runs in one process: start it without torchrun\n"


def test_the_text_says_what_is_told_apart_and_what_is_not():
    found = made({1e-3: [2.6, 2.7], 2e-3: [2.3, 2.42], 4e-3: [2.32, 2.41], 8e-3: [2.8, 2.9], 1.6e-2: [math.inf] * 2})
    assert report.why(found) == (
        "the lowest loss is 2.360 ± 0.011 at 0.002; 0.004 is not told apart; the peak is the centre of 0.002 to"
        " 0.004; at 0.016 and above the loss is not finite"
    )
    lines = report.text(found, "next").splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["0.001", "0.002", "0.004", "0.008", "0.016"]
    assert [line.rpartition("  ")[2] for line in (lines[2], lines[3], lines[5])] == [
        "lowest",
        "not told apart",
        "not finite",
    ]
    assert lines[6].startswith("peak     0.0028: ")
    bars = [line.count("━") for line in lines[1:5]]
    assert bars.index(max(bars)) == 3
    assert bars[1] == bars[2] == 1
    assert lines[-2] == "cost     420 steps in 11 trials, 16 s"


def test_an_open_end_and_a_single_seed_are_said():
    found = made({1e-3: [2.3], 2e-3: [2.5]})
    assert any("may be lower" in note for note in report.notes(found))
    assert any("--seeds 2" in note for note in report.notes(found))
    closed = made({1e-3: [2.5, 2.6], 2e-3: [2.3, 2.4], 4e-3: [2.5, 2.6]})
    assert not any("may be" in note or "--seeds" in note for note in report.notes(closed))
