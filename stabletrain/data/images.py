"""Image classification data: batches and augmentation are functions of the batch number.

Images are decoded by several threads, and stay uint8 until they are on the training device (`augment.Finish`).
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Thread
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from stabletrain.data.augment import DRAWS, Finish, NoAugment, ResizedCrop, augmentation, resize
from stabletrain.data.order import Sources, key, pass_ids, sample_ids, split_hash, uniform
from stabletrain.errors import ConfigError
from stabletrain.records import IGNORE_INDEX, Batch, Transform


@runtime_checkable
class Pictures(Protocol):
    """The images of one split."""

    labels: np.ndarray
    """int64 `[n]`."""

    def __call__(self, index: int) -> Tensor:
        """Returns image `index`, uint8 `[channels, height, width]`."""
        ...

    def locate(self, index: int) -> str:
        """Describes where image `index` comes from."""
        ...


class InMemory:
    """Images in memory, all of one size.

    Args:
        pixels: uint8 `[n, channels, size, size]`.
        labels: class ids.
        name: prefix of an image's source, `name:index`.
    """

    def __init__(self, pixels: UInt8[Tensor, "n channels size size"], labels: Sequence[int], name: str) -> None:
        self.pixels, self.labels, self._name = pixels, np.asarray(labels, np.int64), name
        self.targets = torch.from_numpy(self.labels)

    def to(self, device: torch.device) -> None:
        """Moves pixels and targets to a device; `labels` stays on the host."""
        self.pixels, self.targets = self.pixels.to(device), self.targets.to(device)

    def __call__(self, index: int) -> UInt8[Tensor, "channels size size"]:
        """Returns image `index`."""
        return self.pixels[index]

    def locate(self, index: int) -> str:
        """Returns `name:index`."""
        return f"{self._name}:{index}"


class Images:
    """Batches of images from a training and a validation split, looked up by number.

    Attributes:
        classes: names of the classes.
        num_classes, in_channels: sizes that the model must have.
        summary: description in one line.
    """

    def __init__(
        self,
        name: str,
        splits: dict[str, Pictures],
        classes: Sequence[str],
        *,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        augment: str,
        seed: int,
        cache_mb: float = 0,
        workers: int | None = None,
    ) -> None:
        """Combines two splits into a data set.

        Args:
            splits: `train` and `val`.
            classes: names of the classes, in the order of their ids.
            size: height and width of the model's input, in pixels.
            mean, std: mean and standard deviation of each channel, of pixels scaled to [0, 1].
            augment: `none`, `crop`, `crop_flip` or `resized_crop`; applies to training only.
            cache_mb: decoded images of a split are cached if they take at most this many MB together.
            workers: threads that decode and scale images; None for this process's share of the cores.

        Raises:
            ConfigError: a value is out of range, or a split has no images.
        """
        if size < 1:
            raise ConfigError(f"data.image_size={size} is below 1, in pixels; fix: data.image_size=1 or more")
        if len(mean) != len(std) or not len(mean):
            raise ConfigError(f"data.mean has {len(mean)} numbers and data.std {len(std)}: use one per channel in each")
        if not all(value > 0 for value in std):
            raise ConfigError(f"data.std={list(std)} is not above 0 everywhere: pixels are divided by it")
        for split, pictures in splits.items():
            if not len(pictures.labels):
                raise ConfigError(f"data={name} has no images to {'train' if split == 'train' else 'validate'} on")
        self.classes, self.num_classes, self.in_channels = list(classes), len(classes), len(mean)
        self._name, self._splits, self._size, self._seed = name, splits, size, seed
        if workers is not None and workers < 1:
            raise ConfigError(f"data.workers={workers} is below 1: null uses every core of this process")
        self._augment = augmentation(augment, size)
        # A resized crop is made by the workers; the device only normalises.
        self._finish = {
            "train": Finish(NoAugment() if isinstance(self._augment, ResizedCrop) else self._augment, mean, std),
            "val": Finish(NoAugment(), mean, std),
        }
        # Threads are enough: decoding and scaling release Python's lock.
        self._pool = ThreadPoolExecutor(
            workers or cores_of_this_rank(), "pictures", use_one_core, (torch.get_num_threads(),)
        )
        self._cache = {
            split: {} if len(p.labels) * self.in_channels * size * size <= cache_mb * 1e6 else None
            for split, p in splits.items()
        }
        counts = " + ".join(f"{len(splits[split].labels):,}" for split in ("train", "val"))
        self.summary = f"{name}, {counts} images of {size} x {size} in {self.num_classes} classes"

    def to(self, device: torch.device) -> None:
        """Moves splits that are in memory at the model's input size to `device`, where their batches are then made."""
        for split, pictures in self._splits.items():
            if isinstance(pictures, InMemory) and self._in_one_operation(split):
                pictures.to(device)

    def batches(self, size: int, split: str) -> int:
        """Returns the number of batches of `size` in one pass; the last validation batch may be smaller."""
        return -(-len(self._splits[split].labels) // size)

    def batch(self, step: int, size: int, split: str) -> Batch:
        """Returns batch number `step`, a pure function of the arguments.

        Args:
            step: batch number from 0; unbounded for training.
            size: samples in the batch.
            split: `train` (reshuffled each epoch, augmented) or `val` (in a fixed order).

        Returns:
            inputs fp32 `[size, channels, image_size, image_size]`, channels_last, and targets int64 `[size]`, on the
            device of the images.
        """
        return replace(self.rows(step, size, split, slice(0, size)).transformed(), counted=None)

    def rows(self, step: int, size: int, split: str, rows: slice) -> Batch:
        """Returns some samples of batch number `step`; decodes no other samples. See `batch`.

        Args:
            rows: which samples, `slice(start, stop)`.

        Returns:
            inputs uint8 with a transform that augments and normalises them: `transformed()` gives the rows of `batch`.
        """
        pictures, finish = self._splits[split], self._finish[split]
        if split == "val":
            every = pass_ids(step, size, len(pictures.labels))
        else:
            every, _ = sample_ids(step * size, size, len(pictures.labels), self._seed)
        ids = every[rows]
        # Looked up by the sample's number in the run: a replay draws the same, another epoch does not.
        numbers = np.arange(step * size, step * size + len(every))[rows]
        draws = uniform(numbers, key(self._seed, "augment"), DRAWS)
        if split == "train" and isinstance(self._augment, ResizedCrop):
            augment = self._augment
            made = self._pool.map(lambda index, drawn: augment(pictures(index), drawn), ids.tolist(), draws)
            images = self._stack(list(made))
        else:
            images = self._gather(split, ids)
        where = torch.from_numpy(ids)
        if isinstance(pictures, InMemory):
            targets = pictures.targets[where.to(pictures.targets.device, non_blocking=True)]
        else:
            targets = torch.from_numpy(pictures.labels[ids])
        return Batch(
            images,
            targets,
            where,
            Sources(pictures.locate, ids),
            int((pictures.labels[every] != IGNORE_INDEX).sum()),
            Transform(finish, finish.augment.chosen(draws)),
        )

    def fingerprint(self) -> dict:
        """Identifies the data by its sizes and a hash of the labels and of every 1000th image."""
        digest = hashlib.sha256()
        for split in ("train", "val"):
            pictures = self._splits[split]
            digest.update(pictures.labels.tobytes())
            for index in range(0, len(pictures.labels), 1000):
                digest.update(pictures(index).cpu().numpy().tobytes())
        sizes = {split: len(pictures.labels) for split, pictures in self._splits.items()}
        return {"name": self._name, **sizes, "classes": self.num_classes, "sha256": digest.hexdigest()}

    def _gather(self, split: str, ids: np.ndarray) -> UInt8[Tensor, "batch channels size size"]:
        """Returns images at the model's input size, from the cache if possible."""
        pictures, kept = self._splits[split], self._cache[split]
        if isinstance(pictures, InMemory) and self._in_one_operation(split):
            return pictures.pixels[torch.from_numpy(ids).to(pictures.pixels.device, non_blocking=True)]
        missing = [index for index in ids.tolist() if kept is None or index not in kept]
        made = dict(
            zip(missing, self._pool.map(lambda index: resize(pictures(index), self._size), missing), strict=True)
        )
        if kept is not None:
            kept.update(made)
        return self._stack([made[index] if index in made else kept[index] for index in ids.tolist()])  # ty: ignore

    def _stack(self, images: list[Tensor]) -> UInt8[Tensor, "batch channels size size"]:
        empty = torch.empty(0, self.in_channels, self._size, self._size, dtype=torch.uint8)
        return torch.stack(images) if images else empty

    def _in_one_operation(self, split: str) -> bool:
        """Whether a batch is gathered in one operation: images in memory, at input size, not augmented one by one."""
        pictures = self._splits[split]
        held = isinstance(pictures, InMemory) and pictures.pixels.shape[-2:] == (self._size, self._size)
        return held and not (split == "train" and isinstance(self._augment, ResizedCrop))


def use_one_core(threads: int) -> None:
    """Makes PyTorch run this thread's operations on one core: else each of many workers would use all of them.

    Args:
        threads: number of threads for operations of other Python threads.
    """
    torch.get_num_threads()  # PyTorch reads its default first, and would otherwise do so after the next line
    torch.set_num_threads(1)
    # It is this thread's own number, but also the default of later threads, which only another thread can restore.
    restoring = Thread(target=torch.set_num_threads, args=(threads,))
    restoring.start()
    restoring.join()


def cores_of_this_rank() -> int:
    """Returns the number of cores this process may use, divided by the number of ranks on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class Digits(Images):
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; a hash selects a fifth of them for validation."""

    def __init__(self, augment: str, seed: int) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        pixels = torch.from_numpy(found.images * (255 / 16)).round().to(torch.uint8)[:, None]
        splits = hold_out(pixels, found.target.tolist(), 0.2, "digits")
        names = [str(name) for name in found.target_names]
        super().__init__("digits", splits, names, size=8, mean=[0.3053], std=[0.3761], augment=augment, seed=seed)


def hold_out(pixels: Tensor, labels: Sequence[int], fraction: float, name: str) -> dict[str, Pictures]:
    """Splits images in memory. In each class, a hash selects the share `fraction` of the images for `val`."""
    labels_of = np.asarray(labels)
    val: list[int] = []
    for label in np.unique(labels_of):
        members = sorted(np.flatnonzero(labels_of == label).tolist(), key=lambda index: split_hash(f"{name}:{index}"))
        val += members[: round(len(members) * fraction)]
    chosen = np.zeros(len(labels_of), bool)
    chosen[val] = True
    return {
        split: InMemory(pixels[torch.from_numpy(mask)], labels_of[mask].tolist(), f"{name}/{split}")
        for split, mask in (("train", ~chosen), ("val", chosen))
    }


class Cifar10(Images):
    """CIFAR-10 (Krizhevsky 2009) from torchvision.

    Raises:
        ConfigError: the files are missing and `download` is False, or the download fails.
    """

    def __init__(
        self, root: str, download: bool, augment: str, mean: Sequence[float], std: Sequence[float], seed: int
    ) -> None:
        import torchvision

        def load(train: bool) -> InMemory:
            try:
                found = torchvision.datasets.CIFAR10(root, train=train, download=download)
            except Exception as error:  # network, disk or a broken archive
                if not download:
                    raise ConfigError(
                        f"data.root={root} does not hold CIFAR-10: data.download=true downloads it (170 MB)"
                    ) from None
                raise ConfigError(f"data.download=true: CIFAR-10 could not be downloaded to {root}: {error}") from None
            names.extend(found.classes[len(names) :])
            pixels = torch.from_numpy(np.ascontiguousarray(found.data.transpose(0, 3, 1, 2)))
            return InMemory(pixels, found.targets, f"cifar10/{'train' if train else 'test'}")

        names: list[str] = []
        splits: dict[str, Pictures] = {"train": load(True), "val": load(False)}
        super().__init__("cifar10", splits, names, size=32, mean=mean, std=std, augment=augment, seed=seed)
