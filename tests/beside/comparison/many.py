"""`python -m tests.beside.comparison.many <folder> <file>` writes the page of ten thousand runs, a sweep with seeds.

It is a separate process because pytest checks the types of all arguments, which takes minutes for a million calls.
"""

import sys
from dataclasses import replace
from pathlib import Path

from stabletrain.beside.comparison import frame_of
from stabletrain.beside.comparison.pages.comparison import write_page
from stabletrain.beside.comparison.reading.runs import read_runs
from tests.beside.comparison.made_pages import sweep


def main(folder: Path, file: Path) -> None:
    runs = read_runs([sweep(folder)])
    many = []
    for seed in range(10_000):
        run = runs[seed % len(runs)]
        many.append(
            replace(run, settings={**run.settings, "seed": seed}, overrides={**run.overrides, "seed": str(seed)})
        )
    write_page(many, frame_of(many), file)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
