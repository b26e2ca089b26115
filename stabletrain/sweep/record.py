"""`sweep.json`: which runs a sweep's folder is for; and which of them are over, by their own `run.json`.

A run is over when it has a result: it finished, or the guard halted it. Started again in the same folder, a sweep runs
what is not.
"""

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stabletrain.arguments import Arguments, key_of, recorded, take_apart
from stabletrain.errors import ConfigError
from stabletrain.sweep.grid import Grid
from stabletrain.tracking.metrics import replace
from stabletrain.tracking.run import RunFolder

OVER = ("finished", "halted")
"""Statuses of a run that has a result."""

NAME = "sweep.json"


class Sweep(NamedTuple):
    """A sweep as its folder knows it.

    Attributes:
        folder: its own, above those of its runs.
        command: the command line of this start.
        runs: overrides of each run; None where they are chosen one by one.
        varies: the keys that differ between them.
        count: of the runs; None where that is not known.
        launcher: Hydra's, `basic` where one run follows the other.
        began: this start, in seconds since 1970.
    """

    folder: Path
    command: str
    runs: list[list[str]] | None
    varies: list[str]
    count: int | None
    launcher: str
    began: float

    def varied(self, overrides: Sequence[str]) -> str:
        """What of a run's overrides tells it from the others, long numbers to four digits."""
        return " ".join(shortened(override) for override in overrides if key_of(override) in self.varies)

    def records(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and `run.json` of the runs that have begun, by number."""
        files = sorted(self.folder.rglob("run.json"), key=lambda file: (len(file.parent.name), str(file.parent)))
        return [(str(file.parent.relative_to(self.folder)), RunFolder(file.parent).read()) for file in files]


def shortened(override: str) -> str:
    """`optimizer.lr=0.00443` for `optimizer.lr=0.004430375245218269`."""
    key, _, value = override.partition("=")
    try:
        return f"{key}={float(value):.4g}" if len(value) > 8 and "." in value else override
    except ValueError:
        return override


def begin(folder: Path, typed: Arguments, grid: Grid) -> Sweep:
    """Writes the record of a sweep that starts, or starts again.

    Args:
        folder: the sweep's.
        typed: its command line.
        grid: what it will run.

    Raises:
        ConfigError: the folder holds runs of another sweep, or cannot be written.
    """
    launcher = str(grid.cfg.hydra.runtime.choices.get("hydra/launcher"))
    sweep = Sweep(folder, shlex.join(sys.orig_argv), grid.runs, grid.varies, grid.count, launcher, time.time())
    for name, record in sweep.records():
        belongs(sweep, name, record)
    kept = [o for o in typed.overrides if key_of(o) not in ("resume", "hydra.sweep.dir", "hydra.output_subdir")]
    fields = sweep._asdict() | {"folder": str(folder), "options": typed.options, "overrides": kept}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace(folder / NAME, json.dumps(fields, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"hydra.sweep.dir={folder} cannot be written ({error}): mend that, or choose another hydra.sweep.dir"
        ) from error
    return sweep


def belongs(sweep: Sweep, name: str, record: Mapping[str, Any]) -> None:
    """Refuses a run that lies in the folder and is not one of the sweep's, in its place.

    Raises:
        ConfigError: says what lies there.
    """
    if sweep.runs is None or not record.get("overrides"):
        return
    its = take_apart([str(override) for override in record["overrides"]]).own()
    planned = [take_apart(run).own() for run in sweep.runs]
    if (its not in planned) if not name.isdecimal() else (planned[int(name) : int(name) + 1] != [its]):
        raise ConfigError(
            f"hydra.sweep.dir={sweep.folder} holds another sweep: its run {name} is {' '.join(its) or 'the default'}, "
            "which is not that run of this command: choose another hydra.sweep.dir"
        )


def read(folder: Path) -> Sweep | None:
    """The sweep of a folder; None where there is no record of one."""
    try:
        fields = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return Sweep(folder, *(fields[name] for name in Sweep._fields[1:]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def over(folder: Path, overrides: Sequence[str], steps: int, statuses: Sequence[str] = OVER) -> dict[str, Any] | None:
    """The `run.json` of the run in a folder, where these very overrides were run there and it is over.

    Args:
        folder: the run's.
        overrides: of the run that is to be there.
        steps: that it is to have; a finished run with fewer is not over.
        statuses: that count as over.
    """
    record = RunFolder(folder).read()
    if record.get("status") not in statuses or not record.get("id"):
        return None
    if recorded(folder).own() != take_apart([*overrides]).own():
        return None
    if record["status"] == "finished" and record.get("final", {}).get("steps", 0) < steps:
        return None
    return record


def refuse_another(folder: Path, overrides: Sequence[str]) -> None:
    """Refuses to go on with a run of other overrides, which a search may come to that proposes anew.

    Raises:
        ConfigError: says what lies there.
    """
    record = RunFolder(folder).read()
    its, this = recorded(folder).own(), take_apart([*overrides]).own()
    if record.get("id") and its != this:
        there, here = ([o for o in one if o not in other] for one, other in ((its, this), (this, its)))
        raise ConfigError(
            f"hydra.sweep.dir={folder.parent} holds another sweep: its run {folder.name} is {' '.join(there)}, here it "
            f"would be {' '.join(here)}: choose another hydra.sweep.dir (a search goes on only under the "
            "hydra.sweeper.sampler.seed it began with)"
        )
