"""The pages as text: self-contained, escaped, and true to the runs."""

import json
import re

import pytest

from stabletrain.beside.comparison import frame_of
from stabletrain.beside.comparison.pages.comparison import (
    EMBEDDED,
    columns_of,
    mean_curves,
    rank,
    runs_with_curves,
    with_shares,
    write_page,
)
from stabletrain.beside.comparison.pages.headline import name_of
from stabletrain.beside.comparison.pages.one_run import write_run_page
from stabletrain.beside.comparison.reading.runs import read_run, read_runs
from stabletrain.beside.comparison.table import headings
from stabletrain.errors import ConfigError
from tests.beside.comparison.made_pages import made, sweep, text_of
from tests.beside.comparison.written import write

NAMESPACES = {"http://www.w3.org/2000/svg"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return sweep(tmp_path_factory.mktemp("pages") / "sweep")


def written(root):
    runs = read_runs([root])
    write_page(runs, frame_of(runs), root / "report.html")
    return (root / "report.html").read_text()


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL).group(1))


def test_no_page_holds_an_address_or_loads_anything(folder):
    write_run_page(folder / "2")
    for text in (written(folder), (folder / "2" / "report.html").read_text()):
        assert set(re.findall(r"https?://[\w./-]*", text)) <= NAMESPACES
        assert not re.findall(r"sourceMappingURL|@import|<script[^>]* src|(?<![.\w])url\((?!data:|#)", text)
        assert "default-src 'none'" in text


def test_the_words_say_which_run_is_best_what_diverged_and_what_went_wrong(folder):
    text = text_of(written(folder))
    assert "Best: stability=full optimizer.lr=0.1, validation loss 1.775 nats." in text
    assert "6 runs: 5 finished, 1 halted." in text
    assert "1 diverged: stability=none optimizer.lr=0.1." in text
    assert "1 incident in 1 run: lr_too_high (1)." in text
    assert "Fastest: NVIDIA H100 in bf16, 4,000 tokens per second, 2 times as fast as cpu in bf16." in text


def test_what_differs_is_a_column_and_what_does_not_is_not(folder):
    data = data_of(written(folder))
    titles = [column["title"] for column in data["columns"]]
    assert titles[:4] == ["run", "stability", "optimizer.lr", "status"]
    assert "card" in titles
    assert "precision" not in titles
    assert "rollbacks" not in titles or any(row[titles.index("rollbacks")] for row in data["rows"])
    assert "val accuracy" not in titles
    assert [row[0] for row in data["rows"]] == ["5", "4", "3", "1", "0", "2"]
    assert data["rows"][0][titles.index("optimizer.lr")] == 0.1
    assert "precision" in text_of(written(folder)).split("The same in all runs")[1]


def test_where_many_settings_differ_the_results_come_first(tmp_path):
    keys = [f"model.key{i}" for i in range(7)]
    for number in range(2):
        made(tmp_path / "s" / str(number), *(f"{key}={number}{i}" for i, key in enumerate(keys)))
    runs = read_runs([tmp_path / "s"])
    columns, _, _ = columns_of(runs, frame_of(runs).to_dict("records"), keys)
    assert [column["title"] for column in columns][:3] == ["run", "status", "val loss"]
    assert name_of(runs[0], keys) == "s/0"


def test_the_setting_and_the_number_of_steps_have_different_headings(tmp_path):
    for steps in (8, 12):
        made(tmp_path / "s" / str(steps), f"steps={steps}", steps=steps)
    titles = [column["title"] for column in data_of(written(tmp_path / "s"))["columns"]]
    assert ("steps" in titles, "steps done" in titles, len({*titles})) == (True, True, len(titles))
    assert headings(frame_of(read_runs([tmp_path / "s"])))["steps"] == "steps done"


def test_runs_are_ordered_by_how_they_ended():
    states = ["finished", "running", "halted", "failed", "broken"]
    ranks = [rank({"status": state, "val_loss": 9.0 - i, "diverged": False}) for i, state in enumerate(states)]
    assert ranks == sorted(ranks)
    assert rank({"status": "finished", "val_loss": 0.0, "diverged": True}) > ranks[1]
    assert rank({"status": "finished", "val_loss": None}) > rank({"status": "finished", "val_loss": 99.0})


def test_sensitivity_is_that_of_the_sweep_and_marks_what_diverged(folder):
    full, none = sorted(data_of(written(folder))["sensitivity"]["arms"], key=lambda arm: arm["name"])
    losses = [3.0 - 0.25 * number + 1 / 40 for number in (3, 4, 5)]
    assert full["sensitivity"] == pytest.approx(sum(losses) / 3 - min(losses))
    assert full["diverged"] == []
    ((rate, _, said),) = none["diverged"]
    assert rate == 0.1
    assert "diverged" in said


def test_throughput_bars_are_relative_to_the_fastest_with_the_same_unit(folder):
    groups = [{"unit": unit, "median": median} for unit, median in [("a", 4000.0), ("a", 1000.0), ("b", 8.0)]]
    assert [group["share"] for group in with_shares(groups)] == [100.0, 25.0, 100.0]
    text = written(folder).split("Throughput by card and precision")[1]
    assert re.findall(r"width:([\d.]+)%", text) == ["100.0", "50.0"]
    assert "4,000 tokens" in text


def test_of_many_runs_the_best_the_worst_and_those_with_incidents_are_drawn(tmp_path):
    run = read_run(made(tmp_path / "run"))
    hit = read_run(made(tmp_path / "hit", incident={"step": 9, "cause": "bad_batch"}))
    runs = [hit if i == 700 else run for i in range(1000)]
    chosen = runs_with_curves(runs)
    assert len(chosen) == EMBEDDED
    assert {0, 1, 999, 700} <= {*chosen}


def test_a_page_that_cannot_be_written_says_so(folder, tmp_path):
    runs = read_runs([folder])
    with pytest.raises(ConfigError, match=r"cannot be written .* name another file"):
        write_page(runs, frame_of(runs), tmp_path / "nowhere" / "report.html")


def test_a_setting_of_which_the_page_has_not_every_run_has_no_mean_and_says_so(tmp_path):
    for name in ("none", "full"):
        for seed in range(3):
            typed = [f"stability={name}", f"seed={seed}"]
            lines = [{"step": step, "train/loss": 5.0 - step / 10 - seed / 100} for step in range(1, 9)]
            write(tmp_path / f"{name}-{seed}", typed, lines=lines)
    runs = sorted(read_runs([tmp_path]), key=lambda run: run.name)
    left_out = runs[0]
    curves = {number: {} for number, run in enumerate(runs) if run is not left_out}
    torn, whole = mean_curves(runs, curves, 40)
    assert (torn["name"], torn["sound"], torn["curves"]) == (
        "stability=full (no mean: too many runs for this page)", [], {},
    )  # fmt: skip
    assert torn["others"] == [1, 2]
    assert (whole["name"], whole["sound"]) == ("stability=none (n=3)", [3, 4, 5])
    assert "train/loss" in whole["curves"]
