"""Which of several ranks is to blame, from what each tells of its own part of the step."""

import math
from dataclasses import replace

import pytest

from stabletrain.forensics import distributed_handler
from stabletrain.forensics.diagnosis.diagnose import diagnose
from stabletrain.forensics.distributed_handler import (
    DistributedIncidentHandler,
    RankEvidence,
    choose_rank,
    for_all_ranks,
    found_between_ranks,
    rank_evidence,
    step_was_bad,
    write_together,
)
from stabletrain.forensics.facts import Damage, LargestInput
from stabletrain.forensics.handler import IncidentHandler, NoIncidentHandler
from stabletrain.forensics.investigate import Findings, IncidentRequest
from stabletrain.forensics.probes.update import UpdateFault
from stabletrain.forensics.subject import StepSubject
from stabletrain.guard.in_code import for_any_loop
from stabletrain.parallel.ranks import Ranks
from stabletrain.parallel.whole import WholeState
from stabletrain.records import RankPart
from tests.forensics import given
from tests.forensics.diagnosis.given import BAD, FINE, NAN, READING, SPIKE, origin

CALM = replace(SPIKE, outcomes={"same": FINE}, part=RankPart(0, 4.0, 1.0))
BROKEN = replace(CALM, kind="nonfinite", reading=READING._replace(loss=math.nan, grad_norm=math.nan))
LOUD = LargestInput({"index": 3}, 1e6, 1.0)
OK, SHARD = RankEvidence(0, 0.0, True, True), RankEvidence(0, 0.0, True, False)


def told(evidence):
    return rank_evidence(Findings(evidence, diagnose(evidence), 0.0, []))


@pytest.mark.parametrize(
    ("evidence", "level"),
    [
        (replace(BROKEN, samples=[{"index": 1, "fault": "label", "what": "x"}]), 3),
        (replace(BROKEN, damage=[Damage("parameter", "w", "bad")]), 3),
        (replace(BROKEN, outcomes={"same": NAN}), 2),
        (replace(CALM, outcomes={"same": BAD}), 2),
        (replace(CALM, outcomes={"same": FINE, "fresh_batch": FINE}, largest_input=LOUD), 2),
        (replace(BROKEN, part=RankPart(0, math.nan, math.nan)), 1),
        (replace(BROKEN, part=RankPart(0, 4.0, math.inf)), 1),
        (replace(BROKEN, part=RankPart(0, math.nan)), 1),
        (replace(CALM, outcomes={"same": replace(FINE, bitwise_equal_to_reading=False)}), 1),
        (BROKEN, 0),
        (CALM, 0),
        (replace(BROKEN, outcomes={"same": BAD}), 0),
    ],
)
def test_the_level_says_how_surely_a_ranks_own_part_was_bad(evidence, level):
    assert told(evidence).level == level


def test_what_a_rank_tells_besides():
    assert told(replace(CALM, outcomes={"same": BAD})).size == 4.0, "its gradient norm is 80, the limit is 20"
    assert told(replace(BROKEN, outcomes={"same": NAN})).size == 0
    assert told(CALM).normal
    assert not told(replace(CALM, outcomes={})).normal, "the replay was not run"
    assert told(CALM).shard
    assert not told(replace(BROKEN, part=RankPart(0, 4.0, None, math.nan))).shard
    assert rank_evidence(None).level == -1


@pytest.mark.parametrize(
    ("accounts", "known", "chosen", "guilty"),
    [
        ([OK, RankEvidence(1, 0, True, True)], -1, 1, 1),
        ([RankEvidence(1, 0, True, True), RankEvidence(2, 0, False, True)], 0, 1, 1),
        ([RankEvidence(2, 1.1, False, True), RankEvidence(2, 9.0, False, True)], -1, 1, 1),
        ([RankEvidence(2, 0, False, True)] * 2, -1, 0, 0),
        ([OK, OK], 1, 1, 1),
        ([OK, SHARD], -1, 1, 1),
        ([SHARD, SHARD], -1, 0, 0),
        ([OK, OK], -1, 0, None),
        ([rank_evidence(None), OK], -1, 1, None),
        ([rank_evidence(None)] * 2, -1, 0, None),
    ],
)
def test_the_rank_with_the_surest_and_largest_failure_writes_the_folder(accounts, known, chosen, guilty):
    assert choose_rank(accounts, known) == (chosen, guilty)


