"""The pages as text: self-contained, escaped, and true to the runs."""

import json
import re

import pytest

from stabletrain.compare import frame_of
from stabletrain.compare.pages import charts as drawn
from stabletrain.compare.pages.comparison import EMBEDDED, columns_of, embedded, rank, write_page
from stabletrain.compare.pages.headline import headline, name_of, throughput
from stabletrain.compare.pages.one_run import write_run_page
from stabletrain.compare.pages.shell import embedded as as_json
from stabletrain.compare.pages.shell import page, words
from stabletrain.compare.reading.runs import read_run, read_runs
from stabletrain.compare.reading.settings import telling
from stabletrain.errors import ConfigError
from tests.compare.made_pages import SAMPLE, made, sweep

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


def text_of(html):
    """The words of a page, without its scripts, styles and tags."""
    return re.sub(r"<(script|style)\b.*?</\1>|<[^>]*>", " ", html, flags=re.DOTALL)


def test_no_page_holds_an_address_or_loads_anything(folder):
    write_run_page(folder / "2")
    for text in (written(folder), (folder / "2" / "report.html").read_text()):
        assert set(re.findall(r"https?://[\w./-]*", text)) <= NAMESPACES
        assert not re.findall(r"sourceMappingURL|@import|<script[^>]* src|(?<![.\w])url\((?!data:)", text)
        assert "default-src 'none'" in text


def test_a_run_s_own_page_is_small_and_the_library_s_licence_is_in_it(folder):
    write_run_page(folder / "2")
    text = (folder / "2" / "report.html").read_text()
    assert len(text) < 300_000
    assert "Copyright (c) 2022 Leon Sorokin" in text
    assert "Tabulator" not in text_of(text)


def test_words_and_data_cannot_end_their_element():
    hostile = '</script><b onclick="x">\'&\x00\x1b'
    assert words(hostile) == "&lt;/script&gt;&lt;b onclick=&quot;x&quot;&gt;&#x27;&amp;\ufffd\ufffd"
    assert "<" not in as_json({hostile: [hostile]})
    assert json.loads(as_json({hostile: [hostile]})) == {hostile: [hostile]}
    text = page(hostile, "", hostile, scripts=["run.js"], styles=[])
    assert hostile not in text
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json(float("nan"))


def test_what_is_no_number_is_a_gap_with_a_mark(tmp_path):
    made(tmp_path / "run", nan_at=20)
    lines = drawn.chart_data(read_run(tmp_path / "run"), 500)
    loss, norm = lines["curves"]["train/loss"], lines["curves"]["grad/norm"]
    assert 20 not in loss["x"]  # the curve leaves out the loss of a skipped step
    assert lines["skips"] == [[20, None]]
    assert norm["y"][norm["x"].index(20)] is None
    assert norm["bad"] == [(20, "NaN")]


def test_a_stretch_that_was_rolled_back_stands_apart(tmp_path):
    made(tmp_path / "run", rolled_back=(24, 30))
    lines = drawn.chart_data(read_run(tmp_path / "run"), 500)
    assert lines["curves"]["train/loss"]["x"] == list(range(1, 41))
    ((steps, losses),) = lines["abandoned"]
    assert steps == list(range(24, 31))
    assert min(losses) > max(lines["curves"]["train/loss"]["y"][20:])
    assert lines["rollbacks"] == [30]


def test_numbers_have_six_figures_and_curves_at_most_the_points_asked_for(tmp_path):
    made(tmp_path / "run", steps=400)
    curve = drawn.chart_data(read_run(tmp_path / "run"), 50)["curves"]["grad/norm"]
    assert 20 < len(curve["x"]) <= 50
    assert all(len(repr(value).replace(".", "").lstrip("0")) <= 6 for value in curve["y"])


def test_the_words_say_which_run_is_best_what_diverged_and_what_went_wrong(folder):
    text = text_of(written(folder))
    assert "Best: stability=full optimizer.lr=0.1, validation loss 1.775 nats." in text
    assert "6 runs: 5 finished, 1 halted." in text
    assert "1 diverged: stability=none optimizer.lr=0.1." in text
    assert "1 incident in 1 run: lr_too_high (1)." in text
    assert "Fastest: NVIDIA H100 in bf16, 4,000 tokens per second, 2 times as fast as cpu in bf16." in text


def test_the_best_over_seeds_is_that_of_the_lowest_mean(tmp_path):
    for number, (arm, seed, level) in enumerate([("a", 0, 1.0), ("a", 1, 3.0), ("b", 0, 1.4), ("b", 1, 1.6)]):
        made(tmp_path / "s" / str(number), f"stability={arm}", f"seed={seed}", level=level)
    runs = read_runs([tmp_path / "s"])
    rows = frame_of(runs).to_dict("records")
    sentences = headline(runs, rows, [], telling(runs, but=()))
    assert sentences[0].startswith("Best: stability=a seed=0, validation loss 1.025")
    assert sentences[1] == "Best mean over 2 seeds: stability=b, 1.525 nats, from 1.425 to 1.625."


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


def test_throughput_is_the_median_by_card_and_precision():
    rows = [{"card": card, "precision": "bf16", "unit": "tokens", "units_per_s": rate} for card, rate in
            [("a", 1.0), ("a", 9.0), ("a", 2.0), ("b", 4.0), ("b", 6.0), ("b", None)]]  # fmt: skip
    assert [(g["card"], g["median"], g["lowest"], g["highest"], g["runs"]) for g in throughput(rows)] == [
        ("b", 5.0, 4.0, 6.0, 2),
        ("a", 2.0, 1.0, 9.0, 3),
    ]


def test_of_many_runs_the_best_the_worst_and_those_with_incidents_are_drawn(tmp_path):
    run = read_run(made(tmp_path / "run"))
    hit = read_run(made(tmp_path / "hit", incident={"step": 9, "cause": "bad_batch"}))
    runs = [hit if i == 700 else run for i in range(1000)]
    chosen = embedded(runs)
    assert len(chosen) == EMBEDDED
    assert {0, 1, 999, 700} <= {*chosen}


def test_the_page_of_a_run_has_its_incident_its_sample_and_its_settings(tmp_path):
    incident = {"step": 20, "cause": "bad_batch", "verdict": "it is this batch", "fix": ["clipping=zclip"]}
    made(tmp_path / "sw" / "run", "optimizer.lr=0.02", incident=incident, sample=SAMPLE)
    write_run_page(tmp_path / "sw" / "run")
    text = (tmp_path / "sw" / "run" / "report.html").read_text()
    assert 'href="incidents/step-00000020/report.md"' in text
    assert words(SAMPLE) in text
    assert SAMPLE not in text
    shown = " ".join(text_of(text).split())
    assert "Finished after 40 steps, validation loss 1.025 nats." in shown
    assert "bad_batch it is this batch clipping=zclip" in shown
    assert "optimizer.lr 0.02" in shown
    assert "torch 2.15.0" in shown


def test_a_page_that_cannot_be_written_says_so(folder, tmp_path):
    runs = read_runs([folder])
    with pytest.raises(ConfigError, match=r"cannot be written .* name another file"):
        write_page(runs, frame_of(runs), tmp_path / "nowhere" / "report.html")
