"""Pictures of runs: which points are drawn, at what values, and that the same runs give the same bytes."""

import math

import numpy as np
import pytest
from matplotlib import pyplot

from stabletrain.beside.comparison.pictures import (
    MOST,
    WIDEST,
    applied_and_skipped_losses,
    best_and_worst,
    draw,
    draw_losses,
    running_mean,
)
from stabletrain.beside.comparison.reading.runs import read_run, read_runs
from stabletrain.beside.comparison.sensitivity import arms
from stabletrain.cli.commands import main
from stabletrain.errors import ConfigError
from stabletrain.tracking.metrics import read_jsonl
from tests.beside.comparison.made_pages import made
from tests.beside.comparison.written import AT_INIT, word, write


@pytest.fixture
def figures(monkeypatch):
    """Collects every figure that is drawn, and closes it after the test."""
    drawn, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", drawn.append)
    yield drawn
    for figure in drawn:
        close(figure)


def lines_of(axis):
    """Returns the name, marker, x values and y values of each line of an axis."""
    return [(line.get_label(), line.get_marker(), [*line.get_xdata()], [*line.get_ydata()]) for line in axis.lines]


def test_the_sensitivity_picture_shows_means_bands_and_a_cross_for_a_diverged_run(tmp_path, figures):
    losses = {("none", 0): (2.0, 9.0), ("none", 1): (2.5, math.nan), ("full", 0): (1.5, 1.75), ("full", 1): (1.25, 1.5)}
    for number, ((arm, seed), pair) in enumerate(losses.items()):
        for rate, loss in zip((0.01, 0.1), pair, strict=True):
            write(tmp_path / f"{number}-{rate}", [f"stability={arm}", f"optimizer.lr={rate}", f"seed={seed}"], loss)
    draw(arms(read_runs([tmp_path])), tmp_path / "curves.svg")
    (figure,) = figures
    loss, logit = figure.axes
    assert (loss.get_xscale(), logit.get_yscale(), loss.get_xlabel()) == ("log", "log", "peak learning rate")
    curves = [line for line in lines_of(loss) if line[1] == "o"]
    assert curves == [
        ("stability=none (n=2)", "o", [0.01, 0.1], [2.25, AT_INIT]),
        ("stability=full (n=2)", "o", [0.01, 0.1], [1.375, 1.625]),
    ]
    assert loss.get_title(loc="left") == (
        "line: mean over n seeds; band: lowest to highest\ncross: diverged, counted as its loss at init (1)"
    )
    crosses = [(x, y) for _, marker, x, y in lines_of(loss) if marker == "x" and x]
    assert crosses == [([0.1], [AT_INIT])], "of the two runs above their loss at init, only one diverged"
    lowest, highest = (pick(loss.collections[1].get_paths()[0].vertices[:, 1]) for pick in (min, max))
    assert (lowest, highest) == (1.25, 1.75)
    assert [line[3] for line in lines_of(logit)[:1]] == [[3.0, 3.0]]


def test_the_loss_picture_shows_runs_without_skips_crosses_for_skips_and_rolled_back_losses(tmp_path, figures):
    for seed, level in enumerate((1.0, 2.0)):
        made(tmp_path / str(seed), f"seed={seed}", level=level, nan_at=20 if seed else None)
    made(tmp_path / "2", "seed=2", rolled_back=(24, 30))
    runs = read_runs([tmp_path])
    draw_losses(runs, tmp_path / "losses.svg", each=True)
    (axis,) = figures[0].axes
    curves = {name: (x, y) for name, _, x, y in lines_of(axis) if name.startswith("seed=")}
    assert {*curves} == {"seed=0", "seed=1", "seed=2"}
    assert curves["seed=0"] == ([*range(1, 41)], [*runs[0].curve("train/loss", -1)[1]])
    assert 20 not in curves["seed=1"][0]
    assert [x for _, marker, x, _ in lines_of(axis) if marker == "x" and x] == [[20]]
    faint = [line for line in axis.lines if line.get_alpha() == 0.5]
    assert [[*line.get_xdata()] for line in faint] == [[*range(24, 31)]]


