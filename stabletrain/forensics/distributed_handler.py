"""The incident handler of several ranks: all investigate an incident together, and one of them writes its folder.

Each rank replays its own part of the step on a copy of the whole model, without communication, so a rank whose model
raises does not block the others. It compares the replay with this rank's own measurements in the step, not with the
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

from torch import nn

from stabletrain.forensics.agreement import NotInvestigated, OlderState, SharedRequests, exchange, on_all_ranks
from stabletrain.forensics.diagnosis.evidence import Evidence, RunSettings, has_input_outlier
from stabletrain.forensics.handler import IncidentHandler, IncidentSummary, NoIncidentHandler
from stabletrain.forensics.investigate import Findings, IncidentRequest
from stabletrain.forensics.subject import Subject
from stabletrain.parallel.ranks import Ranks, timeout
from stabletrain.parallel.whole import WholeState


class RankEvidence(NamedTuple):
    """How strong the evidence against a rank's own part of the step is, for the other ranks.

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
        self._own, self._ranks, self.found = own, ranks, own.found

    def open(self, folder: Path, setting: RunSettings, *, shared: bool = False) -> None:
        """Opens this rank's handler."""
        self._own.open(folder, setting, shared=shared)

    def handle(
        self, request: IncidentRequest, make_subject: Callable[[], Subject], states: WholeState
    ) -> IncidentSummary | None:
        """Like `IncidentHandler.handle`; returns the same summary, or None, or raises the same, on every rank."""
        own = self._own
        if not isinstance(own, IncidentHandler):
            return None
        # The main process decides for all whether the step is explained: it reads and counts the folders.
        filed = exchange(lambda: own.filed_at(request.tick) if self._ranks.is_main else None)[0]
        if filed is not None:
            return filed
        if not all(exchange(lambda: not self._ranks.is_main or own.has_budget())):
            return None
        own.count()
        subject = on_all_ranks(make_subject)
        # Bad samples explain the step: then no rank replays it, and weights are needed only to be saved.
        update = request.kind == "update"  # the step's forward and backward pass were normal, and are not replayed
        bad = exchange(lambda: not update and subject.has_bad_samples(request.classes))
        model: nn.Module | None = None
        if not update and (own.keep_state or not any(bad)):
            on_all_ranks(states.check)  # before anything is allocated or gathered
            on_all_ranks(states.prepare)
            model = on_all_ranks(states.gather)
        # Each rank investigates its own part without communication, except for requests, such as for the older state.
        # The others wait for it: use at most half of the time that they do.
        deadline = own.deadline(timeout().total_seconds() / 2)
        requests = SharedRequests(subject.serves())
        subject.begin(model, OlderState(states, requests), deadline, requests)
        found, error = None, None
        if bad[self._ranks.rank] or not any(bad):
            try:
                found = own.investigate(subject, request)
            except NotInvestigated:  # all ranks raise this one together
                raise
            except Exception as raised:
                error = raised
        requests.finish(error)  # another rank may still need this rank's shards
        return own.noted(write_together(own, self._ranks.rank, subject, found, request.tick))


def write_together(
    own: IncidentHandler,
    rank: int,
    subject: Subject,
    found: Findings | None,
    tick: int | None = None,
) -> IncidentSummary | None:
    """Has one rank write the folder, and returns its summary on all ranks.

    Args:
        own: this rank's handler.
        rank: this rank.
        subject: the step, as this rank sees it.
        found: this rank's findings; None if it has nothing to report.
        tick: see `IncidentRequest`.

    Raises:
        NotInvestigated: a rank failed; on all ranks.
    """
    assert subject.reading is not None
    of_ranks = exchange(lambda: rank_evidence(found))
    writer, rank_at_fault = choose_rank(of_ranks, subject.reading.rank)
    if len({*of_ranks}) == 1 and found is not None and found.evidence.kind == "update" and subject.reading.rank < 0:
        rank_at_fault = None  # every rank takes the same step
    of_ranks_compared = None if found is None or found.evidence.recheck is None else found.evidence.recheck.blame
    if of_ranks_compared is not None and len(of_ranks_compared.suspects) > 1:
        rank_at_fault = None  # one of them, but not known which

    def write() -> IncidentSummary | None:
        if rank != writer or found is None:
            return None
        all_normal = all(each.level == 0 and each.normal for each in of_ranks)
        shown = found_between_ranks(subject, found) if all_normal and step_was_bad(found.evidence) else found
        return own.write_incident(subject, shown, rank=rank_at_fault, tick=tick)

    return exchange(write)[writer]


def rank_evidence(found: Findings | None) -> RankEvidence:
    """Summarises this rank's findings for the others; `found` is None if it has nothing to report."""
    if found is None:
        return RankEvidence(-1, 0.0, True, True)
    evidence, level, size = found.evidence, 0, 0.0
    if evidence.kind == "update":
        fault = evidence.update
        return RankEvidence(0, 0.0, True, True) if fault is None else RankEvidence(3, -float(fault.index), True, True)
    fine = evidence.normal("same") if evidence.kind == "spike" else evidence.finite("same")
    if evidence.samples or evidence.damage or (evidence.recheck is not None and evidence.recheck.differs):
        level = 3
    elif fine is False or has_input_outlier(evidence):
        level, size = 2, times_above_limit(evidence)
    elif part_was_bad(evidence):
        level = 1
    part = evidence.part
    shard = part is None or part.shard_norm is None or math.isfinite(part.shard_norm)
    return RankEvidence(level, size, fine is True, shard)


def times_above_limit(evidence: Evidence) -> float:
    """How many times the guard's limits loss or gradient norm of the replay of a spike reach; 0 for other kinds."""
    same = evidence.outcomes.get("same")
    if evidence.kind != "spike" or same is None or same.loss is None or same.grad_norm is None:
        return 0.0
    found = max(same.loss / evidence.setting.loss_limit, same.grad_norm / evidence.setting.norm_limit)
    return found if math.isfinite(found) else math.inf


def part_was_bad(evidence: Evidence) -> bool:
    """Whether this rank's own part was bad in the step: not finite, or different from its replay."""
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


def choose_rank(of_ranks: list[RankEvidence], known: int) -> tuple[int, int | None]:
    """Returns the rank that writes the folder, and the rank at fault; None if no rank is known to be.

    `known` is the rank that the step's reading names, -1 for none.
    """
    ranking = [each[:2] for each in of_ranks]
    best = max(ranking)
    first = ranking.index(best)
    if best[0] > 0:
        return first, first
    if best[0] < 0:
        return 0, None
    suspects = [rank for rank, each in enumerate(of_ranks) if not each.shard]
    at_fault = known if known >= 0 else suspects[0] if suspects else None
    return (at_fault if at_fault is not None and of_ranks[at_fault].level == 0 else first), at_fault


def found_between_ranks(subject: Subject, found: Findings) -> Findings:
    """The findings, diagnosed with the fact that every rank's own part is normal."""
    evidence = replace(found.evidence, parts_normal=True)
    return replace(found, evidence=evidence, diagnosis=subject.diagnose(evidence))


def for_all_ranks(
    handler: IncidentHandler | NoIncidentHandler, ranks: Ranks
) -> IncidentHandler | DistributedIncidentHandler | NoIncidentHandler:
    """Wraps the handler for several ranks; returns it unchanged for one process."""
    return DistributedIncidentHandler(handler, ranks) if ranks.distributed else handler
