"""The incident handler of several ranks: all investigate an incident together, and one of them writes its folder.

Each rank replays its own part of the step on a copy of the whole model, without communication, so a rank whose model
raises does not block the others. It compares the replay with what this rank itself measured in the step, not with the
step's numbers, which are sums over all ranks. Then the ranks exchange how strong the evidence against their own part
is:

| level | this rank's part |
|---|---|
| 3 | has bad samples, its state was corrupt before the step, its recheck differs, or its update is not finite |
| 2 | fails again in a replay; if it is a spike, the larger one counts |
| 1 | was bad in the step, but is normal in the replay: a fault that happened once |
| 0 | was normal in both |

The first rank of the highest level writes the folder. Of updates that are not finite, the one whose operation came
first in the step is chosen: with sharded parameters, its value has reached the others. If every part was normal in
both, the numbers went wrong between the ranks. With FSDP a rank knows the gradient of its own shards only, after the
sum over the ranks. So this also holds for a gradient that was bad once; the rank whose shards were not finite is then
named.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch.optim import Optimizer

from stabletrain.forensics.agreement import NotInvestigated, OlderState, exchange, together
from stabletrain.forensics.diagnosis.diagnose import diagnose
from stabletrain.forensics.diagnosis.evidence import Evidence, RunSettings, too_bright
from stabletrain.forensics.handler import IncidentHandler, IncidentSummary, NoIncidentHandler
from stabletrain.forensics.investigate import Findings
from stabletrain.forensics.probes.samples import bad_samples
from stabletrain.forensics.repro import Repro
from stabletrain.forensics.subject import StepSubject, Subject
from stabletrain.parallel.ranks import Ranks, timeout
from stabletrain.parallel.whole import WholeState


class Account(NamedTuple):
    """What a rank tells the others of its own part of the step.

    Attributes:
        level: see the module; -1 if this rank has nothing to report.
        size: how many times the guard's limit the replay reached; 0 if the step is no spike. For an update that is not
            finite: minus the number of the operation to blame.
        normal: whether the replay was run, and was normal.
        shard: whether this rank's shards of the gradient were finite.
    """

    level: int
    size: float
    normal: bool
    shard: bool


class DistributedIncidentHandler(NoIncidentHandler):
    """Investigates an incident on all ranks together; every rank must call it."""

    def __init__(self, own: IncidentHandler | NoIncidentHandler, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks

    def open(self, folder: Path, setting: RunSettings) -> None:
        """Opens this rank's handler."""
        self._own.open(folder, setting)

    def handle(
        self,
        make: Callable[[], Repro],
        kind: str,
        *,
        states: WholeState,
        classes: int | None,
        optimizer: Optimizer | None,
        limits: tuple[float, float] = (math.inf, math.inf),
        tick: int | None = None,
    ) -> IncidentSummary | None:
        """Like `IncidentHandler.handle`; returns the same summary, or None, or raises the same, on every rank."""
        own = self._own
        if not isinstance(own, IncidentHandler):
            return None
        # The main process decides for all: it reads and counts the folders.
        filed = exchange(lambda: own.filed_at(tick) if self._ranks.is_main else None)[0]
        if filed is not None:
            return filed
        if not all(exchange(lambda: not self._ranks.is_main or own.has_budget())):
            return None
        own.count()
        repro = together(make)
        # Bad samples explain the step: then no rank replays it, and weights are needed only to be saved.
        update = kind == "update"  # the step's forward and backward pass were normal, and are not replayed
        bad = exchange(lambda: not update and bool(bad_samples(repro.batch, repro.tools.sanitizer.vocab_size, classes)))
        if not update and (own.keep_state or not any(bad)):
            together(states.check)  # before anything is allocated or gathered
            together(states.prepare)
            repro = replace(repro, model=together(states.gather))
        # From here on the other ranks wait for this one: use at most half of the time that they do.
        deadline = own.deadline(timeout().total_seconds() / 2)
        older, found, error = OlderState(states), None, None
        if bad[self._ranks.rank] or not any(bad):
            try:
                ready = replace(repro, older=older, deadline=deadline)
                found = own.investigate(StepSubject(ready), kind, classes=classes, optimizer=optimizer, limits=limits)
            except NotInvestigated:  # all ranks raise this one together
                raise
            except Exception as raised:
                error = raised
        older.finish(error)

        def account() -> Account:
            if error is not None:
                raise error
            return account_of(found)

        return write_together(own, self._ranks.rank, StepSubject(repro), found, exchange(account), tick)


