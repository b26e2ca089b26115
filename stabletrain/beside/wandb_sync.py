"""`stabletrain sync`: uploads the offline runs in run folders to Weights & Biases (W&B).

A run that was resumed consists of several pieces (offline runs of W&B) with the same id. `wandb sync` uploads them, the
oldest first, as one run.
"""

import argparse
import fcntl
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from stabletrain.errors import ConfigError, StabletrainError
from stabletrain.printable import say
from stabletrain.stored.json_files import DamagedFile
from stabletrain.stored.run_files import read_run_record
from stabletrain.tracking.wandb_setup import check_reach

RUNS_PER_CALL = 50
"""Maximum number of runs per call of `wandb sync`, because all folders go on its command line."""

REMOVED_VARIABLES = ("WANDB_MODE", "WANDB_RUN_ID")
"""Environment variables that would keep W&B offline, or give all runs the same id."""


class Piece(NamedTuple):
    """The offline data that a run wrote after one start: `offline-run-<time>-<id>` in the run folder `run`.

    `growing` is True if the run may still be writing to it.
    """

    folder: Path
    run: Path
    growing: bool

    @property
    def uploaded(self) -> bool:
        """Whether W&B has marked the piece as uploaded."""
        # The exit code of `wandb sync` does not show this: it is 0 even after a failure.
        return any(self.folder.glob("*.wandb.synced"))


def pieces(folders: Sequence[Path]) -> list[Piece]:
    """Returns the pieces of all runs at or below these folders, grouped by run, the oldest piece of each run first.

    Args:
        folders: run folders, sweep folders, or folders that contain them. They may overlap.

    Raises:
        ConfigError: a folder does not exist.
    """
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise ConfigError(f"{missing[0]} is not a folder: name run or sweep folders, such as multirun/<date>/<time>")
    offline = (path for folder in folders for path in folder.rglob("wandb/offline-run-*"))
    found = {path.resolve(): path for path in offline if any(path.glob("*.wandb"))}
    sorted_paths = sorted(found.values(), key=lambda path: (path.parent, path.name))
    listed = []
    for wandb, group in groupby(sorted_paths, key=lambda path: path.parent):
        run, paths = wandb.parent, [*group]
        growing = is_running(run)
        listed += [Piece(path, run, growing and path == paths[-1]) for path in paths]
    return listed


def is_running(run: Path) -> bool:
    """Returns whether a process is still executing this run, as far as this machine can tell.

    The record of a killed run still has the status `running`. A run on this machine must therefore also hold its lock.
    For a run on another machine, the record decides.
    """
    try:
        record = read_run_record(run)
        if record.get("status") != "running":
            return False
        with open(run / ".lock") as lock:  # a running process holds it exclusively
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, DamagedFile):
        return False
    return record.get("host") not in (None, platform.node())


def batches(chosen: Sequence[Piece], runs: int = RUNS_PER_CALL) -> Iterator[list[Piece]]:
    """Yields the pieces in bundles of at most `runs` runs. All pieces of a run are in the same bundle."""
    grouped = [[*group] for _, group in groupby(chosen, key=lambda piece: piece.run)]
    for first in range(0, len(grouped), runs):
        yield [piece for group in grouped[first : first + runs] for piece in group]


def upload(chosen: Sequence[Piece], entity: str | None, project: str | None) -> None:
    """Uploads the pieces with `wandb sync`. Afterwards, `Piece.uploaded` tells which uploads succeeded."""
    command = [sys.executable, "-m", "wandb", "sync"]
    command += ["--entity", entity] if entity else []
    command += ["--project", project] if project else []
    environment = {name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES}
    # WANDB_RESUME=allow appends each piece to the uploaded run; without it, each would overwrite the one before it.
    subprocess.run(
        [*command, *(str(piece.folder.absolute()) for piece in chosen)],
        env=environment | {"WANDB_RESUME": "allow"},
        stdin=subprocess.DEVNULL,
        check=False,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `stabletrain sync`."""
    default = " (default: outputs and multirun)"
    parser.add_argument("folders", type=Path, nargs="*", help=f"run or sweep folders{default}")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be uploaded")
    parser.add_argument("--all", action="store_true", help="also upload pieces that a run may still be writing")
    parser.add_argument("--entity", help="upload to this user or team, not to the one that the runs name")
    parser.add_argument("--project", help="upload to this project, not to the one that the runs name")


def run(arguments: argparse.Namespace) -> None:
    """Uploads the pieces that are not uploaded yet, and prints what was done.

    Raises:
        ConfigError: a folder does not exist, W&B has no API key, or its server does not answer.
        StabletrainError: some pieces were not uploaded.
    """
    folders = arguments.folders or [folder for folder in map(Path, ("outputs", "multirun")) if folder.is_dir()]
    if not folders:
        raise ConfigError("there is neither outputs nor multirun here: name run or sweep folders")
    found = pieces(folders)
    new = [piece for piece in found if not piece.uploaded]
    chosen = [piece for piece in new if arguments.all or not piece.growing]
    if arguments.dry_run:
        say("".join(f"would upload  {piece.folder}\n" for piece in chosen), end="")
    elif chosen:
        check_reach()
        for bundle in batches(chosen):
            upload(bundle, arguments.entity, arguments.project)
    failed = [] if arguments.dry_run else [piece for piece in chosen if not piece.uploaded]
    for piece in failed:
        say(f"not uploaded  {piece.folder}")
    for piece in new:
        if piece not in chosen:
            say(f"still running {piece.folder} (--all uploads it anyway)")
    done = f"{len(chosen)} to upload" if arguments.dry_run else f"{len(chosen) - len(failed)} uploaded"
    say(f"{done}, {len(new) - len(chosen)} still running, {len(found) - len(new)} uploaded before")
    if failed:
        raise StabletrainError(
            f"{len(failed)} of {len(chosen)} were not uploaded; wandb prints the reasons above: fix them, and run the "
            "same command again"
        )
