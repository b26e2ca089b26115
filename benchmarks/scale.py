"""How four costs grow: a step's guard, a comparison of runs, pages of runs, and the start of a run.

    python benchmarks/scale.py                    all four
    python benchmarks/scale.py --only report      one of guard, compare, report, start

| part | cost | size |
|---|---|---|
| guard | operations beyond a bare loop's, and their host time | parameters: GPTs of 1 M to 1 B |
| compare | `stabletrain compare` of a sweep, its page included | runs of 1,000 logged steps |
| report | a run's `report.html`, and the page of `stabletrain compare` for two runs | logged steps |
| start | opening the data, and `train.py` to its first step | files of the data |

A column's last row is its exponent: the slope of log(cost) over log(size) at the three largest sizes. 1 is linear.
Times are CPU time, user and system, of a process and all of its children, unless a column says otherwise. The runs are
written without training (`made_runs.py`). Needs 10 GB of disk and of memory at the largest sizes. Linux only.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from first_step import ROOT, TRAIN, to_a_step
from growth import exponent
from jobs import Rounds, built
from made_runs import CONFIG, metrics, record, sweep, swept
from measuring import Clock, command_line, head, in_turns, machine, quartiles, row, save, silence
from operations import both
from overhead import bare_of
from PIL import Image

CPU = torch.device("cpu")

GPTS = ((4, 144), (6, 384), (12, 768), (24, 1024), (24, 2048))
"""Layers and width of GPTs of 1 M to 1.2 B parameters."""

RUNS = (10, 100, 1_000, 10_000)

STEPS = (1_000, 10_000, 100_000, 1_000_000)

FILES = (10, 100, 1_000, 10_000, 100_000)

GUARD = ("guard=rollback", "monitors=default")


def gpt(layers: int, width: int, size_of_head: int) -> tuple[str, ...]:
    """Returns the overrides of a GPT on short sequences of random bytes."""
    shape = (f"model.n_layer={layers}", f"model.n_embd={width}", f"model.n_head={width // size_of_head}")
    return ("model=gpt_nano", *shape, "data=random_tokens", "data.block_size=16", "batch_size=4", *GUARD)


def guard(folder: Path, rounds: int) -> Iterator[list[float]]:
    """Yields parameters, parameter tensors, operations (launched and dispatched) beyond a bare step's, and host time.

    Operations are counted without values, as if on a card. The host time is that of a GPT with as many tensors, but 16
    wide, whose kernels take no time: its guarded steps and its bare steps in turns, on one thread.
    """
    clock = Clock(CPU, "cpu")
    torch.set_num_threads(1)
    for layers, width in GPTS:
        ours, bare = both(gpt(layers, width, 16 if width < 384 else 64), "bf16")
        shared = ("device=cpu", "precision=fp32", "optimizer=adamw")
        with silence():
            run = Rounds(built(folder / str(width), (*gpt(layers, 16, 8), *shared)))
        steps = {"guarded": run, "bare": bare_of(run, "adamw", bf16=False)}
        turns = {name: lambda _, step=step: clock.seconds(step) for name, step in steps.items()}
        taken = in_turns(turns, 20 * rounds)
        tensors = sum(1 for _ in run.job.state.model.parameters())
        run.close()
        guarded, plain = (1e3 * quartiles(taken[name])[0] for name in steps)
        parameters = layers * 12 * width**2
        more = (ours.launched - bare.launched, ours.dispatched - bare.dispatched)
        yield [parameters, tensors, bare.dispatched, *more, plain, guarded - plain]


WATCHED = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
wall, found = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([wall, found.ru_utime + found.ru_stime, found.ru_maxrss / 1e3]))
"""
"""Runs a command as the only child of a small process: a child begins with its parent's peak memory."""


WRITE_PAGE = """
import sys; from pathlib import Path; from stabletrain.beside.comparison.pages.one_run import write_run_page
write_run_page(Path(sys.argv[1]))
"""


def used(command: Sequence[str], cwd: Path) -> list[float]:
    """Runs a command; returns its wall-clock time, the CPU time of it and its children, and its peak memory in MB.

    The peak is that of the process, or of its largest child.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    watched = [sys.executable, "-c", WATCHED, *command]
    done = subprocess.run(watched, cwd=cwd, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def compare(folder: Path, rounds: int) -> Iterator[list[float]]:
    """Yields runs, wall-clock time, CPU time, peak memory and the size of the page."""
    for runs in RUNS:
        place = folder / str(runs)
        sweep(place, runs, 1_000)
        command = [sys.executable, "-m", "stabletrain.cli.commands", "compare", str(place)]
        taken = [used(command, folder) for _ in range(rounds)]
        yield [runs, *np.median(taken, axis=0), (place / "report.html").stat().st_size / 1e6]


def one_run(place: Path, lines: int, text: str) -> None:
    """Writes the folder of a run of `lines` steps with these metrics, of which every hundredth was skipped."""
    (place / ".hydra").mkdir(parents=True)
    (place / ".hydra" / "config.yaml").write_text(CONFIG.format(steps=lines, seed=0, rate=swept(0)[0]))
    (place / "run.json").write_text(json.dumps(record(*swept(int(place.name)))))
    (place / "metrics.jsonl").write_text(text)
    skips = ({"event": "skip", "step": step, "tick": step, "kind": "nonfinite"} for step in range(7, lines, 100))
    (place / "events.jsonl").write_text("".join(f"{json.dumps(skip)}\n" for skip in skips))


def report(folder: Path, rounds: int) -> Iterator[list[float]]:
    """Yields steps, then CPU time, peak memory and size of a run's page, then of the page of two runs."""
    for lines in STEPS:
        place, text = folder / str(lines), metrics(lines, 0)
        for name in ("0", "1"):
            one_run(place / name, lines, text)
        del text
        words = [sys.executable, "-c", WRITE_PAGE, str(place / "0")]
        page = np.median([used(words, folder) for _ in range(rounds)], axis=0)
        command = [sys.executable, "-m", "stabletrain.cli.commands", "compare", str(place)]
        pages = np.median([used(command, folder) for _ in range(rounds)], axis=0)
        sizes = [(place / name).stat().st_size / 1e6 for name in ("0/report.html", "report.html")]
        yield [lines, *page[1:], sizes[0], *pages[1:], sizes[1]]


