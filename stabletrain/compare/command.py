"""`stabletrain compare`: reads runs, prints their table, and writes the requested files."""

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
"""Maximum number of missing runs that are printed by name."""


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
        each: print one row per run, even if only the seed differs.
        sort: a column of the frame or the key of a setting; by default the best run comes first.
        rows: number of rows to print; 0 for all.
        wide: print all columns, even if they do not fit the terminal.
        csv: file for all rows and columns.
        picture: file for the sensitivity curves if the learning rate differs between runs, else the training losses.
        html: file for the page; by default `report.html` in the first folder, or in its parent if it is a run folder.

    Raises:
        ConfigError: a folder contains no runs, the column does not exist, or a file cannot be written.
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
    """Writes the page. A failure raises ConfigError if the user requested the page (`wanted`), else prints a line."""
    try:
        write_page(runs, found, page)
    except ConfigError as error:
        if wanted:
            raise
        print(f"no page  {error}", file=sys.stderr)  # the folder may belong to another user
    else:
        print(f"page     {page}", file=sys.stderr)


def check_arguments(rows: int, csv: Path | None, picture: Path | None, html: Path | None) -> None:
    """Validates the arguments before any run is read; raises ConfigError."""
    if rows < 0:
        raise ConfigError(f"--rows {rows} is below 0: give the number of rows, or 0 for all")
    if picture is not None:
        check_name(picture)
    for file in (csv, html):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{file}: the folder {file.parent} does not exist: create it first")


def print_sensitivity(swept: Sequence[Arm]) -> None:
    """Prints the learning-rate sensitivity table, and which runs it lacks."""
    print(f"\n{markdown(swept)}")
    missing = [line for arm in swept for line in arm.missing]
    for line in missing[:MISSING_SHOWN]:
        print(f"missing  {line}")
    if len(missing) > MISSING_SHOWN:
        print(f"missing  and {len(missing) - MISSING_SHOWN} more")


def page_beside(folder: Path, first: Run) -> Path:
    """Returns where the page goes: the first folder, or its parent if it is a run folder, which has its own page."""
    return (folder.absolute().parent if first.folder == folder else folder) / "report.html"


def terminal(wide: bool) -> Console:
    """Returns a console on standard output, without a width limit if `wide` or in a pipe without COLUMNS."""
    if not wide and (sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()):
        return Console(highlight=False)
    return Console(highlight=False, width=ENDLESS)
