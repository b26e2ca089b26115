"""What is drawn of a run: marked gaps for non-finite values, rolled-back steps as separate lines, and valid links."""

import pytest

from stabletrain.beside.comparison.pages.charts import (
    MOST_SKIPS,
    chart_data,
    incident_rows,
    link,
    panels,
    sample,
    skip_marks,
)
from stabletrain.beside.comparison.reading.columns import joined
from stabletrain.beside.comparison.reading.runs import read_run
from tests.beside.comparison.made_pages import made
from tests.beside.comparison.written import write


def test_a_non_finite_value_is_a_marked_gap(tmp_path):
    made(tmp_path / "run", nan_at=20)
    lines = chart_data(read_run(tmp_path / "run"), 500)
    loss, norm = lines["curves"]["train/loss"], lines["curves"]["grad/norm"]
    assert 20 not in loss["x"]  # the curve excludes skipped steps
    assert lines["skips"] == [[20, None]]
    assert norm["y"][norm["x"].index(20)] is None
    assert norm["bad"] == [(20, "NaN")]


def test_each_kind_of_non_finite_value_has_its_own_word(tmp_path):
    words = ["NaN", "Infinity", "-Infinity"]
    lines = [{"step": step, "grad/norm": word} for step, word in enumerate(words)]
    curve = chart_data(read_run(write(tmp_path / "run", lines=lines)), 500)["curves"]["grad/norm"]
    assert curve == {"x": [0, 1, 2], "y": [None] * 3, "bad": [*enumerate(words)]}


def test_rolled_back_steps_are_a_separate_line(tmp_path):
    made(tmp_path / "run", rolled_back=(24, 30))
    lines = chart_data(read_run(tmp_path / "run"), 500)
    assert lines["curves"]["train/loss"]["x"] == list(range(1, 41))
    ((steps, losses),) = lines["abandoned"]
    assert steps == list(range(24, 31))
    assert min(losses) > max(lines["curves"]["train/loss"]["y"][20:])
    assert lines["rollbacks"] == [30]