def text_files(folder: Path, files: int) -> tuple[str, ...]:
    """Writes text files of 400 bytes; returns the overrides that train on them."""
    for number in range(files):
        (folder / f"{number:06d}.txt").write_text(f"{number:08d}" * 50)
    return ("data=text", f"data.path='{folder}/*.txt'", "data.block_size=64")


def shards(folder: Path, files: int) -> tuple[str, ...]:
    """Writes token shards of 400 tokens; returns the overrides that train on them."""
    for number in range(files):
        np.arange(400, dtype=np.uint16).tofile(folder / f"{number:06d}.bin")
    listed = [{"file": f"{number:06d}.bin", "tokens": 400} for number in range(files)]
    splits = {"train": listed[1:], "val": listed[:1]}
    meta = {"version": 1, "tokenizer": "bytes", "vocab_size": 400, "dtype": "uint16", "splits": splits}
    (folder / "meta.json").write_text(json.dumps(meta))
    return ("data=tokens", f"data.path={folder}", "data.block_size=64")


def images(folder: Path, files: int) -> tuple[str, ...]:
    """Writes JPEG images of 32 x 32 in ten classes, links to one each; returns the overrides that train on them.

    File systems allow some ten thousand links to a file.
    """
    for label in range(10):
        (folder / str(label)).mkdir()
        Image.new("RGB", (32, 32)).save(folder / f".{label}.jpg")
    for number in range(max(files, 40)):
        os.link(folder / f".{number % 10}.jpg", folder / str(number % 10) / f"{number:06d}.jpg")
    model = ("model=resnet20", "optimizer=sgd", "model.depth=8", "data.image_size=32", "eval_every=1000")
    return ("data=imagefolder", f"data.path={folder}", *model)


DATA: dict[str, Callable[[Path, int], tuple[str, ...]]] = {"text": text_files, "tokens": shards, "images": images}


def start(folder: Path, rounds: int) -> Iterator[list[float]]:
    """Yields files, then for each kind of data the CPU time and the wall-clock time to the first step, and the former's
    part beyond that of the fewest files.
    """
    first: dict[str, float] = {}
    for files in FILES:
        cells: list[float] = []
        for kind, write in DATA.items():
            place = folder / f"{kind}-{files}"
            place.mkdir()
            chosen = write(place, files)
            taken = []
            for number in range(rounds):
                out = folder / f"run-{kind}-{files}-{number}"
                words = (*TRAIN, "compile=false", "batch_size=4", "device=cpu", *chosen, f"hydra.run.dir={out}")
                one = to_a_step(words, folder, out / "metrics.jsonl")
                taken.append((one.cpu, one.wall))
            cpu, wall = np.median(taken, axis=0)
            cells += [cpu, wall, max(cpu - first.setdefault(kind, cpu), 0.0)]
        yield [files, *cells]


PARTS: dict[str, tuple[Callable[[Path, int], Iterator[list[float]]], tuple[str, ...]]] = {
    "guard": (
        guard,
        *[("parameters", "tensors", "operations, bare", "more kernels", "more operations", "bare, ms", "more, ms")],
    ),
    "compare": (compare, ("runs", "wall, s", "CPU, s", "memory, MB", "page, MB")),
    "report": (
        report,
        ("steps", "a run: CPU, s", "memory, MB", "page, MB", "two runs: CPU, s", "memory, MB", "page, MB"),
    ),
    "start": (
        start,
        ("files", *(f"{kind}: {what}" for kind in DATA for what in ("CPU, s", "wall, s", "for the files, s"))),
    ),
}
"""Per part: what measures it, row by row, and the names of its columns."""


def shown(value: float) -> str:
    """Formats a cell."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def exponents(rows: Sequence[Sequence[float]]) -> list[float | None]:
    """Returns the exponent of each column but the first; None where a value is 0."""
    sizes, *columns = zip(*rows, strict=True)
    return [exponent(sizes, column) if min(column[-3:]) > 0 else None for column in columns]


def main() -> None:
    """Measures, prints the tables, and writes the JSON."""
    parser = command_line(__doc__, 1)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas (default: all)")
    parser.add_argument("--largest", type=int, default=10**10, help="leaves out larger sizes")
    asked = parser.parse_args()
    print(f"{machine(CPU)}")
    results: list[dict[str, Any]] = []
    for part in asked.only.split(","):
        measure, columns = PARTS[part]
        print(f"\n{head(*columns)}")
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            for cells in measure(Path(folder), asked.rounds):
                rows.append([float(cell) for cell in cells])
                print(row(*map(shown, cells)), flush=True)
                if cells[0] * 10 > asked.largest:
                    break
        slopes = exponents(rows)
        print(row("grows as", *("" if slope is None else f"^{slope:.2f}" for slope in slopes)))
        results.append({"part": part, "columns": columns, "rows": rows, "exponents": slopes})
    save(asked.json, CPU, results)


if __name__ == "__main__":
    main()
