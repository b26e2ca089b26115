"""Sensitivity to the learning rate, from run folders written by hand to the printed table and the picture."""

import json
import math
import statistics

import pytest

from stabletrain.beside.comparison.reading.runs import read_runs
from stabletrain.beside.comparison.sensitivity import arms, sensitivity
from stabletrain.cli.commands import main
from tests.beside.comparison.written import AT_INIT, write

RATES = ["1e-3", "1e-2", "1e-1"]
LOSSES = {
    ("none", "0"): [2.0, 2.5, 9.0],  # above the loss at init, which then counts
    ("none", "1"): [2.1, 2.3, math.nan],
    ("qknorm", "0"): [2.0, 1.9, 2.2],
    ("qknorm", "1"): [2.0, 1.8, 2.2],
}


@pytest.fixture
def sweep(tmp_path):
    number = 0
    for (arm, seed), losses in LOSSES.items():
        for rate, loss in zip(RATES, losses, strict=True):
            overrides = ["steps=9", f"stability={arm}", f"optimizer.lr={rate}", f"seed={seed}"]
            write(tmp_path / "sweep" / str(number), overrides, loss)
            number += 1
    return tmp_path / "sweep"


def status_becomes(run, status):
    record = json.loads((run / "run.json").read_text()) | {"status": status}
    (run / "run.json").write_text(json.dumps(record))


def test_each_seeds_sensitivity_is_the_mean_distance_from_its_best_with_init_as_the_ceiling(sweep):
    found = {arm.name: arm for arm in arms(read_runs([sweep]))}
    assert list(found) == ["stability=none", "stability=qknorm"]
    expected = [(0 + 0.5 + 3.5) / 3, (0 + 0.2 + 3.4) / 3]
    assert found["stability=none"].sensitivities() == pytest.approx(expected)
    assert found["stability=qknorm"].sensitivities() == pytest.approx([0.4 / 3, 0.6 / 3])
    assert [point.diverged for point in found["stability=none"].at(0.1)] == [False, True]
    assert [point.loss for point in found["stability=none"].at(0.1)] == [AT_INIT, AT_INIT]
    assert [point.logit for point in found["stability=none"].at(0.1)] == [3.0, 3.0]


@pytest.mark.parametrize("final", [1.9, math.nan, math.inf], ids=str)
def test_a_run_that_was_halted_counts_as_its_loss_at_init_whatever_it_last_evaluated(sweep, final):
    status_becomes(sweep / "6", "halted")
    found = {arm.name: arm for arm in arms(read_runs([sweep]))}["stability=qknorm"]
    assert (found.curves["0"][0].loss, found.curves["0"][0].diverged) == (AT_INIT, True)


def test_a_model_at_chance_everywhere_scores_zero():
    assert sensitivity([5.5, 5.5, 5.5]) == 0


def test_the_command_prints_the_table_and_draws_the_curves(sweep, tmp_path, capsys):
    picture = tmp_path / "curves.svg"
    assert main(["compare", str(sweep), "--picture", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = lines[lines.index("| optimizer.lr | 0.001 | 0.01 | 0.1 | sensitivity |") :]
    mean, deviation = statistics.fmean([4 / 3, 1.2]), statistics.stdev([4 / 3, 1.2])
    assert lines[2] == (
        "| stability=none | 2.050 ± 0.071 | 2.400 ± 0.141 | 5.500 ± 0.000 (1 diverged, 1 above init) "
        f"| {mean:.3f} ± {deviation:.3f} |"
    )
    assert lines[5] == "| stability=none | 3 | 3 | 3 |  |"
    assert "</svg>" in picture.read_text()


@pytest.mark.parametrize("status", ["running", "preempted", "failed"])
def test_a_seed_with_a_run_that_is_not_over_has_no_sensitivity_and_the_run_is_named(sweep, status):
    status_becomes(sweep / "6", status)
    whole, incomplete = arms(read_runs([sweep]))
    assert len(whole.sensitivities()) == 2
    assert not whole.missing
    assert incomplete.sensitivities() == pytest.approx([0.6 / 3])
    assert [point.rate for point in incomplete.curves["0"]] == [0.01, 0.1]
    assert incomplete.missing == [
        f"stability=qknorm, optimizer.lr=0.001, seed=0: {sweep / '6'} is {status}",
    ]


def test_a_run_that_is_not_there_is_named_in_the_printed_table(sweep, capsys):
    for number in ("6", "9"):  # both seeds of an arm at one rate
        (sweep / number / "run.json").unlink()
        (sweep / number / "metrics.jsonl").unlink()
    assert main(["compare", str(sweep)]) == 0
    out = capsys.readouterr().out
    assert "| stability=qknorm | - | 1.850 ± 0.071 | 2.200 ± 0.000 | incomplete |" in out
    assert "missing  stability=qknorm, optimizer.lr=0.001, seed=1: no such run" in out


def test_runs_at_one_rate_have_no_sensitivity(sweep):
    assert arms(read_runs([sweep / "0"])) == []
    assert arms(read_runs([sweep / "0", sweep / "6"])) == []


def test_a_run_that_is_no_part_of_the_sweep_takes_nothing_from_it(sweep, tmp_path):
    write(tmp_path / "other", ["steps=20", "stability=none", "optimizer.lr=3e-3", "seed=0"])
    found = arms(read_runs([sweep, tmp_path / "other"]))
    assert [arm.grid for arm in found] == [(0.001, 0.01, 0.1)] * 2
    assert [len(arm.sensitivities()) for arm in found] == [2, 2]


def test_what_auto_chose_is_the_precision_and_merges_no_arms_that_differ_otherwise(tmp_path):
    for number, (asked, experiment, ran) in enumerate(
        [("bf16", "a", "bf16"), ("fp32", "a", "fp32"), ("auto", "b", "bf16")]
    ):
        for rate in (0.01, 0.1):
            typed = [f"precision={asked}", f"experiment={experiment}", f"optimizer.lr={rate}"]
            write(tmp_path / f"{number}-{rate}", typed, hardware={"precision": ran})
    names = [arm.name for arm in arms(read_runs([tmp_path]))]
    assert names == ["experiment=a precision=bf16", "experiment=a precision=fp32", "experiment=b precision=bf16"]


def test_of_two_runs_of_the_same_settings_the_one_that_is_over_counts(sweep):
    write(sweep / "99", ["steps=9", "stability=qknorm", "optimizer.lr=1e-3", "seed=0"], 1.0, status="running")
    assert arms(read_runs([sweep]))[1].sensitivities() == pytest.approx([0.4 / 3, 0.6 / 3])


def test_the_same_settings_on_another_card_are_another_arm(sweep):
    for run in sweep.iterdir():
        record = json.loads((run / "run.json").read_text())
        card = "A" if int(run.name) < 6 else "B"
        (run / "run.json").write_text(json.dumps(record | {"hardware": {"name": card}}))
    names = [arm.name for arm in arms(read_runs([sweep]))]
    assert names == ["stability=none card=A", "stability=qknorm card=B"]
