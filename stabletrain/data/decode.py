"""Decodes image files to uint8. Pixels of more than 8 bits are scaled by the range of their format, or refused.

torchvision's operator decodes JPEG, faster and without holding Python's lock. Pillow decodes all other formats, damaged
files, and JPEG where this version of torchvision has no operator. Both give the same pixels.
"""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from stabletrain.errors import ConfigError

BITS_PER_SAMPLE = 258
"""TIFF's tag for the number of bits of a pixel."""


def decode(path: Path, mode: str) -> UInt8[Tensor, "channels height width"]:
    """Decodes an image.

    Args:
        path: an image file.
        mode: `RGB` for three channels, `L` for one.

    Returns:
        the pixels, on any strides. Grey values of 9 to 16 bits are scaled to 8 bits and rounded; of 16-bit colours
        Pillow keeps the high byte.

    Raises:
        ConfigError: the file cannot be decoded, or the range of its pixels is unknown (floats, 32-bit integers).
    """
    try:
        with Image.open(path) as opened:
            if opened.format == "JPEG" and opened.mode == mode == "RGB":
                pixels = decoded_jpeg(path)
                if pixels is not None:
                    return pixels
            image = to_8_bits(opened) if opened.mode == "F" or opened.mode.startswith("I") else opened
            found = np.array(image if image.mode == mode else image.convert(mode))
    except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ConfigError(f"data.path: {path} cannot be read as an image ({error}): repair or remove it") from None
    return torch.from_numpy(found.reshape(*found.shape[:2], -1)).permute(2, 0, 1)


def decoded_jpeg(path: Path) -> Tensor | None:
    """Returns the pixels of a colour JPEG, uint8 `[3, height, width]`; None if torchvision cannot decode it."""
    import torchvision.io  # slow to import; registers the operator

    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    try:
        # The operator itself: `torchvision.io.decode_jpeg` warns in every call that it will be replaced.
        return torch.ops.image.decode_jpeg(content, torchvision.io.ImageReadMode.RGB.value)
    except (AttributeError, RuntimeError):  # no such operator, or a damaged file
        return None


def to_8_bits(image: Image.Image) -> Image.Image:
    """Scales a grey image of 9 to 16 bits to 8 bits.

    Raises:
        ValueError: the range of its pixels is unknown.
    """
    bits = bits_of(image)
    if bits is None:
        kind = "floats" if image.mode == "F" else "32-bit integers"
        raise ValueError(f"its pixels are {kind}, of unknown range: save it with 8 or 16 bits")
    white = 2**bits - 1
    values = np.array(image).astype(np.int64)
    if values.min() < 0 or values.max() > white:
        raise ValueError(f"its pixels are outside [0, {white}], the range of {bits} bits")
    return Image.fromarray(((values * 255 + white // 2) // white).astype(np.uint8))


def bits_of(image: Image.Image) -> int | None:
    """Returns the number of bits of a grey pixel of more than 8 bits; None if its range is unknown."""
    if image.mode == "F":
        return None
    if image.format == "TIFF":
        found = getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE, ())
        bits = found[0] if isinstance(found, tuple) and found else found
        return bits if image.mode.startswith("I;16") and isinstance(bits, int) else None
    # Pillow opens PNG and PGM of 16 bits as "I;16" or, in older versions, as "I"
    return 16 if image.mode.startswith("I;16") or image.format in ("PNG", "PPM") else None
