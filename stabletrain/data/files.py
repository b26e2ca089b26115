"""Finds the text files of a path, and reads the manifest of token shards. Does not import torch.

`stabletrain prepare` writes the manifest; `data=tokens` reads it.

meta.json     {"version", "tokenizer", "vocab_size", "dtype", "splits": {"train": [{"file", "tokens"}], "val": ...}}
*.bin         raw little-endian token ids of that dtype
"""

import glob
import os
from pathlib import Path
from typing import Any, TypedDict

from stabletrain.errors import ConfigError, closest
from stabletrain.stored.json_files import Count, DamagedFile, MissingFile, read_record

GLOB_CHARACTERS = frozenset("*?[")
SNIFFED_BYTES = 8000  # bytes that git reads to tell text from binary


def required(path: str | None, option: str, what: str) -> str:
    """Returns the key `data.path`; raises ConfigError if it is not set, or empty, which would be the working folder."""
    if not path:
        raise ConfigError(f"data.path is not set: {option} needs data.path=<{what}>")
    return path


def existing(path: str, name: str) -> Path:
    """Returns `path` as a Path; expands `~`.

    Args:
        path: the user's value.
        name: the user's key, such as `data.path`, for errors.

    Raises:
        ConfigError: the path does not exist; the message suggests the nearest one that does.
    """
    found = Path(path).expanduser()
    if found.exists():
        return found
    folder = found.parent
    missing = found.name
    while not folder.is_dir() and folder != folder.parent:
        folder, missing = folder.parent, folder.name
    near = closest(missing, sorted(os.listdir(folder)) if folder.is_dir() else [])
    hint = f"did you mean {folder / near}?" if near else f"the nearest folder that exists is {folder.absolute()}"
    raise ConfigError(f"{name}={path} does not exist: {hint}")


def find_text(path: str, name: str) -> tuple[Path, list[str]]:
    """Finds the text files of a path.

    A file is taken as it is. A folder or a glob (`**` matches any depth) gives all files in it that are not empty and
    are text by git's rule: no NUL among the first 8000 bytes. In a folder, hidden names and `__pycache__` are excluded,
    and links to folders are not followed.

    Args:
        path: file, folder or glob.
        name: the user's key, for errors.

    Returns:
        a folder, and the sorted names of the files, relative to that folder and with forward slashes.

    Raises:
        ConfigError: the path does not exist, nothing matches, or a file cannot be read.
    """
    if GLOB_CHARACTERS & set(path) and not os.path.exists(os.path.expanduser(path)):
        pattern = os.path.expanduser(path)
        root = Path(pattern)
        while GLOB_CHARACTERS & set(str(root)):
            root = root.parent
        found = [Path(match) for match in glob.glob(pattern, recursive=True) if os.path.isfile(match)]
    else:
        root = existing(path, name)
        if root.is_file():
            return root.parent, [root.name]
        found = list(files_below(root))
    files = sorted(file.relative_to(root).as_posix() for file in found if looks_like_text(file, name))
    if not files:
        raise ConfigError(
            f"{name}={path} holds no text files ({len(found)} files checked): name a file, folder or glob"
        )
    return root, files


def looks_like_text(file: Path, name: str) -> bool:
    """Whether a file is not empty and its first 8000 bytes hold no NUL.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with file.open("rb") as handle:
            head = handle.read(SNIFFED_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{name}: {file} cannot be read ({error.strerror}): change its permissions or move it"
        ) from None
    return bool(head) and b"\0" not in head


def files_below(root: Path):
    for folder, below, names in os.walk(root):
        below[:] = [n for n in below if not n.startswith(".") and n != "__pycache__"]
        yield from (Path(folder, n) for n in names if not n.startswith(".") and Path(folder, n).is_file())


VERSION = 1
DTYPES = ("uint8", "uint16", "uint32")


class Shard(TypedDict):
    """A file of token ids."""

    file: str
    tokens: Count


class Splits(TypedDict):
    """The shards of each split, in order."""

    train: list[Shard]
    val: list[Shard]


class Meta(TypedDict):
    """The content of `meta.json`, and `version` and `dtype`, which say whether this program can read the shards."""

    tokenizer: str
    vocab_size: Count
    splits: Splits


def read_meta(folder: Path) -> dict[str, Any]:
    """Reads the manifest of a folder of shards.

    Raises:
        ConfigError: it is missing, invalid, or of another version.
    """
    file = folder / "meta.json"
    try:
        meta = read_record(file, Meta)
    except MissingFile:
        raise ConfigError(
            f"data.path={folder} has no meta.json: write the folder with `stabletrain prepare <text> {folder}`, "
            "or use data=text for plain text"
        ) from None
    except DamagedFile as error:
        raise ConfigError(
            f"data.path: {file} is not a manifest of token shards ({error}): prepare the data again"
        ) from None
    if meta.get("version") != VERSION or meta.get("dtype") not in DTYPES:
        raise ConfigError(
            f"data.path: {file} has version {meta.get('version')} and dtype {meta.get('dtype')}, "
            f"but this program reads version {VERSION} with dtype {', '.join(DTYPES)}: prepare the data again"
        )
    return dict(meta)
