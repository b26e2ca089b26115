"""Where runs lie: below the folders that a person names."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from stabletrain.errors import ConfigError

SIGNS = ("run.json", "metrics.jsonl", ".hydra")
"""What makes a folder a run's: one of these; a run that was refused before it began has `.hydra` only."""


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run folders that these are, or that lie below them, each once; 2 comes before 10.

    Nothing is looked for inside a run's folder, so its checkpoints cost no time.

    Raises:
        ConfigError: a folder is not there, or holds no run.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            what = "is no folder" if folder.exists() else "is not there"
            raise ConfigError(f"{folder} {what}: name a run folder or a sweep's, such as multirun/<date>/<time>")
        runs = sorted(below(folder, set()), key=lambda run: [natural(part) for part in run.parts])
        if not runs:
            raise ConfigError(f"{folder}: there is no run here: name a run folder or a sweep's, multirun/<date>/<time>")
        for run in runs:
            found.setdefault(os.path.realpath(run), run)
    return [*found.values()]


def below(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """The run folders at or below one; what cannot be listed is passed over, and a circle of links walked once."""
    try:
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in seen:
            return
        seen.add((here.st_dev, here.st_ino))
        with os.scandir(folder) as entries:
            inside = {entry.name: entry.is_dir() for entry in entries}
    except OSError:
        return
    if any(sign in inside for sign in SIGNS):
        yield folder
        return
    for name, is_folder in inside.items():
        if is_folder and not name.startswith("."):
            yield from below(folder / name, seen)


def natural(name: str) -> tuple[int, str]:
    """Sorts 2 before 10."""
    return (int(name), "") if name.isdecimal() else (10**9, name)
