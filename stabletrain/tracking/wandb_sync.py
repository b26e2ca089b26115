"""`stabletrain sync`: uploads to Weights & Biases what offline runs have kept, a continued run as one.

A run that was continued has a piece for each of its stretches, all under one id. They are uploaded by `wandb sync`, the
oldest first, and told to go on where the uploaded run ends (`WANDB_RESUME=allow`): without that each would begin at the
library's step 0 again, over the one before. The library marks what it has uploaded with a file `*.wandb.synced`; that
is what is believed, for its exit code is 0 also where it failed.
"""

import argparse
import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from stabletrain.errors import ConfigError, StabletrainError
from stabletrain.tracking.wandb_setup import check_reach

TOGETHER = 50
"""Runs that one call of the library uploads: it starts anew for each, and their folders are its command line."""

MISLEADING = ("WANDB_MODE", "WANDB_RUN_ID")
"""Variables that would keep the library offline, or give every run one id."""


class Piece(NamedTuple):
    """What one stretch of a run has kept.

    Attributes:
        folder: `offline-run-<time>-<id>`.
        run: the run folder.
        growing: whether the run may still be writing it.
    """

    folder: Path
    run: Path
    growing: bool

    @property
    def uploaded(self) -> bool:
        """Whether the library has said so."""
        return any(self.folder.glob("*.wandb.synced"))


def pieces(folders: Sequence[Path]) -> list[Piece]:
    """What the runs in these folders have kept, run by run, the oldest piece of each first.

    Args:
        folders: of runs, of sweeps, or above them; none twice, though it may lie in another.

    Raises:
        ConfigError: one is not there.
    """
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise ConfigError(f"{missing[0]} is not a folder: name those of runs or sweeps, such as multirun/<date>/<time>")
    found = {path.resolve(): path for folder in folders for path in folder.rglob("wandb/offline-run-*") if files(path)}
    sorted_paths = sorted(found.values(), key=lambda path: (path.parent, path.name))
    listed = []
    for wandb, group in groupby(sorted_paths, key=lambda path: path.parent):
        run, paths = wandb.parent, [*group]
        growing = is_running(run)
        listed += [Piece(path, run, growing and path == paths[-1]) for path in paths]
    return listed


def files(piece: Path) -> list[Path]:
    """The library's own files in a piece."""
    return [*piece.glob("*.wandb")]


def is_running(run: Path) -> bool:
    """Whether a process is at this run, as far as can be known.

    Its record says so, but that of a killed run does as well: on this machine a process must hold its lock, too. A run
    of another machine is believed.
    """
    try:
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
        if record.get("status") != "running":
            return False
        with open(run / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ValueError, AttributeError):
        return False
    return record.get("host") not in (None, platform.node())


def batches(chosen: Sequence[Piece], runs: int = TOGETHER) -> Iterator[list[Piece]]:
    """The pieces in bundles of so many runs, none of which is divided: the library sorts a run's pieces itself."""
    grouped = [[*group] for _, group in groupby(chosen, key=lambda piece: piece.run)]
    for first in range(0, len(grouped), runs):
        yield [piece for group in grouped[first : first + runs] for piece in group]


def upload(chosen: Sequence[Piece], entity: str | None, project: str | None) -> None:
    """Has the library upload the pieces; which of them it has, their marks say afterwards."""
    command = [sys.executable, "-m", "wandb", "sync"]
    command += ["--entity", entity] if entity else []
    command += ["--project", project] if project else []
    environment = {name: value for name, value in os.environ.items() if name not in MISLEADING}
    subprocess.run(
        [*command, *(str(piece.folder.absolute()) for piece in chosen)],
        env=environment | {"WANDB_RESUME": "allow"},
        stdin=subprocess.DEVNULL,
        check=False,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `stabletrain sync`."""
    default = "; without any: outputs and multirun"
    parser.add_argument("folders", type=Path, nargs="*", help=f"folders of runs or sweeps{default}")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be uploaded")
    parser.add_argument("--all", action="store_true", help="also pieces that look as if a run were still writing them")
    parser.add_argument("--entity", help="upload to this user or team, whatever the runs say")
    parser.add_argument("--project", help="upload to this project, whatever the runs say")


def run(arguments: argparse.Namespace) -> None:
    """Uploads, and says what was done.

    Raises:
        ConfigError: a folder is not there, or nothing can be uploaded from here.
        StabletrainError: some of it was not uploaded.
    """
    folders = arguments.folders or [folder for folder in map(Path, ("outputs", "multirun")) if folder.is_dir()]
    if not folders:
        raise ConfigError("there is neither outputs nor multirun here: name the folders of runs or sweeps")
    found = pieces(folders)
    new = [piece for piece in found if not piece.uploaded]
    chosen = [piece for piece in new if arguments.all or not piece.growing]
    if arguments.dry_run:
        print("".join(f"would upload  {piece.folder}\n" for piece in chosen), end="")
    elif chosen:
        check_reach()
        for bundle in batches(chosen):
            upload(bundle, arguments.entity, arguments.project)
    failed = [] if arguments.dry_run else [piece for piece in chosen if not piece.uploaded]
    for piece in failed:
        print(f"not uploaded  {piece.folder}")
    for piece in new:
        if piece not in chosen:
            print(f"still running {piece.folder} (--all uploads it none the less)")
    done = f"{len(chosen)} to upload" if arguments.dry_run else f"{len(chosen) - len(failed)} uploaded"
    print(f"{done}, {len(new) - len(chosen)} still running, {len(found) - len(new)} uploaded before")
    if failed:
        raise StabletrainError(
            f"{len(failed)} of {len(chosen)} were not uploaded, for the reasons that wandb gives above: fix that, and "
            "run the same command again"
        )
