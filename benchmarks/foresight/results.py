"""All results of docs/foresight.md, as text."""

from pathlib import Path

from benchmarks.foresight.act import read_acts
from benchmarks.foresight.looks import watch
from benchmarks.foresight.saved import acts_table
from benchmarks.foresight.store import read
from benchmarks.foresight.tables import everything


def results(folder: Path) -> str:
    """Returns the tables of the recordings in a folder, and of the runs that acted at their alarms."""
    runs = watch(read(folder))
    acted = read_acts()
    return everything(runs) + ("\n### Acting\n\n" + acts_table(acted, runs) + "\n" if acted else "")
