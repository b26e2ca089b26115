"""`stabletrain compare`: reads runs, prints their table, and writes the requested files."""

import itertools
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame
from rich.console import Console
from rich.text import Text

from stabletrain.beside.comparison.by_setting import by_setting, latex, sentence, settings_of
from stabletrain.beside.comparison.by_setting import markdown as markdown_of
from stabletrain.beside.comparison.frames import by_seed, frame_of
from stabletrain.beside.comparison.pages.comparison import is_another_page, write_page
from stabletrain.beside.comparison.pictures import check_name, draw, draw_losses
from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.runs import is_run, read_runs
from stabletrain.beside.comparison.sensitivity import Arm, arms, markdown
from stabletrain.beside.comparison.table import ENDLESS, in_one_line, is_missing, ranked, show, values
from stabletrain.errors import ConfigError
from stabletrain.printable import one_line, say
from stabletrain.tracking.metrics import print_json

RECORDS = (".json", ".jsonl", ".yaml", ".safetensors")
"""Endings of the files that a run consists of; a table never replaces one."""

MISSING_SHOWN = 5
"""Maximum number of lines about missing runs, and of lines about copies."""


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
    by: Sequence[str] = (),
    tex: Path | None = None,
    as_json: bool = False,
) -> None:
    """Compares the runs in `folders`.

    Args:
        each: print one row per run, even if only the seed differs.
        sort: a column of the frame or the key of a setting; by default the best run comes first.
        rows: number of rows to print; 0 for all.
        wide: print all columns, even if they do not fit the terminal.
        csv: file for all rows and columns; with `by`, one row per setting.
        picture: file for the sensitivity curves if the learning rate differs between runs, else the training losses.
        html: file for the page; by default `report.html` in the folder of a sweep, and `compare.html` in the working
            folder for anything else. A page of other runs is never overwritten.
        by: keys of settings, such as `precision`: one row per setting (`by_setting.py`), in place of the table of runs.
        tex: file for the table of settings in LaTeX.
        as_json: print JSON in place of tables: `{"runs": [...], "settings": [...]}`, the columns of `frame` and of
            `by_setting` by their names, with null for what is missing.

    Raises:
        ConfigError: a folder contains no runs, the column does not exist, or a file cannot be written.
    """
    check_arguments(rows, csv, picture, html, tex)
    page, note = page_for(folders, html)
    runs = read_runs(folders)
    found = frame_of(runs)
    settings, swept = settings_of(found, by), arms(runs)
    if as_json:
        rows_by_setting = [{"best_lr": None, **row} for row in records(by_setting(found, *by))]  # the same keys always
        print_json({"runs": records(ranked(found, sort)), "settings": rows_by_setting})
    else:
        if by:
            say(markdown_of(settings))
        else:
            show(ranked(found if each else by_seed(found), sort), terminal(wide), rows)
        print_copies(runs)
        if swept and not by:
            print_sensitivity(swept)
        if by or (len(settings) > 1 and any(each.runs > 1 for each in settings)):
            terminal(wide).print(Text(one_line(sentence(settings, runs[0].loss_unit))))
    if csv is not None:
        in_one_line(by_setting(found, *by) if by else ranked(found, sort)).to_csv(csv)
        say(f"table    {csv}", file=sys.stderr)
    if tex is not None:
        tex.write_text(latex(settings), encoding="utf-8")
        say(f"table    {tex}", file=sys.stderr)
    if picture is not None:
        if swept:
            draw(swept, picture)
        else:
            draw_losses(runs, picture)
        say(f"picture  {picture}", file=sys.stderr)
    try:
        write_page(runs, found, page, folders)
    except ConfigError as error:
        if html is not None:
            raise
        say(f"no page  {error}", file=sys.stderr)  # the folder may belong to another user
    else:
        say(f"page     {page}{note}", file=sys.stderr)


def page_for(folders: Sequence[Path], html: Path | None) -> tuple[Path, str]:
    """Returns the file for the page, and a note for the user if the usual file is taken.

    Raises:
        ConfigError: `html` exists, and is not the page of these folders.
    """
    if html is not None:
        if is_another_page(html, folders):
            raise ConfigError(
                f"--html {html}: this file exists, and is not the page of these runs: name another file, or delete it"
            )
        return html, ""
    one_sweep = len({os.path.realpath(folder) for folder in folders}) == 1 and not is_run(folders[0])
    usual = folders[0] / "report.html" if one_sweep else Path("compare.html")
    if not is_another_page(usual, folders):
        return usual, ""
    names = (usual.with_stem(f"{usual.stem}-{number}") for number in itertools.count(2))
    free = next(name for name in names if not os.path.lexists(name) or not is_another_page(name, folders))
    return free, f" ({usual} is not the page of these runs, so it was kept)"


def check_arguments(
    rows: int, csv: Path | None, picture: Path | None, html: Path | None, tex: Path | None = None
) -> None:
    """Validates the arguments before any run is read; raises ConfigError."""
    if rows < 0:
        raise ConfigError(f"--rows {rows} is below 0: give the number of rows, or 0 for all")
    if picture is not None:
        check_name(picture)
    for name, file in (("csv", csv), ("tex", tex)):
        if file is not None and file.suffix in RECORDS and file.exists():
            raise ConfigError(f"--{name} {file}: this file exists and is no table: name another, such as runs.{name}")
    for file in (csv, html, tex):
        if file is not None and not file.name:
            raise ConfigError(f"{file} is a folder: name a file in it")
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{file}: the folder {file.parent} does not exist: create it first")


def records(table: DataFrame) -> list[dict[str, Any]]:
    """Returns the rows of a table, index included, with None for what is missing.

    A run that ended in NaN has the validation loss NaN, and not none.
    """
    whole = table.reset_index()
    columns = {
        str(name): [None if is_missing(value) else value for value in values(whole[name])] for name in whole.columns
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for row in rows:
        if row.get("status") == "finished" and row["diverged"] and row["val_loss"] is None:
            row["val_loss"] = math.nan
    return rows


def print_copies(runs: Sequence[Run]) -> None:
    """Prints which folders hold a copy of another run, with the same id."""
    lines = [
        f"{folder} holds the same run as {run.folder} (id {run.record['id']}): counted once"
        for run in runs
        for folder in run.copies
    ]
    print_first("copy", lines)


def print_sensitivity(swept: Sequence[Arm]) -> None:
    """Prints the table of learning-rate sensitivity, and the runs that are missing in it."""
    say(f"\n{markdown(swept)}")
    print_first("missing", [line for arm in swept for line in arm.missing])


def print_first(head: str, lines: Sequence[str]) -> None:
    """Prints the first `MISSING_SHOWN` lines, each after a head, and the number of the others."""
    more = [f"and {len(lines) - MISSING_SHOWN} more"] if len(lines) > MISSING_SHOWN else []
    for line in [*lines[:MISSING_SHOWN], *more]:
        say(f"{head:<9}{line}")


def terminal(wide: bool) -> Console:
    """Returns a console on standard output, without a width limit if `wide` or in a pipe without COLUMNS."""
    if not wide and (sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()):
        return Console(highlight=False)
    return Console(highlight=False, width=ENDLESS)
