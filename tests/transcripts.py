"""Terminal transcripts in the documentation: found, run, and compared with what is printed today.

A transcript is a fenced block with lines that begin with `$ `. The comment before the block says when it is tested:

    <!-- transcript -->                  in the slow tier
    <!-- transcript: fast -->            in the fast tier
    <!-- transcript: needs a card -->    never; the comment says why

Output follows each command. Numbers, dates and paths are masked before lines are compared, and `...` stands for any
number of lines. In a command, `<date>/<time>` means the newest run folder that its transcript has made. Each transcript
runs in a folder of its own, so none needs the runs of another. There the options of `train.py` make a smaller model: it
prints the same words, and numbers are not compared.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import forkserver
from tests.runs import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "slurm" / "README.md"]

BLOCK = re.compile(
    r"(?:<!-- transcript(?:: (?P<mark>[^>]*?))? -->\n)?^```\w*\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)

STAMP = r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d"


@dataclass(frozen=True)
class Transcript:
    """One fenced block.

    Attributes:
        page: the file it stands in.
        line: where it begins, from 1.
        mark: what the comment says; empty for the slow tier, None without a comment.
        steps: each command with the lines that should follow.
    """

    page: Path
    line: int
    mark: str | None
    steps: list[tuple[str, list[str]]]

    @property
    def runs(self) -> bool:
        """Whether it is tested."""
        return self.mark in ("", "fast")


def transcripts(page: Path) -> Iterator[Transcript]:
    """The transcripts of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        lines = found["text"].splitlines()
        if not any(line.startswith("$ ") for line in lines):
            continue
        steps: list[tuple[str, list[str]]] = []
        for line in lines:
            if line.startswith("$ "):
                steps.append((line[2:], []))
            elif steps and line.strip():
                steps[-1][1].append(line)
        commented = found[0].startswith("<!--")
        mark = (found["mark"] or "") if commented else None
        yield Transcript(page, text.count("\n", 0, found.start()) + 1, mark, steps)


SMALLER = {
    "config.yaml": {"batch_size: 16 ": "batch_size: 4 ", "eval_batches: null": "eval_batches: 20"},
    "model/gpt_nano.yaml": {"n_layer: 4 ": "n_layer: 1 "},
}
"""By file of `conf/`: what is replaced, so that a step takes a sixteenth of its time and evaluations are short."""

WITHOUT_WANDB = {"wandb: offline": "wandb: disabled"}
"""Replaced in `config.yaml` too, except for the first run of the quickstart: W&B starts slowly and prints nothing."""


def working_folder(path: Path, *, wandb: bool = False) -> Path:
    """Makes `path` look like the project's root, so that commands can be run as they stand; output goes to `path`.

    Args:
        path: is made.
        wandb: whether W&B is on by default, as for users.
    """
    path.mkdir(parents=True, exist_ok=True)
    for name in ("train.py", "docs", "slurm", "examples"):
        (path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "conf", path / "conf")
    for name, replaced in SMALLER.items():
        text = (path / "conf" / name).read_text(encoding="utf-8")
        more = WITHOUT_WANDB if name == "config.yaml" and not wandb else {}
        for large, small in {**replaced, **more}.items():
            assert text.count(large) == 1, f"{name} has no {large!r}"
            text = text.replace(large, small)
        (path / "conf" / name).write_text(text, encoding="utf-8")
    return path


def run(command: str, folder: Path, timeout: float = 300) -> list[str]:
    """The lines that a shell command prints in `folder`, errors included."""
    made = sorted((*folder.glob("outputs/*/*"), *folder.glob("multirun/*/*")), key=lambda path: path.stat().st_mtime)
    if made:
        command = command.replace("<date>/<time>", f"{made[-1].parent.name}/{made[-1].name}")
    environment = {
        **os.environ,
        **forkserver.shims(),
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # lines in the order in which a terminal shows them
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    # this line depends on what else the machine does
    return [line for line in done.stdout.splitlines() if not line.startswith("busy machine: ")]


def masked(line: str) -> str:
    """A line without what differs from run to run: numbers, dates, folders, file names with a position, spacing."""
    line = re.sub(STAMP, "<date>/<time>", line)
    line = re.sub(r"(?:/[\w.+-]+)*/(outputs|multirun)/<date>", r"\1/<date>", line)
    line = re.sub(r"precision \w+ \(auto: [^)]*\)", "precision auto", line)
    line = re.sub(r"(?:\.\.\.|~|(?<![\w.<>])(?:/[\w.+-]+)+)/(?=[\w.<])", "", line)
    line = re.sub(r"\b[\w-]+\.(?:py|md)(?::| at byte )\d+", "<file>", line)
    line = re.sub(r"cpu, \d+ threads?", "cpu", line)
    line = re.sub(r"\b(?:\d+:)+\d\d\b", "# s", line)  # a run that takes longer than 59 s on a busy machine
    line = re.sub(r"\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?(?:[kM]\b)?", "#", line)
    return " ".join(line.split())


def difference(wanted: list[str], printed: list[str]) -> str | None:
    """Why `printed` is not what the page shows, in words; None if it is."""
    found, at, gap = [masked(line) for line in printed if line.strip()], 0, False
    for line in wanted:
        if line.strip() == "...":
            gap = True
            continue
        target = masked(line)
        places = [i for i in range(at, len(found)) if found[i] == target]
        if not places or (not gap and places[0] != at):
            near = found[at : at + 8] if not gap else found[at:][-12:]
            return f"{line!r} ({target!r}) does not follow; printed next:\n" + "\n".join(near)
        at, gap = places[0] + 1, False
    if not gap and at < len(found):
        return "more is printed:\n" + "\n".join(found[at : at + 8])
    return None
