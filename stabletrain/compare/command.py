"""`stabletrain compare`: reads runs, prints their table, and writes the files that are asked for."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from stabletrain.compare.frames import by_seed, frame_of
from stabletrain.compare.pages.comparison import write_page
from stabletrain.compare.pictures import check_name, draw, draw_losses
from stabletrain.compare.reading.run import Run
from stabletrain.compare.reading.runs import read_runs
from stabletrain.compare.sensitivity import Arm, arms, markdown
from stabletrain.compare.table import ENDLESS, ranked, show
from stabletrain.errors import ConfigError

MISSING_SHOWN = 5
"""Lines on runs that an arm lacks; of more only the number is said."""


def compare(
    folders: Sequence[Path],
    *,
    each: bool = False,
    sort: str | None = None,
    rows: int = 50,
    wide: bool = False,
    csv: Path | None = None,
    picture: Path | None = None,
    html: Path | None = None,
) -> None:
    """Compares the runs in `folders`.

    Args:
        each: a row for each run, also where only the seed differs.
        sort: a column of the frame, or the key of a setting; by default what ended best comes first.
        rows: how many are printed; 0 for all.
        wide: print every column, whatever the width.
        csv: where all rows and columns are written.
        picture: where the curves are drawn: over the learning rate where it differs, else the training losses.
        html: where the page is written; by default `report.html` in the first folder, or beside it if that is a run's,
            which has a page of its own.

    Raises:
        ConfigError: a folder holds no run, there is no such column, or a file cannot be written.
    """
    check_arguments(rows, csv, picture, html)
    runs = read_runs(folders)
    found = frame_of(runs)
    show(ranked(found if each else by_seed(found), sort), terminal(wide), rows)
    swept = arms(runs)
    if swept:
        print_sensitivity(swept)
    if csv is not None:
        ranked(found, sort).to_csv(csv)
        print(f"table    {csv}", file=sys.stderr)
    if picture is not None:
        if swept:
            draw(swept, picture)
        else:
            draw_losses(runs, picture)
        print(f"picture  {picture}", file=sys.stderr)
    write_or_warn(runs, found, html or page_beside(folders[0], runs[0]), wanted=html is not None)


def write_or_warn(runs: Sequence[Run], found: Any, page: Path, *, wanted: bool) -> None:
    """Writes the page. If the user did not ask for one, a folder that cannot be written costs a line only.

    Raises:
        ConfigError: the page was asked for, and cannot be written.
    """
    try:
        write_page(runs, found, page)
    except ConfigError as error:
        if wanted:
            raise
        print(f"no page  {error}", file=sys.stderr)  # the folder may be another user's
    else:
        print(f"page     {page}", file=sys.stderr)


def check_arguments(rows: int, csv: Path | None, picture: Path | None, html: Path | None) -> None:
    """Refuses what cannot be printed or written, before any run is read.

    Raises:
        ConfigError: names the value and what to type.
    """
    if rows < 0:
        raise ConfigError(f"--rows {rows} is below 0: give the number of rows, or 0 for all")
    if picture is not None:
        check_name(picture)
    for file in (csv, html):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{file}: there is no folder {file.parent}: make it first")


def print_sensitivity(swept: Sequence[Arm]) -> None:
    """Prints the table of learning-rate sensitivity, and the runs that it lacks."""
    print(f"\n{markdown(swept)}")
    missing = [line for arm in swept for line in arm.missing]
    for line in missing[:MISSING_SHOWN]:
        print(f"not there  {line}")
    if len(missing) > MISSING_SHOWN:
        print(f"not there  and {len(missing) - MISSING_SHOWN} more")


def page_beside(folder: Path, first: Run) -> Path:
    """Where the page of a comparison goes: into the folder named first, or above it where that is a run's own."""
    return (folder.absolute().parent if first.folder == folder else folder) / "report.html"


def terminal(wide: bool) -> Console:
    """Standard output: as wide as it is, or as COLUMNS says; `wide`, or in a pipe, without end."""
    if not wide and (sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()):
        return Console(highlight=False)
    return Console(highlight=False, width=ENDLESS)
