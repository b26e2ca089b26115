"""The norm-free ResNet: kernels standardised to the letter, variance as predicted, and no sample sees another."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabletrain.models.nf_resnet import NFBlock, NFResNet, StandardisedConv2d, activate
from tests.monitors.watched import PRECISIONS
from tests.runs import composed


def model(**changes: Any) -> NFResNet:
    torch.manual_seed(0)
    values: dict[str, Any] = {"depth": 20, "num_classes": 10, "in_channels": 3, "alpha": 0.2, "skipinit": False}
    return NFResNet(**(values | changes))


def test_its_size_and_that_it_has_no_norm_and_no_buffer() -> None:
    net = model()
    assert sum(p.numel() for p in net.parameters()) == 272_474
    assert not list(net.buffers())
    assert not [m for m in net.modules() if "Norm" in type(m).__name__]
    assert len([m for m in net.modules() if isinstance(m, StandardisedConv2d)]) == 19 + 2  # two shortcuts reset
    assert sum(p.numel() for p in model(skipinit=True).parameters()) == 272_474 + 9


@pytest.mark.parametrize("scale", [0.01, 1.0, 300.0])
def test_a_kernel_has_mean_0_and_variance_gain_squared_over_fan_in_whatever_its_weights(scale: float) -> None:
    torch.manual_seed(0)
    convolution = StandardisedConv2d(8, 5, 3).double()
    with torch.no_grad():
        convolution.weight.normal_(3.0, 1.0).mul_(scale)
        convolution.gain.copy_(torch.linspace(-1, 2, 5))
    kernel = convolution.kernel()
    torch.testing.assert_close(kernel.sum(dim=(1, 2, 3)), torch.zeros(5, dtype=torch.float64), atol=1e-11, rtol=0)
    torch.testing.assert_close(kernel.square().sum(dim=(1, 2, 3)), convolution.gain.square())


def test_the_convolution_is_pytorchs_with_the_formulas_kernel() -> None:
    torch.manual_seed(0)
    convolution = StandardisedConv2d(4, 6, 3, stride=2).double()
    with torch.no_grad():
        convolution.gain.uniform_(0.5, 2)
        convolution.get_parameter("bias").normal_()
    x, w = torch.randn(2, 4, 9, 9, dtype=torch.float64), convolution.weight.detach()
    flat = w.flatten(1)
    standard = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, correction=0, keepdim=True) * 36).sqrt()
    expected = F.conv2d(x, (standard * convolution.gain[:, None]).view_as(w), convolution.bias, stride=2, padding=1)
    torch.testing.assert_close(convolution(x), expected)


def test_gradients_reach_weight_gain_and_bias_as_finite_differences_say() -> None:
    torch.manual_seed(0)
    convolution = StandardisedConv2d(2, 3, 3).double()
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    names, values = zip(*convolution.named_parameters(), strict=True)

    def f(*given: Tensor) -> Tensor:
        return torch.func.functional_call(convolution, dict(zip(names, given, strict=True)), x)

    assert torch.autograd.gradcheck(f, values)


@pytest.mark.parametrize("mode", PRECISIONS)
@pytest.mark.parametrize("value", [0.0, 1.0, 1e-20, 1e4])
def test_a_constant_kernel_gives_its_bias_and_finite_gradients(value: float, mode: str) -> None:
    convolution = StandardisedConv2d(3, 4, 3)
    nn.init.constant_(convolution.weight, value)
    nn.init.constant_(convolution.get_parameter("bias"), 0.5)
    with PRECISIONS[mode]().autocast():
        y = convolution(torch.randn(2, 3, 6, 6))
    assert torch.equal(y.float(), torch.full_like(y, 0.5, dtype=torch.float32))
    y.float().square().sum().backward()
    for name, parameter in convolution.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all(), name


def test_statistics_of_a_kernel_are_fp32_under_fp16_autocast() -> None:
    convolution = StandardisedConv2d(8, 4, 3)
    with torch.no_grad():
        convolution.weight.mul_(1e-2)  # squares of about 1e-6: subnormal in fp16
    expected = convolution.kernel()
    with PRECISIONS["fp16"]().autocast():
        kernel = convolution.kernel()
    assert kernel.dtype == torch.float32
    assert torch.equal(kernel, expected)


def test_the_activation_keeps_unit_variance() -> None:
    z = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert activate(z).var().item() == pytest.approx(1, rel=5e-3)
    assert activate(3 * z, 3.0).var().item() == pytest.approx(1, rel=5e-3)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_each_of_18_blocks_has_the_standard_deviation_its_beta_says(seed: int, alpha: float) -> None:
    net = model(depth=38, alpha=alpha)
    torch.manual_seed(seed)
    for module in net.modules():
        if isinstance(module, StandardisedConv2d):
            module.weight.data.normal_(0.0, 0.1)
            module.padding_mode = "circular"  # zero padding takes variance away at the edges, which beta does not know
    seen: list[tuple[float, float, float]] = []

    def note(block: Any, given: tuple[Tensor], y: Tensor) -> None:
        x = given[0]
        shortcut = x if block.shortcut is None else block.shortcut(activate(x, block.beta))
        rms = [t.square().mean().sqrt().item() for t in (x, y, (y - shortcut) / alpha)]
        seen.append((rms[0] / block.beta, rms[1] / math.sqrt(block.variance), rms[2]))

    for block in net.blocks:
        block.register_forward_hook(note)
    with torch.no_grad():
        net(torch.randn(8, 3, 32, 32))
    assert len(seen) == 18
    for entering, leaving, branch in seen:
        assert entering == pytest.approx(1, abs=0.08)
        assert leaving == pytest.approx(1, abs=0.08)
        assert branch == pytest.approx(1, abs=0.12)


def test_the_betas_follow_from_alpha_alone() -> None:
    blocks = [block for block in model(depth=20, alpha=0.5).blocks if isinstance(block, NFBlock)]
    variances = [1, 1.25, 1.5, 1.75, 1.25, 1.5, 1.75, 1.25, 1.5, 1.75]
    assert [block.beta**2 for block in blocks] == pytest.approx(variances[:-1])
    assert blocks[-1].variance == pytest.approx(variances[-1])


def test_the_classifier_reads_the_mean_of_activations_brought_back_to_unit_variance() -> None:
    net, last = model(alpha=1.0), []
    net.blocks[-1].register_forward_hook(lambda _m, _i, y: last.append(y))
    logits = net(torch.randn(4, 3, 16, 16))
    features = math.sqrt(2 / (1 - 1 / math.pi)) * (last[0] / math.sqrt(4)).relu()  # 1 + 3 blocks since the last reset
    torch.testing.assert_close(logits, net.fc(features.mean(dim=(2, 3))))


def test_no_sample_sees_another_and_evaluation_is_training() -> None:
    net, x = model(), torch.randn(6, 3, 8, 8)
    logits = net(x)
    changed = x.clone()
    changed[3] = 1e3
    others = [0, 1, 2, 4, 5]
    assert torch.equal(net(changed)[others], logits[others])
    assert torch.equal(net.eval()(x), logits)


@pytest.mark.slow(unless=lambda mode, skipinit: (mode, skipinit) == ("bf16", False))
@pytest.mark.parametrize("skipinit", [False, True])
@pytest.mark.parametrize("mode", PRECISIONS)
def test_it_trains_in_every_precision(mode: str, skipinit: bool) -> None:
    net = model(depth=8, skipinit=skipinit)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)
    x, targets, losses = torch.randn(8, 3, 8, 8), torch.arange(8), []
    for _ in range(12):
        optimizer.zero_grad()
        with PRECISIONS[mode]().autocast():
            logits = net(x)
        loss = F.cross_entropy(logits.float(), targets)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(10), abs=0.05)
    assert losses[-1] < 0.7 * losses[0]


def test_the_residual_stream_keeps_autocasts_dtype() -> None:
    net, dtypes = model(depth=8, skipinit=True), set()
    for block in net.blocks:
        block.register_forward_hook(lambda _m, _i, y: dtypes.add(y.dtype))
    with PRECISIONS["bf16"]().autocast():
        net(torch.randn(2, 3, 8, 8))
    assert dtypes == {torch.bfloat16}


def test_channels_last_is_kept() -> None:
    net, layouts = model(), []

    def note(_: nn.Module, given: tuple[Tensor], y: Tensor) -> None:
        layouts.extend(x.is_contiguous(memory_format=torch.channels_last) for x in (given[0], y))

    kernels = [module for module in net.modules() if isinstance(module, StandardisedConv2d)]
    for module in kernels:
        module.register_forward_hook(note)
    net(torch.randn(2, 3, 32, 32))
    assert len(layouts) == 2 * 21
    assert all(layouts)
    assert all(module.kernel().is_contiguous(memory_format=torch.channels_last) for module in kernels)


def test_gains_are_vectors_so_that_no_weight_decay_reaches_them() -> None:
    small = {name for name, p in model(skipinit=True).named_parameters() if p.ndim < 2}
    assert {name for name, _ in model(skipinit=True).named_parameters() if "gain" in name} <= small


def test_with_skipinit_only_the_numbers_end_the_branches() -> None:
    for skipinit, end in ((False, "conv2.gain"), (True, "skip_gain")):
        net = model(skipinit=skipinit)
        names = {id(p): name for name, p in net.named_parameters()}
        assert [names[id(p)] for p in net.residual_gains()] == [f"blocks.{i}.{end}" for i in range(9)]
        assert net.classifier() is net.fc


def test_it_chooses_agc_and_a_typed_clipping_wins() -> None:
    chosen = ["model=nf_resnet20", "data=digits"]
    for typed, kind in (([], "AGC"), (["clipping=none"], "NoClip"), (["clipping=norm"], "NormClip")):
        for overrides in (chosen, ["experiment=nf_resnet_digits"]):
            with composed(*overrides, *typed) as cfg:
                assert cfg.clipping._target_.endswith(f".{kind}")
