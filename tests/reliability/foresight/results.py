"""All results of docs/evidence/foresight.md, as text."""

from collections.abc import Sequence

from tests.reliability.foresight.act import read_acts
from tests.reliability.foresight.looks import Watched
from tests.reliability.foresight.saved import acts_table
from tests.reliability.foresight.tables import everything


def results(runs: Sequence[Watched]) -> str:
    """Returns the tables of recorded runs, and of the runs that acted at their alarms."""
    acted = read_acts()
    return everything(runs) + ("\n### Acting\n\n" + acts_table(acted, runs) + "\n" if acted else "")
