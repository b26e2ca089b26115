"""Image folders: `<path>/<class>/*.jpg`, or `<path>/train/<class>/...` beside `val/`, `valid/` or `test/`.

Images are decoded to uint8. torchvision's operator decodes JPEG, faster and without holding Python's lock. Pillow
decodes all other formats, damaged files, and JPEG where this version of torchvision has no operator. Both give the same
pixels. Pixels of more than 8 bits are scaled by the range of their format, or refused.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from stabletrain.data.files import existing, required
from stabletrain.data.images import Images, Pictures
from stabletrain.data.order import split_hash
from stabletrain.errors import ConfigError

ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


VALIDATION = ("val", "valid", "validation", "test")
"""Names of the folder to validate on, the first that exists."""
NAMES_OF_SPLITS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation"})


class Files:
    """Image files, decoded on access.

    Args:
        files: name relative to `root` and class id of each file.
        channels: 3 for colour, 1 for grey.
    """

    def __init__(self, root: Path, files: Sequence[tuple[str, int]], channels: int) -> None:
        self._root, self._names, self._mode = root, [name for name, _ in files], "RGB" if channels == 3 else "L"
        self.labels = np.array([label for _, label in files], np.int64)

    def __call__(self, index: int) -> Tensor:
        """Returns image `index`, uint8 `[channels, height, width]`.

        Raises:
            ConfigError: see `decode`.
        """
        return decode(self._root / self._names[index], self._mode)

    def locate(self, index: int) -> str:
        """Returns the file's path."""
        return str(self._root / self._names[index])


class ImageFolder(Images):
    """Images in one folder per class.

    The splits are `train/` and `val/` (or `valid/`, `validation/`, `test/`) if they exist. Otherwise `val_fraction` of
    the files (those in `train/` if it exists) is held out for validation, chosen by a hash of their names.

    Attributes:
        split: names the classes without images to validate on; empty if there are none.

    Raises:
        ConfigError: the path is not set, a value is out of range, a class has no images, or the class folders are
            missing or differ between the splits.
    """

    def __init__(
        self,
        path: str | None,
        image_size: int,
        augment: str,
        val_fraction: float,
        cache_mb: float,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int,
        workers: int | None = None,
    ) -> None:
        path = required(path, "data=imagefolder", "folder of class folders")
        if not 0 < val_fraction < 1:
            raise ConfigError(f"data.val_fraction={val_fraction} is not between 0 and 1: 0.1 holds out a tenth")
        if len(mean) not in (1, 3):
            raise ConfigError(f"data.mean={list(mean)} has {len(mean)} numbers: use 3 for colour, 1 for grey")
        root = existing(path, "data.path")
        second = next((name for name in VALIDATION if (root / name).is_dir()), None)
        if (root / "train").is_dir() and second:
            classes = class_folders(root / "train", path)
            if classes != class_folders(root / second, path):
                raise ConfigError(f"data.path={path}: train/ and {second}/ do not have the same class folders")
            folders = {"train": root / "train", "val": root / second}
            files = {split: files_of(folder, classes) for split, folder in folders.items()}
        else:
            root = root / "train" if (root / "train").is_dir() else root
            classes = class_folders(root, path)
            folders = {"train": root, "val": root}
            files: dict[str, list[tuple[str, int]]] = {"train": [], "val": []}
            for name, label in files_of(root, classes):
                files["val" if split_hash(name) < val_fraction else "train"].append((name, label))
        splits: dict[str, Pictures] = {
            split: Files(folder, files[split], len(mean)) for split, folder in folders.items()
        }
        for split, found in splits.items():
            if not len(found.labels):
                use = "train" if split == "train" else "validate"
                raise ConfigError(f"data.path={path} has no images to {use} on: {layout(path)}")
        missing = {split: without_images(found.labels, classes) for split, found in splits.items()}
        if missing["train"]:
            raise ConfigError(
                f"data.path={path}: no images to train on in class {', '.join(missing['train'])}: remove the folder, "
                f"or add images ({', '.join(sorted(ENDINGS))})"
            )
        self.split = f"no images to validate on in class {', '.join(missing['val'])}" if missing["val"] else ""
        super().__init__(
            root.name,
            splits,
            classes,
            size=image_size,
            mean=mean,
            std=std,
            augment=augment,
            seed=seed,
            cache_mb=cache_mb,
            workers=workers,
        )


def class_folders(root: Path, path: str) -> list[str]:
    """Returns the sorted names of the class folders in `root`, a folder of the user's `path`.

    Raises:
        ConfigError: there are fewer than two.
    """
    if not root.is_dir():
        raise ConfigError(f"data.path={path} is a file: {layout('<folder>')}")
    found = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(found) < 2:
        count = f"{len(found)} class folder{'s' if len(found) != 1 else ''}"
        raise ConfigError(f"data.path={path}: {root} has {count}: {layout(path)}")
    if {name.lower() for name in found} <= NAMES_OF_SPLITS:
        raise ConfigError(f"data.path={path}: the class folders are named {' and '.join(found)}: {layout(path)}")
    return found


def layout(path: str) -> str:
    """Describes the folders that `path` should hold."""
    path = path.rstrip("/")
    return f"expected {path}/<class>/*.png, or {path}/train/<class>/*.png and {path}/val/<class>/*.png (or test/)"


def files_of(root: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    """Returns name relative to `root` and class id of every image file, in a fixed order."""
    return [
        (file.relative_to(root).as_posix(), label)
        for label, name in enumerate(classes)
        for file in sorted(image_files(root / name))
    ]


def image_files(folder: Path) -> Iterator[Path]:
    """Yields the image files in a folder and the folders below it; passes over pipes, sockets and devices.

    A link to nothing is yielded, so that reading it fails: its image is missing.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from image_files(Path(entry.path))
            elif Path(entry.name).suffix.lower() in ENDINGS and (entry.is_file() or not os.path.exists(entry.path)):
                yield Path(entry.path)


def without_images(labels: np.ndarray, classes: Sequence[str]) -> list[str]:
    """Returns the names of the classes that no label has."""
    return [name for label, name in enumerate(classes) if not np.any(labels == label)]


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
