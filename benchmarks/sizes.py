"""The models that throughput.py measures, with their data on a CPU and on a GPU."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from made_data import token_shards

DEFAULTS = ("monitors=default", "wandb=offline", "log_every=10", "warmup=linear", "warmup.steps=50")
"""Restores the defaults that `jobs.NOTHING_ELSE` disables."""


@dataclass(frozen=True)
class Size:
    """A model with its batch and block sizes by device; `vocab_size` is 0 for images."""

    model: tuple[str, ...]
    batch: dict[str, int]
    vocab_size: int = 0
    block_size: dict[str, int] = field(default_factory=dict)
    data: str = "tokens"


SIZES = {
    "gpt_nano": Size(("model=gpt_nano",), {"cpu": 16, "cuda": 256}, 256, {"cpu": 128, "cuda": 256}),
    "gpt_mini": Size(("model=gpt_mini",), {"cpu": 16, "cuda": 64}, 256, {"cpu": 256, "cuda": 256}),
    "gpt2": Size(("model=gpt2",), {"cpu": 1, "cuda": 32}, 50257, {"cpu": 256, "cuda": 1024}),
    "resnet20": Size(("model=resnet20",), {"cpu": 32, "cuda": 512}, data="cifar_shaped"),
    "resnet18": Size(("model=resnet18", "model.stem=small"), {"cpu": 8, "cuda": 512}, data="cifar_shaped"),
    "resnet50": Size(("model=resnet50",), {"cpu": 2, "cuda": 128}, data="imagenet_shaped"),
    "gpt_tiny": Size(
        ("model=gpt_nano", "model.n_layer=2", "model.n_head=2", "model.n_embd=16"),
        {"cpu": 4, "cuda": 4},
        256,
        {"cpu": 16, "cuda": 16},
    ),
    "resnet_tiny": Size(("model=resnet20", "model.depth=8"), {"cpu": 2, "cuda": 2}, data="cifar_shaped"),
}
"""By name; the last two only check that the benchmark runs."""

USUAL = {"cpu": "gpt_nano,gpt_mini,resnet20", "cuda": ",".join([*SIZES][:-2])}


def overrides_of(size: Size, folder: Path, device: torch.device, mode: str) -> list[str]:
    """Returns the run's overrides."""
    chosen = [*size.model, f"data={size.data}", f"batch_size={size.batch[device.type]}", *DEFAULTS]
    if size.vocab_size:
        needed = 200 * size.batch[device.type] * size.block_size[device.type]
        shards = token_shards(folder / "shards", size.vocab_size, min(needed, 20_000_000))
        chosen += [f"data.path={shards}", f"data.block_size={size.block_size[device.type]}", "optimizer.lr=1e-3"]
    else:
        chosen += ["optimizer=sgd"]
    return [*chosen, f"device={device}", f"precision={mode}"]
