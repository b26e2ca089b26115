"""Reads a file of a folder that may hold anything."""

import errno
import os
import stat
from pathlib import Path


def read_file(path: Path) -> bytes:
    """Returns the content of a file.

    Raises:
        OSError: it cannot be read, or is a pipe, a device or a folder: reading a pipe could block forever.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
        return file.read()


def read_words(path: Path) -> str:
    """Returns the content of a file as text, in which bytes that are no UTF-8 are replaced; see `read_file`."""
    return read_file(path).decode("utf-8", errors="replace")
