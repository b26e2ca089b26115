"""All results of docs/foresight.md, as text."""

from pathlib import Path

from benchmarks.foresight.act import FILE
from benchmarks.foresight.looks import watch
from benchmarks.foresight.saved import acts_table
from benchmarks.foresight.store import read
from benchmarks.foresight.tables import everything
from stabletrain.tracking.metrics import read_jsonl


def results(folder: Path) -> str:
    """Returns the tables of the recordings in a folder, and of the runs that acted at their alarms."""
    runs = watch(read(folder))
    acted = read_jsonl(FILE) if FILE.exists() else []
    return everything(runs) + ("\n### Acting\n\n" + acts_table(acted, runs) + "\n" if acted else "")
