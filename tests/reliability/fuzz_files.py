"""Damages one file of a run folder, then reads the folder with everything that reads one; many times.

    python -m tests.reliability.fuzz_files --cases 500 --seed 0

One run with checkpoints and an incident, its token shards and a sweep of two runs are made once. Each case copies them
and damages one file (`damage.py`). Long-lived processes then call every reader under a time limit: the run is resumed
and trained some steps further, by the code of `train.py`, and it begins a new run (`init_from`); `compare`, `diagnose`,
`replay` and `export` are called, the run's page is written, and its sweep is listed.

A failure is an exception that is not one of the project's errors, a traceback in the output, a call that exceeds its
time, or a run that begins with weights that no checkpoint has. Every case depends on the seed and its number only:
`--only 17` repeats one and shows what it printed.
"""

import argparse
import contextlib
import io
import itertools
import json
import multiprocessing
import os
import pickle
import queue
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.reliability.commands import command
from tests.reliability.damage import copied, damage
from tests.runs import ROOT, TINY_GPT

STEPS, LONGER = 9, 12
"""Steps of the run that is made, and steps to which it is resumed."""

RUN = [
    *[word for word in TINY_GPT if not word.startswith(("batch_size", "eval_batches"))],
    "batch_size=2",
    "eval_batches=1",
    "data=tokens",
    "data.path=shards",
    "checkpoint.every=3",
    "checkpoint.keep=3",
    "log_every=1",
    "faults=label",
    "faults.at=[4]",
]
FOLDER, SWEEP = "outputs/2026-01-02/03-04-05", "multirun/2026-01-02/03-04-05"

LIMIT = 60.0
"""Seconds that a call may take, on a machine that is busy with other work."""


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Context with another working folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


class TooLong(BaseException):
    """A call exceeded its time. Not an Exception, so that no handler takes it for one of its own."""


@dataclass
class Outcome:
    """The result of one case.

    Attributes:
        number: of the case.
        what: the damage.
        answers: by reader, `done`, or `refused` if it ended with one of the project's errors.
        failures: by reader, what went wrong.
        output: by reader, what it printed.
    """

    number: int
    what: str
    answers: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    output: dict[str, str] = field(default_factory=dict)


def make(base: Path) -> None:
    """Makes the shards, the run and the sweep."""
    from stabletrain.cli.commands import main

    base.mkdir(parents=True)
    with inside(base):
        Path("text.txt").write_text((ROOT / "stabletrain" / "step.py").read_text() * 2)
        main(["prepare", "text.txt", "shards"])
        Path("text.txt").unlink()
    for words in (
        [*RUN, f"steps={STEPS}", f"hydra.run.dir={FOLDER}"],
        ["-m", *RUN, "steps=2", "seed=0,1", f"hydra.sweep.dir={SWEEP}"],
    ):
        done = command(*words, cwd=base)
        if done.returncode:
            raise RuntimeError(done.stderr)


def known_weights(base: Path) -> dict[int, dict[str, Any]]:
    """Returns the weights of the run's checkpoints, by step."""
    from stabletrain.checkpoint.reader import peek

    paths = sorted((base / FOLDER / "checkpoints").glob("step-*"))
    return {(found := peek(path)).step: found.load_model() for path in paths}


# ---- the readers


def train(words: list[str], weights: dict[int, dict[str, Any]]) -> None:
    """Trains as `python train.py words` does, and checks the weights that the run begins with.

    Raises:
        SystemExit: the run ended with an error.
        WrongWeights: it began with weights that no checkpoint has.
    """
    from stabletrain.cli.train import run_job
    from stabletrain.config.arguments import parse_arguments, resolve_resume
    from stabletrain.program import called
    from stabletrain.trainer import build

    known = [*weights.values()]
    whole = build.build

    def watched(*given: Any, **more: Any) -> Any:
        run = whole(*given, **more)
        began, model = run.state.step, run.state.model.state_dict()
        restored = began > 0 or any(word.startswith("init_from") for word in words)
        expected = [weights[began]] if began in weights else known
        if restored and not any(same(model, each) for each in expected):
            raise WrongWeights(f"the run begins after step {began} with weights that no checkpoint has")
        print(f"began after step {began}")
        return run

    arguments = resolve_resume(parse_arguments(words))
    build.build = watched
    try:
        with called(words, [*itertools.chain(*arguments)]), job(arguments.overrides) as cfg:
            run_job(cfg)
    finally:
        build.build = whole


class WrongWeights(Exception):
    """A run began with weights that no checkpoint has."""


