"""`Guard(keep="all_but_guilty")`: a bad step of a user's loop is applied without the samples at fault."""

import copy
import gc
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.guard import SkipGuard
from stabletrain.guard.guard import Guard
from stabletrain.guard.samples import weighted
from tests.guard.given import Loop, batches, bits, network, same

BAD = 5
KEEP = {"keep": "all_but_guilty"}


def spoilt(data, rows, value=torch.nan, at=(BAD,)):
    """The same batches, with `value` in the first input of some samples of the bad steps."""
    found = [(x.clone(), y) for x, y in data]
    for step in at:
        found[step][0][list(rows), 0] = value
    return found


def plain(data, rows, at=(BAD,)):
    """A plain loop that never had these samples in the bad steps; returns model and optimizer."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(2)
    for step, (x, y) in enumerate(data):
        kept = [row for row in range(len(x)) if step not in at or row not in rows]
        optimizer.zero_grad()
        F.cross_entropy(model(x[kept]), y[kept]).backward()
        optimizer.step()
    return bits(model, optimizer)


@pytest.mark.parametrize("rows", [[2], [0, 7], [1, 2, 6]])
def test_the_step_is_that_of_a_plain_loop_that_never_had_the_guilty_samples(tmp_path, rows):
    data = batches(8)
    loop = Loop(tmp_path, **KEEP)
    losses = loop.run(spoilt(data, rows))
    assert same(loop.bits(), plain(data, rows))
    guard = loop.guard
    assert (guard.kept_steps, guard.samples_left_out, guard.skipped) == (1, len(rows), 0)
    assert losses[BAD] < 10, "the loss that is returned is that of the step that was applied"
    assert guard.alarms == [], "less than a hundredth of the window's samples"
    assert len(guard.incidents) == 1
    page = (guard.incidents[0].path / "report.md").read_text()
    assert f"The rest of the step was applied, without {len(rows)} of its samples" in page


@pytest.mark.parametrize("name", ["bf16", "fp16", "scaler", "rollback"])
def test_it_is_so_in_every_precision_and_with_every_policy(tmp_path, name):
    options = {
        "bf16": lambda: {"precision": "bf16"},
        "fp16": lambda: {"precision": "fp16"},
        "scaler": lambda: {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0)},
        "rollback": lambda: {"rollback": True, "max_norm": 0.5, "checksum_every": 1},
    }[name]
    data = batches(8)
    loop, never = Loop(tmp_path / "kept", **KEEP, **options()), Loop(tmp_path / "never", **options())
    loop.run(spoilt(data, [2]))
    never.run(
        [batch if step != BAD else [part[[0, 1, 3, 4, 5, 6, 7]] for part in batch] for step, batch in enumerate(data)]
    )
    assert loop.guard.kept_steps == 1
    assert same(loop.bits(), never.bits())


def test_nothing_differs_while_nothing_is_wrong(tmp_path):
    data = batches(8)
    loop = Loop(tmp_path, **KEEP)
    loop.run(data)
    assert same(loop.bits(), plain(data, []))
    assert loop.guard.left_out == loop.guard.kept_steps == 0


@pytest.mark.parametrize("rows", [[2], [0, 7], [1, 2, 6]])
def test_without_the_samples_of_a_spike_it_is_that_of_a_plain_loop_too(tmp_path, rows):
    data, one, other = batches(8), nn.Linear(4, 3), nn.Linear(4, 3)
    other.load_state_dict(one.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (one, other)]
    guard = Guard(one, optimizers[0], folder=tmp_path, **KEEP)
    for step, (x, y) in enumerate(spoilt(data, rows, 1e6)):
        kept = [row for row in range(len(x)) if step != BAD or row not in rows]
        guard.step(lambda x, y: F.mse_loss(one(x)[:, 0], y.float()), batch=(x, y))
        optimizers[1].zero_grad()
        F.mse_loss(other(x[kept])[:, 0], y[kept].float()).backward()
        optimizers[1].step()
    assert same(bits(one, optimizers[0]), bits(other, optimizers[1]))
    assert (guard.kept_steps, guard.samples_left_out, guard.skipped) == (1, len(rows), 0)


def test_a_step_most_of_whose_samples_are_guilty_is_skipped(tmp_path):
    data, loop = batches(8), Loop(tmp_path, **KEEP)
    torch.manual_seed(2)
    found = spoilt(data, range(5))
    for step, batch in enumerate(found):
        before = loop.bits()
        loop.guard.step(loop.loss, batch=batch)
        assert same(before, loop.bits()) == (step == BAD)
    assert (loop.guard.kept_steps, loop.guard.skips["nonfinite"]) == (0, 1)


def test_a_fault_of_the_weights_is_no_fault_of_samples(tmp_path):
    loop = Loop(tmp_path, **KEEP)
    loop.run(batches(3))
    with torch.no_grad():
        loop.model[0].weight[0, 0] = torch.nan
    before = loop.bits()
    with pytest.raises(Exception, match="weights or moments have changed"):
        loop.run(batches(1))
    assert same(before, loop.bits())
    assert loop.guard.kept_steps == 0


def test_a_step_that_fails_again_without_them_is_skipped(tmp_path, monkeypatch):
    """The search misses a sample: the rest is judged by the same limits."""
    from stabletrain.guard.guilty import Sample, Search

    monkeypatch.setattr(Search, "find", lambda self: [Sample(0, 0, 3)])
    data, loop = spoilt(batches(8), [2, 3]), Loop(tmp_path, **KEEP)
    torch.manual_seed(2)
    for step, batch in enumerate(data):
        before = loop.bits()
        loop.guard.step(loop.loss, batch=batch)
        assert same(before, loop.bits()) == (step == BAD)
    assert (loop.guard.kept_steps, loop.guard.skips["nonfinite"]) == (0, 1)


class Mean(nn.Module):
    """A model without coupling between samples, so that only the divisor matters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


