"""Reads a configuration from a file that may hold anything."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stabletrain.stored.json_files import read_file


def load_yaml(path: Path) -> Any:
    """Returns the configuration in a file of YAML.

    Raises:
        OSError: see `read_file`.
        Exception: it is no such YAML; its parsers raise many types.
    """
    return OmegaConf.create(read_file(path).decode())
