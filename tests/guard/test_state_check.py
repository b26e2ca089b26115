"""`Guard(checksum_every=...)`: what changes between two steps of a user's loop is found, named and undone."""

import json
import logging

import pytest
import torch

from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.guard.guard import Guard
from stabletrain.guard.policy import RollbackGuard
from tests.guard.given import Loop, batches, network, same


class Data:
    """A loader whose position can be saved."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def __next__(self):
        self.at += 1
        return self.data[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def run(folder, change=None, at=9, **options):
    """Steps through 14 batches, in `change` of which a tensor changes before step `at`, once."""
    data = Data(batches(14))
    loop = Loop(folder, loader=data, policy=RollbackGuard(snapshot_every=4, healthy_after=1), **options)
    changed = change is None
    while data.at < len(data.data):
        if data.at == at and not changed:
            changed = True
            with torch.no_grad():
                change(loop)
        batch = next(data)
        torch.manual_seed(data.at)
        loop.guard.step(loop.loss, batch=batch)
        assert loop.guard.rolled_back == 0
    return loop


CHANGES = {
    "parameter 4.weight": lambda loop: loop.model[4].weight.mul_(1.01),
    "exp_avg 4.weight": lambda loop: loop.optimizer.state[loop.model[4].weight]["exp_avg"].neg_(),
    "buffer 1.running_mean": lambda loop: loop.model[1].running_mean.view(torch.int32).bitwise_xor_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_steps_is_named_and_undone(tmp_path, name, caplog):
    clean = run(tmp_path / "clean", checksum_every=1)
    with caplog.at_level(logging.WARNING, "stabletrain"):
        loop = run(tmp_path / "run", CHANGES[name], checksum_every=1)
    assert same(loop.bits(), clean.bits())
    assert loop.guard.skips["state"] == 1
    (incident,) = loop.guard.incidents
    assert incident.cause == "corrupt_state"
    record = json.loads((incident.path / "diagnosis.json").read_text())
    assert record["kind"] == "state"
    assert name in [f"{each['what']} {each['name']}" for each in record["damage"]]
    assert name.split()[1] in caplog.text


def test_a_loop_that_changes_its_weights_itself_is_left_alone_by_default(tmp_path):
    loop = run(tmp_path, CHANGES["parameter 4.weight"])
    assert loop.guard.skipped == 0


def test_without_snapshots_the_loop_halts(tmp_path):
    loop = Loop(tmp_path, checksum_every=1)
    loop.run(batches(3))
    with torch.no_grad():
        loop.model[0].weight[0, 0] += 1e-3
    with pytest.raises(TrainingHalted, match="not what the last update left"):
        loop.run(batches(1))


def test_an_attached_guard_checks_as_well(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    guard = Guard.attach(model, optimizer, folder=tmp_path, rollback=True, checksum_every=1)
    for number, (x, y) in enumerate(batches(6)):
        if number == 4:
            with torch.no_grad():
                model[4].weight[1, 1] += 1e-4
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert guard.last.applied == (number != 4)
    assert guard.skips["state"] == 1


def test_a_negative_interval_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"checksum_every=-1\) is below 0"):
        Loop(tmp_path, checksum_every=-1)
