"""`stabletrain export`: writes a run's model for other programs.

The folder of an export appears complete, or not at all. Files are written under a hidden name beside it, and
synchronised to disk; one rename makes the folder appear. A folder with anything in it is replaced only if the caller
says so, and only if it holds nothing but files of an export.
"""

import os
import secrets
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

import stabletrain
from stabletrain.beside.export.to_onnx import Onnx
from stabletrain.beside.export.to_safetensors import Safetensors
from stabletrain.beside.export.to_torchvision import Torchvision
from stabletrain.beside.export.to_transformers import Transformers
from stabletrain.beside.export.trained import Format, Trained, Written
from stabletrain.checkpoint.folder import find
from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.checkpoint.writer import sync
from stabletrain.config import trust
from stabletrain.config.make import Choice
from stabletrain.config.moved import updated
from stabletrain.data.files import read_meta
from stabletrain.errors import ConfigError, did_you_mean
from stabletrain.models.gpt import GPT
from stabletrain.models.resnet import TorchvisionResNet
from stabletrain.printable import say
from stabletrain.stored.run_files import run_record_or_empty
from stabletrain.stored.trusted import check_links
from stabletrain.trainer.contract import checked
from stabletrain.trainer.saved import build_model, config_of


def export(run: Path, to: str, out: Path | None, *, best: bool, overwrite: bool, averaged: bool = False) -> None:
    """Writes the model of a run folder or a checkpoint as `to`, and prints what it wrote and how to load it.

    Args:
        run: a run folder, which stands for its newest healthy checkpoint; or one checkpoint.
        to: `hf`, `safetensors` or `onnx`.
        out: the folder to write; None for one below the run folder.
        best: take the healthy checkpoint with the lowest validation loss.
        overwrite: replace an earlier export in `out`.
        averaged: take the averaged weights of a run with `averaging`.

    Raises:
        ConfigError: there is no usable checkpoint, the model cannot be written so, or `out` holds anything.
        StabletrainError: the exported model computes something else.
    """
    check_run(run)
    checkpoint = find(run.absolute(), best=best)
    if out is None:
        check_links(checkpoint.path.parent.parent)
    name = f"{to}-{checkpoint.path.name}{'-averaged' if averaged else ''}"
    folder = (out or checkpoint.path.parent.parent / "export" / name).absolute()
    check_place(folder, overwrite=overwrite)
    trained = trained_of(checkpoint, averaged)
    form = format_of(to, trained)
    form.refuse(trained)
    trust.remember_config(trained.config)
    with new_folder(folder, overwrite=overwrite) as hidden:
        written = form.write(trained, hidden)
    say(report(folder, checkpoint, written, averaged))


def check_run(run: Path) -> None:
    """Raises ConfigError if there is no such folder, or if it is a run that saved no checkpoint."""
    if not run.is_dir():
        near = did_you_mean(run.name, [path.name for path in run.absolute().parent.glob("*") if path.is_dir()])
        raise ConfigError(f"{run}: there is no such folder{near}")
    if (run / "run.json").exists() and not any((run / "checkpoints").glob("step-*")):
        raise ConfigError(
            f"{run} has no checkpoint, so there are no weights to export: train it with checkpoint=default"
        )


FORMATS: dict[str, type[Format]] = {"safetensors": Safetensors, "onnx": Onnx}
"""Formats for any model."""

FORMATS_OF_LIBRARIES: dict[type, type[Format]] = {GPT: Transformers, TorchvisionResNet: Torchvision}
"""`hf`, by the architecture."""


def format_of(to: str, trained: Trained) -> Format:
    """Returns the format: for `hf`, that of the library which has the model's architecture.

    Raises:
        ConfigError: no library has it.
    """
    found = FORMATS.get(to) or FORMATS_OF_LIBRARIES.get(type(trained.model))
    if found is not None:
        return found()
    raise ConfigError(
        f"{trained.name}: neither transformers nor torchvision has {trained.config['_target_']}, so --to hf cannot "
        "write it: use --to safetensors or --to onnx"
    )


def trained_of(checkpoint: Checkpoint, averaged: bool = False) -> Trained:
    """Returns the model of a checkpoint, rebuilt from the configuration of its run."""
    config = config_of(checkpoint)
    choice = Choice.of(config, "model")
    data = Choice.of(config, "data")
    model, sizes = build_model(checkpoint, choice, data, averaged=averaged)
    origin = {
        "stabletrain": stabletrain.__version__,
        "run": checkpoint.info.get("run"),
        "step": checkpoint.step,
        **({"weights": "averaged"} if averaged else {"val_loss": checkpoint.val_loss}),
    }

    def samples() -> Tensor:
        return checked(data.build().batch(0, 2, "val")).transformed().inputs

    return Trained(
        model.eval(),
        {**updated(dict(choice.node)), **sizes},
        choices_in(checkpoint.path.parent.parent),
        {name: str(value) for name, value in origin.items() if value is not None},
        samples,
        reads(data),
        tokenizer_of(data),
    )


