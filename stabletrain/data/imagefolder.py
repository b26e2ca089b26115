"""Image folders: `<path>/<class>/*.jpg`, or `<path>/train/<class>/...` beside `val/` or `test/`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from stabletrain.data.files import existing
from stabletrain.data.images import Images, Pictures
from stabletrain.data.order import place
from stabletrain.errors import ConfigError

ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


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
            ConfigError: the file cannot be decoded.
        """
        path = self._root / self._names[index]
        try:
            with Image.open(path) as opened:
                pixels = np.array(opened.convert(self._mode))
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise ConfigError(f"data.path: {path} cannot be read as an image ({error}): repair or remove it") from None
        return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1).contiguous()

    def locate(self, index: int) -> str:
        """Returns the file's path."""
        return str(self._root / self._names[index])


class ImageFolder(Images):
    """Images in one folder per class.

    The splits are `train/` and `val/` (or `test/`) if they exist. Otherwise `val_fraction` of the files (those in
    `train/` if it exists) is held out for validation, chosen by a hash of their names.

    Raises:
        ConfigError: the path is not set, a value is out of range, or the class folders are missing or differ between
            the splits.
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
    ) -> None:
        if path is None:
            raise ConfigError("data.path is not set: data=imagefolder needs data.path=<folder of class folders>")
        if not 0 < val_fraction < 1:
            raise ConfigError(f"data.val_fraction={val_fraction} is not between 0 and 1: 0.1 holds out a tenth")
        if len(mean) not in (1, 3):
            raise ConfigError(f"data.mean={list(mean)} has {len(mean)} numbers: use 3 for colour, 1 for grey")
        root = existing(path, "data.path")
        splits: dict[str, Pictures]
        second = next((name for name in ("val", "test") if (root / name).is_dir()), None)
        if (root / "train").is_dir() and second:
            classes = class_folders(root / "train", path)
            if classes != class_folders(root / second, path):
                raise ConfigError(f"data.path={path}: train/ and {second}/ do not have the same class folders")
            train, val = (files_of(root / split, classes) for split in ("train", second))
            splits = {
                "train": Files(root / "train", train, len(mean)),
                "val": Files(root / second, val, len(mean)),
            }
        else:
            root = root / "train" if (root / "train").is_dir() else root
            classes = class_folders(root, path)
            files = files_of(root, classes)
            kept = [place(name) < val_fraction for name, _ in files]
            splits = {
                "train": Files(root, [f for f, held in zip(files, kept, strict=True) if not held], len(mean)),
                "val": Files(root, [f for f, held in zip(files, kept, strict=True) if held], len(mean)),
            }
        for split, found in splits.items():
            if not len(found.labels):
                use = "train" if split == "train" else "validate"
                raise ConfigError(f"data.path={path} has no images to {use} on: {layout(path)}")
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
        for file in sorted((root / name).rglob("*"))
        if file.suffix.lower() in ENDINGS
    ]
