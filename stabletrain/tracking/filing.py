"""Where a run is filed in Weights & Biases when nobody says: its group, its name, its job type, its tags.

The group is the sweep, so that its runs stand together; the name is what was typed for the run, so that legends can be
read; the job type is the card; the tags are the options of the config groups, `precision:bf16`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

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