def test_if_every_part_was_normal_the_sum_over_the_ranks_is_to_blame(repro):
    for evidence in (BROKEN, CALM):
        assert step_was_bad(evidence)
        assert diagnose(evidence).cause != "hardware_fault"
        found = found_between_ranks(StepSubject(repro), Findings(evidence, diagnose(evidence), 0.0, []))
        assert found.diagnosis.cause == "hardware_fault"
        assert "network" in found.diagnosis.fix[0]


def test_a_fault_between_the_ranks_is_explained_in_the_words_of_the_subject(repro):
    class InALoop(StepSubject):
        def diagnose(self, evidence):
            return for_any_loop(super().diagnose(evidence))

    found = found_between_ranks(InALoop(repro), Findings(BROKEN, diagnose(BROKEN), 0.0, []))
    assert found.diagnosis.fix[0].startswith("check that the closure")


def test_a_step_that_was_skipped_for_its_inputs_or_only_investigated_was_not_bad():
    assert not step_was_bad(replace(CALM, reading=READING._replace(loss=4.0, grad_norm=1.0)))
    assert not step_was_bad(replace(CALM, kind="loss_scale"))


def test_gathering_the_weights_takes_no_time_from_the_diagnosis(tmp_path, monkeypatch):
    order = []

    class Gathered(WholeState):
        def gather(self):
            order.append("gather")
            return super().gather()

    class Own(IncidentHandler):
        def has_budget(self):
            return True

        def deadline(self, longest=math.inf):
            order.append("deadline")
            return super().deadline(longest)

        def investigate(self, *_, **__):
            order.append("investigate")

    monkeypatch.setattr(distributed_handler, "exchange", lambda work: [work()])
    monkeypatch.setattr(distributed_handler, "on_all_ranks", lambda work: work())
    monkeypatch.setattr(distributed_handler.SharedRequests, "finish", lambda self, error: None)
    job = given.made(tmp_path, *given.GPT)
    repro = given.repro_of(job, job.data.load(0), reading=READING)
    handler = DistributedIncidentHandler(Own(), Ranks(0, 2, 0, launched=True))
    states = Gathered(job.state.model, lambda: None)
    assert handler.handle(IncidentRequest("nonfinite"), lambda: StepSubject(repro), states) is None
    assert order == ["gather", "deadline", "investigate"]


def test_one_process_keeps_its_handler():
    handler = NoIncidentHandler()
    assert for_all_ranks(handler, Ranks()) is handler
    assert isinstance(for_all_ranks(handler, Ranks(0, 2, 0, launched=True)), DistributedIncidentHandler)


def fault(index):
    place = replace(origin(), index=index)
    return UpdateFault("Adam", "w", "parameter", "float32", 0, {}, ["w"], 1, "zero_eps", "words", origin=place)


@pytest.mark.parametrize(
    ("faults", "chosen", "at_fault"),
    [
        ([fault(5), fault(5)], 0, None),  # ddp: all ranks take the same step
        ([None, fault(5)], 1, 1),
        ([fault(7), fault(5)], 1, 1),
        ([fault(5), None], 0, 0),
    ],
)
def test_of_updates_that_are_not_finite_the_earliest_is_filed(faults, chosen, at_fault, repro, monkeypatch):
    evidence = [replace(BROKEN, kind="update", update=one, update_ran=True) for one in faults]
    found = [Findings(each, diagnose(each), 0.0, []) for each in evidence]
    filed = []

    class Own(IncidentHandler):
        def write_incident(self, subject, found, rank=None, tick=None):
            filed.append((found.evidence.update, rank))

    for rank, each in enumerate(found):
        answers = iter([[rank_evidence(other) for other in found]])  # of all ranks; then each runs `write`
        monkeypatch.setattr(
            distributed_handler, "exchange", lambda work, answers=answers: next(answers, None) or [work()] * 2
        )
        write_together(Own(), rank, StepSubject(repro), each)
    assert filed == [(faults[chosen], at_fault)]
