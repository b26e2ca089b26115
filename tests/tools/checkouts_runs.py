"""Runs the cases of one checkout. Each command is a fork of this process, which has imported PyTorch but not the
package.

A fork starts in milliseconds, where `python train.py` needs seconds, and behaves like the command: it has its own
arguments, folder, output files and exit code. Only torchrun starts processes of its own.
"""

import atexit
import importlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from types import ModuleType

from checkouts_cases import Case, Command

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONHASHSEED": "0",
    "COLUMNS": "250",
    "TERM": "dumb",
    "MPLBACKEND": "agg",
}
"""Set before PyTorch is imported, for all commands."""

LOADED = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torchvision", "numpy"),
    *("hydra.main", "omegaconf", "rich.console", "rich.table", "sklearn.datasets", "safetensors.torch"),
    *("matplotlib.pyplot", "jaxtyping", "orjson", "yaml"),
)
"""Slow-to-import libraries that the commands need, imported once."""

LIMIT = 400
"""Time limit of a command in seconds."""


class Broken(Exception):
    """A checkout cannot be compared."""


def copied(source: str, repository: Path, target: Path) -> str:
    """Copies a checkout's files to `target`; returns its name.

    Args:
        source: a folder, copied without the files that git ignores; or a revision of `repository`.
        repository: where to look up a revision.
        target: a folder that does not exist yet.

    Raises:
        Broken: `source` is neither.
    """
    folder = Path(source)
    if folder.is_dir():
        listed = ask_git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        if listed is None:
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__", "outputs", "multirun"))
        else:
            for name in listed.decode().split("\0"):
                if name and (folder / name).is_file():
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(folder / name, target / name)
        commit = (ask_git(folder, "rev-parse", "--short", "HEAD") or b"").decode().strip()
        changed = ", with changes" if ask_git(folder, "status", "--porcelain") else ""
        return f"{folder.resolve()}{f' ({commit}{changed})' if commit else ''}"
    archive = ask_git(repository, "archive", source)
    if archive is None:
        raise Broken(f"{source} is neither a folder nor a git revision")
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(target, filter="data")
    return f"{source} ({(ask_git(repository, 'rev-parse', '--short', source) or b'').decode().strip()})"


def ask_git(folder: Path, *words: str) -> bytes | None:
    """Returns git's output in a folder; None if it fails."""
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


def load() -> None:
    """Imports the libraries into this process; starts no threads, because a process with threads cannot be forked
    safely.
    """
    sys.modules["pandas"] = None  # ty: ignore[invalid-assignment]  scikit-learn does without; it starts a thread
    for name in LOADED:
        importlib.import_module(name)
    del sys.modules["pandas"]
    if len(os.listdir("/proc/self/task")) > 1:
        raise Broken("a library started a thread when it was loaded, so this process cannot be forked")


