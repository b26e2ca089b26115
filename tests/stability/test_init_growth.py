"""Growth at step 0: the residual stream and the gradients of each block under each init."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from stabletrain.models.nf_resnet import NFBlock, NFResNet
from stabletrain.models.resnet import CifarBlock, CifarResNet, TorchvisionResNet
from stabletrain.stability.init import FanInInit, GPT2Init, NormalInit, SmallInit, TorchInit, ZeroResidualInit
from tests.monitors.watched import tiny_gpt, tokens

BLOCKS = (CifarBlock, NFBlock, BasicBlock, Bottleneck)
EVERY = {
    "torch": TorchInit(),
    "gpt2": GPT2Init(0.02),
    "normal": NormalInit(0.02),
    "fan_in": FanInInit(),
    "small": SmallInit(),
    "zero_residual": ZeroResidualInit(),
}


class Growth(NamedTuple):
    """RMS of the stream before the first block and after each, and each block's gradient norm."""

    rms: list[float]
    gradients: list[float]


def measure(model: nn.Module, blocks: Sequence[nn.Module], inputs: Tensor, targets: Tensor) -> Growth:
    """Measures one forward and backward pass with hooks on `blocks`."""
    rms: list[float] = []

    def note(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        for x in (output,) if rms else (given[0], output):
            rms.append(x.detach().double().square().mean().sqrt().item())

    hooks = [block.register_forward_hook(note) for block in blocks]
    logits = model(inputs)
    F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
    for hook in hooks:
        hook.remove()
    squares = [[p.grad.double().square().sum() for p in block.parameters() if p.grad is not None] for block in blocks]
    return Growth(rms, [math.sqrt(sum(each)) for each in squares])


def deep_gpt(init: Any, depth: int, seed: int = 0) -> Any:
    model = tiny_gpt(n_layer=depth, n_embd=64, block_size=32, vocab_size=64, dropout=0.0)
    torch.manual_seed(seed)
    init(model)
    return model


def of_gpt(init: Any, depth: int, seed: int = 0) -> Growth:
    model, batch = deep_gpt(init, depth, seed), tokens(samples=8, time=32, vocab=64)
    return measure(model, list(model.blocks), batch.inputs, batch.targets)


def added(growth: Growth) -> float:
    """Returns the variance that the blocks added, relative to their input's."""
    return (growth.rms[-1] / growth.rms[0]) ** 2 - 1


@pytest.mark.parametrize("init", ["gpt2", "small"])
def test_with_scaled_residual_projections_growth_does_not_depend_on_depth(init: str) -> None:
    sums = [added(of_gpt(EVERY[init], depth)) for depth in (2, 8, 16)]
    assert max(sums) < 1.5 * min(sums)
    assert max(sums) < {"gpt2": 1.5, "small": 0.2}[init]


@pytest.mark.slow(unless=lambda init: init == "normal")
@pytest.mark.parametrize("init", ["normal", "fan_in"])
def test_without_scaled_residual_projections_every_block_adds_the_same_variance(init: str) -> None:
    """Averages over 8 models, because a single one varies by about 10 %."""
    shallow, deep = (sum(added(of_gpt(EVERY[init], depth, seed)) for seed in range(8)) / 8 for depth in (8, 16))
    assert deep == pytest.approx(2 * shallow, rel=0.2)
    assert deep > 10 * added(of_gpt(GPT2Init(0.02), 16))


def test_small_enters_the_blocks_with_an_rms_of_1() -> None:
    error = 5 / math.sqrt(2 * 64 * 64)  # 5 standard errors for 64 tokens of 64 values
    assert of_gpt(SmallInit(), 2).rms[0] == pytest.approx(1, rel=error)
    assert of_gpt(GPT2Init(0.02), 2).rms[0] == pytest.approx(0.02, rel=error)


@pytest.mark.parametrize("depth", [2, 8, 16])
def test_a_gpt_with_zeroed_branches_equals_its_shortcuts(depth: int) -> None:
    model, seen = deep_gpt(ZeroResidualInit(), depth), []
    for block in model.blocks:
        block.register_forward_hook(lambda _m, given, y: seen.append(torch.equal(given[0], y)))
    model(tokens(time=32, vocab=64).inputs)
    assert seen == [True] * depth


@pytest.mark.parametrize("depth", [2, 8, 16])
@pytest.mark.parametrize("init", EVERY)
def test_gradients_of_all_blocks_are_of_one_order(init: str, depth: int) -> None:
    gradients = of_gpt(EVERY[init], depth).gradients
    bound = {"small": 1.2, "zero_residual": 1.2, "torch": 2, "gpt2": 2}.get(init, 6)
    assert min(gradients) > 0.01
    assert max(gradients) < bound * min(gradients)


def learns(model: nn.Module, inputs: Tensor, targets: Tensor, within: tuple[type[nn.Module], ...]) -> list[set[str]]:
    """The parameters of blocks that have a gradient in step 0, and in step 1 after an SGD update."""
    inside = {id(p) for block in model.modules() if isinstance(block, within) for p in block.parameters()}
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        logits = model(inputs)
        F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        steps.append(
            {name for name, p in model.named_parameters() if id(p) in inside and p.grad is not None and p.grad.any()}
        )
    return steps


def test_the_zeroed_projections_learn_at_once_and_the_rest_of_the_branch_a_step_later() -> None:
    model, batch = deep_gpt(ZeroResidualInit(), 4), tokens(samples=8, time=32, vocab=64)
    first, second = learns(model, batch.inputs, batch.targets, (type(model.blocks[0]),))
    ends = {f"blocks.{i}.{name}.weight" for i in range(4) for name in ("attention.out", "mlp.down")}
    assert first == ends
    assert second == {name for name, p in model.named_parameters() if name.startswith("blocks.")}


def resnets() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "cifar": CifarResNet(depth=56, num_classes=10, in_channels=3),
        "torchvision18": TorchvisionResNet(depth=18, num_classes=10, in_channels=3, stem="small"),
        "torchvision50": TorchvisionResNet(depth=50, num_classes=10, in_channels=3, stem="small"),
        "nf": NFResNet(depth=56, num_classes=10, in_channels=3, alpha=0.2, skipinit=False),
    }


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, 16, 16, generator=generator), torch.arange(8)


