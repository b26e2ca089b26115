"""Image folders: `<path>/<class>/*.jpg`, or `<path>/train/<class>/...` beside `val/`, `valid/` or `test/`."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from stabletrain.data.decode import decode
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
