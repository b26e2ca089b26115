"""Random command lines: each must train, be refused in a few lines, or be halted by the guard; none may hang.

    python -m tests.reliability.fuzz_commands --lines 2000 --commands 200 --seed 0

`--lines` go through composition, checks and build in a few long-lived processes; `--commands` are run as
`python train.py ... steps=2`. Each has a time limit and a memory limit. With `--log FILE` a start goes on where an
earlier one ended. `--only N` runs line N alone, as a command, and prints what it says.
"""

import argparse
import collections
import json
import logging
import multiprocessing as mp
import os
import queue
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stabletrain.printable import CONTROL
from tests.reliability.fuzz_lines import line
from tests.runs import CONF, ROOT

ENDS = {0: "worked", 2: "refused", 3: "halted"}
"""How a line may end, by exit code."""

MOST_LINES = 12
"""Lines on standard error above which a message counts as a flood."""


@dataclass(frozen=True)
class Outcome:
    """How a command line ended.

    Attributes:
        number: of the line.
        code: the exit code; None if it was killed at the time limit.
    """

    number: int
    words: Sequence[str]
    code: int | None
    out: str
    err: str

    def fault(self) -> str:
        """Returns what is wrong with this end; empty if nothing is."""
        if self.code is None:
            return "hang"
        if "Traceback (most recent call last)" in self.err:
            return "traceback"
        if self.code not in ENDS:
            return f"exit code {self.code}"
        if self.code and not self.err.strip():
            return "no message"
        if len(self.err.splitlines()) > MOST_LINES:
            return "flood"
        return "control characters" if CONTROL.search(self.out + self.err) else ""


