"""One run in a comparison: four numbers per metric, curves read on demand, and facts from its record."""

import copy
import math
import pickle

import numpy as np
import pytest

from stabletrain.beside.comparison.reading.columns import POINTS, read_columns
from stabletrain.beside.comparison.reading.run import Ranges, Run
from stabletrain.beside.comparison.reading.runs import read_run
from tests.beside.comparison.written import write
from tests.monitors.test_rolling import spike_score


def test_ranges_and_curves_match_the_logged_lines(tmp_path):
    lines = [
        {"step": 1, "train/loss": 5.0, "a": 1},
        {"step": 2, "train/loss": "NaN", "a": 3},
        {"step": 3, "train/loss": "Infinity", "monitors/x/block": 7.5, "monitors/xy": 9.0},
        {"step": 4, "train/loss": 4.0, "a": -2},
        {"step": 5, "word": "no number", "list": [1]},
    ]
    run = read_run(write(tmp_path / "run", lines=lines))
    assert (run.first("a"), run.last("a"), run.lowest("a"), run.highest("a")) == (1, -2, -2, 3)
    assert (run.first("train/loss"), run.last("train/loss")) == (5.0, 4.0)
    assert (run.lowest("train/loss"), run.highest("train/loss")) == (4.0, np.inf)
    assert run.highest("monitors/x") == 7.5, "over the names below it, not over names that only share a prefix"
    assert np.isnan([run.first("none"), run.highest("none"), run.last("word"), run.last("list")]).all()
    steps, losses = run.curve("train/loss")
    assert steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_array_equal(losses, [5.0, np.nan, np.inf, 4.0])
    assert [len(part) for part in run.curve("none")] == [0, 0]


def test_a_metric_in_lines_with_different_keys_has_one_range(tmp_path):
    """The first and last value follow the order of the file, whatever other keys a line has."""
    lines = [{"step": 1, "b": 0, "a": 4}, {"step": 2, "a": 9}, {"step": 3, "a": 1}, {"step": 4, "b": 0, "a": 3}]
    columns = read_columns(write(tmp_path / "run", lines=lines) / "metrics.jsonl")
    assert len(columns.kept) == 2
    for sheets in (columns.kept, columns.kept[::-1]):
        assert Ranges.of(sheets)["a"] == (4.0, 3.0, 1.0, 9.0)
    assert {*Ranges.of(columns.kept)} == {"step", "a", "b"}


def test_rolled_back_steps_are_excluded_from_curves_and_ranges(tmp_path):
    lines = [{"step": 1, "a": 5.0}, {"step": 2, "a": 9.0, "rolled_back": True}, {"step": 2, "a": 4.0}]
    run = read_run(write(tmp_path / "run", lines=lines))
    assert run.curve("a")[1].tolist() == [5.0, 4.0]
    assert run.highest("a") == 5.0
    assert [values.tolist() for _, values in run.abandoned("a")] == [[9.0]]
    assert run.abandoned("none") == []


def test_a_curve_has_at_most_the_requested_points(tmp_path):
    lines = [{"step": step, "train/loss": float(step % 7)} for step in range(1, 2001)]
    run = read_run(write(tmp_path / "run", lines=lines))
    assert len(run.curve("train/loss")[0]) <= POINTS
    assert len(run.curve("train/loss", points=50)[0]) <= 50
    assert len(run.curve("train/loss", points=-1)[0]) == 2000


def test_a_pickled_run_is_small_and_rereads_its_curves(tmp_path):
    run = read_run(write(tmp_path / "run"))
    run.curve("val/loss")
    again = pickle.loads(pickle.dumps(run))
    assert len(pickle.dumps(run)) < 2000
    assert again.last("val/loss") == copy.copy(run).last("val/loss") == 2.0
    assert again.curve("val/loss")[1].tolist() == [2.0]


def test_a_runs_spike_score_is_the_one_it_logged(tmp_path):
    values = [1.0 + 0.01 * (step % 3) for step in range(40)] + [9.0]
    run = read_run(write(tmp_path / "run", lines=[{"step": 41, "spike/score": spike_score(values)}]))
    assert run.spike_score == pytest.approx(1 / 21)
    lines = [{"step": 10, "spike/score": 0.0}, {"step": 11, "spike/score": 0.5, "rolled_back": True}]
    ended = write(tmp_path / "ended", lines=lines, status="halted", final={"spike/score": 0.25})
    assert read_run(ended).spike_score == 0.25, "the spikes after the last logged step count too"


@pytest.mark.parametrize(
    ("status", "loss", "diverged"),
    [("halted", 2.0, True), ("finished", 2.0, False), ("finished", math.inf, True), ("failed", math.nan, False)],
)
def test_a_run_diverged_if_it_halted_or_finished_without_a_finite_loss(tmp_path, status, loss, diverged):
    assert read_run(write(tmp_path / "run", loss=loss, status=status)).diverged is diverged


def test_card_and_precision_come_from_the_record_or_else_from_the_choices(tmp_path):
    def run(**record):
        return Run(tmp_path / "sweep" / "7", "finished", None, record, {}, False, {})

    full = run(hardware={"name": "NVIDIA H200", "precision": "bf16"}, model={"parameters": 9}, choices={})
    assert (full.name, full.sweep) == ("7", "sweep")
    assert (full.card, full.precision, full.parameters) == ("NVIDIA H200", "bf16", 9)
    bare = run(choices={"precision": "auto"}, model={"parameters": "nine"})
    assert (bare.card, bare.precision, bare.parameters) == (None, "auto", None)


def test_a_run_continued_with_more_steps_shows_them(tmp_path):
    change = {"step": 9, "keys": {"steps": [9, 12]}}
    folder = write(tmp_path / "run", ["steps=9"], final={"steps": 12}, changes=[change])
    assert read_run(folder).settings["steps"] == 12
