"""`run.json`: what a run is, on what it ran, and how it ended; written whole or not at all."""

import fcntl
import json
import os
import platform
import secrets
import shlex
import string
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stabletrain.errors import ConfigError
from stabletrain.tracking.metrics import now, numbers, plain, replace, warn

STATUSES = ("running", "finished", "halted", "preempted", "failed")

PACKAGES = ("stabletrain", "torch", "torchvision", "numpy", "hydra-core", "omegaconf", "safetensors", "wandb")
"""Whose versions are recorded."""


NOTHING: Mapping[str, Any] = MappingProxyType({})


def new_id() -> str:
    """A random run id: eight letters and digits."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


class NoRunFolder:
    """Records nothing: what every rank but the first has.

    Attributes:
        path: the folder.
        id: the run's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = ""

    def start(
        self,
        *,
        resuming: bool,
        choices: Mapping[str, Any],
        hardware: Mapping[str, Any],
        data: Mapping[str, Any],
        model: Mapping[str, Any] = NOTHING,
        run_id: str | None = None,
        options: Sequence[str] = (),
        overrides: Sequence[str] = (),
    ) -> str:
        """Nothing is written; returns the run's id."""
        return self.id

    def abandon(self, reason: str) -> None:
        """Nothing is written."""

    def learn(self, hardware: Mapping[str, Any]) -> None:
        """Nothing is written."""

    def finish(self, status: str, reason: str | None, final: Mapping[str, Any]) -> None:
        """Nothing is written."""


class RunFolder(NoRunFolder):
    """A run's folder and its `run.json`.

    Attributes:
        path: the folder.
        id: eight letters and digits, the same for a run and whatever continues it; empty before `start`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._record: dict[str, Any] = {}
        self._earlier: dict[str, Any] = {}
        self._lock: int | None = None

    def start(
        self,
        *,
        resuming: bool,
        choices: Mapping[str, Any],
        hardware: Mapping[str, Any],
        data: Mapping[str, Any],
        model: Mapping[str, Any] = NOTHING,
        run_id: str | None = None,
        options: Sequence[str] = (),
        overrides: Sequence[str] = (),
    ) -> str:
        """Writes `run.json` with status `running`.

        Args:
            resuming: continue the run that the folder holds, if it holds one: same id, same start.
            choices: option chosen in each config group.
            hardware: what it runs on.
            data: fingerprint of the data set.
            model: its number of parameters, and FLOPs.
            run_id: the id to go on under where the folder has lost its `run.json`.
            options, overrides: the command line; those of the first start are kept, since they are what `resume=auto`
                knows the run by.

        Returns:
            the run's id.

        Raises:
            ConfigError: the folder holds a run, and this is not to continue it; another process is at it; or it cannot
                be written.
        """
        earlier = self._claim_for(resuming)
        self.id = earlier.get("id") or run_id or new_id()
        self._record = first_record(self.id, earlier) | {
            "choices": dict(choices),
            "hardware": dict(hardware),
            "versions": versions(),
            "data": dict(data),
            "model": dict(model),
            "options": earlier.get("options", list(options)),
            "overrides": earlier.get("overrides", list(overrides)),
            "command": shlex.join(sys.orig_argv),
            "host": platform.node(),
            "pid": os.getpid(),
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
        """Creates and locks the folder; returns the `run.json` it holds already."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            earlier, metrics = self.read(), self.path / "metrics.jsonl"
            self._claim(earlier)
        except OSError as error:
            raise self._unwritable(error) from error
        if not resuming and (earlier.get("id") or (metrics.is_file() and metrics.stat().st_size)):
            self._release()
            raise ConfigError(
                f"hydra.run.dir={self.path} already holds run {earlier.get('id')} ({earlier.get('status')}): continue "
                "it with resume=auto, or choose another hydra.run.dir"
            )
        return earlier

    def learn(self, hardware: Mapping[str, Any]) -> None:
        """Adds to what the record says of the machine; it is written with how the run ends."""
        self._record["hardware"] |= hardware

    def abandon(self, reason: str) -> None:
        """Ends a start that led to nothing: what the folder said before stands again, or that it failed."""
        if self._earlier.get("id"):
            self._record = self._earlier
            self._write_at_last()
        else:
            self.finish("failed", reason, {})

    def finish(self, status: str, reason: str | None, final: Mapping[str, Any]) -> None:
        """Writes how the run ended.

        Args:
            status: finished, halted, preempted or failed.
            reason: one line for people; None where there is nothing to say.
            final: the last metrics; NaN and infinities as in `metrics.jsonl`.
        """
        assert status in STATUSES[1:], status
        self._record |= {"status": status, "reason": reason, "ended": now(), "final": dict(final)}
        self._write_at_last()

    def _write_at_last(self) -> None:
        try:
            self._write()
        except OSError as error:  # the run is over: no reason to call it failed
            warn(f"{self.path / 'run.json'} still says running ({error})")
        self._release()

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"hydra.run.dir={self.path} cannot be written ({error}): fix that, or choose another hydra.run.dir"
        )

    def _claim(self, earlier: Mapping[str, Any]) -> None:
        """Takes the folder for this process; the system gives it free when the process ends, however it ends."""
        self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
            raise ConfigError(
                f"hydra.run.dir={self.path} is in use by process {earlier.get('pid')} on {earlier.get('host')}: "
                "wait for it, stop it, or choose another hydra.run.dir"
            ) from None
        except OSError:  # a file system without locks: nothing can be known
            pass

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __del__(self) -> None:
        self._release()

    def read(self) -> dict[str, Any]:
        """What `run.json` says; empty where there is none that can be read."""
        try:
            record = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return numbers(record) if isinstance(record, dict) else {}

    def _write(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        replace(self.path / "run.json", json.dumps(plain(self._record), allow_nan=False, indent=2) + "\n")


def first_record(run_id: str, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """The first keys of `run.json`: which run this is, and when it began; `earlier` is the record it continues."""
    time = now()
    return {
        "id": run_id,
        "status": "running",
        "reason": None,
        "started": earlier.get("started") or time,
        "resumed": [*(earlier.get("resumed") or []), time] if earlier.get("id") else [],
        "ended": None,
        "git": git(Path(__file__).parents[2]),
    }


def git(checkout: Path) -> dict[str, Any] | None:
    """Commit of a checkout, and whether tracked files differ from it; None where it is none of its own."""

    def ask(*words: str) -> str:
        command = ["git", "-C", str(checkout), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if Path(ask("rev-parse", "--show-toplevel")).resolve() != checkout.resolve():
            return None  # installed somewhere inside another project's checkout
        return {"commit": ask("rev-parse", "HEAD"), "dirty": ask("status", "--porcelain", "-uno") != ""}
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide what a run computes."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:  # a loaded module knows more than its metadata: torch's says which CUDA it was built for
            found[package] = str(getattr(sys.modules.get(package), "__version__", None) or version(package))
        except PackageNotFoundError:
            found[package] = None
    return found