def limit_memory(gib: float) -> None:
    """Limits what this process may allocate, as a small machine would."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30), resource.RLIM_INFINITY))


# ---- in long-lived processes


def serve(connection: Any, folder: str, gib: float) -> None:
    """Runs each command line that arrives up to the build; answers with its exit code, output and errors."""
    os.chdir(folder)
    streams = [(Path(folder) / name).open("w+b", buffering=0) for name in ("out", "err")]
    for stream, descriptor in zip(streams, (1, 2), strict=True):
        os.dup2(stream.fileno(), descriptor)
    import torch
    from hydra import main as hydra_main
    from hydra.core.global_hydra import GlobalHydra

    import stabletrain.cli.train as cli
    from stabletrain.trainer.build import build

    def build_only(cfg: Any, place: Path, *_: Any, **__: Any) -> None:
        run = build(cfg, place)
        run.data.batches.close()
        run.output.tracker.close(0)

    cli.build_and_train = build_only
    limit_memory(gib)
    while (words := connection.recv()) is not None:
        for stream, descriptor in zip(streams, (1, 2), strict=True):
            os.ftruncate(descriptor, 0)
            stream.seek(0)
        torch.use_deterministic_algorithms(False)
        GlobalHydra.instance().clear()
        logging.root.handlers.clear()  # after `--info` or `hydra.verbose=true`, Hydra would log every later line too
        logging.root.setLevel(logging.WARNING)
        os.chdir(folder)
        sys.argv = [str(ROOT / "train.py"), *words]
        main = hydra_main(version_base="1.3", config_path=str(CONF), config_name="config")(cli.run_job)
        try:
            code = cli.launch(main, CONF)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:  # the loop must go on
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        texts = [(Path(folder) / name).read_bytes().decode("utf-8", "replace") for name in ("out", "err")]
        for name in ("outputs", "multirun"):
            shutil.rmtree(Path(folder) / name, ignore_errors=True)
        connection.send((code, *texts))


class Server:
    """A process that runs command lines up to the build; a new one replaces it after a hang or a crash."""

    def __init__(self, gib: float, seconds: float) -> None:
        self._gib, self._seconds = gib, seconds
        self._process: Any = None

    def run(self, number: int, words: Sequence[str]) -> Outcome:
        """Runs one line."""
        if self._process is None:
            self._folder = tempfile.mkdtemp(prefix="fuzz")
            self._here, there = mp.Pipe()
            self._process = mp.get_context("spawn").Process(target=serve, args=(there, self._folder, self._gib))
            self._process.start()
            there.close()
        self._here.send(list(words))
        try:
            if self._here.poll(self._seconds):
                code, out, err = self._here.recv()
                return Outcome(number, words, code, out, err)
            code, err = None, self._said()
        except (EOFError, ConnectionError):
            self._process.join()
            code, err = self._process.exitcode, self._said()
        self.close()
        return Outcome(number, words, code, "", err)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def _said(self) -> str:
        return (Path(self._folder) / "err").read_text(encoding="utf-8", errors="replace")


def built(numbers: Sequence[int], seed: int, workers: int, gib: float, seconds: float) -> Iterator[Outcome]:
    """Yields the outcome of each line, built in `workers` long-lived processes."""
    free: queue.Queue[Server] = queue.Queue()
    for _ in range(workers):
        free.put(Server(gib, seconds))

    def run(number: int) -> Outcome:
        server = free.get()
        try:
            return server.run(number, line(seed, number))
        finally:
            free.put(server)

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(run, numbers)
    while not free.empty():
        free.get().close()


# ---- as commands


def command(number: int, seed: int, gib: float, seconds: float) -> Outcome:
    """Runs a line as `python train.py ... steps=2` in an empty folder."""
    words = [word for word in line(seed, number) if "\x00" not in word] + ["steps=2"]  # no argument can hold a 0
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *words],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=partial(limit_memory, gib),
        )
        try:
            out, err = process.communicate(timeout=seconds)
            code = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            code = None
    return Outcome(number, words, code, *(text.decode("utf-8", "replace") for text in (out, err)))


def commands(numbers: Sequence[int], seed: int, workers: int, gib: float, seconds: float) -> Iterator[Outcome]:
    """Yields the outcome of each line as a command."""
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(partial(command, seed=seed, gib=gib, seconds=seconds), numbers)


# ---- the report


def tell(outcome: Outcome) -> None:
    """Prints a line that failed, with the end of what it said."""
    if fault := outcome.fault():
        said = [each for each in outcome.err.strip().splitlines() if each.strip()]
        print(f"{fault}  line {outcome.number}: {' '.join(map(shown, outcome.words))}", file=sys.stderr)
        print(f"    {shown(said[-1]) if said else ''}", file=sys.stderr, flush=True)


def shown(word: str) -> str:
    """Returns a word in printable characters, shortened."""
    text = ascii(word)[1:-1]
    return text if len(text) < 200 else f"{text[:90]}...{text[-90:]}"


def counts(ends: Sequence[str]) -> dict[str, int]:
    """Counts how lines ended: worked, refused, halted, failed, and each kind of failure."""
    found = collections.Counter(ends)
    failed = sum(count for end, count in found.items() if end not in ENDS.values())
    return {"lines": len(ends), **dict.fromkeys(ENDS.values(), 0), "failed": failed} | found


def known(log: Path | None, part: str) -> dict[int, str]:
    """Returns how the lines ended that an earlier start has logged, by number."""
    if log is None or not log.exists():
        return {}
    lines = [json.loads(each) for each in log.read_text().splitlines()]
    return {each["line"]: each["end"] for each in lines if each["part"] == part}


def main() -> int:
    """Runs the lines and prints the counts; returns 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=2000, help="lines through composition, checks and build")
    parser.add_argument("--commands", type=int, default=200, help="lines run as commands, with steps=2")
    parser.add_argument("--first", type=int, default=0, help="number of the first line")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gib", type=float, default=4.0, help="memory that each process may allocate")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of a line")
    parser.add_argument("--log", type=Path, help="append each line's end to this file, and leave out lines that it has")
    parser.add_argument("--only", type=int, help="run this line alone, as a command")
    chosen = parser.parse_args()
    if chosen.only is not None:
        outcome = command(chosen.only, chosen.seed, chosen.gib, chosen.seconds)
        print(" ".join(map(shown, outcome.words)), outcome.out, outcome.err, outcome.fault() or outcome.code, sep="\n")
        return bool(outcome.fault())
    began, limits = time.monotonic(), (chosen.seed, chosen.workers, chosen.gib, chosen.seconds)
    report: dict[str, dict[str, int]] = {}
    for name, run, count in (("built", built, chosen.lines), ("commands", commands, chosen.commands)):
        numbers = range(chosen.first, chosen.first + count)
        ends = {number: end for number, end in known(chosen.log, name).items() if number in numbers}
        for outcome in run([number for number in numbers if number not in ends], *limits):
            tell(outcome)
            ends[outcome.number] = outcome.fault() or ENDS[outcome.code or 0]
            if chosen.log is not None:
                with chosen.log.open("a") as file:
                    file.write(json.dumps({"part": name, "line": outcome.number, "end": ends[outcome.number]}) + "\n")
        report[name] = counts([*ends.values()])
    print(json.dumps({**report, "minutes": round((time.monotonic() - began) / 60, 1)}, indent=2))
    return int(any(part["failed"] for part in report.values()))


if __name__ == "__main__":
    sys.exit(main())