class Checkout:
    """A checkout, and how to run its commands.

    Args:
        path: the checkout.
        place: the parent of the cases' folders.
    """

    def __init__(self, path: Path, place: Path) -> None:
        self.path, self.place = path, place
        project = (path / "pyproject.toml").read_text()
        self.package = found(r'^name = "([\w-]+)"', project)
        self.entry = found(r'^stabletrain = "([\w.]+:\w+)"', project)
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("RANK", "WORLD_", "LOCAL_", "WANDB_"))
            },
            **ENVIRONMENT,
            "PYTHONPATH": f"{path}{os.pathsep}{place / 'plugin'}",
        }
        script = f"import {self.package}; print({self.package}.__file__)"
        seen = subprocess.run(
            [sys.executable, "-c", script], env=self.environment, cwd=place, capture_output=True, text=True, check=False
        )
        if not seen.stdout.startswith(f"{path}{os.sep}"):
            raise Broken(f"{self.package} is imported from {seen.stdout or seen.stderr}, not from {path}")

    def run(self, cases: Mapping[str, Case], jobs: int, done: Callable[[str], None]) -> None:
        """Runs the cases, `jobs` at a time, each in its own folder; calls `done` with each case's name."""
        waiting, running = iter(cases.items()), {}
        while True:
            while len(running) < jobs and (following := next(waiting, None)) is not None:
                name, case = following
                running[forked(lambda case=case, name=name: self.perform(case, self.place / slug(name)))] = name
            if not running:
                return
            process, status = os.wait()
            if process in running:
                name = running.pop(process)
                if status:
                    raise Broken(f"{name}: the case itself failed, see {self.place / slug(name)}")
                done(name)

    def perform(self, case: Case, folder: Path) -> None:
        """Runs a case's commands; writes their output and exit codes to its folder."""
        folder.mkdir()
        for number, command in enumerate(case.commands, 1):
            name = f"{number}.{command.program}"
            start = self.launched if command.program == "torchrun" else self.imitated
            code = start(command, folder, folder / f"{name}.out", folder / f"{name}.err")
            (folder / f"{name}.code").write_text(f"{code}\n")

    def imitated(self, command: Command, folder: Path, out: Path, err: Path) -> int:
        """Runs a command in a fork; returns its exit code, negative for a signal."""

        def work() -> None:
            os.chdir(folder)
            for stream, file in ((1, out), (2, err)):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            os.environ.clear()
            os.environ.update(self.environment)
            signal.alarm(LIMIT)
            end(self.imitate(command))

        process = forked(work)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def imitate(self, command: Command) -> int:
        """Executes the command in this process; returns its exit code."""
        script = {"train": self.path / "train.py", "python": Path(command.arguments[0] if command.arguments else "")}
        arguments = command.arguments[1:] if command.program == "python" else command.arguments
        file = script.get(command.program, Path(sys.executable).with_name("stabletrain"))
        sys.argv = [str(file), *arguments]
        sys.orig_argv = [sys.executable, *sys.argv]
        sys.path[:1] = [str(self.path), str(self.place / "plugin")]
        try:
            if command.program == "stabletrain":
                module, name = self.entry.split(":")
                sys.exit(getattr(importlib.import_module(module), name)())
            runpy.run_path(str(file), run_name="__main__")
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        strays = [name for name, module in package(self.package) if not origin(module).startswith(str(self.path))]
        if strays:
            print(f"checkouts.py: {strays[0]} is imported from {origin(sys.modules[strays[0]])}", file=sys.stderr)
            return 99
        return code

    def launched(self, command: Command, folder: Path, out: Path, err: Path) -> int:
        """Runs train.py on two ranks; returns torchrun's exit code."""
        options = ["--nproc_per_node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        whole = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *options,
            str(self.path / "train.py"),
            *command.arguments,
        ]
        with out.open("w") as written, err.open("w") as errors:
            return subprocess.run(
                whole, cwd=folder, env=self.environment, stdout=written, stderr=errors, timeout=LIMIT, check=False
            ).returncode


def package(name: str) -> Iterator[tuple[str, ModuleType]]:
    """Returns the imported modules of a package."""
    return ((each, module) for each, module in [*sys.modules.items()] if each.partition(".")[0] == name)


def origin(module: ModuleType) -> str:
    """Returns the file of a module."""
    return str(getattr(module, "__file__", None) or "nowhere")


def found(pattern: str, text: str) -> str:
    """Returns the first group of a pattern in pyproject.toml.

    Raises:
        Broken: the pattern does not match.
    """
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise Broken(f"pyproject.toml has no line {pattern}")
    return match[1]


def slug(name: str) -> str:
    """Returns a case's name as a folder name."""
    return re.sub(r"[^\w=.+-]+", "_", name)


def forked(work: Callable[[], None]) -> int:
    """Forks this process; the fork executes `work` and exits. Returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def end(code: int) -> None:
    """Ends this process as Python does: waits for threads and runs `atexit` functions."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
