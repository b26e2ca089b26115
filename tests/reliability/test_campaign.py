"""The short form of `python -m tests.reliability.campaign`, and that the campaign can fail."""

import pytest

from tests.reliability.campaign import FAULTS, Setting, campaign, line, one, rendered, table

QUICK = [
    Setting("gpt", "fp32", False, 0),
    Setting("gpt", "fp16", True, 0),
    Setting("resnet", "bf16", True, 0),
]
IN_PROCESS = [kind for kind in FAULTS if kind != "kill"]
"""Kinds that can run inside a test process; for kills see test_in_io.py and tests/laws/test_resume.py."""


@pytest.mark.slow
def test_random_faults_at_random_times_corrupt_nothing():
    kinds = [*IN_PROCESS[::2], *IN_PROCESS[1::2]]  # two unlike ones in a run
    found = campaign((len(kinds) + 1) // 2, 3, QUICK, kinds, together=2)
    assert {outcome.setting for outcome in found} == {*QUICK}
    assert not [line(outcome) for outcome in found if outcome.bad]
    assert sum(outcome.skipped["bad_data"] for outcome in found) >= 5
    assert sum(outcome.rollbacks for outcome in found) >= 1
    assert rendered(table(found)).count("\n") == len(IN_PROCESS)


@pytest.mark.slow
def test_without_a_guard_the_campaign_finds_the_damage():
    outcome = one(QUICK[0], [{"kind": "gradient", "at": [30], "value": "nan"}], guarded=False)
    assert outcome.bad
    assert outcome.worse
    assert any("at the end" in what for what in outcome.corrupted)
