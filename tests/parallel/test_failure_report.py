"""What a rank publishes when it dies, and what the others report."""

import os
import platform
import signal
import subprocess

import pytest

from stabletrain.errors import ConfigError, RankLost
from stabletrain.machine.signals import StopRequest
from stabletrain.parallel import failure_report
from stabletrain.parallel.distributed import Distributed
from stabletrain.parallel.failure_report import (
    as_rank_lost,
    describe_lost_rank,
    get,
    is_alive,
    publish_end,
    publish_failure,
    publish_location,
    put,
    says_how_to_continue,
)
from stabletrain.parallel.ranks import Ranks

HERE = platform.node()
CLOSED = RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234")
"""What gloo raises if another rank has ended."""


class Store(dict):
    """torchrun's store, as far as it is used."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key]

    def add(self, key, amount):
        self[key] = self.setdefault(key, 0) + amount
        return self[key]


@pytest.fixture
def store(monkeypatch):
    """Replaces torchrun's store, and does not wait for missing messages."""
    made = Store()
    monkeypatch.setattr(failure_report, "store", lambda: made)
    monkeypatch.setattr(failure_report, "REPORT_WAIT", 0.0)
    return made


class Event:
    """A CUDA event that the device reaches after so many looks; and never, if it is None."""

    def __init__(self, looks=None):
        self.looks = looks

    def query(self):
        if self.looks is None:
            return False
        self.looks -= 1
        return self.looks < 0


class Clock:
    """Stands for `time`: a second passes with each sleep."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += 1.0
        assert self.now < 1000, "it waits forever"


@pytest.fixture
def clock(monkeypatch):
    """Replaces the time, for this module only."""
    monkeypatch.setattr(failure_report, "time", Clock())
    return failure_report.time


@pytest.fixture(autouse=True)
def _sigterm():
    """The handler of SIGTERM, which a rank that loses another ignores from then on."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def rank(number, count=2, restarts=0):
    return Ranks(number, count, number, launched=True, restarts=restarts, local_world_size=count)


def test_the_rank_that_failed_is_named_with_its_error(store):
    for number in range(3):
        publish_location(rank(number, 3))
    publish_failure(rank(2, 3), ValueError("a  bad\nvalue"))
    found = as_rank_lost(CLOSED, rank(0, 3))
    assert isinstance(found, RankLost)
    assert str(found) == "rank 2 of 3 has ended: ValueError: a bad value"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "torchrun ends all: not before this is told"


def test_who_has_waited_in_vain_says_how_long_and_what_to_raise(store):
    publish_location(rank(1))
    lost = as_rank_lost(RuntimeError("[gloo/buffer.cc:81] Timed out waiting 900000ms for recv operation"), rank(0))
    assert str(lost).endswith(
        "although all still run; this rank has waited for 900 s: if the ranks need longer, raise parallel.timeout, or "
        "parallel.start_timeout if the first step is not done yet"
    )
    lost = as_rank_lost(RuntimeError("[gloo/pair.cc:534] Connection closed by peer"), rank(0))
    assert str(lost).endswith("although all still run")


def test_a_rank_that_gave_up_waiting_tells_the_one_it_waited_for(store):
    publish_location(rank(0))
    publish_location(rank(1))
    as_rank_lost(RuntimeError("[gloo/buffer.cc:81] Timed out waiting 900000ms for recv operation"), rank(1))
    assert str(as_rank_lost(CLOSED, rank(0))) == "rank 1 of 2 has ended: it waited 900 s for another rank"


def waiting(here, *signals):
    """A rank that waits for its device, and the signals that it has been sent."""
    request, ranks = StopRequest(), Distributed(here)
    for each in signals:
        request.note(each, None)
    ranks.request_stop(request)
    return ranks


def test_a_step_that_takes_long_is_waited_for(store, clock):
    publish_location(rank(1))
    waiting(rank(0)).wait_for(Event(0))
    assert clock.now == 0, "what has arrived is not waited for"
    waiting(rank(0)).wait_for(Event(500))
    waiting(rank(0), signal.SIGUSR2).wait_for(Event(500))


def test_a_device_that_waits_for_a_killed_rank_is_not_waited_for(store, clock):
    process = subprocess.Popen(["true"])
    process.wait()
    put(rank(1), "at", f"{HERE} {process.pid}")
    with pytest.raises(RankLost, match=f"^rank 1 of 2 .process {process.pid} on {HERE}. has ended without an error"):
        waiting(rank(0)).wait_for(Event())
    assert clock.now < 5


