"""The incident handler, and the one that several ranks share.

`IncidentHandler` investigates the first incidents of a run, each within a budget of seconds, files them, and returns
three lines to show. The same cause at the same operation is filed once.

`DistributedIncidentHandler` does so on several ranks. Each rank replays its own part by itself, without the others, on
a copy of the whole model, so a model that raises on one rank holds no other up. Then every rank tells the others
whether its own part fails. The first whose part does writes the folder, with its number, and all ranks return the same
lines. If no part fails though the step did, the numbers were changed between the ranks, or by a machine that erred
once."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.forensics.diagnosis.cause_table import CAUSES
from stabletrain.forensics.diagnosis.causes import diagnose
from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.incident import place_for, write
from stabletrain.forensics.investigate import Findings, investigate
from stabletrain.forensics.repro import Repro
from stabletrain.parallel.ranks import Ranks, all_gather_object, broadcast_object

ATTEMPTS = 3
"""Times `max_incidents` that a run looks into incidents at most: those it finds filed already cost time as well."""


@dataclass(frozen=True)
class IncidentSummary:
    """An incident that was looked into.

    Attributes:
        path: its folder; None where it could not be written.
        cause, verdict, fix: what it was, and what to do, best first.
        lines: three lines for a person: what, do this, where to read on.
    """

    path: Path | None
    cause: str
    verdict: str
    fix: Sequence[str]
    lines: list[str]


class NoIncidentHandler:
    """Looks into nothing.

    Attributes:
        newest: kind of the withheld step that was last explained, as the guard calls it; its caller's to write.
    """

    newest = ""

    def open(self, folder: Path, setting: RunSettings) -> None:
        """Nothing to open."""

    def handle(
        self,
        make: Callable[[float], Repro | None],
        kind: str,
        *,
        classes: int | None,
        optimizer: Optimizer | None,
        limits: tuple[float, float] = (math.inf, math.inf),
    ) -> IncidentSummary | None:
        """None."""
        return None


class IncidentHandler(NoIncidentHandler):
    """Looks into the first incidents of a run.

    A mistake in the code or the configuration shows again after every rollback. It is filed once: the same cause at the
    same operation again is only counted, so that another mistake finds room.

    Attributes:
        max_incidents: so many; folders that are there already count.
        max_seconds: for each, about: what has not begun by then is left out.
        keep_state: keep weights and batch with each.
        again: how often what had been filed came again, by cause, module, operation, direction and line.
    """

    def __init__(self, max_incidents: int = 10, max_seconds: float = 120.0, keep_state: bool = True) -> None:
        if max_incidents < 1:
            raise ConfigError(
                f"forensics.max_incidents={max_incidents} is below 1: use forensics=off to look into none"
            )
        if not max_seconds > 0:
            raise ConfigError(f"forensics.max_seconds={max_seconds} is not above 0: 120 is customary")
        self.max_incidents, self.max_seconds, self.keep_state = max_incidents, max_seconds, keep_state
        self.again: Counter[tuple[str, ...]] = Counter()
        self._filed: set[tuple[str, ...]] = set()
        self._looks = 0
        self._folder: Path | None = None
        self._setting = RunSettings()

    def open(self, folder: Path, setting: RunSettings) -> None:
        """Chooses the run folder, and takes the run's setting, by which fixes are chosen."""
        self._folder, self._setting = folder, setting

    def handle(
        self,
        make: Callable[[float], Repro | None],
        kind: str,
        *,
        classes: int | None,
        optimizer: Optimizer | None,
        limits: tuple[float, float] = (math.inf, math.inf),
    ) -> IncidentSummary | None:
        """Explains a step and writes its folder.

        None once the budget is spent, for a mistake that is filed already, or where an alarm is not borne out.

        Args:
            make: the repro, given its deadline (of `time.monotonic()`).
            kind: `nonfinite` or `spike`, of a step that was withheld; `loss_scale`, of an alarm that gradients vanish.
            classes: the last dimension of the logits; None if nobody knows.
            optimizer: the live one; only read.
            limits: the guard's, of loss and gradient norm.
        """
        if not self.has_budget():
            return None
        case = self.investigate(make, kind, classes=classes, optimizer=optimizer, limits=limits)
        return None if case is None else self.write_incident(*case)

    def has_budget(self) -> bool:
        """Whether there is budget left for another incident."""
        if self._folder is None or self._looks >= ATTEMPTS * self.max_incidents:
            return False
        return len(list(self._folder.glob("incidents/step-*"))) < self.max_incidents

    def investigate(
        self,
        make: Callable[[float], Repro | None],
        kind: str,
        *,
        classes: int | None,
        optimizer: Optimizer | None,
        limits: tuple[float, float],
    ) -> tuple[Repro, Findings] | None:
        """The repro, and what came of looking into it; None where an alarm is not borne out."""
        self._looks += 1
        repro = make(time.monotonic() + self.max_seconds)
        if repro is None:
            return None
        setting = replace(self._setting, loss_limit=limits[0], norm_limit=limits[1])
        found = investigate(repro, kind, classes=classes, optimizer=optimizer, setting=setting)
        small = found.evidence.underflow
        if kind == "loss_scale" and (small is None or not small.real):
            return None
        return repro, found

    def write_incident(self, repro: Repro, found: Findings, rank: int | None = None) -> IncidentSummary | None:
        """Writes the folder, and words what is said of it; None for a mistake that is filed already.

        Args:
            repro, found: from `investigate`.
            rank: the rank at fault; None for one process.
        """
        mistake = mistake_key(found)
        if mistake in self._filed:
            self.again[mistake] += 1
            return None
        assert self._folder is not None, "open(folder, setting) comes first"
        assert repro.reading is not None
        path: Path | None = place_for(self._folder, repro.reading.step)
        try:
            write(path, repro, found, rank=rank, keep_state=self.keep_state)
        except OSError as error:  # a full disk is no reason to end the run, nor to keep the cause back
            path, where = None, f"its folder could not be written ({error.strerror or error})"
        else:
            where = str(path)
            self._filed |= set() if CAUSES[mistake[0]].accident else {mistake}
        about = found.diagnosis
        of_rank = "" if rank is None else f", rank {rank}"
        lines = [
            f"step {repro.reading.step}{of_rank}: {about.cause} ({about.confidence:.0%} sure): {about.verdict}",
            f"do this: {about.fix[0] if about.fix else 'nothing is known to help'}",
            f"read on: {where}",
        ]
        return IncidentSummary(path, about.cause, about.verdict, about.fix, lines)