def write_together(
    own: IncidentHandler,
    rank: int,
    subject: Subject,
    found: Findings | None,
    told: list[Account],
    tick: int | None = None,
) -> IncidentSummary | None:
    """Has one rank write the folder, and returns its summary on all ranks.

    Args:
        own: this rank's handler.
        rank: this rank.
        subject: the step, as this rank sees it.
        found: this rank's findings; None if it has nothing to report.
        told: what each rank tells the others.
        tick: see `IncidentHandler.handle`.
    """
    assert subject.reading is not None
    chosen, guilty = choose(told, subject.reading.rank)
    if len({*told}) == 1 and found is not None and found.evidence.kind == "update" and subject.reading.rank < 0:
        guilty = None  # every rank takes the same step

    def write() -> IncidentSummary | None:
        if rank != chosen or found is None:
            return None
        all_normal = all(account.level == 0 and account.normal for account in told)
        mine = unattributed(found) if all_normal and step_was_bad(found.evidence) else found
        return own.write_incident(subject, mine, rank=guilty, tick=tick)

    return exchange(write)[chosen]


def account_of(found: Findings | None) -> Account:
    """What this rank tells the others; `found` is None if it has nothing to report."""
    if found is None:
        return Account(-1, 0.0, True, True)
    evidence, level, size = found.evidence, 0, 0.0
    if evidence.kind == "update":
        fault = evidence.update
        return Account(0, 0.0, True, True) if fault is None else Account(3, -float(fault.index), True, True)
    fine = evidence.normal("same") if evidence.kind == "spike" else evidence.finite("same")
    if evidence.samples or evidence.damage or (evidence.recheck is not None and evidence.recheck.differs):
        level = 3
    elif fine is False or too_bright(evidence):
        level, size = 2, excess(evidence)
    elif was_bad(evidence):
        level = 1
    part = evidence.part
    shard = part is None or part.shard_norm is None or math.isfinite(part.shard_norm)
    return Account(level, size, fine is True, shard)


def excess(evidence: Evidence) -> float:
    """How many times the guard's limits loss or gradient norm of the replay of a spike reach; 0 for other kinds."""
    same = evidence.outcomes.get("same")
    if evidence.kind != "spike" or same is None or same.loss is None or same.grad_norm is None:
        return 0.0
    found = max(same.loss / evidence.setting.loss_limit, same.grad_norm / evidence.setting.norm_limit)
    return found if math.isfinite(found) else math.inf


def was_bad(evidence: Evidence) -> bool:
    """Whether this rank's own part was bad in the step: not finite, or not what the replay gives."""
    part, same = evidence.part, evidence.outcomes.get("same")
    if part is None:
        return False
    finite = math.isfinite(part.loss) and (part.grad_norm is None or math.isfinite(part.grad_norm))
    return not finite or (same is not None and same.bitwise_equal_to_reading is False)


def step_was_bad(evidence: Evidence) -> bool:
    """Whether the step failed by its loss or gradient norm."""
    reading, setting = evidence.reading, evidence.setting
    if evidence.kind == "spike":
        return reading.loss > setting.loss_limit or reading.grad_norm > setting.norm_limit
    return evidence.kind != "loss_scale"


def choose(told: list[Account], known: int) -> tuple[int, int | None]:
    """Returns the rank that writes the folder, and the rank at fault; None if no rank is known to be.

    `known` is the rank that the step's reading names, -1 for none.
    """
    ranking = [account[:2] for account in told]
    best = max(ranking)
    if best[0] > 0:
        return (first := ranking.index(best)), first
    if best[0] < 0:
        return 0, None
    suspects = [rank for rank, account in enumerate(told) if not account.shard]
    guilty = known if known >= 0 else suspects[0] if suspects else None
    writes = guilty if guilty is not None and told[guilty].level == 0 else ranking.index(best)
    return writes, guilty


def unattributed(found: Findings) -> Findings:
    """The findings, diagnosed with what all ranks know: every rank's own part is normal."""
    evidence = replace(found.evidence, parts_normal=True)
    return replace(found, evidence=evidence, diagnosis=diagnose(evidence))


def for_all_ranks(
    handler: IncidentHandler | NoIncidentHandler, ranks: Ranks
) -> IncidentHandler | DistributedIncidentHandler | NoIncidentHandler:
    """Wraps the handler for several ranks; returns it unchanged for one process."""
    return DistributedIncidentHandler(handler, ranks) if ranks.distributed else handler
