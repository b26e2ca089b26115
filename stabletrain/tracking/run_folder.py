"""The run folder and its `run.json`: what the run is, which machine it uses, and how it ended."""

import errno
import fcntl
import json
import os
import platform
import secrets
import string
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any

from stabletrain.errors import ConfigError
from stabletrain.printable import printable, warn
from stabletrain.program import started
from stabletrain.stored.json_files import DamagedFile, MissingFile
from stabletrain.stored.run_files import RUN, read_run_record
from stabletrain.stored.trusted import check_links, remember_links
from stabletrain.tracking.metrics import now, numbers, plain, replace

STATUSES = ("running", "finished", "halted", "preempted", "failed")

PACKAGES = ("stabletrain", "torch", "torchvision", "numpy", "hydra-core", "omegaconf", "safetensors", "wandb")
"""Packages whose versions are recorded."""

EMPTY: Mapping[str, Any] = MappingProxyType({})


def new_id() -> str:
    """Returns a random run id of eight letters and digits."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def check_same_data(earlier: Mapping[str, Any], data: Mapping[str, Any], run: Path) -> None:
    """Checks that a resumed run reads the data it was trained on. Names are not compared: data may be moved.

    Args:
        earlier: the fingerprint that the run recorded; empty for a new run.
        data: the fingerprint now.
        run: the run folder, for the message.

    Raises:
        ConfigError: the fingerprints differ.
    """
    if not earlier:
        return
    differing = [key for key in earlier if key != "name" and key in data and earlier[key] != data[key]]
    if set(earlier) != set(data) and not {"keys"} & (set(earlier) ^ set(data)):
        differing = differing or ["name"]
    if not differing:
        return
    key = next((key for key in differing if key.endswith(("hash", "sha256"))), differing[0])
    then, now = (f"{each.get('name')} ({key} {str(each.get(key))[:12]})" for each in (earlier, data))
    raise ConfigError(
        f"data: {run} was trained on {then}, and this command reads {now}: pass the same data, or start a new run with "
        f"resume=none; to fine-tune on other data: init_from={run}, a new run with a fresh optimizer"
    )


@dataclass(frozen=True)
class Description:
    """What a run is, as its first start records it.

    Attributes:
        choices: option chosen in each config group.
        hardware: the machine.
        data: fingerprint of the data set.
        model: number of parameters, and FLOPs.
        init_from: the weights that the run began with; empty if its own. A resumed run keeps the first record.
        options, overrides: the command line. A resumed run keeps those of its first start, by which `resume=auto`
            recognizes it.
        start: what this start uses: the number of GPUs, as `gpus`, and more.
    """

    choices: Mapping[str, Any]
    hardware: Mapping[str, Any]
    data: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    init_from: Mapping[str, Any] = field(default_factory=dict)
    options: Sequence[str] = ()
    overrides: Sequence[str] = ()
    start: Mapping[str, Any] = field(default_factory=dict)


class NoRunFolder:
    """Records nothing: for all ranks except the main process. Base class, and what each must offer.

    Attributes:
        id: eight letters and digits, which a resumed run keeps; empty before `start`.
        init_from: the weights that the run began with; see `Description`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = ""
        self.init_from: Mapping[str, Any] = EMPTY

    def start(self, about: Description, *, resuming: bool, run_id: str | None = None) -> str:
        """Claims the folder and begins the record; returns the id of the run. This one does nothing.

        Args:
            about: what the run is.
            resuming: whether to continue the run in the folder, if there is one, with its id and start time.
            run_id: the id of a resumed run whose folder has lost its `run.json`.

        Raises:
            ConfigError: the folder contains a run that this one does not continue, another process uses the folder, or
                it cannot be written.
        """
        return self.id

    def abandon(self, reason: str) -> None:
        """Ends a run that failed to start. Does nothing."""

    def learn(self, hardware: Mapping[str, Any]) -> None:
        """Adds to the record of the machine. Does nothing."""

    def change(self, step: int, keys: Mapping[str, Any], *, on_top: bool = False) -> None:
        """Records the settings that a run has changed by resuming after `step` steps. Does nothing.

        Args:
            keys: configuration keys, each as `[before, now]`; empty if nothing has changed.
            on_top: whether the checkpoint of `step` has the changes that are recorded for `step` already. If not, these
                are dropped: the run is resumed from `step` once more, and otherwise.
        """

    def went_back(self, step: int) -> None:
        """Dates changes of later steps to `step`: the steps after it are run again. Does nothing."""

    def finish(self, status: str, reason: str | None, final: Mapping[str, Any], remarks: Sequence[str] = ()) -> None:
        """Records how the run ended. Does nothing.

        Args:
            status: finished, halted, preempted or failed.
            reason: one line for the user, or None.
            final: the last metrics; NaN and infinities as in `metrics.jsonl`.
            remarks: what else to know of a finished run, a line each. Unlike `reason` they do not mean
                that something is left to do.
        """


