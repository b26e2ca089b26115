"""Augmentation: random crops and flips, a pure function of the sample's number in the run.

torchvision's transforms draw from the global generator, which a background thread must not use and a replay could not
reproduce. Here random numbers are looked up by sample number (`order.uniform`). Small images are cropped a batch at a
time, on the device that holds them; large images one by one on the host.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor

from stabletrain.errors import ConfigError

DRAWS = 42
"""Random numbers available per image: 2 (one for the flip), and 4 for each of 10 attempts at a resized crop."""


def fit(image: UInt8[Tensor, "channels _ _"], size: int) -> UInt8[Tensor, "channels {size} {size}"]:
    """Scales the shorter side of the image to `size` and crops the center; returns an image of that size unchanged."""
    if image.shape[-2:] == (size, size):
        return image
    from torchvision.transforms.v2 import functional as kernels  # slow to import

    return kernels.center_crop(kernels.resize(image, [size], antialias=True), [size, size])


@dataclass(frozen=True)
class Plain:
    """No augmentation."""

    whole = False
    """Whether the augmentation needs the image at its original size."""

    def __call__(
        self, images: UInt8[Tensor, "batch channels size size"], draws: np.ndarray
    ) -> UInt8[Tensor, "batch channels size size"]:
        """Returns the images unchanged."""
        del draws
        return images


@dataclass(frozen=True)
class CropFlip:
    """Pads by an eighth with zeros, crops the original size at random, flips half (arXiv 1512.03385, section 4.2).

    Attributes:
        flip: whether to flip; do not flip digits or text.
    """

    flip: bool = True
    whole = False

    def __call__(
        self, images: UInt8[Tensor, "batch channels size size"], draws: np.ndarray
    ) -> UInt8[Tensor, "batch channels size size"]:
        """Returns one crop of each image, on the images' device."""
        count, channels, size, _ = images.shape
        pad = max(1, size // 8)
        places = torch.from_numpy(self.places(draws, size, pad)).to(images.device, non_blocking=True)
        rows, columns = places.unbind(1)
        padded = F.pad(images, [pad] * 4)
        sample, channel = (torch.arange(n, device=images.device) for n in (count, channels))
        return padded[
            sample[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None]
        ]

    def places(self, draws: np.ndarray, size: int, pad: int) -> np.ndarray:
        """Returns rows and columns of each padded image to gather: int64 `[batch, 2, size]`."""
        start = (draws[:, :2] * (2 * pad + 1)).astype(np.int64)
        found = start[:, :, None] + np.arange(size)
        if self.flip:
            mirrored = draws[:, 2] < 0.5
            found[mirrored, 1] = found[mirrored, 1, ::-1]
        return found


@dataclass(frozen=True)
class ResizedCrop:
    """Crops 8 to 100 % of the area at an aspect ratio of 3/4 to 4/3, resizes it, flips half (arXiv 1409.4842).

    Attributes:
        size: height and width of the result, in pixels.
    """

    size: int
    whole = True

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


def augmentation(name: str, size: int) -> Plain | CropFlip | ResizedCrop:
    """Returns the augmentation of that name for images of `size` pixels.

    Raises:
        ConfigError: the name is unknown.
    """
    kinds = {"none": Plain(), "crop": CropFlip(flip=False), "crop_flip": CropFlip(), "resized_crop": ResizedCrop(size)}
    if name not in kinds:
        raise ConfigError(f"data.augment={name} is none of {', '.join(kinds)}: choose one of them")
    return kinds[name]
