"""Several ranks: by torchrun, as a user starts them, or as forks of one process, which start in milliseconds."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tests import forkserver
from tests.runs import ROOT

PATIENCE = 300
"""Seconds that a launch may take before it counts as hanging."""


def torchrun(count: int, *arguments: str) -> list[str]:
    """The command that starts `count` ranks here."""
    options = [f"--nproc_per_node={count}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *arguments]


def start(count: int, *arguments: str, cwd: Path, forks: bool = True) -> subprocess.Popen:
    """A fork of torchrun as a process group of its own, so that nothing of it is left behind.

    Args:
        count: the number of ranks.
        arguments: what each of them runs, as `python arguments...`.
        cwd: the working folder.
        forks: whether the ranks are forks, too; else they are fresh interpreters.
    """
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    shims = forkserver.shims() if forks else {}
    return subprocess.Popen(
        [forkserver.python(), *torchrun(count, *arguments)[1:]],
        cwd=cwd,
        env={**os.environ, **shims, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, timeout: float = PATIENCE) -> subprocess.CompletedProcess:
    """Waits for the process to end; raises if it takes too long.

    Raises:
        AssertionError: it hangs; with what it had said.
    """
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"hangs:\n{out[-3000:]}\n{err[-3000:]}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def trained(count: int, *overrides: str, cwd: Path) -> subprocess.CompletedProcess:
    """`torchrun --nproc_per_node=count train.py ...`, to its end."""
    return finish(start(count, str(ROOT / "train.py"), *overrides, cwd=cwd))


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """The process of each rank that torchrun has started so far."""
    found, torchrun = {}, forkserver.command_of(process.pid)
    for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        try:
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {int(each[5:]): forkserver.command_of(int(child)) for each in environment if each.startswith(b"RANK=")}
    return found


def until(reached: Callable[[], bool], process: subprocess.Popen) -> None:
    """Waits until something has happened while a launch goes on."""

    def looked() -> bool:
        there = reached()
        assert there or process.poll() is None, process.communicate()
        return there

    wait_for(looked, "it never happens")


def performed(place: Path, count: int, cases: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Results of each case on each rank. The first test process to ask runs them all, once."""
    place.mkdir(parents=True, exist_ok=True)
    with alone(place / "lock"):
        if not (place / "done").exists():
            (place / "cases.json").write_text(json.dumps(cases))
            forked(count, "-m", "tests.parallel.worker", str(place), cwd=ROOT, logs=place)
            (place / "done").touch()
    return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(count)]


class OnDemand(Mapping[str, dict[str, Any]]):
    """Results of each case on one rank; a case runs when it is first asked for."""

    def __init__(self, rank: int, names: Collection[str], seen: Callable[[str], list[dict[str, Any]]]) -> None:
        self._rank, self._names, self._seen = rank, names, seen

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._seen(name)[self._rank]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def on_demand(
    place: Path, count: int, cases: Mapping[str, Any], together: Sequence[Sequence[str]] = ()
) -> list[OnDemand]:
    """Results on each rank of the cases that the selected tests ask for.

    Args:
        place: folder of the run folders, each named like its case, and of `launches`, which holds what ranks print.
        count: the world size.
        cases: by name.
        together: names of cases that one launch runs when the first of them is asked for: half of a short run's time
            goes by before its first step.
    """

    @cache
    def launched(*names: str) -> list[dict[str, Any]]:
        chosen = {name: {**cases[name], "folder": str(place / name)} for name in names}
        return performed(place / "launches" / names[0].replace("/", "-"), count, chosen)

    def seen(name: str) -> list[dict[str, Any]]:
        return launched(*next((names for names in together if name in names), (name,)))

    return [OnDemand(rank, cases.keys(), lambda name: [each[name] for each in seen(name)]) for rank in range(count)]


def printed(place: Path, name: str, rank: int) -> str:
    """What a rank printed while it ran a case of `on_demand`."""
    texts = [file.read_text() for file in place.glob(f"launches/*/rank{rank}.out")]
    (text,) = [text for text in texts if f"case {name}\n" in text]
    return text.partition(f"case {name}\n")[2].partition("\ncase ")[0]


def forked(count: int, *argv: str, cwd: Path, logs: Path) -> None:
    """Runs `count` ranks as forks of one process: torchrun would import torch in each of them.

    They see the variables that torchrun sets, and a store that outlives each of them, as torchrun's does.

    Args:
        count: the world size.
        argv: what each rank runs, as `python argv...`.
        cwd: the working folder.
        logs: an existing folder for what the ranks print.

    Raises:
        AssertionError: a rank fails or hangs; with the ends of its output.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def start(name: str, argv: Sequence[str], more: Mapping[str, str]) -> forkserver.Forked:
        return forkserver.start(argv, cwd, {**variables, **more}, logs / f"{name}.out", logs / f"{name}.err")

    port = logs / "port"
    port.unlink(missing_ok=True)  # of an earlier launch, which failed
    store = start("store", ["-m", "tests.parallel.store", str(port)], {})
    ranks: dict[int, forkserver.Forked] = {}
    try:
        wait_for(port.exists, "the store does not start")
        shared = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port.read_text(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
        }
        for rank in range(count):
            ranks[rank] = start(f"rank{rank}", argv, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        codes = [ranks[rank].wait(PATIENCE) for rank in ranks]
    except TimeoutError:
        codes = []
    finally:
        for process in [*ranks.values(), store]:
            process.kill()
    ends = [f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(logs.glob("rank*.[oe][ur][tr]"))]
    assert codes == [0] * count, "\n".join([f"exit codes {codes}" if codes else "hangs", *ends])


def wait_for(reached: Callable[[], bool], otherwise: str) -> None:
    """Waits until something has happened; fails after `PATIENCE` seconds."""
    end = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < end, otherwise
        time.sleep(0.02)


@contextmanager
def alone(path: Path) -> Generator[None]:
    """Lets one process in at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
