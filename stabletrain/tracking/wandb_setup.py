"""How a run is filed in Weights & Biases, and whether its server can be reached.

Whether Weights & Biases will let us in: is there a key, and does its server answer. Nobody is ever asked for one.

Where a run is filed in Weights & Biases when nobody says: its group, its name, its job type, its tags.

The group is the sweep, so that its runs stand together; the name is what was typed for the run, so that legends can be
read; the job type is the card; the tags are the options of the config groups, `precision:bf16`.
"""

import netrc
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stabletrain.errors import ConfigError

PATIENCE = 10.0
"""Seconds after which a server that does not answer counts as out of reach; the library itself would wait for days."""


def check_reach() -> None:
    """Refuses at once what would fail after hours.

    Raises:
        ConfigError: wandb is not installed, there is no key, or the server does not answer.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(f"wandb cannot be loaded ({error}): pip install 'wandb>=0.31'") from error
    if not has_key(wandb):
        raise ConfigError("no API key was found: log in once with `wandb login`, or set WANDB_API_KEY")
    url = wandb.setup(settings=wandb.Settings(silent=True)).settings.base_url
    try:
        urllib.request.urlopen(url, timeout=PATIENCE).close()
    except urllib.error.HTTPError as answer:  # it is there, and that is enough
        answer.close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"{url} cannot be reached ({reason}): run this where there is a network, such as on a login node"
        ) from error


def has_key(wandb: Any) -> bool:
    """Whether the library will find credentials without asking for them: environment, its settings, or ~/.netrc."""
    settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
    if os.environ.get("WANDB_API_KEY") or settings.api_key or getattr(settings, "identity_token_file", None):
        return True
    hosts = {urlsplit(settings.base_url).netloc}
    if settings.base_url == type(settings).model_fields["base_url"].default:
        hosts.add("api.wandb.ai")  # under which `wandb login` has always filed the key
    for path in [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            if path and hosts & netrc.netrc(os.path.expanduser(path)).hosts.keys():
                return True
    return False


LONGEST_NAME = 128
"""Characters that W&B takes in a group or a name."""

LONGEST_TAG = 64
"""Characters that W&B takes in a tag; a longer one is refused with the whole run."""

DATE, TIME = re.compile(r"\d{4}-\d\d-\d\d"), re.compile(r"\d\d-\d\d-\d\d")


def sweep_of(folder: Path, sweeping: bool) -> str | None:
    """The name of the sweep that a run folder is part of, None for a single run.

    Where the path has Hydra's date and time, `multirun/2026-11-21/16-45-39/3`, these are the name,
    `2026-11-21_16-45-39`, also if there is a folder for each card between them and the run; elsewhere it is the name of
    the folder above the run's.

    Args:
        folder: of the run.
        sweeping: whether Hydra says so; a job of a Slurm array does not know it, but has `multirun.yaml` above it.
    """
    if not sweeping and not (folder.parent / "multirun.yaml").exists():
        return None
    parts = folder.absolute().parts[:-1]
    for date, time in reversed([*pairwise(parts)]):
        if DATE.fullmatch(date) and TIME.fullmatch(time):
            return f"{date}_{time}"
    return parts[-1][:LONGEST_NAME]


def name_of(folder: Path, typed: Sequence[str]) -> str:
    """A name for a run of a sweep: its number and what is its own, `3 stability=qknorm optimizer.lr=0.1`.

    Args:
        folder: of the run.
        typed: its overrides. Left out are those that stand in the sweep's `multirun.yaml` as they are, for all its runs
            have them, and those that say where to file it, or are Hydra's.
    """
    try:
        lines = (folder.parent / "multirun.yaml").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    shared = {line.strip()[2:].strip("'\"") for line in lines if line.strip().startswith("- ")}
    said = [override for override in typed if override not in shared]
    said = [override for override in said if not override.lstrip("+~").startswith(("wandb", "hydra"))]
    return " ".join([folder.name, *said])[:LONGEST_NAME]


def tags_of(choices: Mapping[str, Any], own: Iterable[str] = ()) -> list[str]:
    """The user's own tags, then `group:option` for each config group, each once and no longer than W&B takes.

    `wandb` itself is left out, and so are groups for which no option was chosen.
    """
    options = [f"{group}:{option}" for group, option in choices.items() if group != "wandb" and option is not None]
    return [*dict.fromkeys(tag[:LONGEST_TAG] for tag in [*own, *options] if tag)]


def card_of(hardware: Mapping[str, Any]) -> str:
    """The card's product name, or `cpu`."""
    return str(hardware.get("name") or "cpu")[:LONGEST_TAG]