def test_a_stretch_that_a_healing_ended_is_no_rollback(tmp_path):
    def line(tick, step, healings, **gone):
        counts = {"guard/rollbacks": min(tick // 10, 1), "guard/healings": healings}
        return {"tick": tick, "step": step, "train/loss": 1.0, **counts, **gone}

    gone = {"rolled_back": True}
    lines = [
        *(line(tick, tick, 0, **gone) for tick in range(1, 10)),
        *(line(10 + n, 4 + n, 0, **gone) for n in range(9)),
    ]
    lines += [line(20 + n, 2 + n, 1) for n in range(20)]
    heal = {"event": "heal", "step": 12, "tick": 18, "reason": "loss 7 is a spike", "to": 1, "arm": "clip=1"}
    events = [{"event": "rollback", "step": 9, "tick": 9}, heal]
    made = chart_data(read_run(write(tmp_path / "run", lines=lines, events=events)), 500)
    assert [each[0] for each in made["abandoned"]] == [[*range(1, 10)], [*range(4, 13)]]
    assert made["curves"]["train/loss"]["x"] == [*range(2, 22)]
    assert made["rollbacks"] == [9]
    assert made["healings"] == [[12, "halted: loss 7 is a spike; went on from step 1 with clip=1"]]


def test_numbers_have_six_digits_and_curves_at_most_the_requested_points(tmp_path):
    made(tmp_path / "run", steps=400)
    curve = chart_data(read_run(tmp_path / "run"), 50)["curves"]["grad/norm"]
    assert 20 < len(curve["x"]) <= 50
    assert all(len(repr(value).replace(".", "").lstrip("0")) <= 6 for value in curve["y"])


@pytest.mark.parametrize(("last", "drawn"), [(1.0, False), (2.0, True)])
def test_a_constant_loss_scale_is_not_drawn(tmp_path, last, drawn):
    lines = [{"step": step, "precision/loss_scale": scale, "lr": 0.1} for step, scale in enumerate([1.0, 1.0, last])]
    curves = chart_data(read_run(write(tmp_path / "run", lines=lines)), 500)["curves"]
    assert ("precision/loss_scale" in curves) is drawn
    assert "lr" in curves, "a learning rate is drawn even if it is constant"


def test_the_number_of_marked_skips_is_limited(tmp_path):
    events = [{"event": "skip", "step": step, "tick": step, "kind": "spike"} for step in range(1, 1001)]
    run = read_run(write(tmp_path / "run", events=events))
    marks = skip_marks(run, joined([], "train/loss"), [])
    assert MOST_SKIPS / 2 < len(marks) <= MOST_SKIPS
    assert {loss for _, loss in marks} == {None}
    steps = [step for step, _ in marks]
    assert steps[0] == 1
    assert steps == sorted(steps)


def test_a_skipped_step_has_the_loss_of_its_event(tmp_path):
    lines = [{"step": 10, "train/loss": 2.0, "guard/applied": 1}]
    losses = {3: 4.5, 4: "NaN", 5: None}
    events = [
        {"event": "skip", "step": step, "tick": step, "kind": "spike", "loss": loss} for step, loss in losses.items()
    ]
    assert chart_data(read_run(write(tmp_path / "run", lines=lines, events=events)), 500)["skips"] == [
        [3, 4.5],
        [4, None],
        [5, None],
    ]


def test_an_incident_keeps_its_skip_among_many(tmp_path):
    events = [{"event": "skip", "step": step, "tick": step, "kind": "spike", "loss": step} for step in range(1, 1001)]
    events.append({"event": "incident", "step": 503, "tick": 503})
    marks = chart_data(read_run(write(tmp_path / "run", events=events)), 500)["skips"]
    assert [503, 503.0] in marks
    assert len(marks) <= MOST_SKIPS + 1


@pytest.mark.parametrize("skipped", [True, False])
def test_a_run_that_was_halted_before_its_first_update_has_marks_and_an_empty_curve(tmp_path, skipped):
    lines = [{"step": 1, "train/loss": "NaN", "guard/applied": 0}] if skipped else [{"step": 1, "lr": 0.1}]
    events = [{"event": "skip", "step": 1, "tick": 1, "kind": "nonfinite", "loss": "NaN"}] if skipped else []
    folder = write(tmp_path / "run", lines=lines, events=events, status="halted", reason="why", final={"steps": 3})
    found = chart_data(read_run(folder), 500)
    assert found["curves"]["train/loss"] == {"x": [], "y": []}
    assert (found["skips"], found["halt"]) == ([[1, None]] if skipped else [], {"step": 3, "reason": "why"})
    assert panels([found])[0]["names"] == ["train/loss"]


def test_a_forecast_is_a_mark_with_a_band_if_its_interval_is_known(tmp_path):
    events = [
        {"event": "forecast", "step": 2, "signal": "log_z", "low": 5.5, "high": 9, "text": "soon"},
        {"event": "forecast", "step": 3, "signal": "loss", "low": None, "high": None, "text": "sooner"},
        {"event": "forecast", "step": 4, "signal": "loss", "low": 5, "high": "Infinity", "text": "sooner"},
    ]
    assert chart_data(read_run(write(tmp_path / "run", events=events)), 500)["forecasts"] == [
        {"step": 2, "signal": "log_z", "text": "soon", "to": [5.5, 9]},
        {"step": 3, "signal": "loss", "text": "sooner", "to": None},
        {"step": 4, "signal": "loss", "text": "sooner", "to": None},
    ]


def test_a_run_that_was_not_halted_has_no_halt(tmp_path):
    assert chart_data(read_run(made(tmp_path / "run")), 500)["halt"] is None


def test_only_panels_with_logged_metrics_are_shown():
    found = panels([{"curves": {"train/loss": {}}}, {"curves": {"spike/grad_norm_score": {}, "unheard of": {}}}])
    assert [(panel["title"], panel["names"]) for panel in found] == [
        ("Training loss", ["train/loss"]),
        ("Spike score", ["spike/grad_norm_score"]),
    ]
    assert panels([]) == []


def test_a_link_is_relative_to_the_pages_folder_and_escapes_the_file_name(tmp_path):
    place = tmp_path / "a sweep#1" / "0"
    place.mkdir(parents=True)
    (place / "report.html").write_text("")
    assert link(place / "report.html", tmp_path) == "a%20sweep%231/0/report.html"
    assert link(place / "report.html", place / "deeper") == "../report.html"
    assert link(place / "missing.html", tmp_path) is None


def test_an_incident_is_linked_if_it_has_a_report(tmp_path):
    incident = {"step": 9, "cause": "bad_batch", "verdict": "it is this batch", "fix": ["clipping=zclip"]}
    folder = made(tmp_path / "sweep" / "0", incident=incident)
    row = {**incident, "kind": "nonfinite", "link": "0/incidents/step-00000009/report.md"}
    assert incident_rows(read_run(folder), tmp_path / "sweep") == [row]
    (folder / "incidents" / "step-00000009" / "report.md").unlink()
    assert incident_rows(read_run(folder), tmp_path / "sweep") == [{**row, "link": None}]


def test_a_finished_run_shows_the_beginning_of_its_sample(tmp_path):
    text = "x" * 5000
    run = read_run(made(tmp_path / "run", sample=text))
    assert sample(run) == text[:4000]
    assert sample(run, 10) == text[:10]
    assert sample(read_run(made(tmp_path / "halted", status="halted", sample=text))) is None
    assert sample(read_run(made(tmp_path / "mute"))) is None
