"""A run's own page: it agrees with the run's files, and is one small file."""

import pytest

from stabletrain.beside.comparison.pages.one_run import (
    commands,
    figures,
    guard,
    machine,
    outcome,
    referred_setting,
    run_page,
    write_run_page,
)
from stabletrain.beside.comparison.pages.rendering import escaped
from stabletrain.beside.comparison.reading.run import Range, Run
from stabletrain.beside.comparison.reading.runs import read_run
from tests.beside.comparison.made_pages import SAMPLE, made, text_of
from tests.beside.comparison.written import write


def run(folder, status="finished", problem=None, final=None, **more):
    record = {"final": final or {}, "reason": more.pop("reason", None)}
    return Run(folder, status, problem, record, {}, True, {}, **more)


def test_the_page_of_a_run_shows_its_incident_sample_and_settings(tmp_path):
    incident = {"step": 20, "cause": "bad_batch", "verdict": "it is this batch", "fix": ["clipping=zclip"]}
    made(tmp_path / "sw" / "run", "optimizer.lr=0.02", incident=incident, sample=SAMPLE)
    write_run_page(tmp_path / "sw" / "run")
    text = (tmp_path / "sw" / "run" / "report.html").read_text()
    assert 'href="incidents/step-00000020/report.md"' in text
    assert escaped(SAMPLE) in text
    assert SAMPLE not in text
    shown = " ".join(text_of(text).split())
    assert "Finished after 40 steps, validation loss 1.025 nats." in shown
    assert "bad_batch it is this batch clipping=zclip" in shown
    assert "optimizer.lr 0.02" in shown
    assert "torch 2.15.0" in shown


