"""Ranks that explain an incident agree after every part: an error of one is raised on all."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from stabletrain.errors import StabletrainError
from stabletrain.forensics import agreement
from stabletrain.forensics.agreement import (
    OLDER_STATE,
    NotInvestigated,
    OlderState,
    Requests,
    SharedRequests,
    exchange,
    on_all_ranks,
    one_line_of,
)
from stabletrain.forensics.rerun import RerunResult, outcome_of
from stabletrain.parallel.whole import WholeState


@pytest.fixture
def other(monkeypatch):
    """What the other rank tells in turn: an error's text, or a result in a list; it repeats the last one."""
    told = []

    def gathered(mine):
        theirs = told.pop(0) if len(told) > 1 else told[0]
        return [mine, (theirs, []) if isinstance(theirs, str) else ("", theirs)]

    monkeypatch.setattr(agreement, "all_gather_object", gathered)
    return told


def test_results_of_all_ranks_come_back_in_order(other):
    other += [[7]]
    assert exchange(lambda: 3) == [3, 7]
    assert on_all_ranks(lambda: "own") == "own"


def test_an_error_of_any_rank_is_raised_with_its_number(other):
    other += ["MemoryError: no room"]
    with pytest.raises(NotInvestigated, match="^rank 1: MemoryError: no room$"):
        exchange(lambda: 3)
    other[:] = [[7]]
    with pytest.raises(NotInvestigated, match="^rank 0: ZeroDivisionError: division by zero$"):
        exchange(lambda: 1 / 0)
    other[:] = ["KeyError: 'a'"]
    with pytest.raises(NotInvestigated, match=r"^rank 0 \(and 1 other ranks\): ZeroDivisionError"):
        on_all_ranks(lambda: 1 / 0)


def test_a_lost_connection_is_not_swallowed(monkeypatch):
    def closed(mine):
        raise RuntimeError("gloo: connection closed by peer")

    monkeypatch.setattr(agreement, "all_gather_object", closed)
    with pytest.raises(RuntimeError, match="connection closed"):
        exchange(lambda: 1)


def test_an_error_is_told_in_one_line():
    assert one_line_of(ValueError("two\n  lines")) == "ValueError: two lines"
    assert one_line_of(StabletrainError("for the user")) == "for the user"
    assert len(one_line_of(ValueError("x" * 1000))) == agreement.MAX_LENGTH


class States(WholeState):
    """Counts how often the older state is looked up."""

    def __init__(self):
        self.calls = []

    def prepare_older(self):
        self.calls.append("prepare")

    def gather_older(self):
        self.calls.append("gather")
        return {"step": 3}


@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("theirs", [True, False])
def test_the_older_state_is_gathered_by_all_ranks_once_or_by_none(other, needs, theirs):
    done = [None]
    other += [[(OLDER_STATE,)] if theirs else done, done]
    states, requests = States(), SharedRequests({})
    older = OlderState(states, requests)
    if needs:
        assert older() == {"step": 3}
        assert older() == {"step": 3}
    requests.finish()
    if needs or theirs:
        assert older() == {"step": 3}, "a rank that took part has it too"
    assert states.calls == (["prepare", "gather"] if needs or theirs else [])


def test_a_rank_that_failed_tells_the_others_instead_of_gathering(other):
    other += [[(OLDER_STATE,)]]
    states, requests = States(), SharedRequests({})
    older = OlderState(states, requests)
    with pytest.raises(NotInvestigated, match="rank 0: ValueError: bad"):
        requests.finish(ValueError("bad"))
    other[:] = ["ValueError: theirs"]
    with pytest.raises(NotInvestigated, match="rank 1: ValueError: theirs"):
        older()
    assert not states.calls


@pytest.fixture
def two_ranks(monkeypatch):
    """Runs a function on two ranks, as threads that exchange objects; returns what each rank returned or raised."""
    barrier, told = threading.Barrier(2, timeout=20), [None, None]
    rank_of = threading.local()

    def gathered(mine):
        told[rank_of.rank] = mine
        barrier.wait()
        found = [*told]
        barrier.wait()
        return found

    monkeypatch.setattr(agreement, "all_gather_object", gathered)

    def on_rank(rank, work):
        rank_of.rank = rank
        try:
            return work(rank)
        except NotInvestigated as error:
            return error

    def run(work):
        with ThreadPoolExecutor(2) as pool:
            return [*pool.map(on_rank, (0, 1), (work, work))]

    return run


WANTED = [["fp32", "older_state"], ["same", "older_state", "fp32"]]
"""What each rank asks for, in order."""


def test_ranks_serve_each_others_requests_until_all_are_done(two_ranks):
    def investigate(rank):
        together = []
        requests = SharedRequests({"rerun": lambda variant: together.append((variant, "serves"))})
        for variant in WANTED[rank]:
            requests.run("rerun", variant, work=lambda variant=variant: together.append((variant, "needs")))
        requests.finish()
        return together

    one, other = two_ranks(investigate)
    assert [variant for variant, _ in one] == [variant for variant, _ in other], "all run the same, in one order"
    for together, wanted in zip((one, other), WANTED, strict=True):
        assert [variant for variant, role in together if role == "needs"] == wanted


def test_the_error_of_a_rank_ends_the_requests_of_all(two_ranks):
    def investigate(rank):
        requests = SharedRequests({"rerun": lambda variant: None})
        if rank == 1:
            requests.finish(ValueError("bad"))
        outcome_of(lambda: requests.run("rerun", "same", work=lambda: RerunResult(1.0, 1.0, [])), math.inf)
        return "a replay that was not run"

    assert [str(each) for each in two_ranks(investigate)] == ["rank 1: ValueError: bad"] * 2


def test_alone_a_request_is_just_run():
    requests = Requests()
    assert requests.run("rerun", "same", work=lambda: 3) == 3
    requests.finish()
    with pytest.raises(ValueError, match="bad"):
        requests.finish(ValueError("bad"))
