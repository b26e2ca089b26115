"""The model of a checkpoint, rebuilt from the configuration of its run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.checkpoint.folder import find
from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.config import trust
from stabletrain.config.make import Choice
from stabletrain.config.recorded import read_config
from stabletrain.errors import ConfigError
from stabletrain.machine import hardware
from stabletrain.stored.json_files import MissingFile
from stabletrain.trainer.contract import FROM_DATA
from stabletrain.weights.files import CONFIG, is_export, read_export

ODD = 7919
"""Placeholder for model sizes that the data determines: a number that no user would choose, so it is easy to find."""


def load_model(path: Path, *, best: bool = False, averaged: bool = False, device: str = "cpu") -> nn.Module:
    """Returns the model of a run folder, a checkpoint or an export, in eval mode; see `stabletrain.load`."""
    target = hardware.choose_device(device)
    if is_export(path):
        if averaged:
            raise ConfigError(f"{path} is an export, which holds the live or the averaged weights; fix: averaged=False")
        group, state = read_export(path)
        trust.check_config(group, path / CONFIG)
        return filled(Choice("model", group), {}, state, path).to(target).eval()
    checkpoint = find(path.absolute(), best=best)
    config = config_of(checkpoint)
    model, _ = build_model(checkpoint, Choice.of(config, "model"), Choice.of(config, "data"), averaged=averaged)
    return model.to(target).eval()


def build_model(
    checkpoint: Checkpoint, choice: Choice[Any], data: Choice[Any], *, averaged: bool = False
) -> tuple[nn.Module, dict[str, int]]:
    """Returns the model of a checkpoint on the CPU, and the sizes that are null in its option.

    Args:
        checkpoint: of the run.
        choice: the run's model.
        data: the run's data, which are only read if a size is found nowhere else.
        averaged: whether it gets its averaged weights.

    Raises:
        ConfigError: there are no averaged weights, or the weights do not fit the model's code any more.
    """
    state = checkpoint.load_model()
    shapes = {name: tensor.shape for name, tensor in state.items() if isinstance(tensor, Tensor)}
    sizes = sizes_of(choice, shapes, data)
    model = filled(choice, sizes, state, checkpoint.path)
    if averaged:
        put_average_(model, checkpoint)
    return model, sizes


@torch.no_grad()
def put_average_(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Replaces the weights that are averaged by their averages; the model has the checkpoint's other weights already.

    Raises:
        ConfigError: the checkpoint has none.
    """
    live = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for name, tensor in checkpoint.load_average().items():
        live[name].copy_(tensor)


def filled(choice: Choice[Any], sizes: Mapping[str, int], state: Mapping[str, Any], where: Path) -> nn.Module:
    """Builds a model and loads `state`; `where` is what an error calls the source of the state."""
    with torch.random.fork_rng(devices=[]):  # the weights that the constructor draws are replaced
        model = choice.build(**sizes)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(
            f"{where}: its weights do not fit {choice.target}, which has changed since the run: use the "
            f"code of that time ({' '.join(str(error).split())})"
        ) from error
    return model


def config_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Returns the configuration of a checkpoint's run, whose groups are resolved when they are read.

    Raises:
        ConfigError: the run folder around the checkpoint holds none, or it is damaged.
    """
    file = checkpoint.path.parent.parent / ".hydra" / "config.yaml"
    try:
        return read_config(file)
    except MissingFile as error:
        raise ConfigError(
            f"{checkpoint.path}: the run's configuration, {file}, is missing: name a run folder, or a checkpoint in one"
        ) from error


def sizes_of(choice: Choice[Any], shapes: Mapping[str, Sequence[int]], data: Choice[Any]) -> dict[str, int]:
    """Returns the model sizes that are null in the model's option.

    They are read off the shapes of the weights, or from the data's option. Only a size that is in neither needs the
    data itself.

    Raises:
        ConfigError: the data cannot be read, or does not have the size either.
    """
    found = sizes_in(choice, shapes)
    wanted = [key for key in open_sizes(choice) if key not in found]
    found |= {key: data.node[key] for key in wanted if data.node.get(key) is not None}
    if missing := [key for key in wanted if key not in found]:
        source = data.build()
        for key in missing:
            if (size := getattr(source, key, None)) is None:
                raise ConfigError(f"model.{key} is null, and neither the weights nor the data have it")
            found[key] = size
    return found


def open_sizes(choice: Choice[Any]) -> list[str]:
    """Returns the keys of the model's sizes that are null in its option."""
    return [key for key in FROM_DATA if key in choice.node and choice.node[key] is None]


def sizes_in(choice: Choice[Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Returns those of the model's null sizes that the shapes of its parameters and buffers contain.

    Args:
        choice: a run's model.
        shapes: of the run's parameters and buffers, by name.
    """
    wanted = open_sizes(choice)
    if not wanted:
        return {}
    # Build the model with a marker for each unknown size, without memory, and read the real sizes off the saved shapes.
    marks = {key: ODD + 2 * number for number, key in enumerate(wanted)}
    with torch.device("meta"):
        model = choice.build(**marks)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found = {}
    for key, mark in marks.items():
        here = [
            shapes[name][dim]
            for name, tensor in tensors
            for dim, size in enumerate(tensor.shape)
            if size == mark and name in shapes and len(shapes[name]) == tensor.ndim
        ]
        if here:
            found[key] = here[0]
    return found
