"""Ranks that explain an incident agree after every part: an error of one is raised on all."""

import pytest

from stabletrain.errors import StabletrainError
from stabletrain.forensics import agreement
from stabletrain.forensics.agreement import NotInvestigated, OlderState, exchange, on_all_ranks, one_line_of
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
    other += [[theirs], [None]]
    states = States()
    older = OlderState(states)
    if needs:
        assert older() == {"step": 3}
        assert older() == {"step": 3}
    older.finish()
    assert states.calls == (["prepare", "gather"] if needs or theirs else [])


def test_a_rank_that_failed_tells_the_others_instead_of_gathering(other):
    other += [[True]]
    states = States()
    with pytest.raises(NotInvestigated, match="rank 0: ValueError: bad"):
        OlderState(states).finish(ValueError("bad"))
    other[:] = ["ValueError: theirs"]
    with pytest.raises(NotInvestigated, match="rank 1: ValueError: theirs"):
        OlderState(states)()
    assert not states.calls
