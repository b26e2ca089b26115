"""Augmentation: random crops and flips of images as a pure function of the sample's number in the run.

torchvision's transforms draw from the global generator, which a background thread must not touch and a replay could not
repeat. So the parameters are looked up by number (`order.uniform`). Small images are gathered whole batches at a time,
wherever they are held; large ones are cut and scaled one by one, by torchvision's functional kernels.
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
"""Random numbers an image may use: a flip, and ten tries of four for a resized crop."""


def fit(image: UInt8[Tensor, "channels _ _"], size: int) -> UInt8[Tensor, "channels {size} {size}"]:
    """The middle square of the image, its shorter side scaled to `size`; the image itself if it is one already."""
    if image.shape[-2:] == (size, size):
        return image
    from torchvision.transforms.v2 import functional as kernels  # it takes a second to load

    return kernels.center_crop(kernels.resize(image, [size], antialias=True), [size, size])


@dataclass(frozen=True)
class Plain:
    """Images as they are, but for their size."""

    whole = False
    """Whether it wants the image before it is brought to size."""

    def __call__(
        self, images: UInt8[Tensor, "batch channels size size"], draws: np.ndarray
    ) -> UInt8[Tensor, "batch channels size size"]:
        """The images themselves."""
        del draws
        return images


@dataclass(frozen=True)
class CropFlip:
    """Zero padding by an eighth, a random crop of the old size, half of them mirrored (arXiv 1512.03385, section 4.2).

    Attributes:
        flip: whether to mirror; digits and text are another thing mirrored.
    """

    flip: bool = True
    whole = False

    def __call__(
        self, images: UInt8[Tensor, "batch channels size size"], draws: np.ndarray
    ) -> UInt8[Tensor, "batch channels size size"]:
        """One crop of each image, all in one gather, on the images' device."""
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
        """The rows and columns of each padded image that are kept, in order: int64 `[batch, 2, size]`."""
        start = (draws[:, :2] * (2 * pad + 1)).astype(np.int64)
        found = start[:, :, None] + np.arange(size)
        if self.flip:
            mirrored = draws[:, 2] < 0.5
            found[mirrored, 1] = found[mirrored, 1, ::-1]
        return found


@dataclass(frozen=True)
class ResizedCrop:
    """A random part of 8 to 100 % of the area at a ratio of 3/4 to 4/3, scaled; half mirrored (arXiv 1409.4842).

    Attributes:
        size: pixels of a side.
    """

    size: int
    whole = True

    def __call__(self, image: UInt8[Tensor, "channels _ _"], draws: np.ndarray) -> UInt8[Tensor, "channels size size"]:
        """A part of one image; the middle, where ten tries find none that fits."""
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
    """The augmentation of that name, for images of `size` pixels.

    Raises:
        ConfigError: there is none.
    """
    kinds = {"none": Plain(), "crop": CropFlip(flip=False), "crop_flip": CropFlip(), "resized_crop": ResizedCrop(size)}
    if name not in kinds:
        raise ConfigError(f"data.augment={name} is none of {', '.join(kinds)}: choose one of them")
    return kinds[name]
