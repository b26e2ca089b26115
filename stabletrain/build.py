"""From a configuration to the objects of a run; what cannot work is refused here, before a step is taken.

Every group's option is one object, made by Hydra from its `_target_`. The groups meet in three ways only, all visible
in the YAML or below: a model takes `${qknorm}` and `${softcap}` into its own YAML; a model's nulls are filled from the
data (`vocab_size`, `block_size`, `num_classes`, `in_channels`); and a precision is told the device.
"""

import inspect
import os
import platform
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from stabletrain.data.order import position
from stabletrain.data.prefetch import Prefetch
from stabletrain.errors import ConfigError, StabletrainError
from stabletrain.loop import History, Job, Plan
from stabletrain.machine import hardware
from stabletrain.records import Batch, TrainState
from stabletrain.stability.objective import Objective
from stabletrain.stability.schedule import LearningRate
from stabletrain.state.capture import restore
from stabletrain.step import Tools

FROM_DATA = ("vocab_size", "block_size", "num_classes", "in_channels")
"""Keys of a model that null leaves to the data."""

DEFAULT_VAL_BATCHES = 20
"""Batches of an evaluation over a plug-in's data that does not say how many it has."""


def make(cfg: DictConfig, group: str, **given: Any) -> Any:
    """The object of a group's option, with plain Python values.

    Raises:
        ConfigError: a key the option does not have, or a bound passed.
    """
    node = OmegaConf.to_container(cfg[group], resolve=True)
    node.pop("modality", None)
    option = HydraConfig.get().runtime.choices.get(group, group)
    if "_target_" not in node:
        raise ConfigError(f"{group}={option}: its YAML has no _target_, so there is nothing to build")
    try:
        return instantiate(node, **given, _convert_="all")
    except InstantiationException as error:
        cause = innermost(error)
        if isinstance(cause, StabletrainError):
            raise cause from None
        raise ConfigError(f"{group}={option} cannot be built: {cause}") from error


def innermost(error: BaseException) -> BaseException:
    """The error that started a chain of them."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def make_model(cfg: DictConfig, data: Any) -> nn.Module:
    """The model, its nulls filled from the data."""
    given = {}
    for key in FROM_DATA:
        if key in cfg.model and cfg.model[key] is None:
            if not hasattr(data, key):
                raise ConfigError(f"model.{key} is null, and the data does not say it: set model.{key}")
            given[key] = getattr(data, key)
    model = make(cfg, "model", **given)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: {cfg.model._target_} gives a {type(model).__name__}, not an nn.Module")
    return model
