"""FSDP: each block is sharded, and the results equal the whole model's."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from stabletrain.checkpoint.capture import capture, restore
from stabletrain.checkpoint.refit import fresh_optimizer
from stabletrain.checkpoint.tree import is_sharded
from stabletrain.monitors.probe import measure_gradients
from stabletrain.parallel.fsdp import FSDP, blocks
from stabletrain.parallel.ranks import Ranks
from stabletrain.parallel.whole import GatheredState
from stabletrain.records import IGNORE_INDEX, Batch, GradNorms, OwnNumbers, RankPart, TrainState
from stabletrain.stability.objective import CrossEntropy
from stabletrain.stability.optimizers import SGD
from stabletrain.stability.parameter_roles import classifier
from tests.monitors.watched import tiny_gpt, tiny_resnet, tokens


@pytest.fixture
def fsdp():
    return FSDP(Ranks(0, 2, 0, launched=True))


@pytest.fixture
def only(group_of_one):
    """The only rank: its part of every tensor is the whole of it."""
    return FSDP(group_of_one)


def run_passes(model, batch, sync=None):
    """Runs a forward and a backward pass; returns the logits."""
    with sync or nullcontext():
        logits = model(batch.inputs)
        logits.square().mean().backward()
    return logits.detach()


def test_only_sgd_runs_without_its_fused_kernel(fsdp):
    assert fsdp.optimizer_overrides("sgd") == {"fused": False}
    assert fsdp.optimizer_overrides("adamw") == {}


def test_blocks_are_the_list_members_with_weights_inner_before_outer():
    inner = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    model = nn.Module()
    model.layers = nn.ModuleList([inner, nn.Identity()])
    model.head = nn.Linear(1, 1)
    assert blocks(model) == [inner[0], inner[2], inner]
    gpt = tiny_gpt()
    assert blocks(gpt) == list(gpt.blocks)
    assert blocks(nn.Linear(1, 1)) == []


def test_the_global_norm_sums_the_squares_of_all_shards(fsdp):
    """One tensor has its elements 3 and 4 on two ranks; another is on the second rank only."""
    here = GradNorms(torch.tensor(3.0), torch.tensor([3.0, 0.0]))
    there = GradNorms(torch.tensor(5.0), torch.tensor([4.0, 12.0]))
    found = fsdp.norms_from_rows(here, torch.stack([fsdp.gradient_row(here), fsdp.gradient_row(there)]))
    assert found.each.tolist() == [5.0, 12.0]
    assert found.total == 13.0


@pytest.mark.parametrize("make", [tiny_gpt, tiny_resnet])
def test_every_weight_is_sharded_and_each_block_is_its_own_unit(only, make):
    model = make()
    only.shard(model)
    assert isinstance(model, FSDPModule)
    assert all(isinstance(block, FSDPModule) for block in blocks(model))
    assert all(is_sharded(parameter) for parameter in model.parameters())


def test_a_sharded_model_computes_the_same_as_the_whole_model(only):
    model, batch = tiny_gpt(dropout=0.0), tokens()
    whole = copy.deepcopy(model)
    only.shard(model)
    torch.testing.assert_close(run_passes(model, batch), run_passes(whole, batch))
    for sharded, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), expected.grad)


HEADS = {
    "of_the_root": partial(tiny_gpt, dropout=0.0),
    "apart": lambda: nn.Sequential(nn.Embedding(32, 2), nn.Flatten(), nn.Linear(16, 3)),
}


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
def test_the_head_is_whole_after_the_forward_pass_and_its_gradient_counts(only, make):
    model, batch = make(), tokens()
    whole = copy.deepcopy(model)
    only.shard(model)
    forward = only.with_whole(model, model, classifier(model))
    for run, each in ((forward, model), (whole, whole)):
        outputs = run(batch.inputs)
        weight = classifier(each).weight
        assert not is_sharded(weight)
        (outputs.square().mean() + weight.mean(dim=0).square().sum()).backward()
    assert all(map(is_sharded, model.parameters())), "until the backward pass has used it"
    for sharded, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), expected.grad)


def test_a_whole_copy_of_the_model_has_nothing_to_gather(fsdp):
    model = tiny_gpt()
    assert fsdp.with_whole(model, model, classifier(model)) is model


def test_monitors_measure_every_parameter_of_a_sharded_model(only):
    model, batch = tiny_gpt(dropout=0.0), tokens()
    whole = copy.deepcopy(model)
    only.shard(model)
    run_passes(model, batch)
    run_passes(whole, batch)
    found, expected = (measure_gradients(each).layers().metrics for each in (model, whole))
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(found) == 2 * len([*whole.parameters()])


def test_gradients_are_reduced_after_the_last_micro_batch_only(only):
    model, batches = tiny_gpt(dropout=0.0), tokens().split(2)
    whole = copy.deepcopy(model)
    only.shard(model)
    run_passes(model, batches[0], only.gradient_sync(model, last=False))
    assert all(parameter.grad is None for parameter in model.parameters())
    run_passes(model, batches[1], only.gradient_sync(model, last=True))
    for batch in batches:
        run_passes(whole, batch)
    for sharded, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), expected.grad)


def test_the_states_for_replays_are_gathered(only):
    model = tiny_gpt()
    only.shard(model)
    assert isinstance(only.whole_state(model, lambda: None, tiny_gpt), GatheredState)


def test_momentum_that_starts_at_zero_takes_no_memory_in_what_a_resume_compares_with(only):
    model = tiny_gpt()
    only.shard(model)
    state = TrainState(model, SGD(lr=0.1, momentum=0.9, nesterov=False, weight_decay=0.0, fused=False)(model))
    fresh, momenta = fresh_optimizer(state), [each["momentum_buffer"] for each in state.optimizer.state.values()]
    pieces = [each["momentum_buffer"] for each in fresh["state"].values()]
    assert [each.local.untyped_storage().nbytes() for each in pieces] == [4] * len(momenta)
    for momentum in momenta:
        momentum.to_local().fill_(1)
    restore({**capture(state, {}), "optimizer": fresh}, state, {})
    assert not any(each["momentum_buffer"].full_tensor().any() for each in state.optimizer.state.values())


def test_a_rank_knows_its_own_loss_and_of_the_gradient_only_its_shards(fsdp):
    batch = Batch(torch.zeros(4, 1), torch.tensor([1, 1, IGNORE_INDEX, 1]), counted=12)
    part = fsdp.rank_part(OwnNumbers(torch.tensor(0.5), torch.tensor(3.0)), CrossEntropy().own_factor(batch), 8.0)
    assert part == RankPart(0, 2.0, None, 3.0), "12 targets in the batch, 3 of them here"
