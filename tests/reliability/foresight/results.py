"""All results of docs/foresight.md, as text."""

from pathlib import Path

from tests.reliability.foresight.act import read_acts
from tests.reliability.foresight.looks import watch
from tests.reliability.foresight.saved import acts_table
from tests.reliability.foresight.store import read
from tests.reliability.foresight.tables import everything


def results(folder: Path) -> str:
    """Returns the tables of the recordings in a folder, and of the runs that acted at their alarms."""
    runs = watch(read(folder))
    acted = read_acts()
    return everything(runs) + ("\n### Acting\n\n" + acts_table(acted, runs) + "\n" if acted else "")