def test_a_device_that_waits_for_a_rank_of_another_machine_that_failed_is_not_waited_for(store, clock):
    there = Ranks(1, 2, 0, launched=True, local_world_size=1)
    put(there, "at", "far_away 1")
    publish_failure(there, ValueError("a bad value"))
    here = waiting(Ranks(0, 2, 0, launched=True, local_world_size=1))
    here.wait_for(Event(500))  # of a sweep whose next run goes on
    publish_end(there)
    with pytest.raises(RankLost, match="^rank 1 of 2 has ended: ValueError: a bad value$"):
        here.wait_for(Event())


@pytest.mark.parametrize(("seconds", "waited"), [("30", 20), ("100", 90)])
def test_a_rank_that_is_about_to_be_killed_reports_that_its_device_waits(store, clock, monkeypatch, seconds, waited):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", seconds)
    put(rank(1), "at", "far_away 1")
    here = waiting(rank(0), signal.SIGTERM)
    here.wait_for(Event(waited))
    begun = clock.now
    with pytest.raises(RankLost, match=r"^another rank no longer responds, .* machines \(1 on far_away\)$"):
        here.wait_for(Event())
    assert waited <= clock.now - begun < waited + 5


def test_an_error_of_another_kind_is_left_alone(store):
    before = signal.getsignal(signal.SIGTERM)
    assert as_rank_lost(ValueError("Connection closed by peer"), rank(0)) is None
    assert as_rank_lost(RuntimeError("out of memory"), rank(0)) is None
    assert as_rank_lost(ConfigError("steps=0 is below 1"), rank(0)) is None
    assert as_rank_lost(CLOSED, Ranks()) is None, "one process cannot lose a rank"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_loss_that_is_known_already_stays_as_it_is(store):
    error = RankLost("rank 1 has ended")
    assert as_rank_lost(error, rank(0)) is error
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "torchrun ends all: not before this is told"


def test_a_process_that_ended_without_a_message_is_named(store):
    process = subprocess.Popen(["true"])
    process.wait()
    put(rank(1), "at", f"{HERE} {process.pid}")
    told = describe_lost_rank(rank(0))
    assert told.startswith(f"rank 1 of 2 (process {process.pid} on {HERE}) has ended without an error message")


def test_processes_that_still_run_are_not_accused(store):
    publish_location(rank(1))
    assert describe_lost_rank(rank(0)) == "another rank no longer responds, although all still run"


def test_of_another_machine_only_its_name_is_known(store):
    publish_location(rank(1, 3))
    put(rank(2, 3), "at", "far_away 1")
    assert describe_lost_rank(rank(0, 3)).endswith("one of those on other machines (2 on far_away)")


def test_a_late_message_is_waited_for(store, monkeypatch):
    monkeypatch.setattr(failure_report, "REPORT_WAIT", 60.0)
    monkeypatch.setattr(failure_report.time, "sleep", lambda seconds: publish_failure(rank(1), ValueError("late")))
    publish_location(rank(1))
    assert describe_lost_rank(rank(0)) == "rank 1 of 2 has ended: ValueError: late"


def test_messages_from_before_a_restart_are_ignored(store):
    publish_failure(rank(1), ValueError("before"))
    assert get(rank(0), "last", 1) == "ValueError: before"
    assert get(rank(0, restarts=1), "last", 1) == ""


def test_a_message_is_one_short_line(store):
    put(rank(1), "last", "a\n b " + "x" * 1000)
    assert get(rank(0), "last", 1) == ("a b " + "x" * 1000)[: failure_report.LONGEST_MESSAGE]


def test_one_process_publishes_nothing(store):
    publish_failure(Ranks(), ValueError("alone"))
    assert store == {}


def test_a_store_that_is_gone_does_no_harm(monkeypatch):
    def register():
        raise ConnectionError

    monkeypatch.setattr(failure_report, "store", register)
    publish_location(rank(0))
    publish_failure(rank(0), ValueError("unheard"))
    assert get(rank(0), "at", 1) == ""


@pytest.mark.parametrize("alive", [(0, 1, 2), (1, 2), (2,)])
def test_one_of_the_ranks_that_are_left_says_how_to_continue(store, alive):
    assert [says_how_to_continue(rank(number, 3)) for number in alive] == [True, *[False] * (len(alive) - 1)]
    assert says_how_to_continue(rank(1, 3, restarts=1)), "after a restart it is said again"


def test_what_rank_0_failed_with_is_not_continued_by_the_others(store):
    publish_failure(rank(0), ValueError("a mistake"))
    assert not says_how_to_continue(rank(1))


def test_without_a_store_each_machine_says_how_to_continue(monkeypatch):
    monkeypatch.setattr(failure_report, "store", dict)
    assert [says_how_to_continue(Ranks(number, 4, number % 2, launched=True)) for number in (2, 3)] == [True, False]


def test_a_zombie_counts_as_ended():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(str(process.pid))
    process.wait()
    assert not is_alive(str(process.pid))
    assert is_alive(str(os.getpid()))
