"""Muon: orthogonal steps for hidden matrices, AdamW for the rest, and the same bits after a copy or a load."""

import copy
import math

import torch

from stabletrain.stability.optimizers import AdamW, Muon
from tests.stability.optimizers.given import ADAM, MUON, Two


def test_muon_moves_hidden_matrices_along_orthogonal_directions_and_the_rest_as_adamw():
    torch.manual_seed(0)
    model, reference = Two(), Two()
    reference.load_state_dict(model.state_dict())
    optimizers = Muon(**MUON | {"weight_decay": 0.0})(model), AdamW(**ADAM | {"weight_decay": 0.0})(reference)
    before = model.up.weight.detach().clone()
    for each, optimizer in zip((model, reference), optimizers, strict=True):
        torch.manual_seed(1)
        for p in each.parameters():
            p.grad = torch.randn_like(p)
        each.up.weight.grad[:, 0] *= 10  # one direction far longer than the others
        optimizer.step()
    for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if name != "up.weight":
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    sizes = torch.linalg.svdvals((model.up.weight.detach() - before).double())
    # Five Newton-Schulz iterations bring every singular value to about 0.7 to 1.2 times the factor.
    assert sizes.max() < 1.3 * 0.2 * math.sqrt(6) * MUON["lr"]
    assert sizes.min() > 0.5 * 0.2 * math.sqrt(6) * MUON["lr"]


def test_muons_learning_rate_and_zero_grad_reach_both_parts():
    model = Two()
    optimizer = Muon(**MUON)(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    model(torch.arange(7)).sum().backward()
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))


def test_muon_continues_bitwise_after_a_copy_and_after_a_load():
    torch.manual_seed(0)
    model = Two()
    optimizer = Muon(**MUON)(model)

    def take(each, owner, seed):
        torch.manual_seed(seed)
        for p in owner.parameters():
            p.grad = torch.randn_like(p)
        each.step()

    take(optimizer, model, 1)
    copied_model, copied = copy.deepcopy((model, optimizer))
    loaded_model = copy.deepcopy(model)
    loaded = Muon(**MUON)(loaded_model)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, owner in ((optimizer, model), (copied, copied_model), (loaded, loaded_model)):
        take(each, owner, 2)
    for name, p in model.named_parameters():
        assert torch.equal(copied_model.get_parameter(name), p), name
        assert torch.equal(loaded_model.get_parameter(name), p), name