def accumulated(model, optimizer, data, parts, guard=None, without=()):
    """Steps of `parts` micro-batches; each sample left counts equally. With a guard, it leaves samples out."""
    for step, (x, y) in enumerate(data):
        kept = [row for row in range(len(x)) if step != BAD or row not in without]
        if guard is None:
            optimizer.zero_grad()
            losses = F.cross_entropy(model(x[kept]), y[kept], reduction="sum") / len(kept)
            losses.backward()
            optimizer.step()
            continue
        for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            guard.backward(lambda x, y: F.cross_entropy(model(x), y) / parts, batch=part)
        guard.update()


@pytest.mark.parametrize("rows", [[1], [4, 5], [0, 1, 2, 3]], ids=["a sample", "two", "a whole micro-batch"])
def test_with_micro_batches_every_sample_left_counts_equally(tmp_path, rows):
    data, one, other = batches(8), Mean(), Mean()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    guard = Guard(one, optimizer, folder=tmp_path, **KEEP)
    accumulated(one, optimizer, spoilt(data, rows), 2, guard)
    accumulated(other, torch.optim.SGD(other.parameters(), lr=0.1), data, 2, without=rows)
    assert (guard.kept_steps, guard.samples_left_out) == (1, len(rows))
    for mine, wanted in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-5, atol=1e-7)


def test_with_other_weights_a_closure_returns_what_it_returns_beside_the_loss():
    assert weighted(lambda: torch.tensor(3.0), 0.5)() == 1.5
    assert weighted(lambda: (torch.tensor(3.0), "logits"), 0.5)() == (1.5, "logits")


def test_a_micro_batch_whose_samples_are_not_known_is_left_out_as_a_whole(tmp_path):
    """Its closure takes no tensors with rows."""
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, folder=tmp_path, **KEEP)
    x, _ = batches(1)[0]
    for step in range(6):
        for number in range(4):
            scale = torch.nan if (step, number) == (BAD, 2) else 1.0
            guard.backward(lambda given: (model(x) * given["scale"]).square().mean() / 4, batch={"scale": scale})
        guard.update()
    assert (guard.kept_steps, guard.samples_left_out) == (1, 1)
    assert guard.last.applied


def test_counts_and_the_alarm_survive_a_checkpoint(tmp_path):
    """Two of every eight samples of some steps are more than 1 % of the window."""
    data = spoilt(batches(40), [0, 1], at=range(5, 40, 2))
    whole = Loop(tmp_path / "whole", **KEEP)
    whole.run(data)
    assert [alarm.kind for alarm in whole.guard.alarms] == ["left_out"]
    assert "of the samples of the last 128 steps were left out" in whole.guard.alarms[0].text
    first, second = Loop(tmp_path / "first", **KEEP), Loop(tmp_path / "second", **KEEP)
    first.run(data[:11])
    saved = copy.deepcopy([first.model.state_dict(), first.optimizer.state_dict(), first.guard.state_dict()])
    for part, state in zip((second.model, second.optimizer, second.guard), saved, strict=True):
        part.load_state_dict(state)
    alarms = [*first.guard.alarms]
    del first  # otherwise its guard and the second one count as coupled
    gc.collect()
    for batch in data[11:]:
        second.guard.step(second.loss, batch=batch)
    assert same(second.bits(), whole.bits())
    assert second.guard.state_dict()["policy"] == whole.guard.state_dict()["policy"]
    assert alarms + second.guard.alarms == whole.guard.alarms


def test_what_cannot_be_kept_is_refused(tmp_path):
    model, optimizer = Mean(), torch.optim.SGD(Mean().parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"Guard\(keep='some'\) is not one of none, all_but_guilty"):
        Guard(model, optimizer, keep="some")
    with pytest.raises(ConfigError, match=r"guard.keep=some is not one of none, all_but_guilty"):
        SkipGuard(keep="some")
    for options in (KEEP, {"policy": SkipGuard(**KEEP)}):
        with pytest.raises(ConfigError, match=r"Guard.attach\(keep='all_but_guilty'\): only a closure"):
            Guard.attach(model, optimizer, **options)
    guard = Guard(model, optimizer, folder=tmp_path, **KEEP)
    with pytest.raises(ConfigError, match="the closure takes no batch"):
        guard.step(lambda: model(torch.ones(2, 4)).mean())


def test_a_bad_step_with_sparse_gradients_is_kept(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path, **KEEP)
    labels = torch.randn(8, 1)
    labels[3] = torch.nan
    guard.step(lambda x, y: F.mse_loss(model(x), y), batch=(torch.randint(0, 5, (8,)), labels))
    assert (guard.last.applied, guard.left_out) == (True, 1)


def test_complex_weights_are_judged_as_a_whole(tmp_path):
    """The search reads the norm of the whole gradient, not of its real parts."""
    torch.manual_seed(0)
    weight = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    guard = Guard([weight], torch.optim.SGD([weight], lr=0.1), folder=tmp_path, keep="all_but_guilty")
    x = torch.randn(6, 3, dtype=torch.complex64)
    x[4, 1] = complex(0.0, math.nan)
    kept = x[[0, 1, 2, 3, 5]]
    twin = weight.detach().clone().requires_grad_()
    (kept @ twin).abs().mean().backward()
    guard.step(lambda x: (x @ weight).abs().mean(), batch=(x,))
    assert guard.left_out == 1
    assert torch.equal(weight, twin.detach() - 0.1 * twin.grad)
