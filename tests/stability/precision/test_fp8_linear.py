"""fp8: which layers compute in it, how close it is to bf16, and that nothing but the arithmetic changes."""

import copy
import itertools
import sys

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.machine import hardware
from stabletrain.stability import precision
from stabletrain.stability.precision.fp8_linear import RECIPES, Fp8Linears, fp8_layers, to_bf16_
from stabletrain.trainer.build import build
from tests.devices import CARD, need_torchao, skip_unless_it_has
from tests.runs import TINY_GPT, TINY_RESNET, composed
from tests.stability.precision.given import CPU, CUDA


@pytest.fixture(autouse=True)
def torchao(request):
    if "without" not in request.node.name:
        need_torchao()


def made(*sizes, bias=True, device="cpu"):
    torch.manual_seed(0)
    layers = [nn.Linear(size, after, bias=bias) for size, after in itertools.pairwise(sizes)]
    return nn.Sequential(*layers).to(device)


def wrapped(model, recipe="tensorwise", **keys):
    acting = precision.fp8(next(model.parameters()).device, recipe, **keys)
    acting.wrap_fp32_modules(model)
    return acting


def passed(model, acting, inputs):
    """Output and gradients, by name."""
    inputs = inputs.clone().requires_grad_()
    with acting.autocast():
        output = model(inputs)
    output.float().square().mean().backward()
    found = {"output": output.detach(), "input": inputs.grad}
    found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def test_head_and_odd_sizes_are_left_out_and_the_first_line_says_so():
    model = made(32, 48, 20, 32, 16)
    acting = wrapped(model)
    assert [*fp8_layers(model)] == ["0"]
    assert "1 Linear in fp8, 3 left out (its size is no multiple of 16, the head)" in acting.why
    assert acting.why.startswith("e4m3, gradients e5m2, a scale for each tensor; emulated and slow: a CPU has no fp8")


def test_modules_can_be_kept_in_bf16_or_fp32():
    model = made(16, 16, 16, 16, 16)
    acting = wrapped(model, bf16_modules=["0"], fp32_modules=["1"])
    assert [*fp8_layers(model)] == ["2"]
    assert "in precision.bf16_modules, in precision.fp32_modules, the head" in acting.why
    with acting.autocast():
        assert model[1](torch.ones(1, 16)).dtype == torch.float32
    with pytest.raises(ConfigError, match="precision.bf16_modules: '9' names no module"):
        wrapped(made(16, 16, 16), bf16_modules=["9"])
    with pytest.raises(ConfigError, match="precision.bf16_modules=.*is not the name of a module"):
        precision.fp8(CPU, "tensorwise", bf16_modules=[""])


def test_a_subclass_that_computes_in_its_own_way_is_left_alone():
    model = nn.Sequential(nn.MultiheadAttention(16, 2), nn.Linear(16, 16), nn.Linear(16, 16))
    wrapped(model)
    assert [*fp8_layers(model)] == ["1"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(32, 32), (3, 7, 32)], ids=["16s", "other"])
@pytest.mark.parametrize("device", ["cpu", CARD])
def test_output_and_gradients_are_those_of_bf16_up_to_three_bits(recipe, shape, device):
    skip_unless_it_has(device, "fp8")
    plain, eight = made(32, 64, 32, device=device), made(32, 64, 32, device=device)
    acting, inputs = wrapped(eight, recipe), torch.randn(*shape, device=device)
    wide, narrow = passed(plain, precision.bf16(torch.device(device)), inputs), passed(eight, acting, inputs)
    for name, value in wide.items():
        assert narrow[name].dtype == value.dtype, name
        assert narrow[name].shape == value.shape, name
        assert float((narrow[name] - value).norm() / value.norm()) < 0.15, name
    assert not torch.equal(wide["output"], narrow["output"])


def test_a_cast_is_torchs_own_with_the_largest_value_at_the_end_of_the_format():
    """Checks the emulation against the formula: scale, round to e4m3, multiply in fp32, unscale."""
    model = made(32, 64, 32, bias=False)
    acting, inputs = wrapped(model), torch.randn(16, 32)
    with acting.autocast():
        output = model[0](inputs)

    def rounded(x):
        scale = (448 / x.double().abs().max()).float()
        return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale

    expected = rounded(inputs.bfloat16()) @ rounded(model[0].weight).T
    torch.testing.assert_close(output, expected.bfloat16())


@pytest.mark.parametrize("recipe", RECIPES)
def test_outside_of_autocast_a_layer_is_a_plain_one(recipe):
    plain, eight, inputs = made(32, 64, 32), made(32, 64, 32), torch.randn(5, 32)
    wrapped(eight, recipe)
    wide, same = passed(plain, precision.fp32(CPU), inputs), passed(eight, precision.fp32(CPU), inputs)
    for name, value in wide.items():
        assert torch.equal(same[name], value), name


