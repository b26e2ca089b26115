"""What acting at the alarm saved: the table of the arms, and the runs to act on."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.reliability.foresight.cases import FITTED, HELD_OUT
from tests.reliability.foresight.events import WORSE, Run
from tests.reliability.foresight.looks import Watched
from tests.reliability.foresight.score import Scores, judge, share
from tests.reliability.foresight.tables import number, percent, table

ARMS = {"nothing": "nothing", "fix_arm": "the named fix", "wrong_arm": "a wrong fix"}


def to_act_on(runs: Sequence[Watched], scores: Scores, threshold: float) -> list[str]:
    """Returns the runs to act on: those with an event and a hit, and clean and hot ones with a false alarm."""
    found = []
    for each in runs:
        verdict = judge(each, scores[each.run.name], threshold)
        hit = each.run.family in (*FITTED, *HELD_OUT) and not each.run.partner and (verdict.hit or verdict.early)
        false = each.run.family in ("clean", "hot") and verdict.alarms > 0
        if (hit and each.run.trouble) or false:
            found.append(each.run.name)
    return found


def trouble(arm: Mapping[str, Any], run: Run) -> bool:
    """Whether an arm broke, or ended worse than a partner."""
    return arm["broke"] is not None or arm["final"] is None or arm["final"] > WORSE * run.best


def acts_table(found: Sequence[Mapping[str, Any]], runs: Sequence[Watched]) -> str:
    """Returns for each arm the share of runs without an event, and the change of the final loss."""
    by_name = {each.run.name: each.run for each in runs}
    groups = {
        "fitted families, with an event": [one for one in found if of_family(one, FITTED)],
        "held-out families, with an event": [one for one in found if of_family(one, HELD_OUT)],
        "clean and hot, false alarm": [one for one in found if of_family(one, ("clean", "hot"))],
    }
    rows = []
    for text, group in groups.items():
        false = text.startswith("clean")
        alarmed = [one for one in group if one["alarm"] is not None]
        in_trouble = alarmed if false else [one for one in alarmed if trouble(one["nothing"], by_name[one["case"]])]
        for arm, name in ARMS.items():
            ran = [one for one in in_trouble if arm in one and "refused" not in one[arm]]
            saved = [not trouble(one[arm], by_name[one["case"]]) for one in ran]
            changes = [change for one in ran if not math.isnan(change := relative(one, arm))]
            rows.append(
                [
                    text,
                    name,
                    f"{len(ran)}",
                    "-" if false else percent(share(saved)),
                    number(100 * float(np.median(changes)) if changes else math.nan, "+.1f") + " %",
                ]
            )
    return table(["runs", "from the alarm on", "number", "no event any more", "final loss, median change"], rows)


def of_family(one: Mapping[str, Any], families: Sequence[str]) -> bool:
    """Whether a result belongs to one of some families."""
    return one["case"].partition("/")[0] in families


def relative(one: Mapping[str, Any], arm: str) -> float:
    """Returns the relative change of the final loss against doing nothing; NaN if either is not finite."""
    with_arm, without = one[arm]["final"], one["nothing"]["final"]
    return math.nan if with_arm is None or without is None else with_arm / without - 1
