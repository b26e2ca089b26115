"""One process: every method returns its argument unchanged."""

import signal
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from stabletrain.buffers import buffers_of
from stabletrain.machine.signals import StopRequest
from stabletrain.parallel.ranks import Ranks
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Batch, GradNorms, LossTerms, StepChecks, TrainState


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


@pytest.fixture
def alone():
    return SingleProcess()


def test_it_is_the_main_process_unless_it_is_told_which_it_is(alone):
    assert alone.ranks == Ranks()
    assert alone.ranks.is_main
    ranks = Ranks(launched=True)
    assert SingleProcess(ranks).ranks is ranks


def test_a_model_is_neither_changed_nor_wrapped(alone, model):
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    kinds = [type(module) for module in model.modules()]
    alone.check({"precision": "bf16_params"})
    alone.shard(model)
    alone.wrap(model)
    alone.average_buffers_(model, buffers_of(model).save())
    assert [type(module) for module in model.modules()] == kinds
    for name, tensor in model.state_dict(keep_vars=True).items():
        was, value = before[name]
        assert tensor is was
        assert torch.equal(tensor, value)
    assert alone.whole_state(model, lambda: None, lambda: nn.Linear(1, 1)).gather() is model
    assert alone.optimizer_overrides("adamw") == {}


def test_the_whole_batch_is_its_part(alone):
    batch = Batch(torch.zeros(2, 3), torch.zeros(2))
    assert alone.shard_batch(batch, 8) is batch
    samples = [{"index": 1}]
    assert alone.gather_samples(samples, 8) is samples


def test_the_model_is_called_as_it_is(alone):
    model = nn.Linear(1, 1)
    assert alone.wrapped(model) is model
    assert isinstance(alone.gradient_sync(model, last=False), nullcontext)


def test_numbers_are_the_steps_own(alone):
    loss = torch.tensor(2.0, requires_grad=True)
    assert alone.scale_for_averaging(loss) is loss
    terms, norms = LossTerms(loss), GradNorms(loss, loss[None])
    checks = StepChecks(torch.tensor(False), loss, loss)
    found = alone.reduce_stats(terms, norms, checks)
    assert all(one is other for one, other in zip(found, (terms, norms, checks), strict=True))
    values = torch.tensor([1.0, 2.0])
    assert alone.all_reduce_sum(values) is values
    alone.max_over_ranks_([values])
    assert values.tolist() == [1, 2]


def test_there_is_nobody_to_differ_from(alone, model):
    assert alone.find_divergence(TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))) == ""
    tree = {"a": torch.zeros(1)}
    assert alone.whole_state(model, lambda: tree, lambda: model).gather_older() is tree
    assert alone.rank_part(None, 1.0, 1.0) is None
    assert alone.any_rank(True)
    assert not alone.any_rank(False)


def test_its_own_signal_stops_it(alone):
    signals = StopRequest()
    signals.note(signal.SIGINT, None)
    alone.request_stop(signals)
    alone.note_stop(True)
    assert alone.stopping("") == "", "what other ranks were asked does not count"
    assert alone.stopping("SIGTERM") == "SIGTERM"