def test_the_page_of_a_run_does_not_grow_with_its_steps_skips_and_rollbacks(tmp_path):
    sizes = []
    for rollbacks in (20, 200):
        steps = 200 * rollbacks  # the second half of each 200 is rolled back
        lines = [
            {"step": step, "train/loss": 1 + step % 7 / 10, "guard/rollbacks": step // 200} for step in range(steps)
        ]
        lines = [line | ({"rolled_back": True} if line["step"] % 200 >= 100 else {}) for line in lines]
        events = [{"event": "skip", "step": step, "loss": 3.0} for step in range(0, steps, 10)]
        events += [{"event": "rollback", "step": step} for step in range(199, steps, 200)]
        page = run_page(read_run(write(tmp_path / str(rollbacks), lines=lines, events=events)))
        sizes.append(len(page) - len(run_page(run(tmp_path))))
    assert sizes[1] < 2 * sizes[0] < 200_000


def test_the_page_of_a_run_lists_its_forecasts(tmp_path):
    told = {"step": 1200, "signal": "log_z", "low": 5.0, "high": 9.0, "text": "log Z <reaches> 50"}
    page = run_page(run(tmp_path, forecasts=[told]))
    assert '<td class="number">1,200</td><td class="short">log_z</td>' in page
    assert '<td class="wide">log Z &lt;reaches&gt; 50</td>' in page
    assert "Forecasts" not in run_page(run(tmp_path))


def test_the_page_of_a_run_shows_what_was_tried_after_its_halts(tmp_path):
    told = {"step": 1200, "tick": 1300, "reason": "loss <7> is a spike", "to": 1100, "arms": ["lr_half", "clip"]}
    heal = {**told, "event": "heal", "arm": "lr_half", "steps": 2000}
    last = {**told, "event": "unhealed", "tick": 1500, "arm": "", "steps": 0, "why": "none of 2 fixes holds"}
    folder = write(tmp_path / "run", events=[heal, last], final={"guard/updates": 9, "guard/healings": 1})
    (folder / "whatif" / "halt-00001300").mkdir(parents=True)
    (folder / "whatif" / "halt-00001300" / "whatif.html").touch()
    write_run_page(folder)
    page = (folder / "report.html").read_text()
    assert '<a href="whatif/halt-00001300/whatif.html">1,200</a>' in page
    assert "halt-00001500" not in page.split("<script")[0], "no link to a page that is not there"
    shown = " ".join(text_of(page).split())
    assert "Halted at step 1,200, and went on from step 1,100 with lr_half, the best of 2 arms" in shown
    assert "1,200 loss &lt;7&gt; is a spike 2 lr_half, clip 2,000 lr_half 1,100" in shown
    assert "none: none of 2 fixes holds" in shown
    assert "tried after a halt" not in run_page(run(tmp_path))


def test_a_runs_page_is_small_and_contains_the_librarys_licence(tmp_path):
    write_run_page(made(tmp_path / "run"))
    text = (tmp_path / "run" / "report.html").read_text()
    assert len(text) < 300_000
    assert "Copyright (c) 2022 Leon Sorokin" in text
    assert "Tabulator" not in text_of(text)


@pytest.mark.parametrize(
    ("final", "expected"),
    [
        ({"val/loss": 1.23456, "steps": 1500}, "Halted after 1,500 steps, validation loss 1.235 nats."),
        ({"val/loss": 1.5, "val/accuracy": 0.5, "steps": 9},
         "Halted after 9 steps, validation loss 1.5 nats, accuracy 50.00 %."),
        ({"val/loss": float("nan"), "steps": 9},
         "Halted after 9 steps, but the validation loss is not finite: the run diverged."),
        ({}, "Halted after 7 steps."),
        ({"steps": 1}, "Halted after 1 step."),
    ],
    ids=["loss", "accuracy", "nan", "nothing", "one step"],
)  # fmt: skip
def test_the_first_sentence_says_how_the_run_ended(tmp_path, final, expected):
    first, *rest = outcome(run(tmp_path, "halted", final=final, steps=7, reason="the loss is NaN"))
    assert first == expected
    assert rest == ["the loss is NaN", "No incidents."]


@pytest.mark.parametrize("mark", ["sweep.json", "multirun.yaml", None])
def test_a_run_of_a_sweep_shows_its_own_command_and_then_that_of_the_sweep(tmp_path, mark):
    sweep = "torchrun train.py -m seed=0,1 'data.path=a b'"
    record = {"command": sweep, "options": ["--config-dir", "mine"], "overrides": ["seed=1", "data.path=a b"]}
    (tmp_path / "1").mkdir()
    if mark is not None:
        (tmp_path / mark).touch()
    own = "torchrun train.py --config-dir mine seed=1 'data.path=a b'" if mark else sweep
    made = Run(tmp_path / "1", "finished", None, record, {}, True, {})
    assert commands(made) == (own, sweep)
    shown = " ".join(text_of(run_page(made)).split())
    assert (f"{escaped(own)} Run 1 of the sweep {escaped(sweep)}" in shown) == (mark is not None)
    assert commands(run(tmp_path)) == ("", "")


def test_an_interpolated_setting_shows_the_value_that_it_refers_to():
    settings = {"seed": 3, "data.seed": "${seed}", "other": "${not.there}", "path": "${seed}/x"}
    assert {key: referred_setting(value, settings) for key, value in settings.items()} == {**settings, "data.seed": 3}


def test_a_problem_with_the_files_replaces_the_recorded_reason(tmp_path):
    found = outcome(run(tmp_path, "broken", "run.json is not valid JSON", reason="another", incidents=[{}, {}]))
    assert found == ["Broken after 0 steps.", "run.json is not valid JSON", "2 incidents, listed below."]


def test_a_sentence_counts_what_the_guard_did():
    kept = {"guard/updates": 1200, "steps": 1200, "guard/skipped_spike": 0, "guard/rollbacks": 0}
    assert guard(kept) == "Guard: 1,200 updates in 1,200 steps, no step skipped."
    lost = {"guard/updates": 7, "steps": 10, "guard/skipped_bad_data": 3, "guard/rollbacks": 1}
    lost |= {"guard/lost_steps": 5, "guard/lost_seconds": 1.6}
    assert guard(lost) == "Guard: 7 updates in 10 steps, 3 skipped (bad data), 1 rollback, 5 steps (2 s) lost."
    healed = {**lost, "guard/rollbacks": 0, "guard/healings": 2}
    assert guard(healed).endswith("3 skipped (bad data), 2 healings, 5 steps (2 s) lost.")
    assert guard({"guard/updates": 1, "steps": 1}) == "Guard: 1 update in 1 step, no step skipped."
    faulty = guard({"guard/updates": 9, "steps": 9, "guard/machine_faults": 1})
    assert faulty == "Guard: 9 updates in 9 steps, 1 step taken again after a fault of the machine."
    assert guard({"steps": 10}) == ""


def test_the_key_numbers_are_those_that_were_measured(tmp_path):
    ranges = {"throughput/mfu": Range(0.1, 0.425, 0.1, 0.5), "memory/peak_gb/cuda:0": Range(1.0, 2.0, 1.0, 7.125)}
    final = {"tokens_per_s": 12345.6, "seconds": 59.7}
    assert figures(run(tmp_path, final=final, best=(1.5, 1200), ranges=ranges)) == [
        ("best validation loss", "1.5 at step 1,200"),
        ("tokens per second", "12,346"),
        ("of the card's peak FLOP/s", "42.5%"),
        ("GB of peak memory", "7.12"),
        ("seconds of training", "60"),
    ]
    assert figures(run(tmp_path)) == []


def test_the_machine_is_described_without_empty_values():
    record = {
        "id": "abc",
        "started": None,
        "hardware": {"name": "H200", "clocks": {"sm": 1980, "mem": None}, "driver": ""},
        "versions": {"torch": "2.15"},
        "git": {"commit": "0123456789abcdef", "dirty": True},
    }
    assert machine(record) == {
        "id": "abc",
        "name": "H200",
        "clocks.sm": 1980,
        "torch": "2.15",
        "commit": "0123456789ab, with uncommitted changes",
    }
    assert machine({"git": {"commit": "0123456789abcdef"}}) == {"commit": "0123456789ab"}
