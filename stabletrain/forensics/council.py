"""The desk of several ranks: each looks into its own part of the step, and the guilty one files what it found.

A rank replays its part by itself, without the others, on a copy of the whole model; so a model that raises on one rank
holds nobody up. Then every rank tells the others whether its own part fails. The first whose does writes the
folder, with its number; all tell the same three lines. Where no part fails though the step did, nothing that can be run
again explains it: the numbers were changed between the ranks, or by a machine that erred once.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch.optim import Optimizer

from stabletrain.forensics.causes import diagnose
from stabletrain.forensics.desk import Filed, Forensics, NoForensics
from stabletrain.forensics.evidence import Setting
from stabletrain.forensics.explain import Explained
from stabletrain.forensics.scene import Scene
from stabletrain.ranks import Ranks, from_all, told


class Council(NoForensics):
    """What all ranks make of an incident together; every rank must call it.

    Args:
        own: this rank's desk.
        ranks: this process among those of the run.
    """

    def __init__(self, own: NoForensics, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    def open(self, folder: Path, setting: Setting) -> None:
        """Opens this rank's desk."""
        self._own.open(folder, setting)

    def look_into(
        self,
        make: Callable[[float], Scene | None],
        kind: str,
        *,
        classes: int | None,
        optimizer: Optimizer | None,
        limits: tuple[float, float] = (math.inf, math.inf),
    ) -> Filed | None:
        """As a desk's own; None on every rank or on none."""
        if not isinstance(self._own, Forensics) or not told(self._own.due()):  # rank 0 counts the folders
            return None
        case = self._own.explained(make, kind, classes=classes, optimizer=optimizer, limits=limits)
        marks = from_all(-1 if case is None else weight(case[1]))
        if max(marks) < 0:
            return None
        chosen = marks.index(max(marks))
        if not max(marks) and case is not None and (reading := case[0].reading) is not None:
            chosen = max(reading.rank, 0)  # whose numbers were bad, though they are not when it is run again
        filed = None
        if case is not None and chosen == self._ranks.rank:
            scene, found = case
            if kind == "nonfinite" and not max(marks):
                found = nobodys(found)
            filed = self._own.file(scene, found, rank=chosen)
        return from_all(filed)[chosen]


def weight(found: Explained) -> int:
    """How surely a rank's own part failed: 2 for bad samples or a bad state, 1 for a replay that fails, else 0."""
    evidence = found.evidence
    if evidence.samples or evidence.damage:
        return 2
    return int(evidence.finite("same") is False)


def nobodys(found: Explained) -> Explained:
    """The case with what is known of all ranks: run again, no part of the step fails."""
    outcomes = dict(found.evidence.outcomes)
    outcomes["same"] = replace(outcomes["same"], bitwise_equal_to_reading=False)
    evidence = replace(found.evidence, outcomes=outcomes, repeats=True)
    return replace(found, evidence=evidence, diagnosis=diagnose(evidence))