class RunFolder(NoRunFolder):
    """Writes `run.json`, atomically, and locks the run folder while the run is active."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._record: dict[str, Any] = {}
        self._earlier: dict[str, Any] = {}
        self._locks: list[int] = []
        self._began = 0.0

    def start(self, about: Description, *, resuming: bool, run_id: str | None = None) -> str:
        """Writes `run.json` with status `running`; returns the id of the run."""
        earlier = self._claim_for(resuming)
        try:
            check_same_data(earlier.get("data", {}), about.data, self.path)
            # A link is the user's own if it was there before any run; a record may be missing.
            begun = self._holds_run(earlier) or any(self.path.glob("checkpoints/step-*"))
            check_links(self.path) if begun else remember_links(self.path)
        except ConfigError:
            self._release()
            raise
        self.id = earlier.get("id") or run_id or new_id()
        self.init_from = about.init_from or earlier.get("init_from", EMPTY)
        time, self._began = now(), monotonic()
        starts = [*earlier_starts(earlier, self.path), {"time": time, "host": platform.node(), **about.start}]
        self._record = {
            "id": self.id,
            "status": "running",
            "reason": None,
            "started": earlier.get("started") or time,
            "resumed": [*(earlier.get("resumed") or []), time] if earlier.get("id") else [],
            "ended": None,
            "git": git(Path(__file__).parents[2]),
            "choices": dict(about.choices),
            "hardware": dict(about.hardware),
            "versions": versions(),
            "data": dict(about.data),
            "model": dict(about.model),
            **({"init_from": dict(self.init_from)} if self.init_from else {}),
            "options": earlier.get("options", list(about.options)),
            "overrides": earlier.get("overrides", list(about.overrides)),
            **({"changes": earlier["changes"]} if "changes" in earlier else {}),
            "command": started().command,
            "host": platform.node(),
            "pid": os.getpid(),
            "starts": starts,
            **spent(starts),
            "final": {},
        }
        self._earlier = earlier
        try:
            self._write()
        except OSError as error:
            self._release()
            raise self._unwritable(error) from error
        return self.id

    def _claim_for(self, resuming: bool) -> dict[str, Any]:
        """Creates and locks the folder; returns its existing `run.json`."""
        try:
            str(self.path).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"hydra.run.dir={printable(str(self.path))} is no valid UTF-8, so the run's records could not name it: "
                "choose another hydra.run.dir"
            ) from error
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            earlier = self._earlier_record()
            self._claim(earlier)
        except OSError as error:
            raise self._unwritable(error) from error
        if not resuming and self._holds_run(earlier):
            self._release()
            raise ConfigError(
                f"hydra.run.dir={self.path} already holds run {earlier.get('id')} ({earlier.get('status')}): continue "
                "it with resume=auto, or choose another hydra.run.dir"
            )
        return earlier

    def _holds_run(self, earlier: Mapping[str, Any]) -> bool:
        """Returns whether a run was started in the folder: its `run.json` says so, or it has metrics."""
        metrics = self.path / "metrics.jsonl"
        return bool(earlier.get("id") or (metrics.is_file() and metrics.stat().st_size))

    def _earlier_record(self) -> dict[str, Any]:
        """Returns the existing `run.json`; empty if there is none. Warns about a damaged one."""
        if (self.path / RUN).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.path / RUN))
        record, damage = usable_record(self.path)
        if damage is not None and not isinstance(damage, MissingFile):
            warn(f"{damage}: the damaged parts are written again")
        return record

    def learn(self, hardware: Mapping[str, Any]) -> None:
        """Adds to the record of the machine; `finish` writes it."""
        self._record["hardware"] |= hardware

    def change(self, step: int, keys: Mapping[str, Any], *, on_top: bool = False) -> None:
        """Records changed settings.

        Changes of later steps are dropped: they belong to steps that the run has gone back from.
        """
        earlier = self._record.get("changes", [])
        changes = [change for change in earlier if change["step"] < step + on_top]
        changes += [{"step": step, "keys": dict(keys)}] if keys else []
        if changes != earlier:
            self._record["changes"] = changes
            self._write_or_warn()

    def went_back(self, step: int) -> None:
        """Dates changes of later steps to `step`: the steps after it are run again, with the present settings."""
        earlier = self._record.get("changes", [])
        keys: dict[str, list[Any]] = {}
        for change in earlier:
            for key, (before, after) in change["keys"].items() if change["step"] > step else ():
                keys[key] = [keys.get(key, [before])[0], after]
        self.change(step, {key: pair for key, pair in keys.items() if pair[0] != pair[1]}, on_top=True)

    def abandon(self, reason: str) -> None:
        """Ends a run that failed to start: restores the record of the run it was to continue, or records `failed`."""
        if self._earlier.get("id"):
            self._record = self._earlier
            self._write_and_release()
        else:
            self.finish("failed", reason, {})

    def finish(self, status: str, reason: str | None, final: Mapping[str, Any], remarks: Sequence[str] = ()) -> None:
        """Writes how the run ended."""
        assert status in STATUSES[1:], status
        self._record |= {"status": status, "reason": reason, "ended": now(), "final": dict(final)}
        self._record["remarks"] = [*remarks]
        if starts := self._record.get("starts"):
            used = {name.removeprefix("gpu/"): value for name, value in final.items() if name.startswith("gpu/")}
            starts[-1] |= {"hours": (monotonic() - self._began) / 3600, **used}
            self._record |= spent(starts)
        self._write_and_release()

    def _write_and_release(self) -> None:
        self._write_or_warn()
        self._release()

    def _write_or_warn(self) -> None:
        try:
            self._write()
        except OSError as error:  # the run itself goes well, so only warn
            warn(f"{self.path / 'run.json'} still says running ({error})")

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"hydra.run.dir={self.path} cannot be written ({error}): fix that, or choose another hydra.run.dir"
        )

    def _claim(self, earlier: Mapping[str, Any]) -> None:
        """Locks the folder for this process. The system releases it when the process ends or is killed.

        Locks the folder itself too: the file may be deleted while the run lives. NFS locks only files.
        """
        self._locks = [
            os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644),
            os.open(self.path, os.O_RDONLY),
        ]
        for lock in self._locks:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._release()
                raise ConfigError(
                    f"hydra.run.dir={self.path} is in use by process {earlier.get('pid')} on {earlier.get('host')}: "
                    "wait for it, stop it, or choose another hydra.run.dir"
                ) from None
            except OSError:  # the file system does not support locks
                pass

    def _release(self) -> None:
        while self._locks:
            os.close(self._locks.pop())

    def __del__(self) -> None:
        self._release()

    def read(self) -> dict[str, Any]:
        """Returns what can be used of `run.json`; empty if it cannot be read."""
        return usable_record(self.path)[0]

    def _write(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        replace(self.path / "run.json", json.dumps(plain(self._record), allow_nan=False, indent=2) + "\n")


def earlier_starts(record: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Returns the starts of a run so far. One that was killed has lasted until the last line of its metrics."""
    starts = [{**start} for start in record.get("starts", [])]
    if starts and "hours" not in starts[-1]:
        with suppress(OSError, ValueError):  # no step was logged, or the record is damaged
            began = datetime.fromisoformat(starts[-1]["time"]).timestamp()
            starts[-1]["hours"] = max((folder / "metrics.jsonl").stat().st_mtime - began, 0) / 3600
    return starts


