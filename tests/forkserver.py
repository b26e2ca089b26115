"""Runs commands in forks of a process that has already imported the program.

Starting Python and importing torch, Hydra and the package takes several seconds per command; a fork takes milliseconds.
A forked command is a process of its own, with its own folder, environment, output, signals and exit code; it shares
only the imported modules with the server. Tests of what a command imports use a fresh interpreter, or a server without
torch.

    python -m tests.forkserver SOCKET KIND PROCESS      serves on a Unix socket until that process has ended
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent

PRELOADED = {
    "command line": (
        "stabletrain.cli.train",
        "stabletrain.parallel.ranks",
        "hydra._internal.hydra",
        "hydra.core.override_parser.overrides_parser",
    )
}
PRELOADED["program"] = (
    *PRELOADED["command line"],
    "stabletrain.trainer.build",
    "stabletrain.cli.commands",
    "stabletrain.trainer.loop",
    "stabletrain.models.resnet",
    "stabletrain.checkpoint.checkpoints",
    "stabletrain.checkpoint.dcp",
    "stabletrain.parallel.hsdp",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch._dynamo",  # every step imports it, and that takes longer than most commands
    "sklearn.datasets",
)
"""What commands import, without torch and with it. None may start a thread: a fork has only the one that forked it."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Variables that libraries read on import; the second is pyarrow's, which pandas imports."""

PR_SET_PDEATHSIG = 1
"""Linux's prctl option for the signal that a process receives when its parent ends."""

REQUEST = 1 << 20
"""Maximum size of a request in bytes."""


class Forked:
    """A command running in a fork of the server.

    Attributes:
        pid: its process id.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._status: int | None = None
        self.pid = int(self._line())

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code; minus the signal's number if a signal ended it.

        Raises:
            TimeoutError: it still runs after `timeout` seconds.
        """
        if self._status is None:
            self._connection.settimeout(timeout)
            self._status = int(self._line())
            self._connection.close()
        return self._status

    def kill(self) -> None:
        """Kills the command and every process in its process group; waits for its end."""
        for end in (os.killpg, os.kill):  # a new fork has no process group of its own yet
            with contextlib.suppress(ProcessLookupError):
                end(self.pid, signal.SIGKILL)
        self.wait(60)

    def _line(self) -> bytes:
        text = b""
        while not text.endswith(b"\n"):
            part = self._connection.recv(1)
            if not part:
                raise RuntimeError("the fork server has ended")
            text += part
        return text


def start(
    argv: Sequence[str], cwd: Path, environment: Mapping[str, str], output: Path, errors: Path, kind: str = "program"
) -> Forked:
    """Starts `python argv...` in a fork.

    Args:
        argv: a script and its arguments; or `-m`, a module and its arguments; or `-c`, code and its arguments.
        cwd: the working folder.
        environment: all variables of the command.
        output, errors: files for standard output and standard error.
        kind: the server's kind, a key of `PRELOADED`.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(server(kind))
    request = json.dumps({"argv": list(argv), "cwd": str(cwd), "environment": dict(environment)}).encode()
    assert len(request) < REQUEST, "the request is too long"
    with open(os.devnull, "rb") as nothing, output.open("wb") as out, errors.open("wb") as err:
        connection.sendall(len(request).to_bytes(4, "big"))
        socket.send_fds(connection, [b"f"], [nothing.fileno(), out.fileno(), err.fileno()])
        connection.sendall(request)
    return Forked(connection)


def run(
    argv: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout: float, kind: str = "program"
) -> subprocess.CompletedProcess:
    """Runs `python argv...` in a fork until it ends; see `start`.

    Raises:
        subprocess.TimeoutExpired: it ran longer than `timeout` seconds and was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "out", Path(folder) / "err"
        forked = start(argv, cwd, environment, output, errors, kind)
        try:
            code = forked.wait(timeout)
        except TimeoutError:
            forked.kill()
            raise subprocess.TimeoutExpired(list(argv), timeout, output.read_bytes(), errors.read_bytes()) from None
        return subprocess.CompletedProcess([sys.executable, *argv], code, output.read_text(), errors.read_text())


@cache
def shims() -> dict[str, str]:
    """Returns the variables with which `python`, `torchrun` and `stabletrain` are programs that run in forks.

    For commands whose processes a test does not start itself: those of a shell, and the ranks of torchrun.
    """
    address = Path(server("program"))
    folder, scripts = address.with_name("bin"), Path(sys.executable).parent
    folder.mkdir(exist_ok=True)
    for name in ("python", "torchrun", "stabletrain"):
        words = "" if name == "python" else f" {scripts / name}"
        script = f"exec {sys.executable} -S -E {ROOT / 'tests' / 'forkclient.py'} {address}{words}"
        written = folder / f"{name}-{os.getpid()}"
        written.write_text(f'#!/bin/sh\n{script} "$@"\n')
        written.chmod(0o755)
        written.rename(folder / name)  # another process may be starting it
    return {"PATH": f"{folder}:{scripts}:{os.environ['PATH']}", "PYTHON_EXEC": str(folder / "python")}


def python() -> str:
    """Returns the path of a `python` that runs in forks."""
    return shims()["PYTHON_EXEC"]


def command_of(pid: int) -> int:
    """Returns the process of the command for which a process of `shims` stands; `pid` if it stands for none."""
    word, _, fork = Path(f"/proc/{pid}/comm").read_text().strip().partition("-")
    return int(fork) if word == "fork" else pid


