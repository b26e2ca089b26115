"""Records which tests run which lines, and how long each test takes; `mutation.py` and `breaks.py` choose tests by it.

The fast tier of some folders runs once, in two processes, with coverage.py measuring a few files only. A line that a
fixture of a module, class or session runs counts for every test that uses the fixture, not only for the first. Lines
that run in processes that a test starts are not seen.
"""

import hashlib
import json
import multiprocessing
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.reliability.forked_tests import ARGUMENTS

DONE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
"""How pytest ends if it came to the end."""


@dataclass(frozen=True)
class Covering:
    """Which tests run which lines.

    Attributes:
        seconds: CPU time of each test, with its processes; tests are named as pytest does.
        lines: per file and line the tests that run it.
        sums: SHA-256 of each file when it was recorded.
    """

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]
    sums: dict[str, str]

    def write(self, path: Path) -> None:
        """Writes a JSON file in which tests are numbers."""
        names = [*self.seconds]
        numbers = {name: number for number, name in enumerate(names)}
        lines = {
            file: {line: sorted(numbers[test] for test in tests) for line, tests in each.items()}
            for file, each in self.lines.items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"seconds": self.seconds, "lines": lines, "sums": self.sums}, separators=(",", ":"))
        path.write_text(text)

    @classmethod
    def read(cls, path: Path) -> "Covering":
        """Reads what `write` wrote."""
        kept = json.loads(path.read_text())
        names = [*kept["seconds"]]
        lines = {
            file: {int(line): [names[number] for number in tests] for line, tests in each.items()}
            for file, each in kept["lines"].items()
        }
        return cls(kept["seconds"], lines, kept["sums"])


class Recorder:
    """A plugin of pytest that names a context of coverage.py after the running test or fixture.

    Args:
        root: the checkout.
        files: what is measured.
        parts: see `record`.
    """

    def __init__(self, root: Path, files: Sequence[str], parts: Path) -> None:
        import coverage  # not needed to read a record

        include = [str(root / file) for file in files]
        self.coverage = coverage.Coverage(data_file=None, include=include, config_file=False)
        self.coverage.set_option("run:disable_warnings", ["no-data-collected"])  # some tests run no such line
        self._root, self._files, self._parts = root, files, parts
        self._sums = {file: checksum(root / file) for file in files}
        self.seconds: dict[str, float] = {}
        self.fixtures: dict[str, list[str]] = defaultdict(list)
        self._test = self._ended = ""
        self._failed = False

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Notes whether this test is its file's last."""
        module = item.nodeid.partition("::")[0]
        self._ended = "" if nextitem is not None and nextitem.nodeid.startswith(f"{module}::") else module

    def _write(self, module: str) -> None:
        """Writes the record of a file of tests, and forgets it."""
        self.coverage.stop()
        data = self.coverage.get_data()
        covered: dict[str, dict[int, list[str]]] = {}
        for file in self._files:
            covered[file] = {}
            for line, contexts in data.contexts_by_lineno(str(self._root / file)).items():
                names = {name for context in contexts for name in self.fixtures.get(context, [context])}
                covered[file][line] = sorted(name for name in names if name in self.seconds)
        Covering(self.seconds, covered, self._sums).write(part_of(self._parts, module))
        print(f" {module}: {len(self.seconds)} tests, {sum(self.seconds.values()):.0f} s of CPU time", flush=True)
        self.seconds, self.fixtures = {}, defaultdict(list)
        self.coverage.erase()
        self.coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        """Measures a test, and keeps it if it passes."""
        self._test, self._failed = item.nodeid, False
        self.coverage.switch_context(item.nodeid)
        definitions = item._fixtureinfo.name2fixturedefs  # ty: ignore[missing-attribute]
        used = [fixture_name(each[-1]) for each in definitions.values() if each[-1].scope != "function"]
        before = cpu_seconds()
        result = yield
        self.coverage.switch_context("")
        if not self._failed:
            self.seconds[item.nodeid] = round(cpu_seconds() - before, 3)
            for name in used:
                self.fixtures[name].append(item.nodeid)
        if self._ended:
            self._write(self._ended)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef):
        """Counts the lines of a fixture that tests share for the fixture."""
        shared = fixturedef.scope != "function"
        if shared:
            self.coverage.switch_context(fixture_name(fixturedef))
        try:
            return (yield)
        finally:
            if shared:
                self.coverage.switch_context(self._test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a test that fails or is skipped."""
        self._failed |= not report.passed


def fixture_name(definition: pytest.FixtureDef) -> str:
    """Returns the context of a fixture."""
    return f"fixture {definition.baseid} {definition.argname}"


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of the processes that it started and waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def record(root: Path, tests: Sequence[str], files: Sequence[str], parts: Path, processes: int = 2) -> Covering:
    """Runs the fast tests of some files and folders in `root`, in several processes; returns what they cover.

    Args:
        root: a checkout.
        tests: files and folders of tests.
        files: what is measured.
        parts: a folder for the result of each file of tests. A file that has one there does not run again, so that
            a record that was interrupted is continued.
    """
    parts.mkdir(parents=True, exist_ok=True)
    modules = [each for name in tests for each in test_files(root, name)]
    left = [each for each in modules if not part_of(parts, each).exists()]
    context = multiprocessing.get_context("fork")
    jobs = [
        context.Process(target=_record, args=(root, left[number::processes], files, parts))
        for number in range(processes)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    if any(job.exitcode for job in jobs):
        raise RuntimeError("the record of covering tests broke off: see pytest's output above; run the command again")
    return merged([Covering.read(part_of(parts, each)) for each in modules if part_of(parts, each).exists()])


def merged(parts: Sequence[Covering]) -> Covering:
    """Returns the records of several files of tests as one."""
    seconds: dict[str, float] = {}
    lines: dict[str, dict[int, list[str]]] = {}
    for part in parts:
        seconds |= part.seconds
        for file, each in part.lines.items():
            there = lines.setdefault(file, {})
            for line, tests in each.items():
                there.setdefault(line, []).extend(tests)
    return Covering(seconds, lines, parts[0].sums if parts else {})


def part_of(parts: Path, module: str) -> Path:
    """Returns the file with the record of one file of tests."""
    return parts / f"{module.replace('/', '.')}.json"


def checksum(path: Path) -> str:
    """Returns a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_files(root: Path, name: str) -> list[str]:
    """Returns the files of tests in a folder, or the file, relative to `root`."""
    path = root / name
    return [name] if path.is_file() else sorted(str(each.relative_to(root)) for each in path.rglob("test_*.py"))


def _record(root: Path, modules: Sequence[str], files: Sequence[str], parts: Path) -> None:
    os.chdir(root)
    recorder = Recorder(root, files, parts)
    recorder.coverage.start()
    code = pytest.main([*ARGUMENTS, *modules], plugins=[recorder])
    recorder.coverage.stop()
    sys.exit(0 if code in DONE else int(code))
