"""Signals that ask a run to stop: recorded, handled once, and the previous handlers are restored."""

import signal
import threading

import pytest

from stabletrain.machine.signals import STOP_SIGNALS, StopRequest, handling


def handlers():
    """The handler of each signal that asks to stop."""
    return [signal.getsignal(number) for number in STOP_SIGNALS]


@pytest.fixture(autouse=True)
def _before():
    """Handlers as they were before each test, also if it fails."""
    before = dict(zip(STOP_SIGNALS, handlers(), strict=True))
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_by_name_and_ends_nothing(number):
    with StopRequest() as stop:
        assert stop.name == ""
        signal.raise_signal(number)
        assert stop.name == signal.Signals(number).name


def test_a_second_ctrl_c_interrupts_at_once():
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.name == "SIGINT"


def test_a_job_that_is_told_to_end_twice_is_not_interrupted():
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.name == "SIGINT", "the first Ctrl-C after another signal is noted as well"


def test_the_handlers_of_before_come_back_also_after_an_error():
    before, within = handlers(), []

    def fail():
        with StopRequest():
            within.extend(handlers())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert within != before
    assert handlers() == before


def test_contexts_may_lie_in_one_another():
    with StopRequest() as outer:
        with StopRequest() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert (inner.name, outer.name) == ("SIGTERM", "")
        signal.raise_signal(signal.SIGUSR2)
        assert (inner.name, outer.name) == ("SIGTERM", "SIGUSR2")


def test_signals_can_be_ignored_for_a_while():
    before = handlers()
    with handling(signal.SIG_IGN):
        for number in STOP_SIGNALS:
            signal.raise_signal(number)
    assert handlers() == before


def test_outside_the_main_thread_nothing_changes():
    before, within = handlers(), []

    def work():
        with StopRequest():
            within.extend(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert within == before
