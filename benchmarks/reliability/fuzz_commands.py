"""Random command lines: each must train, be refused in a few lines, or be halted by the guard; none may hang.

    python -m benchmarks.reliability.fuzz_commands --lines 2000 --commands 200 --seed 0

`--lines` go through composition, checks and build in a few long-lived processes; `--commands` are run as
`python train.py ... steps=2`. Each has a time limit and a memory limit. `--only N` runs line N alone, as a command, and
prints what it says.
"""

import argparse
import collections
import json
import multiprocessing as mp
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.reliability.fuzz_lines import line
from benchmarks.runs import CONF, ROOT

CODES = (0, 2, 3)
"""Exit codes of a run that finished, was refused, or was halted by the guard."""

MOST_LINES = 12
"""Lines on standard error above which a message counts as a flood."""

ODD = {
    *map(chr, range(0x20)),
    *map(chr, range(0x7F, 0xA0)),
    *"\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
}
ODD -= {"\n", "\t"}
"""Characters that control a terminal."""


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
        if self.code not in CODES:
            return f"exit code {self.code}"
        if self.code and not self.err.strip():
            return "no message"
        if len(self.err.splitlines()) > MOST_LINES:
            return "flood"
        if ODD & {*self.err} or ODD & {*self.out}:
            return "control characters"
        return ""


def limit_memory(gib: float) -> None:
    """Limits what this process may allocate, as a small machine would."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30), resource.RLIM_INFINITY))


# ---- in long-lived processes


def serve(connection: Any, folder: str, gib: float) -> None:
    """Runs each command line that arrives up to the build; answers with exit code, standard output and standard error."""
    os.chdir(folder)
    streams = [(Path(folder) / name).open("w+b", buffering=0) for name in ("out", "err")]
    for stream, descriptor in zip(streams, (1, 2), strict=True):
        os.dup2(stream.fileno(), descriptor)
    import torch
    from hydra import main as hydra_main
    from hydra.core.global_hydra import GlobalHydra

    import stabletrain.cli.train as cli
    from stabletrain.trainer.build import build

    def build_only(cfg: Any, place: Path, *_: Any) -> None:
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
        os.chdir(folder)
        sys.argv = [str(ROOT / "train.py"), *words]
        try:
            code = cli.launch(
                hydra_main(version_base="1.3", config_path=str(CONF), config_name="config")(cli.run_job), CONF
            )
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:  # the loop must go on
            import traceback

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

    def share(first: int) -> list[Outcome]:
        server = Server(gib, seconds)
        outcomes = []
        for number in numbers[first::workers]:
            outcomes.append(server.run(number, line(seed, number)))
            tell(outcomes[-1])
        server.close()
        return outcomes

    with ThreadPoolExecutor(workers) as pool:
        for outcomes in pool.map(share, range(workers)):
            yield from outcomes


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

    def run(number: int) -> Outcome:
        outcome = command(number, seed, gib, seconds)
        tell(outcome)
        return outcome

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(run, numbers)


# ---- the report


def tell(outcome: Outcome) -> None:
    """Prints a line that failed, with the end of what it said."""
    if fault := outcome.fault():
        typed = " ".join(map(shown, outcome.words))
        said = [each for each in outcome.err.strip().splitlines() if each.strip()]
        print(
            f"{fault}  line {outcome.number}: {typed}\n    {shown(said[-1]) if said else ''}",
            file=sys.stderr,
            flush=True,
        )


def shown(word: str) -> str:
    """Returns a word in printable characters, shortened."""
    text = ascii(word)[1:-1]
    return text if len(text) < 200 else f"{text[:90]}...{text[-90:]}"


def counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Counts the ends by exit code, and what was wrong."""
    ends = {0: "worked", 2: "refused", 3: "halted"}
    found = collections.Counter(each.fault() or ends[each.code or 0] for each in outcomes)
    return {
        "lines": len(outcomes),
        **dict.fromkeys(ends.values(), 0),
        "failed": sum(bool(each.fault()) for each in outcomes),
    } | found


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
    parser.add_argument("--only", type=int, help="run this line alone, as a command")
    chosen = parser.parse_args()
    if chosen.only is not None:
        outcome = command(chosen.only, chosen.seed, chosen.gib, chosen.seconds)
        print(" ".join(map(shown, outcome.words)), outcome.out, outcome.err, outcome.fault() or outcome.code, sep="\n")
        return bool(outcome.fault())
    began, limits = time.monotonic(), (chosen.seed, chosen.workers, chosen.gib, chosen.seconds)
    report = {}
    for name, run, count in (("built", built, chosen.lines), ("commands", commands, chosen.commands)):
        report[name] = counts([*run(range(chosen.first, chosen.first + count), *limits)])
    print(json.dumps({**report, "minutes": round((time.monotonic() - began) / 60, 1)}, indent=2))
    return int(any(part["failed"] for part in report.values()))


if __name__ == "__main__":
    sys.exit(main())
