"""A folder that `stabletrain export --to safetensors` has written: the tensors, and the config group `model`."""

from pathlib import Path
from typing import Any, TypedDict

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.stored.json_files import check_type
from stabletrain.weights.files import EXPORT_FORMAT, ONE_FILE, config_in


def is_export(folder: Path) -> bool:
    """Returns whether `folder` is one."""
    return config_in(folder).get("format") == EXPORT_FORMAT


class Target(TypedDict):
    """The config group `model`."""

    _target_: str


def read_export(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the config group `model` and the tensors of an exported folder.

    Raises:
        ConfigError: the weights are missing or damaged.
    """
    try:
        model = config_in(folder)["model"]
        check_type(model, Target)
        return model, load_file(folder / ONE_FILE)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigError(f"{folder} is not a complete export ({error}): export the run again") from error