def test_the_loss_picture_of_a_run_that_was_halted_early_shows_its_point_its_skips_and_its_halt(tmp_path, figures):
    lines = [{"step": 1, "train/loss": 5.5, "guard/applied": 1}]
    events = [{"event": "skip", "step": step, "tick": step, "loss": loss} for step, loss in [(3, 4.5), (4, "NaN")]]
    folder = write(tmp_path / "run", lines=lines, events=events, status="halted", final={"steps": 4})
    draw_losses([read_run(folder)], tmp_path / "losses.svg")
    (axis,) = figures[0].axes
    assert [(marker, x, y) for _, marker, x, y in lines_of(axis) if x] == [
        ("o", [1], [5.5]),
        ("x", [3], [4.5]),
        ("x", [4], [0.97]),  # of the axis: its loss is not finite
        ("None", [4, 4], [0, 1]),
    ]


def test_the_loss_picture_marks_forecasts_on_the_curve_and_names_their_run(tmp_path, figures):
    lines = [{"step": step, "train/loss": 4.0, "guard/applied": 1} for step in range(1, 21)]
    events = [{"event": "forecast", "step": step, "signal": "log_z", "text": "soon"} for step in (5, 15)]
    write(tmp_path / "a", ["precision=fp16"], lines=lines, events=events)
    write(tmp_path / "b", ["precision=bf16"], lines=lines)
    draw_losses(read_runs([tmp_path]), tmp_path / "losses.svg")
    (axis,) = figures[0].axes
    assert [(name, x, y) for name, marker, x, y in lines_of(axis) if marker == "v"] == [
        ("forecast for precision=fp16: steps 5, 15", [5, 15], [4.0, 4.0])
    ]


def test_the_loss_picture_has_a_dash_dotted_line_where_a_run_halted_and_went_on(tmp_path, figures):
    lines = [{"step": step, "train/loss": 4.0, "guard/applied": 1} for step in range(1, 21)]
    events = [
        {"event": kind, "step": 9 + n, "tick": 9 + n, "arm": "clip"} for n, kind in enumerate(["heal", "unhealed"])
    ]
    draw_losses([read_run(write(tmp_path / "run", lines=lines, events=events))], tmp_path / "losses.svg")
    (axis,) = figures[0].axes
    assert [[*line.get_xdata()] for line in axis.lines if line.get_linestyle() == "-."] == [[9, 9]]


def test_runs_with_the_same_settings_are_told_apart_by_their_folders(tmp_path, figures):
    for name, seed in (("a/0", 0), ("b/0", 0), ("b/1", 1)):
        made(tmp_path / name, f"seed={seed}")
    draw_losses(read_runs([tmp_path]), tmp_path / "losses.svg", each=True)
    draw_losses(read_runs([tmp_path]), tmp_path / "losses.svg")
    labels = [[text.get_text() for text in figure.axes[0].get_legend().get_texts()] for figure in figures]
    assert labels == [["seed=0 (a/0)", "seed=0 (b/0)", "seed=1"], ["a (n=1)", "b (n=2)"]]
    made(tmp_path / "c" / "2", f"data.path={'long/' * 20}")
    draw_losses(read_runs([tmp_path]), tmp_path / "losses.svg", each=True)
    labels = [text.get_text() for text in figures[2].axes[0].get_legend().get_texts()]
    assert max(len(line) for label in labels for line in label.split("\n")) <= WIDEST
    assert f"data.path={'long/' * 20}" in labels[-1].replace("\n", ""), "wrapped, and not cut"


def test_a_label_names_a_run_in_words(tmp_path, figures):
    for number, guard in enumerate(("off", "rollback")):
        made(tmp_path / str(number), f"guard={guard}")
    draw_losses(read_runs([tmp_path]), tmp_path / "losses.svg", labels={"0": "faults, no guard"})
    labels = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert labels == ["faults, no guard", "guard=rollback"]
    with pytest.raises(ConfigError, match="--label 2=...: no run has this name; the runs are 0, 1"):
        draw_losses(read_runs([tmp_path]), tmp_path / "losses.svg", labels={"2": "x"})
    assert main(["losses", str(tmp_path), str(tmp_path / "losses.svg"), "--label", "0"]) == 2


