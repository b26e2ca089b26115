"""`events.jsonl` of a user's own loop: one line for each event, on the main process; without a folder, no events."""

import json
import logging
import math

import pytest

from stabletrain.errors import TrainingHalted
from stabletrain.guard import SkipGuard
from stabletrain.guard.reports import LoopTracker
from stabletrain.parallel.ranks import Ranks
from tests.guard.given import Loop, batches
from tests.guard.test_repeat import Wrong, broken


def strict(text):
    """Parses JSON in which NaN is written as a word."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def events(folder):
    return [strict(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def spoilt(loop, at=2):
    """Trains on batches of which one is NaN."""
    for number, (x, y) in enumerate(batches(4)):
        loop.guard.step(loop.loss, batch=(x * math.nan if number == at else x, y))


def test_each_event_is_a_line_beside_the_incidents(tmp_path):
    spoilt(Loop(tmp_path / "it"))
    skip, incident = events(tmp_path / "it")
    assert {name: skip[name] for name in ("event", "step", "kind", "tick", "reason", "loss")} == {
        "event": "skip",
        "step": 3,
        "kind": "nonfinite",
        "tick": 3,
        "reason": "loss is nan",
        "loss": "NaN",
    }
    assert (incident["event"], incident["cause"], incident["path"]) == ("incident", "poison_input", "it/step-00000003")
    assert (tmp_path / incident["path"]).is_dir()
    assert skip["time"] <= incident["time"]


def test_a_later_guard_appends(tmp_path):
    for _ in range(2):
        spoilt(Loop(tmp_path))
    assert [each["event"] for each in events(tmp_path)] == ["skip", "incident"] * 2


def test_a_loop_in_which_nothing_happens_writes_nothing(tmp_path):
    Loop(tmp_path / "it").run(batches(3))
    assert not [*tmp_path.iterdir()]


def test_a_loop_without_incidents_writes_nothing(tmp_path):
    spoilt(Loop(tmp_path / "it", max_incidents=0))
    assert not [*tmp_path.iterdir()]


def test_a_step_that_is_taken_again_and_a_halt_are_events(tmp_path):
    loop, Wrong.calls = Loop(tmp_path, recheck_every=2, policy=SkipGuard(max_consecutive=1)), []
    loop.run(batches(3))
    loop.guard.step(broken(loop), batch=batches(1)[0])
    with pytest.raises(TrainingHalted) as halted:
        spoilt(loop, at=0)
    found = events(tmp_path)
    assert [each["event"] for each in found] == ["skip", "incident", "restore", "skip", "incident", "halt"]
    assert str(halted.value) == f"step {found[-1]['step']}: {found[-1]['reason']}"


def test_only_the_main_process_writes_and_logs(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "stabletrain"):
        for rank in range(2):
            tracker = LoopTracker(tmp_path / str(rank), Ranks(rank, world_size=2))
            tracker.event("skip", 7, loss=math.inf)
            tracker.note(f"by rank {rank}")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert (events(tmp_path / "0")[0]["loss"], caplog.messages) == ("Infinity", ["by rank 0"])


def test_a_folder_that_cannot_be_written_is_said_once_and_ends_nothing(tmp_path, caplog):
    (folder := tmp_path / "it").write_text("a file")
    tracker = LoopTracker(folder, Ranks())
    with caplog.at_level(logging.WARNING, "stabletrain"):
        tracker.event("skip", 1)
        tracker.event("skip", 2)
    (line,) = caplog.messages
    assert "events cannot be written" in line
    assert "training is not affected" in line
    # Nor does it end a loop whose incidents have no place either.
    spoilt(loop := Loop(folder))
    assert loop.guard.skipped == 1
    assert loop.guard.last.applied