def spent(starts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns `gpu_hours`, summed over the starts that have ended; empty without GPUs."""
    hours = sum(start.get("gpus", 0) * start.get("hours", 0) for start in starts)
    return {"gpu_hours": hours} if hours else {}


def usable_record(folder: Path) -> tuple[dict[str, Any], DamagedFile | None]:
    """Returns what can be used of the `run.json` in a folder, and what is wrong with it."""
    try:
        return numbers(dict(read_run_record(folder))), None
    except DamagedFile as error:
        return numbers(error.usable), error


def git(checkout: Path) -> dict[str, Any] | None:
    """Returns the commit of a git checkout, and whether tracked files differ from it; None if it is not a checkout."""
    if not (checkout / ".git").exists():
        return None  # it may be installed inside the checkout of another project
    command = [
        "git",
        "-C",
        str(checkout),
        "status",
        "--porcelain=v2",
        "--branch",
        "--untracked-files=no",
        "--no-ahead-behind",
    ]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    headers = dict(line.removeprefix("# ").split(maxsplit=1) for line in told if line.startswith("# "))
    if headers.get("branch.oid", "(initial)") == "(initial)":
        return None  # a branch without a commit
    return {"commit": headers["branch.oid"], "dirty": any(not line.startswith("#") for line in told)}


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of `PACKAGES`; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:  # a loaded module says more than its metadata: torch's version names its CUDA build
            found[package] = str(getattr(sys.modules.get(package), "__version__", None) or version(package))
        except PackageNotFoundError:
            found[package] = None
    return found
