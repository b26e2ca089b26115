"""What this user trusts of the code that recorded files name, and whether a record is among it.

Each trusted record is an empty file in the user's state directory, named by the hash of the record.
"""

import hashlib
import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import Any

from stabletrain.errors import ConfigError

OPTION = "--trust"
"""The option of commands by which a user accepts what a folder from elsewhere names."""

_ACCEPTS: ContextVar[bool] = ContextVar("accepts", default=False)


@contextmanager
def accepting(accepts: bool = True) -> Generator[None]:
    """A context in which checks remember what they would refuse, if the user has asked for it."""
    token = _ACCEPTS.set(accepts)
    try:
        yield
    finally:
        _ACCEPTS.reset(token)


def state_folder() -> Path:
    """Returns the folder whose files name what is trusted: below `XDG_STATE_HOME`, or `~/.local/state`."""
    home = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(home) / "stabletrain" / "trusted"


def remember(record: Any) -> None:
    """Trusts a record from now on; where the state directory cannot be written, it stays unknown.

    Args:
        record: plain values, as they are read from its file.
    """
    folder = state_folder()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / digest(record)).touch()


def is_remembered(record: Any) -> bool:
    """Returns whether this user has made a record, or trusts it."""
    return (state_folder() / digest(record)).exists()


def digest(record: Any) -> str:
    """Returns the SHA-256 of a record, which is the same for the same values in the same order."""
    return hashlib.sha256(json.dumps(record, default=str).encode()).hexdigest()


def check_trusted(record: Any, named: str, file: Path) -> None:
    """Checks that what a recorded file names may be used.

    Args:
        record: what the user must have made or trusted.
        named: what the record names that is neither this package's nor PyTorch's; empty if there is nothing.
        file: that holds it.

    Raises:
        ConfigError: the record names something, and is not of this user.
    """
    if not named or is_remembered(record):
        return
    if _ACCEPTS.get():
        remember(record)
    else:
        raise ConfigError(
            f"{file} names {named}, which is not part of stabletrain and could run any code, and no run of yours has "
            f"recorded it; fix: if you know where the folder comes from, add {OPTION}, which is remembered"
        )


PARTS = ("checkpoints", "incidents", "whatif", "export", "wandb", ".hydra")
"""Folders in a run folder into which commands write."""


def links_out(run: Path) -> Iterator[tuple[Path, Path]]:
    """Yields each link in the parts of a run folder that leads out of it, and where it leads."""
    here = run.resolve()
    for part in PARTS:
        below = ((Path(place) / name for name in (*folders, *files)) for place, folders, files in os.walk(run / part))
        # W&B writes into new folders only, and makes such links itself, to the logs of its own process.
        passed = (run / part).is_symlink() or part == "wandb"
        for path in (run / part, *(() if passed else chain.from_iterable(below))):
            if path.is_symlink() and not (target := Path(os.path.realpath(path))).is_relative_to(here):
                yield path, target


def remember_links(run: Path) -> None:
    """Trusts the links that this user has made in a run folder before the run began, such as one to a larger disk."""
    for _, target in links_out(run):
        remember(["link", str(target)])


def check_links(run: Path) -> None:
    """Checks that nothing is written out of a run folder through a link in it.

    Raises:
        ConfigError: a link leads out of the folder, and the user has neither made it before the run nor trusts it.
    """
    for path, target in links_out(run):
        link = ["link", str(target)]
        if not is_remembered(link) and not _ACCEPTS.get():
            raise ConfigError(
                f"{path} is a link to {target}, where files would be written and deleted; fix: delete the link, or add "
                f"{OPTION} if you have made it, which is remembered"
            )
        remember(link)