def same(model: dict[str, Any], saved: dict[str, Any]) -> bool:
    """Returns whether two models have the same tensors."""
    import torch

    return model.keys() == saved.keys() and all(
        model[name].dtype == saved[name].dtype and torch.equal(model[name], saved[name]) for name in model
    )


COMPOSED: dict[tuple[Any, ...], bytes] = {}


def compose_once(name: str, overrides: list[str], **options: Any) -> Any:
    """Composes a configuration, once for each command line: it takes longer than the steps of such a run."""
    from hydra import compose

    key = (name, *overrides, *options.items())
    if key not in COMPOSED:
        COMPOSED[key] = pickle.dumps(compose(name, overrides, **options))
    return pickle.loads(COMPOSED[key])


@contextlib.contextmanager
def job(overrides: list[str]) -> Iterator[Any]:
    """Context like a Hydra job's: yields the configuration; the run folder is the one that the overrides name."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import read_write

    from tests.runs import composed

    with composed(*overrides) as cfg:
        runtime = HydraConfig.get().runtime
        folder = next((o.partition("=")[2].strip("'") for o in overrides if o.startswith("hydra.run.dir=")), "new")
        with read_write(runtime):
            runtime.output_dir = str(Path(folder).absolute())
        yield cfg


def stabletrain(*words: str) -> None:
    """Runs a subcommand.

    Raises:
        SystemExit: it ended with an error.
    """
    from stabletrain.cli.commands import main

    if code := main([*words]):
        raise SystemExit(code)


def page() -> None:
    """Writes the run's page."""
    from stabletrain.beside.comparison.pages.at_end import PageAtEnd

    PageAtEnd(Path(FOLDER)).write()


def sweep() -> None:
    """Reads what a sweep's restart reads."""
    from stabletrain.beside.sweep import lines, plan
    from stabletrain.cli.finished import finished_run
    from stabletrain.config.arguments import parse_arguments, resolve_resume

    resolve_resume(parse_arguments([f"resume={SWEEP}"]))
    resolve_resume(parse_arguments(["-m", *RUN, "steps=2", "seed=0,1", "resume=auto"]))
    found = plan.read(Path(SWEEP))
    if found is None:
        return
    print(lines.opening(found), lines.closing(found), lines.code(found), sep="\n")
    for number, run in enumerate(found.runs or []):
        folder = Path(SWEEP, str(number))
        plan.check_same_run(folder, run, found)
        record = finished_run(folder, run, 2)
        if record is not None:
            print(lines.ending(found, number, run, record, None), lines.loss_of(record))


def readers(draw: random.Random, weights: dict[int, dict[str, Any]]) -> dict[str, Callable[[], None]]:
    """Returns what to call, by name and in this order. One of two ways to resume is drawn; both write."""
    incident = next(iter(sorted(Path(FOLDER, "incidents").glob("step-*"))), Path(FOLDER, "incidents"))
    newest = f"{FOLDER}/checkpoints/step-{STEPS:08d}"
    longer, auto = f"steps={LONGER}", [*RUN, "resume=auto", f"steps={LONGER}"]
    by_name = draw.choice([[f"resume={FOLDER}", longer], [f"resume={newest}", longer]])
    fresh = [*RUN, "steps=2", f"init_from={FOLDER}", "hydra.run.dir=fresh"]
    return {
        "compare": lambda: stabletrain("compare", "outputs", "multirun", "--html", "page.html", "--csv", "table.csv"),
        "diagnose": lambda: stabletrain("diagnose", FOLDER),
        "diagnose --json": lambda: stabletrain("diagnose", FOLDER, "--json"),
        "replay": lambda: stabletrain("replay", str(incident)),
        "replay with a fix": lambda: stabletrain("replay", str(incident), "precision=bf16"),
        "page": page,
        "export": lambda: stabletrain("export", FOLDER, "--to", "safetensors", "--out", "exported"),
        "sweep": sweep,
        "sync": lambda: stabletrain("sync", "outputs", "multirun", "--dry-run"),
        "init_from": lambda: train(fresh, weights),
        "resume": lambda: train(auto if draw.random() < 0.5 else by_name, weights),
    }


# ---- one case


