"""Augmentation: random crops and flips, a pure function of the sample's number in the run.

torchvision's transforms draw from the global generator, which a background thread must not use and a replay could not
reproduce. Here random numbers are looked up by sample number (`order.uniform`). Images of the model's input size are
cropped, flipped and normalised a batch at a time, on the training device (`Finish`). A crop that is resized is made
from each image at its original size, on the host.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from stabletrain.errors import ConfigError

CPU = torch.device("cpu")

DRAWS = 42
"""Random numbers available per image: 2 (one for the flip), and 4 for each of 10 attempts at a resized crop."""


def resize(image: UInt8[Tensor, "channels _ _"], size: int) -> UInt8[Tensor, "channels {size} {size}"]:
    """Scales the shorter side of the image to `size` and crops the center; returns an image of that size unchanged."""
    if image.shape[-2:] == (size, size):
        return image
    from torchvision.transforms.v2 import functional as kernels  # slow to import

    return kernels.center_crop(kernels.resize(image, [size], antialias=True), [size, size])


@dataclass(frozen=True)
class NoAugment:
    """No augmentation."""

    def chosen(self, draws: np.ndarray) -> Tensor:
        """Returns the numbers that `__call__` needs for each image: none."""
        return torch.empty(len(draws), 0, dtype=torch.int64)

    def __call__(
        self, images: UInt8[Tensor, "batch channels size size"], chosen: Int64[Tensor, "batch _"]
    ) -> UInt8[Tensor, "batch channels size size"]:
        """Returns the images unchanged."""
        return images


@dataclass(frozen=True)
class CropFlip:
    """Pads by an eighth with zeros, crops the original size at random, flips half (arXiv 1512.03385, section 4.2).

    Attributes:
        size: height and width of the images, in pixels.
        flip: whether to flip; do not flip digits or text.
    """

    size: int
    flip: bool = True

    @property
    def pad(self) -> int:
        """Width of the padding on each side, in pixels."""
        return max(1, self.size // 8)

    def chosen(self, draws: np.ndarray) -> Tensor:
        """Returns for each image the first row and column of its crop, and 1 if it is flipped, else 0."""
        chosen = np.empty((len(draws), 3), np.int64)
        chosen[:, :2] = draws[:, :2] * (2 * self.pad + 1)
        chosen[:, 2] = draws[:, 2] < 0.5 if self.flip else 0
        return torch.from_numpy(chosen)

    def __call__(
        self, images: UInt8[Tensor, "batch channels size size"], chosen: Int64[Tensor, "batch 3"]
    ) -> UInt8[Tensor, "batch channels size size"]:
        """Returns one crop of each image, on the images' device."""
        count, channels = images.shape[:2]
        padded = F.pad(images, [self.pad] * 4)
        sample, channel, place = (torch.arange(n, device=images.device) for n in (count, channels, self.size))
        top, left, flipped = chosen[:, :, None].unbind(1)
        rows, columns = top + place, left + torch.where(flipped > 0, self.size - 1 - place, place)
        return padded[
            sample[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None]
        ]


@dataclass(frozen=True)
class ResizedCrop:
    """Crops 8 to 100 % of the area at an aspect ratio of 3/4 to 4/3, resizes it, flips half (arXiv 1409.4842).

    Attributes:
        size: height and width of the result, in pixels.
    """

    size: int

    def __call__(self, image: UInt8[Tensor, "channels _ _"], draws: np.ndarray) -> UInt8[Tensor, "channels size size"]:
        """Returns a crop of one image; the center square if none of ten attempts fits into the image."""
        from torchvision.transforms.v2 import functional as kernels

        height, width = image.shape[-2:]
        down = across = min(height, width)
        top, left = (height - down) // 2, (width - across) // 2
        for part, form, y, x in draws[2:].reshape(-1, 4).tolist():
            area = height * width * (0.08 + 0.92 * part)
            ratio = (3 / 4) * (16 / 9) ** form
            tall, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < tall <= height and 0 < wide <= width:
                down, across = tall, wide
                top, left = int(y * (height - tall + 1)), int(x * (width - wide + 1))
                break
        out = kernels.resized_crop(image, top, left, down, across, [self.size, self.size], antialias=True)
        return kernels.horizontal_flip(out) if draws[0] < 0.5 else out


class Finish:
    """Crops, flips and normalises a batch of images on its device: `(pixel / 255 - mean) / std` for each channel.

    The results are the same on every device: each operation is exact or correctly rounded.

    Args:
        augment: what is done before normalising.
        mean, std: of each channel, of pixels scaled to [0, 1].
    """

    def __init__(self, augment: NoAugment | CropFlip, mean: Sequence[float], std: Sequence[float]) -> None:
        self.augment = augment
        # A tensor of 255, because a GPU multiplies by 1/255 instead of dividing by a Python number.
        self._scales = {CPU: tuple(torch.tensor(v).view(1, -1, 1, 1) for v in ([255.0], mean, std))}

    def __call__(
        self, images: UInt8[Tensor, "batch channels size size"], chosen: Int64[Tensor, "batch _"]
    ) -> Float[Tensor, "batch channels size size"]:
        """Returns images for the model, fp32 and channels_last.

        Args:
            images: at the model's input size.
            chosen: `augment.chosen` of each image.
        """
        device = images.device
        if device not in self._scales:
            self._scales[device] = tuple(values.to(device) for values in self._scales[CPU])
        white, mean, std = self._scales[device]
        # In place, because new memory costs more than the arithmetic.
        scaled = self.augment(images, chosen).contiguous(memory_format=torch.channels_last).float()
        return scaled.div_(white).sub_(mean).div_(std)


def augmentation(name: str, size: int) -> NoAugment | CropFlip | ResizedCrop:
    """Returns the augmentation of that name for images of `size` pixels.

    Raises:
        ConfigError: the name is unknown.
    """
    kinds = {
        "none": NoAugment(),
        "crop": CropFlip(size, flip=False),
        "crop_flip": CropFlip(size),
        "resized_crop": ResizedCrop(size),
    }
    if name not in kinds:
        raise ConfigError(f"data.augment={name} is none of {', '.join(kinds)}: choose one of them")
    return kinds[name]
