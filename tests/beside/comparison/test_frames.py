"""Runs as a data frame, from folders written by hand."""

import math

import pandas as pd
import pytest

from stabletrain.beside.comparison import by_seed, frame
from stabletrain.beside.comparison.frames import DTYPES
from tests.beside.comparison.written import AT_INIT, write

FINAL = {"tokens_per_s": 1000.0, "throughput/mfu": 0.4, "memory/peak_gb": 2.5, "seconds": 60.0}
STARTS = [
    {"time": "", "gpus": 2, "hours": 1, "energy_kwh": 1.5, "utilization": 1.0, "slurm": {"job": "9"}},
    {
        "time": "",
        "gpus": 4,
        "hours": 1,
        "energy_kwh": 2.0,
        "utilization": 0.625,
        "slurm": {"job": "19", "array": "17", "task": "3"},
    },
]
CARD = {"name": "NVIDIA H200", "precision": "bf16"}


def qk(norm, seed):
    return {
        "overrides": [f"stability={norm}", f"seed={seed}", "steps=9"],
        "choices": {"stability": norm, "qknorm": "layernorm" if norm == "qknorm" else "none", "data": "stdlib"},
    }


def test_every_column_is_there_and_says_what_the_run_says(tmp_path):
    events = [
        {"event": "incident", "step": 4, "tick": 4, "cause": "bad_label", "fix": [], "path": None},
        {"event": "incident", "step": 6, "tick": 6, "cause": "bad_batch", "fix": [], "path": None},
        {"event": "skip", "step": 4, "tick": 4, "kind": "bad_data"},
        {"event": "rollback", "step": 6, "tick": 6},
        {"event": "heal", "step": 6, "tick": 7, "to": 0, "arm": "clip", "arms": ["clip"], "steps": 90},
        {"event": "forecast", "step": 2, "signal": "log_z", "low": 5, "high": "Infinity", "text": "soon"},
        {"event": "forecast", "step": 3, "signal": "loss", "low": None, "high": None, "text": "sooner"},
        {"event": "forecast", "step": 3, "signal": "loss", "low": None, "high": None, "text": "sooner"},
    ]
    lines = [
        {"step": 1, "train/ce": AT_INIT, "spike/score": 0.0, "tokens_per_s": 1.0},
        {"step": 5, "val/loss": 1.5, "val/accuracy": 0.5},
        {"step": 9, "val/loss": 1.75, "val/accuracy": 0.75},
        {"step": 9, "train/ce": 1.6, "spike/score": 0.125},
    ]
    write(
        tmp_path / "sweep" / "3",
        **qk("qknorm", 7),
        lines=lines,
        events=events,
        final=FINAL,
        hardware=CARD,
        model={"parameters": 123},
        starts=STARTS,
        gpu_hours=6.0,
        host="n2",
    )
    found = frame(tmp_path)
    assert list(found.columns) == list(DTYPES)
    assert found.index.tolist() == [str(tmp_path / "sweep" / "3")]
    assert found.iloc[0].to_dict() == {
        "run": "3",
        "sweep": "sweep",
        "status": "finished",
        "problem": None,
        "steps": 9,
        "val_loss": 1.75,
        "best_val_loss": 1.5,
        "best_step": 5,
        "val_accuracy": 0.75,
        "loss_at_init": AT_INIT,
        "diverged": False,
        "sensitivity": pytest.approx(math.nan, nan_ok=True),
        "spike_score": 0.125,
        "skips": 1,
        "rollbacks": 1,
        "healings": 1,
        "incidents": 2,
        "cause": "bad_label",
        "forecasts": 2,
        "units_per_s": 1000.0,
        "unit": "tokens",
        "mfu": 0.4,
        "peak_memory_gb": 2.5,
        "card": "NVIDIA H200",
        "precision": "bf16",
        "seed": 7,
        "parameters": 123,
        "seconds": 60.0,
        "gpu_hours": 6.0,
        "utilization": 0.75,
        "energy_kwh": 3.5,
        "host": "n2",
        "job": "17_3",
    }


def test_a_run_that_is_going_on_has_its_pace_and_memory_from_its_lines(tmp_path):
    lines = [
        {"step": 1, "time": 10.0, "train/ce": 5.0, "images_per_s": 7.0, "memory/peak_gb": 1.5, "throughput/mfu": 0.2},
        {"step": 2, "time": 14.0, "train/ce": 4.0, "images_per_s": 8.0, "memory/peak_gb": 1.25, "throughput/mfu": 0.3},
    ]
    write(tmp_path / "run", status="running", lines=lines)
    row = frame(tmp_path).iloc[0]
    assert (row.units_per_s, row.unit, row.mfu, row.peak_memory_gb, row.seconds) == (8.0, "images", 0.3, 1.5, 4.0)
    assert math.isnan(row.val_loss)
    assert not row.diverged


@pytest.mark.parametrize(
    ("status", "loss", "diverged"),
    [
        ("finished", 2.0, False),
        ("finished", math.nan, True),
        ("halted", 2.0, True),
        ("failed", math.nan, False),
        ("running", math.nan, False),
    ],
)
def test_diverged_is_what_was_halted_or_ended_without_a_loss(tmp_path, status, loss, diverged):
    write(tmp_path / "run", status=status, loss=loss)
    assert frame(tmp_path).diverged.tolist() == [diverged]