def call(read: Callable[[], None], limit: float) -> tuple[str, str, str]:
    """Calls a reader; returns its answer, its failure (empty if none) and its output."""
    from stabletrain.errors import StabletrainError

    output, answer, failure = io.StringIO(), "done", ""

    def stop(number: int, frame: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            read()
    except (StabletrainError, SystemExit) as error:
        answer = f"refused: {error}"
    except TooLong:
        failure = f"took more than {limit:.0f} s"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if "stabletrain/" in frame.filename]
        mine = f"{Path(own[-1].filename).name}:{own[-1].lineno} " if own else ""
        failure = f"{type(error).__name__}: {str(error)[:150]!r} at {mine}{Path(place.filename).name}:{place.lineno}"
        output.write("".join(traceback.format_exception(error)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    printed = output.getvalue()
    if not failure and "Traceback (most recent call last)" in printed:
        failure = f"printed a traceback: {printed.strip().splitlines()[-1][:200]}"
    no_page = next((line for line in printed.splitlines() if line.endswith("the run is not affected")), "")
    if not failure and no_page:
        if "report.html.tmp' -> " in no_page and "IsADirectoryError" in no_page:  # a folder has taken its place
            answer = f"refused: {no_page}"
        else:
            failure = f"no page: {no_page[:200]}"
    return answer, failure, printed


def case(base: Path, place: Path, seed: int, number: int, weights: dict, limit: float) -> Outcome:
    """Runs one case in a folder that it makes and removes."""
    draw = random.Random(f"{seed}-{number}")
    folder = copied(base, place / f"case-{number}")
    with inside(folder):
        outcome = Outcome(number, damage(folder, draw))
        for name, read in readers(draw, weights).items():
            answer, failure, printed = call(read, limit)
            outcome.answers[name], outcome.output[name] = answer, printed
            if failure:
                outcome.failures[name] = failure
    remove(folder)
    return outcome


def remove(folder: Path) -> None:
    """Deletes a folder."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def work(base: Path, place: Path, seed: int, numbers: Any, results: Any, limit: float) -> None:
    """Runs cases until there are none left, in one process."""
    import torch

    from stabletrain.config import composed
    from tests import runs

    torch.set_num_threads(1)
    os.environ["COLUMNS"] = "200"
    runs.compose = composed.compose = compose_once
    weights = known_weights(base)
    while (number := numbers.get()) is not None:
        results.put(case(base, place, seed, number, weights, limit))


def campaign(place: Path, cases: list[int], seed: int, processes: int, limit: float = LIMIT) -> Iterator[Outcome]:
    """Yields the outcome of each case as it ends. A process that dies or hangs ends the case as a failure."""
    base = place / "base"
    if not base.exists():
        make(base)
    context = multiprocessing.get_context("spawn")
    waiting, left = [*cases], set(cases)
    results, started = context.Queue(), []
    numbers = context.Queue()
    for number in waiting:
        numbers.put(number)
    for _ in range(processes):
        numbers.put(None)
        started.append(context.Process(target=work, args=(base, place, seed, numbers, results, limit), daemon=True))
        started[-1].start()
    answered = time.monotonic()
    while left:
        try:
            outcome = results.get(timeout=5)
        except queue.Empty:
            alive = any(process.is_alive() for process in started)
            if alive and time.monotonic() - answered < limit * 12:
                continue
            for number in sorted(left):
                yield Outcome(number, "unknown", failures={"all": "the process died, or did not answer"})
            break
        answered = time.monotonic()
        left.discard(outcome.number)
        yield outcome
    for process in started:
        process.terminate()


def main() -> int:
    """Runs the cases and prints the counts and each failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of the cases to run; shows what they print")
    parser.add_argument("--place", type=Path, help="a folder for the runs, which are kept (default: a temporary one)")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    began, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory() as temporary:
        cases = chosen.only or [*range(chosen.cases)]
        for outcome in campaign(chosen.place or Path(temporary), cases, chosen.seed, chosen.processes):
            outcomes.append(outcome)
            for name, failure in outcome.failures.items():
                print(f"case {outcome.number}  {outcome.what}  {name}: {failure}", flush=True)
            if chosen.only:
                for name, printed in outcome.output.items():
                    print(f"---- {name}: {outcome.answers[name]}\n{printed}")
    answers = Counter(answer.partition(":")[0] for each in outcomes for answer in each.answers.values())
    failed = [each for each in outcomes if each.failures]
    began_at = Counter(
        line for each in outcomes for line in each.output.get("resume", "").splitlines() if "began after" in line
    )
    report = {
        "cases": len(outcomes),
        "calls": sum(answers.values()),
        "answered": answers["done"],
        "refused in one line": answers["refused"],
        "failures": sum(len(each.failures) for each in failed),
        "cases with failures": len(failed),
        "resumed": dict(sorted(began_at.items())),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    print(json.dumps(report, indent=2))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
