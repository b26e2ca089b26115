"""Sensitivity to the learning rate, from run folders written by hand to the printed table and the picture."""

import json
import math
import statistics

import pytest

from stabletrain.cli import main
from stabletrain.compare.runs import read_runs
from stabletrain.compare.sensitivity import arms, sensitivity
from stabletrain.errors import ConfigError

RATES = ["1e-3", "1e-2", "1e-1"]
LOSSES = {
    ("none", "0"): [2.0, 2.5, 9.0],  # above the loss at init, which then counts
    ("none", "1"): [2.1, 2.3, math.nan],
    ("qknorm", "0"): [2.0, 1.9, 2.2],
    ("qknorm", "1"): [2.0, 1.8, 2.2],
}
AT_INIT = 5.5


def write(folder, overrides, final, status="finished", logit=3.0):
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"status": status, "overrides": overrides}))
    lines = [
        {"step": 1, "train/ce": AT_INIT},
        {"step": 1, "monitors/attn_logit_max": logit, "monitors/attn_logit_max/blocks.0": logit},
        {"step": 9, "train/ce": 0.1},
        {"step": 9, "val/loss": "NaN" if math.isnan(final) else final},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def sweep(tmp_path):
    number = 0
    for (arm, seed), losses in LOSSES.items():
        for rate, loss in zip(RATES, losses, strict=True):
            overrides = ["steps=9", f"stability={arm}", f"optimizer.lr={rate}", f"seed={seed}"]
            write(tmp_path / "sweep" / str(number), overrides, loss, logit=2e4 if math.isnan(loss) else 3.0)
            number += 1
    return tmp_path / "sweep"


def test_each_seeds_sensitivity_is_the_mean_distance_from_its_best_with_init_as_the_ceiling(sweep):
    found = {arm.name: arm for arm in arms(read_runs([sweep]))}
    assert list(found) == ["stability=none", "stability=qknorm"]
    expected = [(0 + 0.5 + 3.5) / 3, (0 + 0.2 + 3.4) / 3]
    assert found["stability=none"].sensitivities() == pytest.approx(expected)
    assert found["stability=qknorm"].sensitivities() == pytest.approx([0.4 / 3, 0.6 / 3])
    assert [point.diverged for point in found["stability=none"].at(0.1)] == [False, True]
    assert [point.loss for point in found["stability=none"].at(0.1)] == [AT_INIT, AT_INIT]
    assert [point.logit for point in found["stability=none"].at(0.1)] == [3.0, 2e4]


def test_a_run_that_did_not_finish_counts_as_its_loss_at_init(sweep):
    record = json.loads((sweep / "6" / "run.json").read_text()) | {"status": "halted"}
    (sweep / "6" / "run.json").write_text(json.dumps(record))
    found = {arm.name: arm for arm in arms(read_runs([sweep]))}["stability=qknorm"]
    assert (found.curves["0"][0].loss, found.curves["0"][0].diverged) == (AT_INIT, True)


def test_a_model_at_chance_everywhere_scores_zero():
    assert sensitivity([5.5, 5.5, 5.5]) == 0


def test_the_command_prints_the_table_and_draws_the_curves(sweep, tmp_path, capsys):
    picture = tmp_path / "curves.svg"
    assert main(["compare", str(sweep), "--picture", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| optimizer.lr | 0.001 | 0.01 | 0.1 | sensitivity |"
    mean, deviation = statistics.fmean([4 / 3, 1.2]), statistics.stdev([4 / 3, 1.2])
    assert (
        lines[2]
        == f"| stability=none | 2.050 | 2.400 | 5.500 (1 diverged, 1 above init) | {mean:.3f} ± {deviation:.3f} |"
    )
    assert lines[5] == "| stability=none | 3 | 3 | 2e+04 |  |"
    assert "</svg>" in picture.read_text()


@pytest.mark.parametrize("status", ["running", "preempted", "failed"])
def test_a_run_that_is_not_over_is_refused_for_it_says_nothing(sweep, status):
    record = json.loads((sweep / "6" / "run.json").read_text()) | {"status": status}
    (sweep / "6" / "run.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=f"its status is {status}.*finish it with resume, or leave it out"):
        arms(read_runs([sweep]))


def test_what_cannot_be_compared_is_refused(sweep, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["compare", str(empty)]) == 2
    assert "there is no run here" in capsys.readouterr().err
    for picture, reason in (("a.xyz", "use .svg, .png, .pdf"), ("no/a.svg", "there is no folder")):
        assert main(["compare", str(sweep), "--picture", str(tmp_path / picture)]) == 2
        seen = capsys.readouterr()
        assert reason in seen.err
        assert not seen.out
    with pytest.raises(ConfigError, match=r"optimizer\.lr does not differ"):
        arms(read_runs([sweep / "0"]))
    with pytest.raises(ConfigError, match="is there twice"):
        arms(read_runs([sweep, sweep / "0"]))
    (sweep / "0" / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
        read_runs([sweep])
    (sweep / "0" / "run.json").unlink()
    with pytest.raises(ConfigError, match="do not share one grid"):
        arms(read_runs([sweep]))
