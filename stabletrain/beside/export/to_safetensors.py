"""Export as plain safetensors: the model's own tensors under their own names, and what rebuilds the model.

`config.json` holds the config group `model` of the run, with the sizes that the data determined filled in.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stabletrain.beside.export.trained import Format, Trained, Written
from stabletrain.buffers import same_bits
from stabletrain.errors import ConfigError, StabletrainError
from stabletrain.weights.files import CONFIG, EXPORT_FORMAT, ONE_FILE


@dataclass(frozen=True)
class Safetensors(Format):
    """`model.safetensors` and `config.json`, for any model."""

    def refuse(self, trained: Trained) -> None:
        """Raises ConfigError if the model's state holds anything but tensors."""
        for name, value in trained.model.state_dict().items():
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"{trained.name}: its state {name} is a {type(value).__name__}, and safetensors hold tensors only: "
                    "use --to onnx, or stabletrain.load in Python"
                )

    def write(self, trained: Trained, folder: Path) -> Written:
        """Writes both files; compares all bits with the model's."""
        save(trained.model.state_dict(), folder / ONE_FILE, trained.origin)
        record = {"format": EXPORT_FORMAT, **trained.origin, "model": trained.config}
        (folder / CONFIG).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        found = load_file(folder / ONE_FILE)
        for name, tensor in trained.model.state_dict().items():
            if found[name].dtype != tensor.dtype or not same_bits(found[name], tensor):
                raise StabletrainError(f"{name} differs after reading it back; nothing was written: is the disk sound?")
        return Written(
            f"all {len(found)} tensors have the same bits when they are read back",
            [
                "model = stabletrain.load('{folder}')",
                "stabletrain train init_from={folder}   # a new run from these weights",
            ],
        )


def save(tensors: Mapping[str, Tensor], file: Path, origin: Mapping[str, str]) -> None:
    """Writes tensors, contiguous and without shared memory; `origin` goes into the header."""
    plain = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    save_file(plain, file, metadata={"format": "pt", **origin})
