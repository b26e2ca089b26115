"""The folder that `init_from` names. Does not import torch, so that a typing error is reported in a second."""

import os
from pathlib import Path

from stabletrain.errors import ConfigError, did_you_mean


def existing_folder(given: str) -> Path:
    """Returns the absolute path of an existing folder.

    Raises:
        ConfigError: it does not exist, or is a file; names the closest folder beside it.
    """
    if not given:
        raise ConfigError("init_from= has no value: use none, a run folder, or a folder of .safetensors files")
    path = Path(given).expanduser().absolute()
    if os.path.isdir(path):  # also of a name that is too long, unlike `Path.is_dir`
        return path
    if os.path.exists(path):
        raise ConfigError(f"init_from={given} is a file: name the folder that holds it")
    around = path.parent
    near = [entry.name for entry in around.iterdir() if entry.is_dir()] if os.path.isdir(around) else []
    hint = did_you_mean(path.name, near)
    raise ConfigError(f"init_from={given}: there is no such folder{hint or ', so there are no weights to begin with'}")
