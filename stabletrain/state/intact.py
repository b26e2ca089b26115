"""A file of a checkpoint, which is what was written, or is refused with its name and the reason."""

import hashlib
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from stabletrain.errors import ConfigError

CHUNK = 1 << 20


class UnusableCheckpoint(ConfigError):
    """A folder that is no checkpoint, or no longer the one that was written; says which file and why."""


def checked(path: Path, name: str, files: Mapping[str, Any]) -> bytes:
    """A file's bytes, which are those that were written."""
    with naming(path, name):
        content = (path / name).read_bytes()
    compare(path, name, files, hashlib.sha256(content).hexdigest())
    return content


def check(path: Path, name: str, files: Mapping[str, Any]) -> None:
    """Reads a file through, whose bytes must be those that were written."""
    size(path, name)  # no pipe, that is
    digest = hashlib.sha256()
    with naming(path, name), open(path / name, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    compare(path, name, files, digest.hexdigest())


def compare(path: Path, name: str, files: Mapping[str, Any], digest: str) -> None:
    if digest != files[name]["sha256"]:
        raise UnusableCheckpoint(f"{path}: {name} does not match its checksum")


def size(path: Path, name: str) -> int:
    """Bytes of a plain file: a pipe or a device in its place could keep its reader for ever."""
    with naming(path, name):
        status = (path / name).stat()
        if not stat.S_ISREG(status.st_mode):
            raise UnusableCheckpoint(f"{path}: {name} is no file")
        return status.st_size


@contextmanager
def naming(path: Path, name: str) -> Generator[None, None, None]:
    """Whatever goes wrong in reading a file says that this is no checkpoint, and names the file: its content is
    anybody's."""
    try:
        yield
    except FileNotFoundError as error:
        raise UnusableCheckpoint(f"{path}: {name} is missing") from error
    except NotADirectoryError as error:
        raise UnusableCheckpoint(f"{path} is a file, not a folder") from error
    except OSError as error:
        raise UnusableCheckpoint(f"{path}: {name} cannot be read ({error.strerror or error})") from error
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
        raise UnusableCheckpoint(f"{path}: {name} does not hold what it should ({type(error).__name__})") from error