def shortcut(block: Any, x: Tensor) -> Tensor:
    """Returns a block's output if its branch outputs 0."""
    if isinstance(block, CifarBlock):
        return F.pad(x[:, :, :: block.stride, :: block.stride], (0, 0, 0, 0, 0, block.new_channels)).relu()
    if isinstance(block, NFBlock):
        g = math.sqrt(2 / (1 - 1 / math.pi)) / block.beta
        return x if block.shortcut is None else block.shortcut(x.relu() * g)
    return (x if block.downsample is None else block.downsample(x)).relu()


@pytest.mark.slow(unless=lambda name: name == "cifar")
@pytest.mark.parametrize("name", ["cifar", "torchvision18", "torchvision50", "nf"])
def test_a_resnet_with_zeroed_branches_equals_its_shortcuts(name: str) -> None:
    model, inputs, seen = resnets()[name].eval(), images()[0], []
    ZeroResidualInit()(model)
    blocks = [block for block in model.modules() if isinstance(block, BLOCKS)]
    hooks: list[Callable] = [
        block.register_forward_hook(lambda m, given, y: seen.append((m, given[0].clone(), y.clone()))).remove
        for block in blocks
    ]
    with torch.no_grad():
        model(inputs)
        for remove in hooks:
            remove()
        assert len(seen) == len(blocks) > 7
        assert all(torch.equal(y, shortcut(block, x)) for block, x, y in seen)


@pytest.mark.parametrize("name", ["cifar", "nf"])
def test_the_zeroed_gains_of_a_resnet_learn_at_once(name: str) -> None:
    model = resnets()[name]
    ZeroResidualInit()(model)
    first, second = learns(model, *images(), BLOCKS)
    ends = [n for n, _ in model.named_parameters() if n.endswith(("bn2.weight", "conv2.gain"))]
    kernels = {
        n for n, _ in model.named_parameters() if n.endswith(("conv1.weight", "conv2.weight")) and n.count(".") > 1
    }
    assert first.issuperset(ends)
    assert not first & kernels
    assert second.issuperset(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("init", ["torch", "normal", "fan_in", "zero_residual"])
@pytest.mark.parametrize("name", ["cifar", "nf"])
def test_a_deep_resnet_grows_little_and_its_gradients_stay_of_one_order(name: str, init: str) -> None:
    torch.manual_seed(0)
    model = resnets()[name]
    EVERY[init](model)
    blocks = [block for block in model.modules() if isinstance(block, BLOCKS)]
    rms, gradients = measure(model, blocks, *images())
    assert len(gradients) == 27
    assert max(rms) < (4 if name == "cifar" else 1.5)
    assert min(rms) > (0.2 if init == "zero_residual" else 0.5)
    if init == "zero_residual" and name == "cifar":
        assert all(after <= before for before, after in itertools.pairwise(rms))
    assert max(gradients) < 30 * min(gradients)
