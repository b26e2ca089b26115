"""Random data read as real data is: token shards through the memory map, images through crops and flips.

There is nothing to learn in it, but reading it costs as much as reading real data.
"""

import json
from pathlib import Path

import numpy as np
import torch

from stabletrain.data.files import VERSION
from stabletrain.data.images import Images, InMemory

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
"""CIFAR-10's per-channel mean and standard deviation."""


def token_shards(folder: Path, vocab_size: int, tokens: int) -> Path:
    """Writes shards of random token ids as `stabletrain prepare` does; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype("uint8" if vocab_size <= 256 else "uint16").newbyteorder("<")
    drawn = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", tokens), ("val", max(tokens // 10, 20_000))):
        drawn.integers(vocab_size, size=count).astype(dtype).tofile(folder / f"{split}.bin")
        splits[split] = [{"file": f"{split}.bin", "tokens": count}]
    meta = {"version": VERSION, "tokenizer": "none", "vocab_size": vocab_size, "dtype": dtype.name, "splits": splits}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def pictures(count: int, size: int, classes: int, name: str) -> InMemory:
    """Returns random images with random labels."""
    drawn = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=drawn)
    return InMemory(pixels, torch.randint(classes, (count,), generator=drawn).tolist(), name)


class CifarShaped(Images):
    """Images of 32 x 32 in 10 classes, augmented as CIFAR-10 is."""

    def __init__(self, count: int, augment: str, seed: int) -> None:
        splits = {"train": pictures(count, 32, 10, "train"), "val": pictures(500, 32, 10, "val")}
        names = [str(number) for number in range(10)]
        super().__init__("cifar_shaped", splits, names, size=32, mean=MEAN, std=STD, augment=augment, seed=seed)


class ImagenetShaped(Images):
    """Decoded images of 256 x 256 in 1,000 classes, augmented to 224 x 224 as ImageNet is."""

    def __init__(self, count: int, augment: str, seed: int) -> None:
        splits = {"train": pictures(count, 256, 1000, "train"), "val": pictures(64, 256, 1000, "val")}
        names = [str(number) for number in range(1000)]
        super().__init__("imagenet_shaped", splits, names, size=224, mean=MEAN, std=STD, augment=augment, seed=seed)
