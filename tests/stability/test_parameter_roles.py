"""Roles of a model's parts, for models that name them and for models that do not."""

import pytest
import torch
from torch import nn

from stabletrain.stability.optimizers import SPAM, AdamW, Muon, StableAdamW, decayed
from stabletrain.stability.parameter_roles import classifier, embeddings
from tests.stability.optimizers.given import ADAM, MUON, SPAM_, Two


class Says(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.after = nn.Linear(2, 3), nn.Linear(3, 3)

    def classifier(self):
        return self.out


class HasAForwardOfThatName(Says):
    def classifier(self, x):
        return self.out(x)


class HasAModuleOfThatName(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(2, 3))


def test_the_classifier_is_the_one_the_model_names_or_the_last_linear_layer():
    says, forward, module = Says(), HasAForwardOfThatName(), HasAModuleOfThatName()
    assert classifier(says) is says.out
    assert classifier(forward) is forward.after
    assert classifier(module) is module.classifier[1]
    assert classifier(nn.Conv2d(1, 1, 1)) is None


def test_embeddings_of_both_kinds_are_found():
    model = nn.ModuleList([nn.Embedding(2, 2), nn.Linear(2, 2), nn.EmbeddingBag(2, 2)])
    assert embeddings(model) == [model[0], model[2]]
    assert all(isinstance(table.weight, torch.Tensor) for table in embeddings(model))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 4, 1)
        self.head = nn.Linear(4, 5)
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)


def names(model, parameters):
    by_id = {id(p): name for name, p in model.named_parameters()}
    return {by_id[id(p)] for p in parameters}


def test_only_matrices_and_kernels_are_decayed():
    model = Small()
    with_decay, without = decayed(model, 0.1)
    assert names(model, with_decay["params"]) == {"conv.weight", "head.weight"}
    assert names(model, without["params"]) == {
        "embed.weight",
        "norm.weight",
        "norm.bias",
        "conv.bias",
        "head.bias",
    }
    assert (with_decay["weight_decay"], without["weight_decay"]) == (0.1, 0.0)


def test_a_head_tied_to_the_embedding_counts_as_embedding():
    model = Small()
    model.head = nn.Linear(4, 5, bias=False)
    model.head.weight = model.embed.weight
    with_decay, _ = decayed(model, 0.1)
    assert names(model, with_decay["params"]) == {"conv.weight"}


@pytest.mark.parametrize("kind", [AdamW, StableAdamW, SPAM, Muon])
def test_independent_decay_shrinks_alike_at_every_learning_rate_and_coupled_does_not(kind):
    values = {AdamW: ADAM, StableAdamW: ADAM, SPAM: SPAM_, Muon: MUON}[kind] | {"weight_decay": 0.01}
    left = {}
    for decay in ("coupled", "independent"):
        for lr in (1e-4, 1e-2):
            torch.manual_seed(0)
            model = Two()
            start = model.up.weight.detach().double().clone()
            optimizer = kind(**values | {"lr": lr, "decay": decay})(model)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5  # the schedule, half-way down
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            left[decay, lr] = float((model.up.weight.detach().double() / start).mean())
    assert left["independent", 1e-4] == pytest.approx(1 - 0.5 * 0.01, abs=1e-6)
    assert left["independent", 1e-2] == pytest.approx(1 - 0.5 * 0.01, abs=1e-6)
    assert left["coupled", 1e-2] == pytest.approx(1 - 0.5 * 0.01 * 1e-2, abs=1e-6)
