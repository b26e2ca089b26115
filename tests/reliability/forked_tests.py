"""Runs tests in a copy of a checkout, in a fork of a process that has imported torch and Hydra but not stabletrain.

So a copy may be changed before each run, and a run does not wait for the imports of the libraries.
"""

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

ARGUMENTS = ["-n", "0", "-p", "no:cacheprovider", "-q", "--no-header", "--tb=line", "-r", "N"]
"""Of pytest, for one process that writes nothing into the checkout."""

IMPORTED = (
    "hypothesis",
    "jaxtyping",
    "beartype.claw",
    "hydra._internal.hydra",
    "hydra.core.override_parser.overrides_parser",
    "safetensors.torch",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torchvision",
    "sklearn.datasets",
    "pandas",
)
"""What each fork has imported already."""

PASSED, FAILED, TIMED_OUT = "passed", "failed", "timed out"


@dataclass(frozen=True)
class Ended:
    """How tests ended.

    Attributes:
        outcome: `PASSED`, `FAILED` or `TIMED_OUT`.
        by: the first test that failed, or what else went wrong.
        tests: number of tests that were to run.
        seconds: CPU time of the process and of those that it waited for.
    """

    outcome: str
    by: str
    tests: int
    seconds: float


class Chosen:
    """A plugin of pytest: runs some of the collected tests in an order.

    Args:
        order: names of tests in the order in which they run; None for all collected ones.
        known: tests of `own` that are not in `order` run too, at the end, unless they are in here.
        own: a file.
        excluded: tests that never run.

    Attributes:
        failed: the first test that failed.
        ran: number of tests to run.
    """

    def __init__(
        self,
        order: Sequence[str] | None = None,
        own: str = "",
        known: Collection[str] = (),
        excluded: Collection[str] = (),
    ) -> None:
        self._order = None if order is None else {test: number for number, test in enumerate(order)}
        self._own, self._known, self._excluded = own, known, excluded
        self.failed, self.ran = "", 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Chooses and orders the tests."""
        items[:] = [each for each in items if each.nodeid not in self._excluded]
        if (order := self._order) is not None:
            items[:] = [each for each in items if each.nodeid in order or self._is_new(each.nodeid)]
            items.sort(key=lambda each: order.get(each.nodeid, len(order)))
        self.ran = len(items)

    def _is_new(self, test: str) -> bool:
        return bool(self._own) and test.startswith(f"{self._own}::") and test not in self._known

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the first failure."""
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keeps the first failure."""
        if report.failed and not self.failed:
            self.failed = f"import of {report.nodeid}"


def mirror(file: str) -> str:
    """Returns the file of tests that mirrors a file of the package; it need not exist."""
    path = Path(file).relative_to("stabletrain")
    return str(Path("tests", path.parent, f"test_{path.name}"))


def import_libraries() -> None:
    """Imports the libraries that all forks need."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read on import
    for name in IMPORTED:
        importlib.import_module(name)


def run_forked(copy: Path, arguments: Sequence[str], chosen: Chosen, limit: int, hangs: float) -> Ended:
    """Runs tests in a fork of this process until the first failure.

    Args:
        copy: the checkout.
        arguments: of pytest: files, folders, options.
        chosen: chooses the tests.
        limit: seconds of CPU time of the process.
        hangs: seconds by the clock.
    """
    answer = copy.parent / f"{copy.name}.json"
    answer.unlink(missing_ok=True)
    began, before = time.monotonic(), children_seconds()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            output = os.open(copy.parent / f"{copy.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            become(copy)
            options = [*ARGUMENTS, "-x", "--rootdir", str(copy), "-c", str(copy / "pyproject.toml")]
            options += ["--assert=plain", "--basetemp", str(copy.parent / f"{copy.name}.tmp")]
            code = int(pytest.main([*options, *arguments], plugins=[chosen]))
            answer.write_text(json.dumps({"code": code, "failed": chosen.failed, "ran": chosen.ran}))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return ended(pid, answer, began, before, hangs)


def failing_anyway(
    copy: Path, tests: Collection[str], options: Sequence[str], limit: int, hangs: float, excluded: Collection[str] = ()
) -> set[str]:
    """Returns which tests fail in an unchanged copy; `options` are pytest's, the rest as in `run_forked`."""
    named = sorted({test for test in tests if "::" in test})
    files = sorted({test.partition("::")[0] for test in named})
    found = {*excluded}
    while named:
        end = run_forked(copy, [*options, *files], Chosen(named, excluded=found), limit, hangs)
        if end.outcome != FAILED or "::" not in end.by:
            break
        found.add(end.by)
    return found


def ended(pid: int, answer: Path, began: float, before: float, hangs: float) -> Ended:
    """Waits for a fork, and returns how it ended."""
    hung, status, done = False, 0, 0
    while not done:
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done and time.monotonic() - began > hangs:
            hung = True
            os.killpg(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # what a test left behind
    seconds = round(children_seconds() - before, 2)
    if hung or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
        return Ended(TIMED_OUT, "the clock" if hung else "CPU time", 0, seconds)
    if not answer.exists():
        return Ended(FAILED, "a crash of the process", 0, seconds)
    said = json.loads(answer.read_text())
    if said["code"] in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return Ended(PASSED, "", said["ran"], seconds)
    return Ended(FAILED, said["failed"] or f"pytest's exit code {said['code']}", said["ran"], seconds)


def become(copy: Path) -> None:
    """Makes this process one that works in a copy of the checkout, and has imported nothing of it."""
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("tests", "stabletrain", "conftest"):
            del sys.modules[name]
    importlib.invalidate_caches()


def children_seconds() -> float:
    """Returns the CPU time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def copied(root: Path, copy: Path) -> Path:
    """Copies a checkout, with its times and bytecode, and without its history and runs; returns the copy's folder."""
    if not copy.exists():
        left = (".git", "outputs", "multirun", "wandb", ".pytest_cache")
        shutil.copytree(root, copy, ignore=lambda folder, _: left if Path(folder) == root else (), symlinks=True)
        git = ["git", "-C", str(copy), "-c", "user.name=tests", "-c", "user.email=tests@example.com"]
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "copy"]):  # tests read the commit
            subprocess.run([*git, *words], check=True)
    return copy


@contextlib.contextmanager
def changed(copy: Path, root: Path, texts: Mapping[str, str], moment: int):
    """Context in which files of a copy have other texts.

    Args:
        copy, root: the copy, and the checkout from which the files are restored.
        texts: by file.
        moment: another number for each change: the files' time, so that no bytecode of another change is used.
    """
    for file, text in texts.items():
        (copy / file).write_text(text)
        os.utime(copy / file, (2_000_000_000 + moment, 2_000_000_000 + moment))
    try:
        yield
    finally:
        for file in texts:
            shutil.copy2(root / file, copy / file)