def test_names_tensors_and_hooks_stay_and_a_copy_has_its_own_weights():
    model, calls = made(32, 32, 16), []
    before, state = dict(model.named_parameters()), {*vars(model.state_dict())}
    model[0].register_forward_hook(lambda *_: calls.append(1))
    acting = wrapped(model)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert {*vars(model.state_dict())} == state
    assert isinstance(model[0], nn.Linear)
    assert [*model.named_buffers()] == []
    twin = copy.deepcopy(model)
    with torch.no_grad(), acting.autocast():
        twin[0].weight.zero_()
        assert twin[0](torch.ones(1, 32)).float().sum() == pytest.approx(float(model[0].bias.sum()), rel=1e-2)
        assert model(torch.ones(1, 32)).shape == (1, 16)
    assert calls


def test_a_layer_can_change_its_recipe_and_leave_fp8():
    model, inputs = made(32, 64, 32), torch.randn(16, 32)
    acting = wrapped(model)
    first = passed(model, acting, inputs)
    precision.fp8(CPU, "rowwise").convert([*fp8_layers(model).values()])
    second = passed(model, acting, inputs)
    assert not torch.equal(first["output"], second["output"])
    rowwise = made(32, 64, 32)
    wrapped(rowwise, "rowwise")
    assert torch.equal(second["output"], passed(rowwise, acting, inputs)["output"])
    to_bf16_(model[0])
    assert torch.equal(
        passed(model, acting, inputs)["output"], passed(made(32, 64, 32), precision.bf16(CPU), inputs)["output"]
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_weight_or_input_is_seen_in_the_output_and_a_bad_gradient_in_the_weights(recipe, bad):
    inputs = torch.randn(16, 32)
    for spoil in ("weight", "input", "gradient"):
        model = made(32, 64, 32)
        acting, given = wrapped(model, recipe), inputs.clone()
        if spoil == "weight":
            model[0].weight.data[3, 2] = bad
        if spoil == "input":
            given[2, 1] = bad
        with acting.autocast():
            output = model(given).float()
        assert bool(output.isfinite().all()) == (spoil == "gradient"), spoil
        if spoil == "gradient":
            gradient = torch.ones_like(output)
            gradient[1, 1] = bad
            output.backward(gradient)
            assert not bool(model[0].weight.grad.isfinite().all())


def test_a_run_resumes_in_bf16_and_back_from_the_same_checkpoint(tmp_path):
    """The state dict is that of bf16: same names, shapes and dtypes, and no tensor of torchao."""
    states = {}
    for kind in ("bf16", "fp8"):
        with composed(*TINY_GPT, f"precision={kind}", "checkpoint=off") as cfg:
            job = build(cfg, tmp_path / kind)
            states[kind] = job.state.model.state_dict()
    assert "12 Linears in fp8, 1 left out (the head)" in job.tools.precision.why
    about = {kind: {name: (t.shape, t.dtype, type(t)) for name, t in state.items()} for kind, state in states.items()}
    assert about["fp8"] == about["bf16"]
    assert all(torch.equal(states["fp8"][name], states["bf16"][name]) for name in states["bf16"])


def test_a_resnet_is_refused(tmp_path):
    with (
        composed(*TINY_RESNET, "model.depth=8", "precision=fp8") as cfg,
        pytest.raises(ConfigError, match="precision=fp8: CifarResNet has no linear layer .* use precision=bf16"),
    ):
        build(cfg, tmp_path)


def test_an_unknown_recipe_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="precision.recipe=blockwise.*tensorwise or rowwise"):
        precision.fp8(CPU, "blockwise")


def test_without_torchao_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"precision=fp8 needs torchao.*pip install -e \"\.\[fp8\]\""):
        precision.fp8(CPU, "tensorwise")


@pytest.mark.parametrize(
    ("card", "capability", "emulated"),
    [("NVIDIA A100", (8, 0), True), ("NVIDIA L4", (8, 9), False), ("NVIDIA H100 80GB HBM3", (9, 0), False)],
)
def test_a_card_without_fp8_emulates_it_and_says_so(monkeypatch, card, capability, emulated):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: card)
    acting = precision.fp8(CUDA, "tensorwise")
    assert isinstance(acting, Fp8Linears)
    assert acting.emulate is emulated
    assert acting._config.emulate is emulated
    reason = f"emulated and slow: {card} (compute capability {capability[0]}.{capability[1]}) has no fp8"
    assert (reason in acting.why) is emulated


def test_a_v100_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla V100")
    with pytest.raises(ConfigError, match="precision=fp8 on Tesla V100: this card has no bf16"):
        precision.fp8(CUDA, "tensorwise")
    assert not hardware.has_fp8(CUDA)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", [CARD])
def test_the_cards_kernels_agree_with_the_emulation(recipe, device):
    if not hardware.has_fp8(torch.device(device)):
        pytest.skip("this card has no fp8")
    here, inputs, results = torch.device(device), torch.randn(40, 256, device=device), {}
    for emulate in (True, False):
        model = made(256, 512, 256, device=device)
        acting = Fp8Linears("fp8", here, torch.bfloat16, recipe=recipe, emulate=emulate)
        acting.wrap_fp32_modules(model)
        results[emulate] = passed(model, acting, inputs)
    for name, value in results[True].items():
        assert float((results[False][name] - value).norm() / value.norm()) < 0.02, name
