"""Checks that the numbers that a loop gives its steps are the ones shown, and change nothing else."""

import json
import logging
import math

import pytest
import torch

from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.guard.guard import Guard
from stabletrain.guard.policy import RollbackGuard, SkipGuard
from stabletrain.monitors.rolling import Alarm
from tests.guard.given import Loop, batches, same


def spoilt(batch):
    """The same batch with a NaN: an incident that is filed each time."""
    x, y = batch
    x = x.clone()
    x[0, 0] = math.nan
    return x, y


class Loops:
    """Three ways to take a step with a number."""

    def __init__(self, folder, way, **options):
        self.way, self.loop = way, Loop(folder, **({} if way == "attached" else options))
        self.guard = self.loop.guard
        if way == "attached":
            torch.manual_seed(0)
            self.guard = Guard.attach(self.loop.model, self.loop.optimizer, folder=folder, **options)

    def step(self, batch, number):
        if self.way == "step":
            self.guard.step(self.loop.loss, batch, step=number)
        elif self.way == "update":
            self.guard.backward(self.loop.loss, batch=batch)
            self.guard.update(step=number)
        else:
            if number is not None:
                self.guard.at(number)
            self.loop.optimizer.zero_grad()
            self.loop.loss(*batch).backward()
            self.loop.optimizer.step()


@pytest.mark.parametrize("way", ["step", "update", "attached"])
def test_the_loops_numbers_are_shown(tmp_path, caplog, way):
    loops = Loops(tmp_path, way)
    data = batches(6)
    with caplog.at_level(logging.WARNING, "stabletrain"):
        for number, batch in zip((60, 61, 60, 62, 7), data, strict=False):
            loops.step(spoilt(batch) if number in (60, 7) else batch, number)
            assert loops.guard.last.step == number
    assert [incident.path.name for incident in loops.guard.incidents] == [
        "step-00000060",
        "step-00000060-2",
        "step-00000007",
    ]
    records = [json.loads((incident.path / "diagnosis.json").read_text()) for incident in loops.guard.incidents]
    assert [record["step"] for record in records] == [60, 60, 7]
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 60", "step 60", "step 7"]
    loops.step(data[5], None)
    assert loops.guard.last.step == 6, "without a number, its own count"


def test_the_numbers_change_nothing_else(tmp_path):
    """Snapshots, rollbacks and repetitions are due as without."""
    found = []
    for name, numbers in (("none", [None] * 30), ("odd", [(7 * i) % 5 for i in range(30)])):
        policy = RollbackGuard(patience=3, snapshot_every=4, healthy_after=2, skip_batches=2, lr_steps=5)
        loop = Loop(tmp_path / name, policy=policy, recheck_every=3)
        torch.manual_seed(2)
        for at, (batch, number) in enumerate(zip(batches(30), numbers, strict=True)):
            loop.guard.step(loop.loss, spoilt(batch) if 12 <= at < 16 else batch, step=number)
        assert loop.guard._loop.policy.rollbacks == 1
        found.append((loop.bits(), loop.guard.state_dict(), loop.guard.skips))
    assert same(found[0][0], found[1][0])
    assert found[0][1]["step"] == 30
    assert str(found[0][1:]) == str(found[1][1:])


def test_a_halt_and_a_rollback_name_the_loops_number(tmp_path, caplog):
    loop = Loop(tmp_path, policy=SkipGuard(max_consecutive=2), max_incidents=0)
    x, y = spoilt(batches(1)[0])
    loop.guard.step(loop.loss, (x, y), step=1000)
    with pytest.raises(TrainingHalted, match=r"^step 1001: "):
        loop.guard.step(loop.loss, (x, y), step=1001)
    loop = Loop(tmp_path, policy=RollbackGuard(patience=2, snapshot_every=2), max_incidents=0)
    with caplog.at_level(logging.WARNING, "stabletrain"):
        for at, batch in enumerate(batches(4)):
            loop.guard.step(loop.loss, batch if at < 2 else (x, y), step=500 + at)
    assert any(line.startswith("step 503: ") and "rollback 1" in line for line in caplog.messages)


def test_an_alarm_says_that_it_counts_otherwise(tmp_path, monkeypatch, caplog):
    loop = Loop(tmp_path)
    monkeypatch.setattr(loop.guard._loop.policy, "new_alarms", lambda: [Alarm("slow_loss", "since about step 1", 1)])
    with caplog.at_level(logging.WARNING, "stabletrain"):
        loop.guard.step(loop.loss, batches(1)[0], step=60)
        loop.guard.step(loop.loss, batches(1)[0])
    told = "step 60: since about step 1 (as the guard counts steps; this is its step 1)"
    assert caplog.messages == [told, "step 2: since about step 1"]


def test_a_number_may_be_a_tensor_and_must_count(tmp_path):
    loop = Loop(tmp_path)
    loop.guard.step(loop.loss, batches(1)[0], step=torch.tensor(12))
    assert loop.guard.last.step == 12
    with pytest.raises(ConfigError, match="step=-1 is below 0"):
        loop.guard.at(-1)


def test_a_resumed_guard_goes_on_with_its_own_count(tmp_path):
    loop, other = Loop(tmp_path), Loop(tmp_path)
    for at, batch in enumerate(batches(3)):
        loop.guard.step(loop.loss, batch, step=100 + at)
    other.guard.load_state_dict(loop.guard.state_dict())
    other.guard.step(other.loss, batches(1)[0])
    assert other.guard.last.step == 4