def mistake_key(found: Findings) -> tuple[str, ...]:
    """What makes two incidents the same mistake: the cause, and the operation where there is one."""
    o = found.evidence.origin
    return (found.diagnosis.cause, *(() if o is None else (o.module, o.op, o.direction, o.source)))


class DistributedIncidentHandler(NoIncidentHandler):
    """What all ranks make of an incident together; every rank must call it.

    Args:
        own: this rank's handler.
        ranks: this process among those of the run.
    """

    def __init__(self, own: IncidentHandler | NoIncidentHandler, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    def open(self, folder: Path, setting: RunSettings) -> None:
        """Opens this rank's handler."""
        self._own.open(folder, setting)

    def handle(
        self,
        make: Callable[[float], Repro | None],
        kind: str,
        *,
        classes: int | None,
        optimizer: Optimizer | None,
        limits: tuple[float, float] = (math.inf, math.inf),
    ) -> IncidentSummary | None:
        """As the handler of one process; None on every rank or on none."""
        if not isinstance(self._own, IncidentHandler):
            return None
        if not broadcast_object(self._own.has_budget()):  # the main process counts the folders
            return None
        case = self._own.investigate(make, kind, classes=classes, optimizer=optimizer, limits=limits)
        marks = all_gather_object(-1 if case is None else certainty(case[1]))
        if max(marks) < 0:
            return None
        chosen = marks.index(max(marks))
        if not max(marks) and case is not None and (reading := case[0].reading) is not None:
            chosen = max(reading.rank, 0)  # whose numbers were bad, though they are not when it is run again
        filed = None
        if case is not None and chosen == self._ranks.rank:
            repro, found = case
            if kind == "nonfinite" and not max(marks):
                found = unattributed(found)
            filed = self._own.write_incident(repro, found, rank=chosen)
        return all_gather_object(filed)[chosen]


def certainty(found: Findings) -> int:
    """How surely a rank's own part failed: 2 for bad samples or a bad state, 1 for a replay that fails, else 0."""
    evidence = found.evidence
    if evidence.samples or evidence.damage:
        return 2
    return int(evidence.finite("same") is False)


def unattributed(found: Findings) -> Findings:
    """The case with what is known of all ranks: run again, no part of the step fails."""
    outcomes = dict(found.evidence.outcomes)
    outcomes["same"] = replace(outcomes["same"], bitwise_equal_to_reading=False)
    evidence = replace(found.evidence, outcomes=outcomes, repeats=True)
    return replace(found, evidence=evidence, diagnosis=diagnose(evidence))


def for_all_ranks(
    handler: IncidentHandler | NoIncidentHandler, ranks: Ranks
) -> IncidentHandler | DistributedIncidentHandler | NoIncidentHandler:
    """The handler that several ranks share; of one process its own."""
    return DistributedIncidentHandler(handler, ranks) if ranks.distributed else handler
