"""Defaults for a run on Weights & Biases (W&B), and checks that its server can be used.

By default, the group of a run is its sweep, its name is its overrides, its job type is the card, and its tags are the
options of the config groups, such as `precision:bf16`. The checks never ask the user for an API key.
"""

import netrc
import os
import re
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stabletrain.errors import ConfigError
from stabletrain.stored.json_files import read_words

PATIENCE = 10.0
"""Seconds to wait for an answer from the server; W&B itself would wait for days."""


def check_reach() -> None:
    """Checks that an upload can work, so that it fails now and not after hours.

    Raises:
        ConfigError: wandb is not installed, there is no key, or the server does not answer.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(f"wandb cannot be imported ({error}): pip install 'wandb>=0.31'") from error
    if not has_key(wandb):
        raise ConfigError("no API key was found: log in once with `wandb login`, or set WANDB_API_KEY")
    url = wandb.setup(settings=wandb.Settings(silent=True)).settings.base_url
    try:
        urllib.request.urlopen(url, timeout=PATIENCE).close()
    except urllib.error.HTTPError as answer:  # any answer shows that the server can be reached
        answer.close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"{url} cannot be reached ({reason}): run this on a machine with a network, such as a login node"
        ) from error


@contextmanager
def cache_folder(instead: Path) -> Generator[None]:
    """A context in which W&B has a cache folder that it can write.

    Without one, as where HOME is not set, W&B's background process would print its log on the terminal.

    Args:
        instead: the folder to use if the user's cannot be written.
    """
    before = os.environ.get("XDG_CACHE_HOME")
    users = Path(before or os.path.join(os.environ.get("HOME") or os.devnull, ".cache"))
    if not writable(users):
        os.environ["XDG_CACHE_HOME"] = str(instead.absolute())
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("XDG_CACHE_HOME", None)
        else:
            os.environ["XDG_CACHE_HOME"] = before


def writable(folder: Path) -> bool:
    """Creates a folder as W&B would; returns whether it can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def has_key(wandb: Any) -> bool:
    """Returns whether W&B will find credentials without a prompt: in the environment, its settings, or ~/.netrc."""
    settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
    if os.environ.get("WANDB_API_KEY") or settings.api_key or getattr(settings, "identity_token_file", None):
        return True
    hosts = {urlsplit(settings.base_url).netloc}
    if settings.base_url == type(settings).model_fields["base_url"].default:
        hosts.add("api.wandb.ai")  # `wandb login` stores the key under this host
    for path in [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            if path and hosts & netrc.netrc(os.path.expanduser(path)).hosts.keys():
                return True
    return False


LONGEST_NAME = 128
"""Maximum number of characters in a W&B group or name."""

LONGEST_TAG = 64
"""Maximum number of characters in a W&B tag; W&B rejects a run with a longer one."""

DATE, TIME = re.compile(r"\d{4}-\d\d-\d\d"), re.compile(r"\d\d-\d\d-\d\d(-\d+)?")


def sweep_of(folder: Path, sweeping: bool) -> str | None:
    """Returns the name of the sweep that a run belongs to, or None for a single run.

    The name is Hydra's date and time: `2026-11-21_16-45-39` for `multirun/2026-11-21/16-45-39/3`, even if there are
    more folders between them and the run. Without date and time in the path, it is the name of the parent folder.

    Args:
        folder: the run folder.
        sweeping: whether Hydra reports a sweep.
    """
    # Hydra reports no sweep to a job of a Slurm array, but `multirun.yaml` is in the parent folder.
    if not sweeping and not (folder.parent / "multirun.yaml").exists():
        return None
    parts = folder.absolute().parts[:-1]
    for date, time in reversed([*pairwise(parts)]):
        if DATE.fullmatch(date) and TIME.fullmatch(time):
            return f"{date}_{time}"
    return parts[-1][:LONGEST_NAME]


def name_of(folder: Path, typed: Sequence[str]) -> str:
    """Returns a name for a run of a sweep: its number and its own overrides, `3 stability=qknorm optimizer.lr=0.1`.

    Args:
        folder: the run folder.
        typed: the overrides. The name omits those that all runs of the sweep have, and those of `wandb` and `hydra`.
    """
    try:
        lines = read_words(folder.parent / "multirun.yaml").splitlines()
    except OSError:
        lines = []
    # Overrides that `multirun.yaml` lists in the same form apply to all runs of the sweep.
    shared = {line.strip()[2:].strip("'\"") for line in lines if line.strip().startswith("- ")}
    said = [override for override in typed if override not in shared]
    said = [override for override in said if not override.lstrip("+~").startswith(("wandb", "hydra"))]
    return " ".join([folder.name, *said])[:LONGEST_NAME]


def tags_of(choices: Mapping[str, Any], own: Iterable[str] = ()) -> list[str]:
    """Returns the user's own tags, then `group:option` for each config group except `wandb`.

    Omits duplicates and groups without a chosen option, and truncates long tags.
    """
    options = [f"{group}:{option}" for group, option in choices.items() if group != "wandb" and option is not None]
    return [*dict.fromkeys(tag[:LONGEST_TAG] for tag in [*own, *options] if tag)]


def card_of(hardware: Mapping[str, Any]) -> str:
    """Returns the product name of the card, or `cpu`."""
    return str(hardware.get("name") or "cpu")[:LONGEST_TAG]
