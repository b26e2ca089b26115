"""Lengths of updates and weights: closed forms, a fixed sample, and no kernel if they are off."""

import pytest
import torch
from torch import nn

from stabletrain.model_tensors import tensors_of
from stabletrain.monitors import update_length
from stabletrain.monitors.update_length import SAMPLED, Lengths, NoLengths


def test_a_small_model_is_measured_whole():
    model = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))
    model[0].bias.requires_grad_(False)
    lengths = Lengths()
    before = lengths.before(model)
    with torch.no_grad():
        model[0].weight += 3.0
        model[1].weight[0, 0, 0, 0] += 8.0
        model[0].bias += 100.0  # not trained
    found = lengths.after(before)
    trained = torch.cat([each.detach().flatten() for each in model.parameters() if each.requires_grad])
    assert found["update"].item() == pytest.approx((12 * 9 + 64) ** 0.5)
    assert found["weights"].item() == pytest.approx(trained.norm().item())


def test_a_large_model_is_sampled_and_its_lengths_are_about_right():
    model = nn.Linear(1024, 1024)
    lengths = Lengths()
    before = lengths.before(model)
    assert SAMPLED / 2 < before.numel() < 2 * SAMPLED
    was = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1e-3 * torch.randn_like(model.weight)
    found = lengths.after(before)
    update, weights = (lengths.factor * found[name].item() for name in ("update", "weights"))
    assert update == pytest.approx((model.weight - was).norm().item(), rel=0.05)
    assert weights == pytest.approx(model.weight.norm().item(), rel=0.05)


def test_each_update_is_measured_from_the_weights_before_it_whatever_has_written_them():
    """Also through `.data`, which PyTorch does not count as a write: what others wrote is no update."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).bfloat16())
    lengths, drawn, kept = Lengths(), torch.Generator().manual_seed(0), tensors_of(model)
    for step in range(12):
        with torch.no_grad():
            if step % 3 == 0:
                model[step % 2].weight.data.clamp_(-0.1 * step, 0.1 * step)
            if step == 7:
                model[0].weight = nn.Parameter(torch.full((4, 3), 2.0))
            if step == 10:
                model[1].bias.requires_grad_(False)
            kept.find()  # as each step does
            before, was = lengths.before(model), Lengths().before(model)
            assert torch.equal(before, was)
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape, generator=drawn)
            found = lengths.after(before)
            assert found["update"] == (Lengths().before(model) - was).norm()
            assert kept.trained is lengths._trained


def test_the_squares_of_shards_are_added_up(monkeypatch):
    model = nn.Linear(3, 4)
    lengths = Lengths()
    before = lengths.before(model)
    lengths._sharded = [model.weight]
    monkeypatch.setattr(update_length, "sum_over_shards", lambda squares, tensors: 4 * squares)
    found = lengths.after(before)
    alone = torch.cat([each.detach().flatten() for each in model.parameters()]).norm()
    assert found["weights"].item() == pytest.approx(2 * alone.item())


def test_a_weight_of_gaps_and_one_without_elements_are_measured():
    model = nn.Module()
    model.gaps = nn.Parameter(torch.ones(4, 6)[:, ::2])
    model.empty = nn.Parameter(torch.ones(0, 3))
    lengths = Lengths()
    found = lengths.after(lengths.before(model))
    assert (found["update"].item(), found["weights"].item()) == (0.0, pytest.approx(3**0.5))


def test_off_measures_nothing():
    assert NoLengths().before(nn.Linear(2, 2)) is None
    assert NoLengths().after(None) == {}
