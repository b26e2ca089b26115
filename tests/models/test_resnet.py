"""The ResNets: as large as published, in channels_last throughout, and the function the paper draws."""

import math

import pytest
import torch
import torchvision
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.models.resnet import CifarBlock, CifarResNet, TorchvisionResNet


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def small_models() -> list[CifarResNet | TorchvisionResNet]:
    torch.manual_seed(0)
    return [
        CifarResNet(depth=20, num_classes=10, in_channels=3),
        TorchvisionResNet(depth=18, num_classes=10, in_channels=3, stem="large"),
        TorchvisionResNet(depth=18, num_classes=10, in_channels=3, stem="small"),
    ]


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)])
def test_cifar_resnets_have_the_sizes_of_the_papers_table_6(depth: int, millions: float) -> None:
    with torch.device("meta"):
        size = count(CifarResNet(depth=depth, num_classes=10, in_channels=3))
    assert size / 1e6 == pytest.approx(millions, abs=0.051 if depth == 110 else 0.0051)


def test_resnet20_has_269722_parameters_with_shortcuts_that_have_none() -> None:
    with torch.device("meta"):
        model = CifarResNet(depth=20, num_classes=10, in_channels=3)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert count(model) == 269_722
    assert len(convolutions) == 19  # and one linear layer: no projection among them
    assert len([m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]) == 19


@pytest.mark.parametrize(("depth", "size"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_torchvision_resnets_have_their_published_sizes(depth: int, size: int) -> None:
    with torch.device("meta"):
        assert count(TorchvisionResNet(depth=depth, num_classes=1000, in_channels=3, stem="large")) == size


@pytest.mark.parametrize("depth", [18, 50])
def test_the_large_stem_is_torchvisions_model(depth: int) -> None:
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, f"resnet{depth}")(num_classes=7).eval()
    ours = TorchvisionResNet(depth=depth, num_classes=7, in_channels=3, stem="large").eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-4)


@pytest.mark.slow(unless=lambda size, in_channels: (size, in_channels) in ((8, 1), (224, 3)))
@pytest.mark.parametrize("size", [8, 32, 224])
@pytest.mark.parametrize("in_channels", [1, 3])
def test_images_of_any_size_become_logits(size: int, in_channels: int) -> None:
    with torch.device("meta"):
        images = torch.empty(2, in_channels, size, size)
        for model in (
            CifarResNet(depth=20, num_classes=5, in_channels=in_channels),
            TorchvisionResNet(depth=18, num_classes=5, in_channels=in_channels, stem="large"),
            TorchvisionResNet(depth=50, num_classes=5, in_channels=in_channels, stem="small"),
        ):
            assert model(images).shape == (2, 5)


@pytest.mark.parametrize(
    ("model", "sides"),
    [(0, [32, 16, 8]), (1, [8, 4, 2, 1]), (2, [32, 16, 8, 4])],
    ids=["cifar", "large", "small"],
)
def test_the_stages_see_the_sizes_they_should(model: int, sides: list[int]) -> None:
    net, seen = small_models()[model], []
    stages = [
        module
        for name, module in net.named_modules()
        if name in {f"stages.{i}" for i in range(3)} or name in {f"layer{i}" for i in range(1, 5)}
    ]
    for stage in stages:
        stage.register_forward_hook(lambda _m, _i, y: seen.append(y.shape[-1]))
    net(torch.randn(2, 3, 32, 32))
    assert seen == sides


def test_a_block_whose_branch_is_silent_passes_every_second_pixel_and_zeros() -> None:
    block = CifarBlock(4, 8, stride=2)
    nn.init.zeros_(block.bn2.weight)
    x = torch.randn(2, 4, 6, 6)
    y = block(x)
    assert torch.equal(y[:, :4], x[:, :, ::2, ::2].relu())
    assert not y[:, 4:].any()


@pytest.mark.parametrize("model", [0, 1, 2], ids=["cifar", "large", "small"])
def test_channels_last_is_kept_from_the_first_convolution_to_the_last(model: int) -> None:
    net, layouts = small_models()[model], []

    def record(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        layouts.extend(x.is_contiguous(memory_format=torch.channels_last) for x in (*inputs, output))
        # A tensor of one pixel is contiguous either way; all others here must be in the one layout only.
        layouts.extend(not x.is_contiguous() for x in (*inputs, output) if x.shape[-1] > 1)

    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            module.register_forward_hook(record)
    net(torch.randn(2, 3, 64, 64))
    assert len(layouts) > 100
    assert all(layouts)
    kernels = [m.weight for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)


@pytest.mark.parametrize("model", [0, 1, 2], ids=["cifar", "large", "small"])
def test_convolutions_start_with_variance_2_over_fan_out(model: int) -> None:
    convolutions = [m for m in small_models()[model].modules() if isinstance(m, nn.Conv2d)]
    for convolution in convolutions:
        height, width = convolution.kernel_size
        std = math.sqrt(2 / (convolution.out_channels * height * width))
        error = 5 / math.sqrt(2 * convolution.weight.numel())  # 5 standard errors of a standard deviation
        assert convolution.weight.std().item() == pytest.approx(std, rel=error)


def test_batch_statistics_move_in_training_and_rest_in_evaluation() -> None:
    for model in small_models():
        means = [buffer for name, buffer in model.named_buffers() if name.endswith("running_mean")]
        before = [mean.clone() for mean in means]
        model.eval()(torch.randn(2, 3, 32, 32))
        assert all(torch.equal(mean, old) for mean, old in zip(means, before, strict=True))
        model.train()(torch.randn(2, 3, 32, 32))
        assert not any(torch.equal(mean, old) for mean, old in zip(means, before, strict=True))


@pytest.mark.parametrize(("model", "last", "blocks"), [(0, "bn2", 9), (1, "bn2", 8), (2, "bn2", 8)])
def test_the_residual_gains_are_those_of_each_blocks_last_norm(model: int, last: str, blocks: int) -> None:
    net = small_models()[model]
    names = {id(p): name for name, p in net.named_parameters()}
    ends = [names[id(gain)] for gain in net.residual_gains()]
    assert len(set(ends)) == blocks
    assert all(name.endswith(f"{last}.weight") and name.count(".") > 2 for name in ends)


def test_the_classifier_is_the_layer_that_makes_the_logits() -> None:
    for net in small_models():
        assert net.classifier() is net.fc


@pytest.mark.parametrize(("depth", "nearest"), [(18, 20), (21, 20), (2, 8), (-4, 8), (25, 26)])
def test_a_depth_that_is_not_6n_plus_2_is_refused(depth: int, nearest: int) -> None:
    with pytest.raises(ConfigError, match=rf"model\.depth={depth} is not 6 n \+ 2: the nearest is {nearest}"):
        CifarResNet(depth=depth, num_classes=10, in_channels=3)
