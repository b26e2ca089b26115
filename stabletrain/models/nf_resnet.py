"""A normalizer-free ResNet for small images: standardised kernels and analytic variances replace BatchNorm.

    w_hat = gain (w - mean(w)) / sqrt(fan_in var(w))        over each output channel's kernel
    a(x)  = g relu(x),  g = sqrt(2 / (1 - 1/pi))            unit variance in, unit variance out
    x     = x + alpha f(a(x / beta))                        in each block; beta^2 = var(x) at initialisation

With gain 1 the branch f keeps unit variance. Each block therefore adds alpha^2 to the variance, and beta is known
without any batch. A block that changes resolution or width also applies `a(x / beta)` on its shortcut, which resets the
variance to 1. Samples are independent of each other, training and evaluation compute the same function, and there are
no buffers.

Sources: Brock et al., "Characterizing signal propagation to close the performance gap in unnormalized ResNets", arXiv
2101.08692. SkipInit is from De and Smith, arXiv 2002.10444. The lower bound of the variance and training with adaptive
gradient clipping are from Brock et al., arXiv 2102.06171.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stabletrain.errors import ConfigError

RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))
"""1 / std(relu(z)) for z ~ N(0, 1)."""

SMALLEST_VARIANCE = 1e-4
"""Lower bound of fan_in var(w): a constant kernel gives 0 instead of 0/0, and gradients grow at most 100 times."""


class StandardisedConv2d(nn.Conv2d):
    """A convolution that standardises its kernel in each forward pass and has a learned gain per output channel.

    Keeps the image size at stride 1. Initialises the kernel with N(0, 1 / sqrt(fan_in)), gains with 1, biases with 0.
    """

    def __init__(self, in_channels: int, channels: int, kernel_size: int, stride: int = 1) -> None:
        super().__init__(in_channels, channels, kernel_size, stride=stride, padding=kernel_size // 2)
        self.gain = nn.Parameter(torch.ones(channels))
        with torch.no_grad():
            # The norm of each kernel is about 1: adaptive clipping compares gradients with it.
            self.weight.normal_(0.0, self.fan_in**-0.5)
            self.get_parameter("bias").zero_()

    @property
    def fan_in(self) -> int:
        """Number of inputs of an output value."""
        return self.weight[0].numel()

    def kernel(self) -> Float[Tensor, "channels in_channels height width"]:
        """Returns the standardised kernel, fp32; fp64 if the weight is."""
        # Even under autocast: in fp16 the square of a value below 2.4e-4 underflows to 0.
        weight = self.weight if self.weight.dtype == torch.float64 else self.weight.float()
        variance, mean = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
        scale = self.gain.view(-1, 1, 1, 1) * (self.fan_in * variance).clamp(min=SMALLEST_VARIANCE).rsqrt()
        return scale * (weight - mean)

    def forward(
        self, input: Float[Tensor, "batch in_channels height width"]
    ) -> Float[Tensor, "batch channels new_height new_width"]:
        return self._conv_forward(input, self.kernel(), self.bias)


class NFBlock(nn.Module):
    """`shortcut(x) + alpha f(a(x / beta))`; f is two 3 x 3 convolutions with an activation between them.

    The shortcut is `x`, or a 1 x 1 convolution of `a(x / beta)` if the block changes resolution or width.

    Args:
        stride: 1, or 2 to halve the resolution.
        alpha: standard deviation of the branch at initialisation.
        variance: variance of the input at initialisation.
        skipinit: whether to multiply the branch by a learned scalar that starts at 0.

    Attributes:
        variance: variance of the output at initialisation, for a SkipInit scalar of 1.
    """

    def __init__(
        self, in_channels: int, channels: int, stride: int, *, alpha: float, variance: float, skipinit: bool
    ) -> None:
        super().__init__()
        resets = stride > 1 or in_channels != channels
        self.alpha = alpha
        self.beta = math.sqrt(variance)
        self.variance = (1.0 if resets else variance) + alpha**2
        self.shortcut = StandardisedConv2d(in_channels, channels, 1, stride) if resets else None
        self.conv1 = StandardisedConv2d(in_channels, channels, 3, stride)
        self.conv2 = StandardisedConv2d(channels, channels, 3)
        self.skip_gain = nn.Parameter(torch.zeros(1)) if skipinit else None

    def forward(
        self, x: Float[Tensor, "batch in_channels height width"]
    ) -> Float[Tensor, "batch channels new_height new_width"]:
        y = activate(x, self.beta)
        shortcut = x if self.shortcut is None else self.shortcut(y)
        y = self.alpha * self.conv2(activate(self.conv1(y)))
        return shortcut + (y if self.skip_gain is None else self.skip_gain.to(y.dtype) * y)


class NFResNet(nn.Module):
    """The architecture of `CifarResNet` without norms: three stages of 16, 32 and 64 channels, 6 n + 2 layers.

    The defaults are those of `model=nf_resnet20` on `data=cifar10`.

    Args:
        depth: 6 n + 2, such as 20, 32, 44, 56 or 110.
        in_channels: 3 for colour, 1 for grey images; their values should have a variance of about 1.
        alpha: standard deviation of each block's branch at initialisation, 0.2 in the paper.
        skipinit: whether to multiply each branch by a learned scalar that starts at 0.

    Raises:
        ConfigError: `depth` is not 6 n + 2, or `alpha` is out of range.
    """

    def __init__(
        self,
        *,
        depth: int = 20,
        num_classes: int = 10,
        in_channels: int = 3,
        alpha: float = 0.2,
        skipinit: bool = False,
    ) -> None:
        super().__init__()
        n_blocks = blocks_per_stage(depth)
        if not 0 < alpha < math.inf:
            raise ConfigError(f"model.alpha={alpha} is outside (0, inf): it scales what each block adds; use 0.2")
        self.conv1 = StandardisedConv2d(in_channels, 16, 3)
        blocks: list[NFBlock] = []
        width, variance = 16, 1.0
        for channels, first_stride in ((16, 1), (32, 2), (64, 2)):
            for i in range(n_blocks):
                stride = first_stride if i == 0 else 1
                block = NFBlock(width, channels, stride, alpha=alpha, variance=variance, skipinit=skipinit)
                blocks.append(block)
                width, variance = channels, block.variance
        self.blocks = nn.Sequential(*blocks)
        self.beta = math.sqrt(variance)
        self.fc = nn.Linear(width, num_classes)
        nn.init.normal_(self.fc.weight, std=0.01)  # no norm bounds the features: small logits, near-equal classes
        nn.init.zeros_(self.fc.bias)
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs: Float[Tensor, "batch in_channels height width"]) -> Float[Tensor, "batch num_classes"]:
        """Returns the logits of images of any size."""
        x = self.blocks(self.conv1(inputs.contiguous(memory_format=torch.channels_last)))
        return self.fc(activate(x, self.beta).mean(dim=(2, 3)))

    def classifier(self) -> nn.Module:
        """Returns the layer that computes the logits."""
        return self.fc

    def residual_gains(self) -> list[nn.Parameter]:
        """Returns the last gain of each residual branch: SkipInit's scalar, or the gain of the last convolution."""
        blocks = [block for block in self.blocks if isinstance(block, NFBlock)]
        return [block.conv2.gain if block.skip_gain is None else block.skip_gain for block in blocks]


def blocks_per_stage(depth: int) -> int:
    """Returns n for a depth of 6 n + 2; raises ConfigError for any other."""
    if depth < 8 or depth % 6 != 2:
        nearest = 6 * max(1, round((depth - 2) / 6)) + 2
        raise ConfigError(f"model.depth={depth} is not 6 n + 2: the nearest is {nearest}")
    return (depth - 2) // 6


def activate(x: Float[Tensor, "*shape"], beta: float = 1.0) -> Float[Tensor, "*shape"]:
    """Returns `g relu(x / beta)`, which has unit variance if `x` is N(0, beta)."""
    return F.relu(x) * (RELU_GAIN / beta)