def test_settings_that_differ_are_columns_and_the_others_are_kept_apart(tmp_path):
    for number, (norm, seed) in enumerate([("none", 0), ("none", 1), ("qknorm", 0)]):
        write(tmp_path / str(number), **qk(norm, seed))
    found = frame(tmp_path)
    assert [name for name in found.columns if "." in name] == ["settings.stability", "settings.qknorm"]
    assert found["settings.stability"].tolist() == ["none", "none", "qknorm"]
    assert found.attrs["telling"] == ["stability"], "qknorm follows from it"
    assert found.attrs["shared"] == {"steps": 9, "data": "stdlib"}


def test_a_default_setting_tells_runs_apart_if_nothing_else_does(tmp_path):
    for number, width in enumerate((16, 32)):
        folder = write(tmp_path / str(number), ["seed=0"])
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "config.yaml").write_text(f"seed: 0\nmodel:\n  n_embd: {width}\n  n_head: {width // 8}\n")
    assert frame(tmp_path).attrs["telling"] == ["model.n_embd"]


def test_a_broken_run_makes_no_setting_differ(tmp_path):
    write(tmp_path / "0", **qk("none", 0))
    (write(tmp_path / "1", **qk("none", 0)) / "run.json").write_text("{")
    found = frame(tmp_path)
    assert found.status.tolist() == ["finished", "broken"]
    assert not [name for name in found.columns if name.startswith("settings.")]


def test_seeds_are_one_row_with_mean_lowest_highest_and_what_was_lost(tmp_path):
    for number, (norm, seed, loss) in enumerate(
        [("none", 0, 2.0), ("qknorm", 0, 1.0), ("none", 1, 3.0), ("qknorm", 1, math.nan), ("none", 2, 2.5)]
    ):
        write(tmp_path / str(number), **qk(norm, seed), loss=loss)
    write(tmp_path / "5", **qk("qknorm", 2), loss=0.5, status="halted")
    first, second = by_seed(frame(tmp_path)).to_dict("records")
    assert (first["run"], first["seed"], first["n"], first["status"]) == ("0, 2, 4", "0, 1, 2", 3, "finished")
    assert (first["val_loss"], first["val_loss_min"], first["val_loss_max"]) == (2.5, 2.0, 3.0)
    assert (second["n"], second["finished"], second["diverged"]) == (3, 1, 2)
    assert second["val_loss"] == 1.0, "over those that ended well"
    assert second["status"] == "2 finished, 1 halted"


def test_gpu_hours_of_seeds_are_added_and_energy_only_if_all_of_it_is_known(tmp_path):
    killed = {"time": "", "gpus": 1, "hours": 2.0}
    for number in range(2):
        write(tmp_path / str(number), **qk("none", number), starts=STARTS, gpu_hours=6.0)
        write(tmp_path / str(2 + number), **qk("qknorm", number), starts=[*STARTS, killed][2 * number :], gpu_hours=8.0)
    first, second = by_seed(frame(tmp_path)).to_dict("records")
    assert (first["gpu_hours"], first["energy_kwh"], first["utilization"]) == (12.0, 7.0, 0.75)
    assert (second["gpu_hours"], second["utilization"], first["job"]) == (16.0, 0.75, "17_3")
    assert math.isnan(second["energy_kwh"])


def test_a_count_that_some_rows_lack_stays_a_whole_number(tmp_path):
    heal = {"event": "heal", "step": 6, "tick": 7, "to": 0, "arm": "clip", "arms": ["clip"], "steps": 90}
    write(tmp_path / "0", **qk("none", 0), events=[heal, {**heal, "tick": 20}])
    write(tmp_path / "1", **qk("qknorm", 0))
    assert [str(each) for each in by_seed(frame(tmp_path)).healings] == ["2", "<NA>"]


def test_the_same_settings_on_another_card_are_another_row(tmp_path):
    for number, card in enumerate(("NVIDIA H200", "cpu")):
        write(tmp_path / str(number), **qk("none", number), hardware={"name": card})
    assert by_seed(frame(tmp_path)).card.tolist() == ["NVIDIA H200", "cpu"]


def test_the_frames_sensitivity_is_that_of_each_runs_arm(tmp_path):
    for number, (rate, loss) in enumerate([(1e-3, 2.0), (1e-2, 3.0), (1e-1, math.nan)]):
        write(tmp_path / str(number), [f"optimizer.lr={rate}"], loss=loss)
    assert frame(tmp_path).sensitivity.tolist() == pytest.approx([(0 + 1 + AT_INIT - 2) / 3] * 3)


def test_a_frame_of_damaged_runs_only_can_be_grouped(tmp_path):
    (write(tmp_path / "0") / "run.json").write_text("{")
    found = by_seed(frame(tmp_path))
    assert found.status.tolist() == ["broken"]
    assert isinstance(found, pd.DataFrame)
