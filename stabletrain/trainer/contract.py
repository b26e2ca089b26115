"""What a model and its data must agree on: sizes that the one leaves to the other, and what a batch is.

Both may be anybody's: a plug-in's model or data is asked for what it offers, and what breaks the contract is refused by
name.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from stabletrain.config.make import make
from stabletrain.errors import ConfigError
from stabletrain.machine.hardware import flops_per_sample
from stabletrain.parallel.ranks import Ranks
from stabletrain.records import IGNORE_INDEX, Batch

FROM_DATA = ("vocab_size", "block_size", "num_classes", "in_channels")
"""Keys of a model that null leaves to the data."""

DEFAULT_VAL_BATCHES = 20
"""Batches of an evaluation over a plug-in's data that does not say how many it has."""


def make_model(cfg: DictConfig, data: Any) -> nn.Module:
    """The model, its nulls filled from the data."""
    given = {}
    for key in FROM_DATA:
        if key not in cfg.model:
            continue
        wanted, needed = cfg.model[key], getattr(data, key, None)
        if wanted is None and needed is None:
            raise ConfigError(f"model.{key} is null, and the data does not say it: set model.{key}")
        if wanted is None:
            given[key] = needed
        elif needed is not None and (wanted < needed or (key == "in_channels" and wanted != needed)):
            raise ConfigError(f"model.{key}={wanted} does not fit the data, which needs {needed}: leave it null")
    model = make(cfg, "model", **given)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: {cfg.model._target_} gives a {type(model).__name__}, not an nn.Module")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"model: {cfg.model._target_} has no parameters to train")
    return model


def vocabulary(model: nn.Module, data: Any) -> int | None:
    """How many token ids the model knows, so that others are kept away from its kernels; None where nobody says."""
    for knows in (model, data):
        if isinstance(size := getattr(knows, "vocab_size", None), int):
            return size
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return tables[0].num_embeddings if tables else None


def units(cfg: DictConfig, data: Any) -> tuple[str, str]:
    """What the pace counts, and what a loss is per: an image, a byte where the vocabulary is the 256 bytes, a token.

    Data that does not say its modality is asked for a sample: a target for each is one class, not a text.
    """
    if cfg.data.get("modality") == "images":
        return "img", "image"
    if cfg.data.get("modality") is None and checked(data.batch(0, 1, "val")).targets.ndim == 1:
        return "sample", "sample"
    return "tok", "byte" if getattr(data, "vocab_size", None) == 256 else "token"


def cost(model: nn.Module, data: Any) -> float | None:
    """FLOPs of a unit of the pace in training; None where the data or the model cannot be asked."""
    try:
        sample = checked(data.batch(0, 1, "val"))
    except Exception:  # what is wrong with the data is told where it is read for good
        return None
    flops = flops_per_sample(model, sample.inputs)
    return None if flops is None else flops / sample.targets.numel()


def checked(batch: Any) -> Batch:
    """The batch, if the data keeps its contract.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(batch, Batch):
        raise ConfigError(
            f"data: batch() gave a {type(batch).__name__}: return stabletrain.records.Batch(inputs, targets)"
        )
    for name in ("inputs", "targets"):
        value = getattr(batch, name)
        if not isinstance(value, Tensor):
            raise ConfigError(f"data: {name} is a {type(value).__name__}: a batch holds tensors; stack them into one")
    if len(batch.inputs) != len(batch.targets):
        raise ConfigError(
            f"data: a batch has {len(batch.inputs)} inputs and {len(batch.targets)} targets: one for each"
        )
    if batch.targets.is_floating_point():
        raise ConfigError(f"data: targets are {batch.targets.dtype}: they are class ids, so return whole numbers")
    return batch


def validation(data: Any, size: int, limit: int | None, ranks: Ranks) -> Iterator[Batch]:
    """The validation split's batches in their fixed order: all, or the first `limit`, every rank those in its turn.

    Ranks take equally many, since sharded weights are gathered by all of them together: one that has none left takes
    the last once more, with no target that counts.
    """
    count = data.batches(size, "val") if hasattr(data, "batches") else DEFAULT_VAL_BATCHES
    count = min(count, limit or count)
    for first in range(0, count, ranks.world_size):
        number = first + ranks.rank
        batch = checked(data.batch(min(number, count - 1), size, "val"))
        yield batch if number < count else replace(batch, targets=torch.full_like(batch.targets, IGNORE_INDEX))
