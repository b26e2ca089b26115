"""The proof of the first steps' limits: faults are tried from one state, and judged as a run's steps are."""

import pytest

from tests.reliability import early_steps as early

pytestmark = pytest.mark.slow

GPT = ("model=gpt_nano", "model.n_layer=2", "model.n_embd=16", "model.n_head=2", "data.block_size=16", "batch_size=4")


def test_faults_of_early_steps_are_tried_on_a_state_that_is_then_restored(tmp_path):
    plain, tried = (early.Start(tmp_path / name, (*GPT, "precision=fp32")) for name in ("plain", "tried"))
    series = [early.values(plain.step()) for _ in range(5)]
    clean = [early.values(tried.step()) for _ in range(2)]
    found = tried.with_faults()
    assert clean + [early.values(tried.step()) for _ in range(3)] == series
    assert found.keys() == early.FAULTS.keys() - {*early.IMAGES_ONLY}
    assert all(readings[:3] != series[2:] for readings in found.values()), "each fault does something"
    for start in (plain, tried):
        start.close()


def test_a_fault_of_early_steps_is_caught_if_a_limit_is_passed_in_time():
    series = [[3.0, 1.0, 0.0]] * 70
    faults = {"loud": [[3.0, 1.0, 0.0], [9.1, 1.0, 0.0]], "quiet": [[4.0, 50.0, 0.0]], "large": [[7.0, 1.0, 0.0]]}
    start = {"series": series, "at": 40, "faults": faults}
    assert [early.caught(start, fault, True) for fault in faults] == [True, False, False]
    assert [early.caught(start, fault, False) for fault in faults] == [True, False, True]
    assert [early.clear(start, fault) for fault in faults] == [True, False, True]
    assert early.false_skips(start, True) == early.false_skips(start, False) == 0
    assert early.false_skips(start | {"series": [*series[:20], [7.0, 1.0, 0.0], *series[20:]]}, False) == 1
