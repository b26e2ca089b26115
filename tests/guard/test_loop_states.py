"""Snapshots of a user's loop: on a card, what the loop itself writes waits for them; a damaged one is not restored."""

import math

import pytest
import torch

from stabletrain.checkpoint.snapshots import Snapshots
from stabletrain.extension import NoForecast
from stabletrain.guard.guard import Guard
from stabletrain.guard.loop_states import LoopStates
from stabletrain.guard.policy import RollbackGuard
from stabletrain.stability.precision.loop import precision_of_loop
from stabletrain.tracking.tracker import NoTracker
from tests.guard.given import Loop, batches, network, same
from tests.tools.fake_card import as_if_on_a_card

WRITES = {
    "clamping": lambda model, optimizer: model[0].weight.clamp_(-1, 1),
    "pruning": lambda model, optimizer: model[0].weight.mul_(torch.ones(16, 4, device="cuda")),
    "an average": lambda model, optimizer: model[0].weight.lerp_(torch.ones(16, 4, device="cuda"), 0.1),
    "SAM": lambda model, optimizer: torch._foreach_add_([*model.parameters()], 0.1),
    "moments": lambda model, optimizer: optimizer.state[model[0].weight]["exp_avg"].zero_(),
}


@pytest.fixture
def card():
    """A user's model and optimizer as if on a card, after one update, and its states."""
    with as_if_on_a_card() as card:
        model = network().to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.randn(8, 4, device="cuda")).mean().backward()
        optimizer.step()
        policy = RollbackGuard(snapshot_every=1)
        policy.check_state_every(0)
        precision = precision_of_loop(None, torch.device("cuda", 0))
        taken = LoopStates(model, optimizer, policy, precision, None, NoTracker(), NoForecast(), bool)
        card.restart()
        yield model, optimizer, taken, card


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_whatever_the_loop_writes_after_a_snapshot_does_not_reach_it(card, write):
    model, optimizer, taken, recorder = card
    taken.before_first_update(0)
    assert not recorder.copied
    with torch.no_grad():
        write(model, optimizer)  # raises if another stream may still be copying
    taken.after_update(1)
    with torch.no_grad():
        write(model, optimizer)


@pytest.mark.parametrize("attached", [False, True])
def test_every_guard_of_a_loop_takes_its_snapshots_so(tmp_path, monkeypatch, attached):
    seen, take = [], Snapshots.take
    monkeypatch.setattr(Snapshots, "take", lambda *given, **named: seen.append(named) or take(*given, **named))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"folder": tmp_path, "policy": RollbackGuard(snapshot_every=1)}
    guard = Guard.attach(model, optimizer, **options) if attached else Guard(model, optimizer, **options)
    for inputs, _ in batches(3):
        if attached:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        else:
            guard.step(lambda x: model(x).square().mean(), inputs)
    assert len(seen) >= 2
    assert all(named == {"only_optimizer_writes": False} for named in seen)


def test_a_damaged_snapshot_is_named_and_an_older_one_is_restored(tmp_path, caplog):
    policy = RollbackGuard(patience=2, snapshot_every=2, healthy_after=0)
    loop = Loop(tmp_path, policy=policy, max_incidents=0, checksum_every=1)
    loop.run(batches(4))
    wanted = loop.bits()
    loop.run(batches(3))
    loop.guard._loop.states.snapshots.newest(6)["model"]["4.weight"].view(torch.int32)[0, 0] ^= 1
    first, second = [(x * math.nan, y) for x, y in batches(2)]
    loop.run([first])
    loop.guard.at(70)
    loop.run([second])
    assert loop.guard.rolled_back
    assert same(loop.bits(), wanted)
    told = [record.message for record in caplog.records if "damaged" in record.message]
    assert told == ["step 70: the snapshot after step 6 is damaged: not used"]


def test_after_a_rollback_exactly_lr_steps_updates_have_the_lower_rate_and_their_readings_say_so(tmp_path):
    policy = RollbackGuard(patience=1, snapshot_every=1, healthy_after=0, skip_batches=0, lr_steps=3)
    loop = Loop(tmp_path, policy=policy, max_incidents=0)
    used, rate = [], loop.optimizer.param_groups[0]["lr"]
    loop.optimizer.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    for batch in batches(3):
        loop.guard.step(loop.loss, batch)
    x, y = batches(1)[0]
    loop.guard.step(loop.loss, (torch.full_like(x, math.nan), y))
    assert loop.guard._loop.policy.rollbacks == 1
    read = []
    for batch in batches(5):
        loop.guard.step(loop.loss, batch)
        read.append(loop.guard.last.lr)
    assert used[3:] == read == [rate * 0.5] * 3 + [rate] * 2
