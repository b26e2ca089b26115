"""What `init_from` may name: a run, a checkpoint, a folder of safetensors files, or a GPT-2 folder of transformers.

`find` decides which of them a path is and which of its files count; `Source.read` reads the tensors. These are two
steps because one rank decides and all ranks read: a run that is still going may write a newer checkpoint in between.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stabletrain.checkpoint import folder, reader
from stabletrain.errors import ConfigError
from stabletrain.weights import files, gpt2
from stabletrain.weights.place import existing_folder

CONVERT = (
    "python -c 'import sys, torch; from safetensors.torch import save_file; "
    "w = torch.load(sys.argv[1], weights_only=True); "
    "save_file({name: t.clone().contiguous() for name, t in w.items()}, sys.argv[2])'"
)
"""A command that converts a pickled state dict, given the file and the name of the new one."""


@dataclass(frozen=True)
class Source:
    """Where weights are read from.

    Attributes:
        path: the folder that holds the files, absolute.
        kind: `run` or `checkpoint` of this trainer, `safetensors`, or `gpt2`.
        files: SHA-256 of each file that holds weights, by name.
        step: of the checkpoint; None for files of other programs.
        val_loss: of the checkpoint, nats per target; None if unknown.
        model: arguments of the model by name, if the folder says them: a GPT-2, or an export of this trainer, which
            also has the model's `_target_`.
    """

    path: Path
    kind: str
    files: Mapping[str, str]
    step: int | None = None
    val_loss: float | None = None
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Whether stabletrain wrote the weights."""
        return self.kind in ("run", "checkpoint")

    def read(self) -> dict[str, Any]:
        """Returns the tensors by name, on the CPU; for a checkpoint, also the non-tensors that its modules saved.

        Raises:
            ConfigError: a file is damaged or gone.
        """
        if self.ours:
            return reader.peek(self.path).load_model()
        if self.kind == "gpt2":
            return dict(gpt2.read(self.path)[1])
        return dict(files.read(self.path, list(self.files)))

    def record(self) -> dict[str, Any]:
        """Returns what `run.json` and W&B record."""
        step = {} if self.step is None else {"step": self.step}
        return {"path": str(self.path), "kind": self.kind, **step, "sha256": dict(self.files)}


def find(given: str, *, as_gpt2: bool) -> Source:
    """Returns the source that a path names; for a run, its newest healthy checkpoint that verifies.

    Args:
        given: as the user typed it.
        as_gpt2: whether the model is this package's GPT, to which GPT-2's tensors are renamed.

    Raises:
        ConfigError: the folder does not exist or holds no weights that can be read; names the fix.
    """
    path = existing_folder(given)
    try:
        return source_of(path, as_gpt2)
    except ConfigError as error:
        # The message of a checkpoint or a file names itself; the user typed only the folder around it.
        raise ConfigError(f"init_from={given}: {error}") from error


def source_of(path: Path, as_gpt2: bool) -> Source:
    """Returns an existing folder as a source."""
    if folder.NAME.fullmatch(path.name) or (path / reader.MANIFEST).exists():
        return of_checkpoint(reader.verify(path), "checkpoint")
    if os.path.isdir(path / "checkpoints") or any(folder.steps_in(path)):
        return of_checkpoint(folder.find(path), "run")
    if (path / "run.json").exists():
        raise ConfigError("this run has no checkpoint (checkpoint=off, or it ended before checkpoint.every steps)")
    if (path / "sweep.json").exists() or (path / "multirun.yaml").exists():
        raise ConfigError(f"this is a sweep: name one of its runs, such as {path.name}/0")
    if names := files.files_of(path):
        hashes = {name: files.sha256(path / name) for name in names}
        if as_gpt2 and gpt2.is_folder(path):
            return Source(path, "gpt2", hashes, model=gpt2.sizes_of(files.config_in(path), files.CONFIG))
        config = files.config_in(path)
        model = config.get("model") if config.get("format") == files.EXPORT_FORMAT else None
        return Source(path, "safetensors", hashes, model=model if isinstance(model, dict) else {})
    if gpt2.is_folder(path):
        gpt2.read_tensors(path)  # says how transformers converts it
    if pickled := files.pickled_in(path):
        raise ConfigError(
            f"it holds only pickled weights ({', '.join(pickled[:3])}), and unpickling a file can run any code in it: "
            f"if you trust the file, convert it with {CONVERT} {path / pickled[0]} {path / files.ONE_FILE}"
        )
    raise ConfigError("it holds no weights: name a run folder, one checkpoint in it, or a folder of .safetensors files")


def of_checkpoint(found: reader.Checkpoint, kind: str) -> Source:
    """Returns a verified checkpoint as a source."""
    return Source(found.path, kind, found.model_files(), found.step, found.val_loss)
