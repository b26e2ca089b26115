"""Roles of a model's parts, for models that name them and for models that do not."""

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.models.gpt import GPT
from stabletrain.models.nf_resnet import NFResNet
from stabletrain.models.resnet import CifarResNet, TorchvisionResNet
from stabletrain.stability.optimizers import SGD, SPAM, AdamW, Muon, StableAdamW
from stabletrain.stability.optimizers.muon import hidden_matrices
from stabletrain.stability.parameter_roles import NO_DECAY, ROLES, WeightDecay, classifier, embeddings, roles
from stabletrain.stability.qknorm import RMSNormQK
from stabletrain.stability.schedule import Constant, Cosine, LearningRate, LinearWarmup, NoWarmup
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
    with_decay, without = WeightDecay(0.1).groups(model, 1.0)
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
    with_decay, _ = WeightDecay(0.1).groups(model, 1.0)
    assert names(model, with_decay["params"]) == {"conv.weight"}


GPT_SIZES = {"vocab_size": 7, "block_size": 4, "n_layer": 1, "n_head": 2, "n_embd": 4}
LINEARS = ("query", "key", "value", "out", "up", "down")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: GPT(**GPT_SIZES, bias=True, position="learned", qknorm=RMSNormQK(1e-6)),
            {
                "embeddings": 2,
                "head": 1,
                "matrices": len(LINEARS),
                "norms": 3 * 2 + 2,  # three LayerNorms with gain and bias, two QK-norms with a gain
                "biases": len(LINEARS),
            },
        ),
        (
            lambda: GPT(**GPT_SIZES, tied_head=True, norm="rmsnorm", mlp="swiglu"),
            {"embeddings": 1, "matrices": len(LINEARS) + 1, "norms": 3},
        ),
        (lambda: CifarResNet(depth=8), {"head": 1, "matrices": 7, "norms": 14, "biases": 1}),
        (lambda: TorchvisionResNet(depth=18, num_classes=2), {"head": 1, "matrices": 20, "norms": 40, "biases": 1}),
        # nine convolutions, each with bias and gain, and SkipInit's gains of three blocks
        (lambda: NFResNet(depth=8, skipinit=True), {"head": 1, "matrices": 9, "biases": 10, "scalars": 12}),
        (lambda: nn.MultiheadAttention(4, 2), {"head": 1, "matrices": 1, "biases": 2}),
    ],
    ids=["gpt", "tied", "resnet", "torchvision", "nf_resnet", "pytorch"],
)
def test_every_parameter_of_every_model_has_one_role(make, expected):
    model = make()
    found = roles(model)
    assert [*found] == [*model.parameters()]
    assert {role: [*found.values()].count(role) for role in ROLES if role in found.values()} == expected
    # By default those with decay are what this package has always decayed.
    tables = {module.weight for module in embeddings(model)}
    with_decay, without = WeightDecay(0.1).groups(model, 1.0)
    assert with_decay["params"] == [p for p in model.parameters() if p.ndim >= 2 and p not in tables]
    assert without["params"] == [p for p in model.parameters() if p.ndim < 2 or p in tables]
    assert [{key for key in group if key != "params"} for group in (with_decay, without)] == [{"weight_decay"}] * 2
    assert {found[p] for p in hidden_matrices(model)} <= {"matrices"}


@pytest.mark.parametrize("kind", [AdamW, StableAdamW, SPAM, SGD, Muon])
def test_no_decay_names_the_roles_whose_gradients_alone_move_them(kind):
    values = {SPAM: SPAM_, Muon: MUON, SGD: {"lr": 0.01, "momentum": 0.9, "nesterov": True}}.get(kind, ADAM)
    for without in (NO_DECAY, (), ("matrices", "head"), ROLES):
        model = Two()
        found, before = roles(model), {p: p.detach().clone() for p in model.parameters()}
        torch.nn.init.ones_(model.norm.bias)
        before[model.norm.bias] = torch.ones(4)
        optimizer = kind(**values | {"weight_decay": 0.5, "no_decay": without})(model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        moved = {found[p] for p in model.parameters() if not torch.equal(p, before[p])}
        assert moved == {*found.values()} - {*without}


def test_a_role_that_there_is_not_is_refused_with_the_choices():
    with pytest.raises(
        ConfigError, match=r"norm is no role of a parameter; did you mean norms\?; fix: choose from emb"
    ):
        AdamW(**ADAM, no_decay=["norm"])


@pytest.mark.parametrize("kind", [AdamW, StableAdamW, SPAM, Muon])
def test_corrected_decay_shrinks_matrices_by_the_rate_squared_and_the_head_by_the_rate(kind):
    """Without gradients, w is multiplied by the product of 1 - lr f^2 decay in float64; AdamC, arXiv 2506.02285."""
    values = {SPAM: SPAM_, Muon: MUON}.get(kind, ADAM) | {"decay": "corrected", "weight_decay": 2.0}
    model = Two()
    start = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    optimizer, rate = kind(**values)(model), LearningRate(LinearWarmup(3), Cosine(0.1), 8)
    for step in range(8):
        rate.set_(
            optimizer.param_groups, step, lowered := 0.5 if step == 4 else 1.0
        )  # a rollback lowers the rate for a step
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        f = rate(step) * lowered
        start["up.weight"] *= 1 - 0.01 * f * f * 2.0
        start["head.weight"] *= 1 - 0.01 * f * 2.0
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), start[name], rtol=1e-6, atol=0, msg=name)
    steady = kind(**values)(model)
    LearningRate(NoWarmup(), Constant(), 8).set_(steady.param_groups, 3)
    assert {group["weight_decay"] for group in steady.param_groups} == {2.0, 0.0}, "coupled, if the rate stays"


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
