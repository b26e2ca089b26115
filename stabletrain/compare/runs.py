"""Finished runs as they lie in their folders: what was varied between them, and what came of each."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stabletrain.errors import ConfigError
from stabletrain.tracking.metrics import read_jsonl


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        folder: where it lies.
        record: its `run.json`.
        overrides: what was typed for it, key to value, later ones winning.
        metrics: the lines of its `metrics.jsonl`, NaN and infinities as floats, without those that were rolled back.
        abandoned: those that were.
    """

    folder: Path
    record: dict[str, Any]
    overrides: dict[str, str]
    metrics: list[dict[str, Any]]
    abandoned: list[dict[str, Any]] = field(default_factory=list)

    def first(self, name: str) -> float | None:
        """The first value logged under `name`."""
        return next((line[name] for line in self.metrics if name in line), None)

    def last(self, name: str) -> float | None:
        """The last value logged under `name`."""
        return next((line[name] for line in reversed(self.metrics) if name in line), None)

    def values(self, prefix: str) -> list[float]:
        """Every value logged under `prefix`, or under a name that continues it after a slash."""
        return [
            value
            for line in self.metrics
            for name, value in line.items()
            if name == prefix or name.startswith(f"{prefix}/")
        ]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in these folders: each is a run's own, or one of a sweep, or one above several of them.

    Raises:
        ConfigError: a folder holds no run.
    """
    runs = []
    for folder in folders:
        files = sorted(folder.rglob("run.json"), key=lambda file: (str(file.parent.parent), natural(file.parent.name)))
        if not files:
            raise ConfigError(f"{folder}: there is no run here: name a run folder or a sweep's, multirun/<date>/<time>")
        runs += [read_run(file.parent) for file in files]
    return runs


def read_run(folder: Path) -> Run:
    """The run of one folder."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{folder / 'run.json'} cannot be read ({error}): leave this run out") from error
    overrides = {}
    for override in record.get("overrides", []):
        key, _, value = override.lstrip("+").partition("=")
        overrides[key] = value
    lines = read_jsonl(folder / "metrics.jsonl")
    kept, abandoned = ([line for line in lines if bool(line.get("rolled_back")) is gone] for gone in (False, True))
    return Run(folder, record, overrides, kept, abandoned)


def natural(name: str) -> tuple[int, str]:
    """Sorts 2 before 10."""
    return (int(name), "") if name.isdecimal() else (10**9, name)


def varied(runs: Sequence[Run]) -> list[str]:
    """The keys whose values differ between the runs, in the order in which they were typed."""
    keys = dict.fromkeys(key for run in runs for key in run.overrides)
    return [key for key in keys if len({run.overrides.get(key) for run in runs}) > 1]