def choices_in(folder: Path) -> Mapping[str, str]:
    """Returns the option of each config group that a run folder records; empty if it does not."""
    choices = run_record_or_empty(folder).get("choices", {})
    return {group: option for group, option in choices.items() if option is not None}


def tokenizer_of(data: Choice[Any]) -> str | None:
    """Returns the name of the tokenizer of the run's data; None if the data is not there, or has none."""
    if data.target.startswith("stabletrain.data.text."):
        return "bytes"
    if data.target != "stabletrain.data.tokens.Tokens":
        return None
    try:
        return read_meta(Path(data.node["path"]))["tokenizer"]
    except (ConfigError, OSError, KeyError, TypeError):
        return None


def reads(data: Choice[Any]) -> str:
    """Returns how the run's data makes inputs of images; empty for other data."""
    node = data.node
    if node.get("modality") != "images":
        return ""
    numbers = f", data.mean={node['mean']} and data.std={node['std']}" if {"mean", "std"} <= node.keys() else ""
    return f"inputs are images as the run's data normalises them: (pixels / 255 - mean) / std of each channel{numbers}"


def report(folder: Path, checkpoint: Checkpoint, written: Written, averaged: bool = False) -> str:
    """Returns what the command prints: what was written, from where, and how to load it."""
    loss = "" if checkpoint.val_loss is None else f", val loss {checkpoint.val_loss:.4g}"
    loss = ", the averaged weights" if averaged else loss
    health = "" if checkpoint.healthy else " (NOT healthy: its weights or the steps before it are suspect)"
    place = near(folder)
    lines: list[tuple[str, Any]] = [
        ("wrote", place),
        *(("", f"{file.name}, {shown(file.stat().st_size)}") for file in sorted(folder.iterdir())),
        ("from", f"{near(checkpoint.path)}{loss}{health}"),
        ("checked", written.checked or "not compared: the library that loads it is not installed here"),
        *(("" if number else "load", line.replace("{folder}", place)) for number, line in enumerate(written.load)),
        *(("note", note) for note in written.notes),
    ]
    return "\n".join(f"{label:<9}{text}" for label, text in lines)


def near(path: Path) -> str:
    """Returns a path as the user would type it: relative to the working folder if it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def shown(size: int) -> str:
    """Returns a number of bytes for people."""
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


EXPORT_FILES = {
    "config.json",
    "generation_config.json",
    "model.onnx",
    "model.onnx.data",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
"""The files that exports write."""


def check_place(path: Path, *, overwrite: bool) -> None:
    """Raises ConfigError if an export may not be written to `path`; names the reason and what to do."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise ConfigError(f"--out {path} is a file or a link, not a folder: name a new folder")
    there = sorted(os.listdir(path))
    if foreign := [name for name in there if name not in EXPORT_FILES or not (path / name).is_file()]:
        raise ConfigError(
            f"--out {path} holds other files ({foreign[0]}), which are not overwritten: name a new folder"
        )
    if there and not overwrite:
        raise ConfigError(f"--out {path} holds an export already: add --overwrite, or name another folder")


@contextmanager
def new_folder(path: Path, *, overwrite: bool = False) -> Generator[Path, None, None]:
    """Yields an empty hidden folder; it gets the name `path` if nothing is raised, and is removed otherwise.

    Raises:
        ConfigError: `path` may not be written, see `check_place`.
        OSError: the disk is full, or the place is read-only.
    """
    check_place(path, overwrite=overwrite)
    own = secrets.token_hex(4)  # so that two exports to one place do not meet
    hidden, older = (path.parent / f".{path.name}.{own}.{kind}" for kind in ("partial", "older"))
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden.mkdir()
    try:
        yield hidden
        mode = hidden.stat().st_mode & 0o666  # the user's umask; some libraries make files that only the owner reads
        for file in hidden.iterdir():
            file.chmod(mode)
            sync(file)
        sync(hidden)
        check_place(path, overwrite=overwrite)  # another export may have finished in the meantime
        if path.exists():
            path.rename(older)
        hidden.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        if older.exists() and not path.exists():
            older.rename(path)
        shutil.rmtree(older, ignore_errors=True)
