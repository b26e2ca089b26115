"""`metrics.jsonl` as columns: non-finite values, unreadable lines, rolled-back steps, and thinned curves."""

import json
import math

import numpy as np
import pytest

from stabletrain.beside.comparison.reading.columns import POINTS, read_columns, thin


def written(file, *lines):
    """Writes lines to a file, mappings as JSON and strings unchanged, and returns the columns read from it."""
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return read_columns(file)


def test_values_keep_the_order_of_the_file_when_lines_have_different_keys(tmp_path):
    found = written(
        tmp_path / "metrics.jsonl",
        {"step": 1, "a": 1.5},
        {"step": 1, "a": -2, "b": True},
        {"step": 3, "b": 7},
        {"step": 2, "a": 0.25},
    )
    steps, values = found.curve("a")
    assert steps.tolist() == [1, 1, 2]
    assert values.tolist() == [1.5, -2.0, 0.25]
    assert [part.tolist() for part in found.curve("b")] == [[1, 3], [1.0, 7.0]]
    assert [len(part) for part in found.curve("absent")] == [0, 0]
    assert (found.curve("absent")[0].dtype, found.lines) == (np.int64, 4)


def test_strings_for_nan_and_infinity_become_floats_and_other_values_nan(tmp_path):
    texts = ['"NaN"', '"Infinity"', '"-Infinity"', '"no number"', "[1]", "null", "NaN", "1" + "0" * 400]
    lines = [f'{{"step": {step}, "a": {text}}}' for step, text in enumerate(texts)]
    values = written(tmp_path / "metrics.jsonl", *lines).curve("a")[1]
    expected = [math.nan, math.inf, -math.inf, *[math.nan] * 5]
    np.testing.assert_array_equal(values, expected)


def test_a_line_without_a_step_is_unreadable_and_an_incomplete_last_line_is_ignored(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 1, "a": 5}\n{"a": 6}\n[1]\n{"st\n{"step": 2.5, "a": 7}\n\n{"step": 2, "a": 8}\n{"step": 3'
    )
    found = read_columns(file)
    assert (found.lines, found.unreadable) == (2, 4)
    assert found.curve("a")[1].tolist() == [5.0, 8.0]
    assert read_columns(tmp_path / "missing").lines == 0


def test_each_rolled_back_stretch_is_a_separate_curve(tmp_path):
    def line(step, loss, rollbacks, **gone):
        return {"step": step, "train/loss": loss, "guard/rollbacks": rollbacks, **gone}

    gone = {"rolled_back": True}
    found = written(
        tmp_path / "metrics.jsonl",
        line(1, 5.0, 0),
        line(2, 9.0, 0, **gone),
        line(3, 8.0, 0, **gone),
        line(2, 7.0, 1, **gone),
        line(2, 4.0, 2),
    )
    assert found.curve("train/loss")[1].tolist() == [5.0, 4.0]
    stretches = [(steps.tolist(), values.tolist()) for steps, values in found.abandoned("train/loss")]
    assert stretches == [([2, 3], [9.0, 8.0]), ([2], [7.0])]
    assert found.abandoned("absent") == []


def test_a_stretch_that_a_healing_ended_is_separate_from_that_of_the_next_rollback(tmp_path):
    def line(step, loss, healings, rollbacks, **gone):
        return {"step": step, "train/loss": loss, "guard/rollbacks": rollbacks, "guard/healings": healings, **gone}

    gone = {"rolled_back": True}
    found = written(
        tmp_path / "metrics.jsonl",
        line(1, 9.0, 0, 0, **gone),
        line(2, 8.0, 0, 0, **gone),
        line(1, 5.0, 1, 0),
        line(2, 7.0, 1, 0, **gone),
        line(2, 4.0, 1, 1),
    )
    assert found.curve("train/loss")[1].tolist() == [5.0, 4.0]
    assert [values.tolist() for _, values in found.abandoned("train/loss")] == [[9.0, 8.0], [7.0]]


def test_a_file_read_in_blocks_loses_no_line(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    whole = written(file, *({"step": step, "a": step / 7} for step in range(500))).curve("a")
    monkeypatch.setattr("stabletrain.beside.comparison.reading.columns.BLOCK", 37)
    for part, expected in zip(read_columns(file).curve("a"), whole, strict=True):
        np.testing.assert_array_equal(part, expected)
    assert len(whole[0]) == 500


def test_a_thinned_curve_keeps_its_ends_and_extremes():
    draw = np.random.default_rng(0)
    values = draw.normal(size=100_000)
    values[[12_345, 77_777]] = [50.0, -60.0]
    values[40_000] = np.nan
    steps = np.arange(100_000)
    kept, thinned = thin((steps, values))
    assert len(kept) <= POINTS
    assert np.all(np.diff(kept) > 0)
    assert {0, 12_345, 40_000, 77_777, 99_999} <= set(kept.tolist())
    np.testing.assert_array_equal(thinned, values[kept])
    short = (steps[:POINTS], values[:POINTS])
    assert thin(short) is short


@pytest.mark.parametrize("length", [501, 1_000, 1_003])
def test_every_stretch_of_a_thinned_curve_keeps_its_extremes_and_one_point_that_is_not_finite(length):
    draw = np.random.default_rng(length)
    values = draw.integers(0, 5, length).astype(float)
    values[draw.random(length) < 0.3] = np.nan
    values[draw.random(length) < 0.1] = -np.inf
    values[200:210] = np.inf
    expected = {0, length - 1}
    for stretch in np.array_split(np.arange(length), (100 - 2) // 3):
        finite = [i for i in stretch if np.isfinite(values[i])]
        expected |= {next((i for i in stretch if i not in finite), stretch[0])} if len(finite) < len(stretch) else set()
        expected |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)} if finite else set()
    kept, _ = thin((np.arange(length), values), 100)
    assert {*kept.tolist()} == expected


def test_too_few_points_for_a_thinned_curve_are_rejected():
    curve = (np.arange(99), np.zeros(99))
    assert len(thin(curve, 8)[0]) <= 8
    with pytest.raises(ValueError, match="points=7 is below 8"):
        thin(curve, 7)
