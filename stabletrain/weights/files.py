"""Reads the tensors of a folder of safetensors files, one file or several. Nothing is ever unpickled.

The first of these that a folder has is read, as in transformers: `model.safetensors`; the files that an index names
(`model.safetensors.index.json`, written for large models); every `.safetensors` file. A folder that
`stabletrain export --to safetensors` has written also holds the config group `model`.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.stored.json_files import check_type, parse, read_file

ONE_FILE, INDEX, SUFFIX = "model.safetensors", ".safetensors.index.json", ".safetensors"

CONFIG = "config.json"

EXPORT_FORMAT = "stabletrain"
"""The `format` in the `config.json` of an exported folder; its `model` is the run's config group."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp")
"""Endings of files that PyTorch writes with pickle, or that need a pickle to be read."""

CHUNK = 1 << 20


def files_of(folder: Path) -> list[str]:
    """Returns the names of the files that hold a folder's tensors, sorted; empty if it holds no safetensors.

    Raises:
        ConfigError: the folder or its index cannot be read, or the index names a file that is missing.
    """
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror or error})") from error
    if ONE_FILE in names:
        return [ONE_FILE]
    indices = [name for name in names if name.endswith(INDEX)]
    if not indices:
        return [name for name in names if name.endswith(SUFFIX)]
    if len(indices) > 1:
        raise ConfigError(f"{folder} holds {' and '.join(indices)}: leave one model in the folder")
    try:
        index = parse(read_file(folder / indices[0]))
        listed = sorted({str(name) for name in index["weight_map"].values()})
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{folder / indices[0]} is no index of safetensors files ({error!r}): copy it again"
        ) from error
    if missing := [name for name in listed if name not in names]:  # also a path that leads out of the folder
        raise ConfigError(f"{folder / indices[0]} names {missing[0]}, which is not in the folder: copy it again")
    return listed


def config_in(folder: Path) -> dict[str, Any]:
    """Returns the `config.json` of a folder; empty if there is none that can be read."""
    try:
        config = parse(read_file(folder / CONFIG))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def pickled_in(folder: Path) -> list[str]:
    """Returns the names of the files in a folder that cannot be read without unpickling, sorted."""
    return sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)


def read(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Returns the tensors of the files, by name, on the CPU and in the dtypes in which they are stored.

    Raises:
        ConfigError: a file is damaged or gone, or two files hold a tensor of the same name.
    """
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{folder / name} cannot be read ({error}): copy it again") from error
        if both := tensors.keys() & found.keys():
            raise ConfigError(
                f"{folder} holds '{min(both)}' in two files, {' and '.join(names[:2])}{' ...' * (len(names) > 2)}: "
                "leave one model in the folder"
            )
        tensors |= found
    return tensors


def sha256(file: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal.

    Raises:
        ConfigError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open(file, "rb") as content:
            while chunk := content.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror or error})") from error
    return digest.hexdigest()


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
