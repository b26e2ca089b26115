"""The tracker forwards each call to the files, W&B and the progress line, in an order that loses nothing."""

import inspect

import pytest

from stabletrain.tracking.metrics import Metrics, read_jsonl
from stabletrain.tracking.progress import Progress
from stabletrain.tracking.tracker import NoTracker, Tracker
from stabletrain.tracking.wandb import NoWandb, Wandb


class Recorder(NoWandb):
    def __init__(self, heard):
        self.heard = heard

    def log(self, step, metrics):
        self.heard.append(("log", step, dict(metrics)))

    def summary(self, values):
        self.heard.append(("summary", dict(values)))

    def alert(self, title, text):
        self.heard.append(("alert", title, text))

    def finish(self, exit_code):
        self.heard.append(("finish", exit_code))


def test_files_and_wandb_hear_the_same_and_the_exit_code_arrives(tmp_path, capsys):
    heard = []
    tracker = Tracker(Metrics(tmp_path), Recorder(heard), Progress(1))
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 1.0 / step})
    tracker.event("skip", 3, reason="grad")
    tracker.note("a line")
    tracker.progress(1, {"train/loss": 1.0}, 10.0, "tok", 0)
    tracker.evaluating(0, 2)
    tracker.alert("title", "text")
    tracker.summary({"val/loss": 2.0})
    tracker.rewind(2)
    tracker.close(3)
    assert [(line["step"], line["train/loss"]) for line in read_jsonl(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 0.5),
    ]
    assert [event["event"] for event in read_jsonl(tmp_path / "events.jsonl")] == ["skip"]
    assert heard[0] == ("log", 1, {"train/loss": 1.0})
    assert heard[3:] == [("alert", "title", "text"), ("summary", {"val/loss": 2.0}), ("finish", 3)]
    printed = capsys.readouterr().out
    assert "a line\n" in printed
    assert "loss 1.00" in printed


@pytest.mark.parametrize(("off", "on"), [(NoTracker, Tracker), (NoWandb, Wandb)])
def test_off_can_be_called_as_on_can(off, on):
    public = {name for name in vars(on) if not name.startswith("_")}
    assert public == {name for name in vars(off) if not name.startswith("_")}
    for name in public:
        assert inspect.signature(getattr(on, name)) == inspect.signature(getattr(off, name))


def test_other_ranks_write_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tracker = NoTracker()
    tracker.log(1, {})
    tracker.event("skip", 1)
    tracker.note("a line")
    tracker.progress(1, {}, 1.0, "tok", 0)
    tracker.close(0)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""
