"""The folder of an export: it appears complete, or not at all.

Files are written under a hidden name beside it, and synchronised to disk; one rename makes the folder appear. A folder
with anything in it is replaced only if the caller says so, and only if it holds nothing but files of an export.
"""

import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from stabletrain.checkpoint.writer import sync
from stabletrain.errors import ConfigError

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