@cache
def server(kind: str) -> str:
    """Returns a server's address; the server starts on first use.

    Pytest's workers share one, which ends with the process that started them; else it ends with this process.
    """
    run, outlives = os.environ.get("PYTEST_XDIST_TESTRUNUID"), os.getppid()
    if run is None:
        run, outlives = uuid.uuid4().hex, os.getpid()
    folder = Path(tempfile.gettempdir(), f"fork-{run}-{kind.replace(' ', '-')}")
    folder.mkdir(mode=0o700, exist_ok=True)
    address = folder / "socket"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            words = [sys.executable, "-m", "tests.forkserver", str(address), kind, str(outlives)]
            subprocess.run(words, cwd=ROOT, env={**os.environ, **ONE_THREAD}, stdin=subprocess.DEVNULL, check=True)
    return str(address)


# ---- the server's side


def serve(address: str, kind: str, outlives: str) -> None:
    """Forks a process for each connection; sends its process id, and its exit code once it has ended.

    Serves in a fork of this process, which ends once there is something to connect to.
    """
    last = os.pidfd_open(int(outlives))
    for name in PRELOADED[kind]:
        importlib.import_module(name)
    if kind == "program":
        keep(Path(address).with_name("composed"))
        warm_up()
    count = len(os.listdir("/proc/self/task"))
    assert count == 1, f"{count} threads run after the imports: a fork would lose them"
    gc.collect()
    gc.freeze()  # garbage collection in a fork would write to shared pages and thus copy them
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(address)
    listening.listen()
    if os.fork():
        return
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    selector.register(last, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == last:
                shutil.rmtree(Path(address).parent)
                return
            if key.fileobj is listening:
                connection, _ = listening.accept()
                request, descriptors = received(connection)
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    listening.close()
                    connection.close()
                    perform(request, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                connection.sendall(f"{pid}\n".encode())
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
                if request.get("tied"):
                    selector.register(connection, selectors.EVENT_READ, (pid, None))
            elif key.data[1] is None:  # a command's client, to which it is tied, has ended
                if key.fd in selector.get_map():
                    selector.unregister(key.fileobj)
                    os.kill(key.data[0], signal.SIGKILL)
            else:
                pid, connection = key.data
                if connection in selector.get_map():
                    selector.unregister(connection)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):  # the client may have given up
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                connection.close()
                selector.unregister(key.fd)
                os.close(key.fd)


def keep(own: Path) -> None:
    """Has the forks share what Hydra composes for them, and begin with the text that small runs read.

    They share it with the tests' own processes, or in the folder `own` if no tests run.

    Without this, a third of the time of a short command goes there.
    """
    import pytest

    from stabletrain.data.text import Stdlib
    from tests import building, composing

    folder = Path(os.environ.get(composing.FOLDER, own))
    folder.mkdir(exist_ok=True)
    patch = pytest.MonkeyPatch()
    composing.remember(patch, folder)
    building.remember(patch, folder)
    for block_size in (16, 128):  # of most small runs, and the default; what is kept goes by the arguments
        text = Stdlib(block_size=block_size, val_fraction=0.04, seed=0, length_warmup=0, length_start=8)
    text.fingerprint()


def warm_up() -> None:
    """Trains a small run as a command, so that the forks need not compute what the first run of a process computes.

    That is a quarter of the time of a short command. Random generators, variables and warnings are as before.
    """
    import random
    import warnings

    import torch

    from tests.runs import TINY_GPT

    script, out = ROOT / "train.py", io.StringIO()
    words, variables = sys.argv, {**os.environ}
    states = torch.get_rng_state(), random.getstate()
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory())
        for each in (contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings()):
            stack.enter_context(each)
        stack.callback(os.chdir, os.getcwd())
        os.chdir(place)
        os.environ["XDG_STATE_HOME"] = place
        sys.argv = [str(script), *TINY_GPT, "steps=2"]
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(script), run_name="__main__")
    assert "\nrun      " in out.getvalue(), out.getvalue()
    sys.argv = words
    os.environ.clear()
    os.environ.update(variables)
    torch.set_rng_state(states[0])
    random.setstate(states[1])


def received(connection: socket.socket) -> tuple[dict, list[int]]:
    """Returns a request, and the descriptors of its input, output and errors."""
    length = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    return json.loads(connection.recv(length, socket.MSG_WAITALL)), list(descriptors)


def perform(request: dict, descriptors: Sequence[int]) -> None:
    """Sets up this fork as the command, and leaves the server's loop by raising `Become`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no command outlives the server
    os.setsid()
    for number in request.get("ignored", ()):
        signal.signal(number, signal.SIG_IGN)
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    words = request["argv"]
    sys.path[0] = request["cwd"] if words[0] in ("-c", "-m") else str(Path(words[0]).parent)
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.orig_argv = [sys.executable, *words]
    raise Become(words)


class Become(BaseException):
    """Leaves the server's loop, so that the command runs as the outermost code of its process and ends like it."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words


def main(words: Sequence[str]) -> None:
    """Runs `python words...` in this process."""
    if words[0] == "-m":
        sys.argv = [*words[1:]]
        package = hasattr(sys.modules.get(words[1]), "__path__")  # of a package, only `__main__` runs
        sys.modules.pop(f"{words[1]}.__main__" if package else words[1], None)  # it must run again, as the main module
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [*words]
        runpy.run_path(words[0], run_name="__main__")


def end(words: Sequence[str]) -> NoReturn:
    """Runs `python words...` and ends this process with its exit code.

    Skips the interpreter's normal shutdown: tearing down all imported modules takes longer than most commands.
    """
    code = 0
    try:
        main(words)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # ty: ignore[unresolved-attribute]  waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    command = None
    try:
        serve(*sys.argv[1:])
    except Become as become:
        command = become.words
    if command is not None:
        end(command)