def seeds(folder, precision, losses, **more):
    """Writes a run per seed, each of two steps that end at its loss, at which it is evaluated."""
    for seed, loss in enumerate(losses):
        lines = [{"step": 1, "train/loss": 5.5, "guard/applied": 1}]
        lines += [{"step": 2, "train/loss": word(loss), "guard/applied": 1, "val/loss": word(loss)}]
        write(folder / f"{precision}-{seed}", [f"precision={precision}", f"seed={seed}"], lines=lines, **more)


def test_seeds_are_one_mean_with_a_band_and_a_run_that_broke_is_in_no_mean(tmp_path, figures):
    seeds(tmp_path, "fp32", [2.0, 3.0, 4.0])
    seeds(tmp_path, "fp16", [2.5, math.inf, 3.5])
    draw_losses(read_runs([tmp_path]), tmp_path / "losses.svg")
    (axis,) = figures[0].axes
    found = {name: (x, y) for name, marker, x, y in lines_of(axis) if x and marker == "o"}
    assert found == {
        "precision=fp16 (n=2 of 3, 1 broke)": ([1, 2], [5.5, 3.0]),
        "precision=fp16 seed=1 (broke), Infinity from\nstep 2": ([1, 2], [5.5, math.inf]),
        "precision=fp32 (n=3)": ([1, 2], [5.5, 3.0]),
    }
    assert [x for _, marker, x, _ in lines_of(axis) if marker == "X"] == [[2]], "where it is no longer finite"
    low, high = (pick(axis.collections[1].get_paths()[0].vertices[:, 1]) for pick in (min, max))
    assert (low, high) == (2.0, 5.5), "3 ± 1 at the end, and no deviation at the first step"
    said = axis.get_title(loc="left")
    assert "band: ± 1 standard deviation (n - 1)" in said
    assert "dashed: a run that broke or is not over, in no mean" in said


def test_the_axis_reaches_the_loss_of_a_lost_run_and_shows_the_others_too(tmp_path, figures):
    seeds(tmp_path / "a", "fp32", [2.0])
    seeds(tmp_path / "a", "fp16", [71.0])
    draw_losses(read_runs([tmp_path / "a"]), tmp_path / "losses.svg")
    (axis,) = figures[0].axes
    assert axis.get_yscale() == "log"
    low, high = axis.get_ylim()
    assert low < 2.0 < 71.0 < high
    seeds(tmp_path / "b", "bf16", [6.0])
    draw_losses(read_runs([tmp_path / "b"]), tmp_path / "losses.svg")
    assert figures[1].axes[0].get_yscale() == "linear"


def test_the_same_runs_give_the_same_bytes(tmp_path):
    runs = [read_run(made(tmp_path / "run"))]
    for name in ("a.svg", "b.svg"):
        draw_losses(runs, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")])
def test_the_file_extension_sets_the_format(tmp_path, name, begins):
    draw_losses([read_run(made(tmp_path / "run"))], tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a.jpg", r"use \.svg, \.png, \.pdf"),
        ("no/a.svg", r"no/a\.svg: the folder .*no does not exist: create it first"),
    ],
)
def test_a_file_that_cannot_be_written_is_rejected(tmp_path, name, why):
    for what in (draw, draw_losses):
        with pytest.raises(ConfigError, match=why):
            what([], tmp_path / name)


