"""`python -m tests.comparison.many <folder> <file>` writes the page of ten thousand runs: a sweep with many seeds.

It is a separate process because pytest checks the types of all arguments, which takes minutes for a million calls.
"""

import sys
from dataclasses import replace
from pathlib import Path

from stabletrain.comparison import frame_of
from stabletrain.comparison.pages.comparison import write_page
from stabletrain.comparison.reading.runs import read_runs
from tests.comparison.made_pages import sweep


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
