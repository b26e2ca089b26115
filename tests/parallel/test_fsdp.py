"""FSDP: unsupported options are refused, each block is sharded, and the results equal the whole model's."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from stabletrain.checkpoint.tree import is_sharded
from stabletrain.errors import ConfigError
from stabletrain.parallel.fsdp import ABLE, FSDP, blocks
from stabletrain.parallel.ranks import Ranks
from stabletrain.records import GradNorms
from tests.monitors.watched import tiny_gpt, tiny_resnet, tokens
from tests.runs import CONF


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


@pytest.mark.parametrize("group", ABLE)
def test_an_option_that_needs_whole_tensors_is_refused_and_the_error_names_one_that_does_not(fsdp, group):
    options = {file.stem for file in (CONF / group).glob("*.yaml")}
    assert options > {*ABLE[group]}, "all of them exist, and at least one other option"
    fsdp.check(dict.fromkeys([group], ABLE[group][0]))
    for option in options - {*ABLE[group]}:
        with pytest.raises(ConfigError, match=f"{group}={option} needs whole tensors.*or {group}={ABLE[group][0]}"):
            fsdp.check({group: option})


def test_supported_options_and_other_groups_are_accepted(fsdp):
    fsdp.check({group: able[-1] for group, able in ABLE.items()})
    fsdp.check({"model": "gpt_nano"})


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
    found = fsdp.norms_of(here, torch.stack([fsdp.of_gradients(here), fsdp.of_gradients(there)]))
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


def test_full_model_returns_a_copy_and_leaves_the_rng_state_unchanged(only):
    model = tiny_gpt()
    only.shard(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found = only.full_model(model, tiny_gpt)
    assert torch.equal(torch.rand(3), expected)
    assert not isinstance(found, FSDPModule)
    assert all(torch.equal(parameter, torch.full_like(parameter, 3.0)) for parameter in found.parameters())


def test_full_state_has_whole_tensors(only):
    model = tiny_gpt()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    only.shard(model)
    found = only.full_state({"model": dict(model.state_dict()), "step": 3})
    assert found["step"] == 3
    assert not any(is_sharded(tensor) for tensor in found["model"].values())
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in before.items())
    assert only.full_state(None) is None