def test_every_point_of_a_loss_picture_is_in_the_metrics_file_and_the_last_one_is_the_last_logged(tmp_path, figures):
    lines = [
        {"step": step, "train/loss": 3.0 - 0.01 * step + (step == 20), "guard/applied": 1}
        for step in (1, *range(10, 101, 10))
    ]
    folder = write(tmp_path / "run", lines=lines)
    logged = {line["step"]: line["train/loss"] for line in read_jsonl(folder / "metrics.jsonl")}
    for smooth in (0, 50):
        draw_losses([read_run(folder)], tmp_path / "losses.svg", smooth)
    (plain,), (smoothed,) = (figure.axes for figure in figures)
    assert [dict(zip(x, y, strict=True)) for _, _, x, y in lines_of(plain) if x] == [logged]
    means, behind = [(x, y) for _, _, x, y in lines_of(smoothed) if x]
    assert dict(zip(*behind, strict=True)) == logged
    assert means[1] != behind[1]
    assert plain.get_ylabel() == "training loss (nats)"
    assert smoothed.get_ylabel() == "training loss (nats),\nrunning mean over 50 steps"
    with pytest.raises(ConfigError, match="smooth=-1 is below 0"):
        draw_losses([], tmp_path / "losses.svg", -1)


def test_a_running_mean_goes_over_steps_and_not_over_logged_points():
    steps = np.arange(1, 1001)
    losses = np.random.default_rng(0).normal(size=1000)
    weights = np.exp(-(1000 - steps) / 50)
    assert running_mean(steps, losses, 50)[-1] == pytest.approx(np.average(losses, weights=weights))
    slope = -0.01 * steps
    for every in (1, 10, 25):
        behind = running_mean(steps[::every], slope[::every], 50)[-1] - slope[::every][-1]
        assert behind == pytest.approx(0.5, abs=0.13), f"half a nat behind, logged every {every} steps"
    np.testing.assert_allclose(running_mean(steps, np.full(1000, 3.0), 50), 3.0)
    assert not len(running_mean(steps[:0], losses[:0], 50))


def test_a_picture_says_how_many_runs_it_leaves_out(tmp_path, figures):
    for number in range(MOST + 1):
        write(tmp_path / str(number), [f"seed={number}"], lines=[{"step": 1, "train/loss": 1.0 + number}])
    draw_losses(read_runs([tmp_path]), tmp_path / "losses.svg", each=True)
    assert figures[0].axes[0].get_title(loc="left") == f"{MOST} of {MOST + 1} runs: lowest and highest losses"


def test_of_many_runs_the_lowest_and_highest_losses_are_drawn_in_the_original_order(tmp_path):
    losses = [5.0, 1.0, 4.0, math.nan, 2.0, 3.0]
    lines = [[{"step": 1, "train/loss": "NaN" if math.isnan(loss) else loss}] for loss in losses]
    runs = [read_run(write(tmp_path / str(number), lines=each)) for number, each in enumerate(lines)]
    assert [run.name for run in best_and_worst(runs, 4)] == ["0", "1", "3", "4"]
    assert best_and_worst(runs, MOST) == runs


def test_applied_and_skipped_steps_are_separated(tmp_path):
    run = read_run(made(tmp_path / "run", nan_at=20))
    (steps, losses), (skipped, lost) = applied_and_skipped_losses(run)
    assert sorted([*steps, *skipped]) == [*range(1, 41)]
    assert skipped.tolist() == [20]
    assert np.isfinite(losses).all()
    assert np.isnan(lost).all()


def test_a_picture_of_many_settings_is_high_enough_for_all_names_and_each_has_its_colour(tmp_path, figures):
    for number in range(18):
        lines = [{"step": step, "train/loss": 5.0 - step / 10 - number / 100} for step in range(1, 9)]
        typed = [f"a_key_whose_name_takes_a_whole_line_of_the_legend_{key}={number % (key + 1)}" for key in (1, 2, 17)]
        write(tmp_path / "sweep" / str(number), typed, lines=lines)
    draw_losses(read_runs([tmp_path]), tmp_path / "many.png")
    [figure] = figures
    legend = figure.axes[0].get_legend()
    assert len(legend.get_texts()) == 18
    assert legend.get_window_extent().y0 >= 0, "its end is not cut off"
    assert len({line.get_color() for line in legend.get_lines()}) == 18
