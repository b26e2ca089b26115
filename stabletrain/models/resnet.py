"""ResNets for image classification (He et al., arXiv 1512.03385): the paper's small ones for CIFAR, and torchvision's.

Parameters and activations are channels_last: in this layout, tensor cores and CPU kernels need no transposed copies.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from stabletrain.errors import ConfigError
from stabletrain.models.nf_resnet import blocks_per_stage


class CifarBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut without parameters (option A of the paper).

    The shortcut takes every second pixel if the block halves the resolution, and pads new channels with zeros.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = channels - in_channels
        self.conv1 = conv3x3(in_channels, channels, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = conv3x3(channels, channels)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(
        self, x: Float[Tensor, "batch in_channels height width"]
    ) -> Float[Tensor, "batch channels new_height new_width"]:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(y + shortcut)


class CifarResNet(nn.Module):
    """The paper's ResNet for small images (section 4.2): three stages of 16, 32 and 64 channels, 6 n + 2 layers.

    The defaults are those of `model=resnet20` on `data=cifar10`. Initialises convolutions with N(0, sqrt(2 / fan_out))
    (He et al., arXiv 1502.01852).

    Args:
        depth: 6 n + 2; 20, 32, 44, 56 or 110 in the paper.
        in_channels: 3 for colour, 1 for grey images.

    Raises:
        ConfigError: `depth` is not 6 n + 2.
    """

    def __init__(self, *, depth: int = 20, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        blocks, width = blocks_per_stage(depth), 16
        self.conv1 = conv3x3(in_channels, 16)
        self.bn1 = nn.BatchNorm2d(16)
        stages = []
        for channels, stride in ((16, 1), (32, 2), (64, 2)):
            first = CifarBlock(width, channels, stride)
            stages.append(nn.Sequential(first, *(CifarBlock(channels, channels, 1) for _ in range(blocks - 1))))
            width = channels
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(width, num_classes)
        start_convolutions(self)
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs: Float[Tensor, "batch in_channels height width"]) -> Float[Tensor, "batch num_classes"]:
        """Returns the logits of images of any size; 32 x 32 in the paper."""
        x = inputs.contiguous(memory_format=torch.channels_last)
        x = self.stages(F.relu(self.bn1(self.conv1(x))))
        return self.fc(x.mean(dim=(2, 3)))

    def classifier(self) -> nn.Module:
        """Returns the layer that computes the logits."""
        return self.fc

    def residual_gains(self) -> list[nn.Parameter]:
        """Returns the gain of the last BatchNorm of each block."""
        return [block.bn2.weight for block in self.modules() if isinstance(block, CifarBlock)]


class TorchvisionResNet(ResNet):
    """torchvision's ResNet, with its parameter names and a choice of stem and input channels.

    The defaults are those of `model=resnet18` on ImageNet.

    Args:
        depth: 18, 34, 50, 101 or 152.
        in_channels: 3 for colour, 1 for grey images.
        stem: `large`: 7 x 7 with stride 2 and a max-pool, as in the paper, for images of about 224 pixels; `small`:
            3 x 3 with stride 1 and no max-pool, for images of at most 64 pixels.

    Raises:
        ConfigError: `depth` or `stem` is unknown.
    """

    def __init__(self, *, depth: int = 18, num_classes: int = 1000, in_channels: int = 3, stem: str = "large") -> None:
        if depth not in STAGES:
            raise ConfigError(f"model.depth={depth} is unknown: choose {' or '.join(map(str, STAGES))}")
        block, blocks = STAGES[depth]
        super().__init__(block, blocks, num_classes=num_classes)
        if stem == "large":
            self.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        elif stem == "small":
            self.conv1 = conv3x3(in_channels, 64)
            self.maxpool = nn.Identity()
        else:
            raise ConfigError(f"model.stem={stem} is unknown: choose large or small")
        start_convolutions(self.conv1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Float[Tensor, "batch in_channels height width"]) -> Float[Tensor, "batch num_classes"]:
        """Returns the logits of images of any size that is large enough for the stem."""
        return super().forward(x.contiguous(memory_format=torch.channels_last))

    def classifier(self) -> nn.Module:
        """Returns the layer that computes the logits."""
        return self.fc

    def residual_gains(self) -> list[nn.Parameter]:
        """Returns the gain of the last BatchNorm of each block."""
        blocks = [module for module in self.modules() if isinstance(module, BasicBlock | Bottleneck)]
        return [block.get_parameter("bn3.weight" if hasattr(block, "bn3") else "bn2.weight") for block in blocks]


STAGES: dict[int, tuple[type[BasicBlock] | type[Bottleneck], list[int]]] = {
    18: (BasicBlock, [2, 2, 2, 2]),
    34: (BasicBlock, [3, 4, 6, 3]),
    50: (Bottleneck, [3, 4, 6, 3]),
    101: (Bottleneck, [3, 4, 23, 3]),
    152: (Bottleneck, [3, 8, 36, 3]),
}
"""Block type and number of blocks per stage by depth (table 1 of the paper)."""


def conv3x3(in_channels: int, channels: int, stride: int = 1) -> nn.Conv2d:
    """Returns a 3 x 3 convolution that keeps the image size at stride 1; no bias, because BatchNorm would cancel it."""
    return nn.Conv2d(in_channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)


def start_convolutions(model: nn.Module) -> None:
    """Initialises every convolution with N(0, sqrt(2 / fan_out)), arXiv 1502.01852: keeps the gradients' variance."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
