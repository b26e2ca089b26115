"""Prefetching returns the same batches as without it, in any order of requests."""

import threading

import pytest
import torch

from stabletrain.data.batches import Prefetch
from stabletrain.records import Batch


def load(step):
    return Batch(torch.full((2,), float(step)), torch.tensor([step, step]))


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_are_those_of_their_number_in_any_order(ahead):
    prefetch = Prefetch(load, ahead=ahead)
    for step in [0, 1, 2, 3, 1, 2, 50, 51, 0, 0]:  # on, back, far ahead, again
        assert prefetch.get(step).targets.tolist() == [step, step]
    prefetch.close()


def test_the_next_ones_are_under_way_on_another_thread():
    begun, threads = [threading.Event() for _ in range(10)], set()

    def noting(step):
        threads.add(threading.current_thread())
        begun[step].set()
        return load(step)

    prefetch = Prefetch(noting, ahead=2)
    prefetch.get(0)
    assert begun[2].wait(60), "step 2 is computed before it is requested"
    assert not begun[3].is_set()
    assert threading.main_thread() not in threads
    prefetch.close()
    assert not any(thread.is_alive() for thread in threads)


def test_an_error_is_raised_at_the_step_it_belongs_to():
    def failing(step):
        if step == 2:
            raise RuntimeError("sample 2 is broken")
        return load(step)

    prefetch = Prefetch(failing, ahead=3)
    assert prefetch.get(0).targets[0] == 0
    assert prefetch.get(1).targets[0] == 1
    with pytest.raises(RuntimeError, match="sample 2 is broken"):
        prefetch.get(2)
    assert prefetch.get(3).targets[0] == 3
    prefetch.close()


def test_what_was_guessed_is_forgotten_where_the_batches_have_become_others():
    shift = 0
    prefetch = Prefetch(lambda step: load(step + shift), ahead=3)
    assert prefetch.get(0).targets[0] == 0
    shift = 100
    prefetch.forget()
    assert [int(prefetch.get(step).targets[0]) for step in range(1, 6)] == [101, 102, 103, 104, 105]
    prefetch.close()


@pytest.mark.parametrize("pin", [False, True])
def test_a_batch_is_put_into_page_locked_memory_on_the_thread_where_that_is_asked_for(monkeypatch, pin):
    threads = []

    def noting(batch):
        threads.append(threading.current_thread())
        return batch

    monkeypatch.setattr(Batch, "pin_memory", noting)
    prefetch = Prefetch(load, ahead=0, pin=pin)
    assert prefetch.get(7).targets[0] == 7
    prefetch.close()
    assert len(threads) == pin
    assert threading.main_thread() not in threads
