"""ResNets that turn images into class logits: the small ones of the paper for CIFAR, torchvision's for the rest.

Both keep parameters and activations in channels_last, the layout in which tensor cores and CPU vectors convolve without
transposing. Source: He et al., arXiv 1512.03385.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from stabletrain.errors import ConfigError


class CifarBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut without parameters (option A of the paper).

    Where the block halves the image, the shortcut takes every second pixel; where it widens, new channels are zero.
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

    Convolutions start from N(0, sqrt(2 / fan_out)) (He et al., arXiv 1502.01852).

    Args:
        depth: 20, 32, 44, 56 or 110 in the paper.
        num_classes: number of classes.
        in_channels: 3 for colour, 1 for grey images.

    Raises:
        ConfigError: `depth` is not 6 n + 2.
    """

    def __init__(self, *, depth: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ConfigError(
                f"model.depth={depth} is not 6 n + 2: the nearest is {6 * max(1, round((depth - 2) / 6)) + 2}"
            )
        self.conv1 = conv3x3(in_channels, 16)
        self.bn1 = nn.BatchNorm2d(16)
        blocks, width = (depth - 2) // 6, 16
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
        """Logits of images of any size; 32 x 32 in the paper."""
        x = inputs.contiguous(memory_format=torch.channels_last)
        x = self.stages(F.relu(self.bn1(self.conv1(x))))
        return self.fc(x.mean(dim=(2, 3)))

    def classifier(self) -> nn.Module:
        """The layer that makes the logits."""
        return self.fc

    def residual_gains(self) -> list[nn.Parameter]:
        """The gains that end the residual branches: those of each block's last BatchNorm."""
        return [block.bn2.weight for block in self.modules() if isinstance(block, CifarBlock)]


class TorchvisionResNet(ResNet):
    """torchvision's ResNet, its parameter names included, with a choice of stem and of input channels.

    Args:
        depth: 18, 34, 50, 101 or 152.
        num_classes: number of classes.
        in_channels: 3 for colour, 1 for grey images.
        stem: `large`: 7 x 7 with stride 2 and a max-pool, as in the paper, for images of some 224 pixels; `small`:
            3 x 3 with stride 1 and no max-pool, for images of 64 pixels or less.

    Raises:
        ConfigError: an unknown `depth` or `stem`.
    """

    def __init__(self, *, depth: int, num_classes: int, in_channels: int, stem: str) -> None:
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
        """Logits of images of any size that the stem leaves something of."""
        return super().forward(x.contiguous(memory_format=torch.channels_last))

    def classifier(self) -> nn.Module:
        """The layer that makes the logits."""
        return self.fc

    def residual_gains(self) -> list[nn.Parameter]:
        """The gains that end the residual branches: those of each block's last BatchNorm."""
        blocks = [module for module in self.modules() if isinstance(module, BasicBlock | Bottleneck)]
        return [block.get_parameter("bn3.weight" if hasattr(block, "bn3") else "bn2.weight") for block in blocks]


STAGES: dict[int, tuple[type[BasicBlock] | type[Bottleneck], list[int]]] = {
    18: (BasicBlock, [2, 2, 2, 2]),
    34: (BasicBlock, [3, 4, 6, 3]),
    50: (Bottleneck, [3, 4, 6, 3]),
    101: (Bottleneck, [3, 4, 23, 3]),
    152: (Bottleneck, [3, 8, 36, 3]),
}
"""Blocks of each stage, table 1 of the paper."""


def conv3x3(in_channels: int, channels: int, stride: int = 1) -> nn.Conv2d:
    """A 3 x 3 convolution that keeps the size at stride 1; without a bias, which BatchNorm would take out again."""
    return nn.Conv2d(in_channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)


def start_convolutions(model: nn.Module) -> None:
    """Fills every convolution with N(0, sqrt(2 / fan_out)), arXiv 1502.01852: the backward pass keeps its variance."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
