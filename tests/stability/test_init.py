"""Init: every parameter has the standard deviation its kind promises, and a padding row stays 0."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.models.gpt import GPT
from stabletrain.models.nf_resnet import NFResNet
from stabletrain.models.resnet import CifarResNet, TorchvisionResNet
from stabletrain.stability.init import (
    STD_AFTER_TRUNCATION,
    FanInInit,
    GPT2Init,
    NormalInit,
    SmallInit,
    TorchInit,
    ZeroResidualInit,
)
from stabletrain.stability.qkclip import NoQKClip
from stabletrain.stability.qknorm import LayerNormQK
from stabletrain.stability.softcap import NoSoftcap

RESIDUAL = ("attention.out.weight", "mlp.down.weight")
TOKENS, POSITIONS = "embedding.weight", "position.embedding.weight"
WIDTH = 48
WRITING = [GPT2Init(0.02), NormalInit(0.02), FanInInit(), SmallInit(), ZeroResidualInit()]


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "n_layer": 3,
        "position": "learned",
        "mlp": "gelu",
        "bias": True,
        "tied_head": False,
    } | changes
    return GPT(
        vocab_size=64,
        block_size=32,
        n_head=2,
        n_embd=WIDTH,
        norm="layernorm",
        dropout=0.0,
        qknorm=LayerNormQK(1e-6),
        softcap=NoSoftcap(),
        qkclip=NoQKClip(),
        **values,
    )


def resnet() -> CifarResNet:
    torch.manual_seed(0)
    return CifarResNet(depth=8, num_classes=10, in_channels=3)


def check_std(name: str, parameter: torch.Tensor, expected: float) -> None:
    """Asserts that std and mean are within five standard errors of those of a normal."""
    values, n = parameter.detach().double(), parameter.numel()
    assert values.square().mean().sqrt().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * n)), name
    assert values.mean().item() == pytest.approx(0.0, abs=5 * expected / math.sqrt(n)), name


def gpt2_std(std: float) -> Callable[[str, nn.Parameter, int], float]:
    return lambda name, _, layers: std / math.sqrt(2 * layers) if name.endswith(RESIDUAL) else std


def fan_in_std(name: str, parameter: nn.Parameter, layers: int) -> float:
    del layers
    return (WIDTH if name in (TOKENS, POSITIONS) else parameter.shape[1]) ** -0.5


def small_std(name: str, parameter: nn.Parameter, layers: int) -> float:
    del parameter
    return 1.0 if name == TOKENS else gpt2_std(math.sqrt(2 / (5 * WIDTH)))(name, nn.Parameter(), layers)


def zero_residual_std(name: str, parameter: nn.Parameter, layers: int) -> float:
    del parameter, layers
    return 0.0 if name.endswith(RESIDUAL) else 0.02


def name_of(value: Any) -> str:
    """Returns an id: an init's values, or a function's name, because its address differs between pytest workers."""
    return value.__name__ if inspect.isfunction(value) else str(value)


PROMISED = [
    (GPT2Init(0.02), gpt2_std(0.02)),
    (GPT2Init(0.1), gpt2_std(0.1)),
    (NormalInit(0.02), lambda *_: 0.02),
    (NormalInit(0.1), lambda *_: 0.1),
    (FanInInit(), fan_in_std),
    (SmallInit(), small_std),
    (ZeroResidualInit(), zero_residual_std),
]


@pytest.mark.parametrize(
    "changes", [{}, {"mlp": "swiglu", "n_layer": 5}, {"bias": False, "tied_head": True, "position": "rope"}], ids=str
)
@pytest.mark.parametrize(("init", "promised"), PROMISED, ids=name_of)
def test_every_parameter_of_a_gpt_has_its_standard_deviation(
    init: Any, promised: Callable[..., float], changes: dict[str, Any]
) -> None:
    if isinstance(init, SmallInit):
        changes = changes | {"tied_head": False}
    model = gpt(**changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.fill_(7.0)  # so that one left alone shows
    init(model)
    seen = set()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight")))), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            check_std(name, parameter, promised(name, parameter, model.n_layer))
            seen.add(name.endswith(RESIDUAL))
    assert seen == {True, False}


@pytest.mark.slow(unless=lambda init: isinstance(init, NormalInit))
@pytest.mark.parametrize(
    ("init", "std"), [(NormalInit(0.02), lambda _: 0.02), (FanInInit(), lambda w: w[0].numel() ** -0.5)], ids=name_of
)
def test_kernels_and_the_classifier_of_a_resnet_are_written_and_its_norms_left(init: Any, std: Any) -> None:
    model = TorchvisionResNet(depth=18, num_classes=10, in_channels=3, stem="small")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    init(model)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            check_std(name, parameter, std(parameter))
            assert not torch.equal(parameter, before[name]), name
        else:
            assert torch.equal(parameter, torch.zeros_like(parameter) if name == "fc.bias" else before[name]), name


def test_the_fan_in_of_a_grouped_kernel_is_what_one_output_sums_over() -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(64, 256, 5, groups=8)
    FanInInit()(nn.Sequential(convolution))
    check_std("weight", convolution.weight, (64 / 8 * 25) ** -0.5)


def test_fan_in_truncates_at_two_standard_deviations_and_rescales() -> None:
    z = torch.linspace(-2, 2, 200_001, dtype=torch.float64)
    density = (-z.square() / 2).exp()
    assert math.sqrt((z.square() * density).sum() / density.sum()) == pytest.approx(STD_AFTER_TRUNCATION, rel=1e-5)
    torch.manual_seed(0)
    linear = nn.Linear(400, 2000)
    FanInInit()(nn.Sequential(linear))
    largest = linear.weight.abs().max().item()
    bound = 2 / STD_AFTER_TRUNCATION / math.sqrt(400)
    assert 0.999 * bound < largest <= bound * (1 + 1e-6)


def test_fan_in_keeps_unit_variance_through_a_layer() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(512, 2048, dtype=torch.float64)
    FanInInit()(nn.Sequential(linear))
    y = linear(torch.randn(256, 512, dtype=torch.float64))
    assert y.var().item() == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("init", WRITING, ids=str)
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(init: Any) -> None:
    def weights(seed: int) -> torch.Tensor:
        model = gpt()
        torch.manual_seed(seed)
        init(model)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("init", WRITING, ids=str)
def test_an_init_writes_in_place_and_leaves_nothing_to_backward(init: Any) -> None:
    model = gpt()
    before = dict(model.named_parameters())
    init(model)
    assert all(p is before[name] and p.requires_grad and p.is_leaf for name, p in model.named_parameters())


@pytest.mark.parametrize("init", [NormalInit(0.02), FanInInit()], ids=str)
def test_a_padding_row_stays_0(init: Any) -> None:
    embedding = nn.Embedding(6, 8, padding_idx=2)
    init(nn.Sequential(embedding))
    assert torch.equal(embedding.weight.any(dim=1), torch.arange(6) != 2)


def test_a_users_model_is_scaled_if_it_lists_residual_projections() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = [nn.Linear(64, 64) for _ in range(9)]
            self.layers = nn.ModuleList(self.linears)

        def residual_projections(self) -> list[nn.Linear]:
            return self.linears[:4]

    for init, ends in ((GPT2Init(0.02), 0.01), (ZeroResidualInit(), 0.0)):
        model = Mine()
        init(model)
        for i, layer in enumerate(model.linears):
            assert layer.weight.std().item() == pytest.approx(ends if i < 4 else 0.02, rel=0.06)
            assert not layer.bias.any()


@pytest.mark.parametrize(
    "make", [resnet, lambda: NFResNet(depth=8, num_classes=10, in_channels=3, alpha=0.2, skipinit=False)]
)
def test_zero_residual_on_a_resnet_changes_the_ends_of_its_branches_and_draws_nothing(make: Any) -> None:
    model = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    ZeroResidualInit()(model)
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert len(changed) == 3
    assert all(name.endswith(("bn2.weight", "conv2.gain")) for name in changed)
    assert not any(dict(model.named_parameters())[name].any() for name in changed)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("depth", "last", "blocks"), [(18, "bn2", 8), (50, "bn3", 16)])
def test_torchvisions_blocks_end_with_their_last_norm(depth: int, last: str, blocks: int) -> None:
    model = TorchvisionResNet(depth=depth, num_classes=10, in_channels=3, stem="small")
    ZeroResidualInit()(model)
    silent = [name for name, p in model.named_parameters() if "bn" in name and name.endswith("weight") and not p.any()]
    assert len(silent) == blocks
    assert all(f".{last}." in name for name in silent)


def refusals() -> list[tuple[Any, nn.Module, str]]:
    """Returns inits, models they do not fit, and the expected messages."""
    linear = nn.Sequential(nn.Linear(3, 3))
    unlisted = r"Sequential lists none: use init=torch, or .* residual_projections\(\)"
    skip = NFResNet(depth=8, num_classes=10, in_channels=3, alpha=0.2, skipinit=True)
    headed = nn.Sequential(nn.Linear(3, 3))
    headed.__dict__["residual_projections"] = lambda: [headed[0]]
    return [
        (GPT2Init(0.02), linear, unlisted),
        (SmallInit(), linear, unlisted),
        (ZeroResidualInit(), linear, unlisted),
        (ZeroResidualInit(), skip, "init=zero_residual does nothing: the residual gains of NFResNet are 0 already"),
        (SmallInit(), headed, "init=small computes its scale from the width of the embeddings, but Sequential has no"),
        (
            SmallInit(),
            gpt(tied_head=True),
            r"that of the logits would be about 7: use model\.tied_head=false, or init=gpt2",
        ),
        (
            NormalInit(0.02),
            nn.Sequential(nn.LayerNorm(3)),
            "init=normal initialises linear layers, .* Sequential has none",
        ),
        (FanInInit(), nn.Sequential(nn.LayerNorm(3)), "init=fan_in initialises linear layers, .* Sequential has none"),
    ]


@pytest.mark.parametrize("case", range(8))
def test_an_init_that_does_not_fit_the_model_is_refused_and_changes_nothing(case: int) -> None:
    init, model, message = refusals()[case]
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ConfigError, match=message):
        init(model)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_torch_changes_nothing_and_draws_nothing() -> None:
    model = gpt()
    before = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    TorchInit()(model)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("init", [NormalInit(0.02), FanInInit()])
def test_a_weight_that_is_computed_from_others_is_refused_by_name(init: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match="the weight of 1 is computed from other parameters .*use init=torch"):
        init(model)
