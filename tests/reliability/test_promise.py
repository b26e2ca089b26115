"""The short form of `python -m tests.reliability.promise`, and that this campaign can fail."""

import pytest

from tests.reliability.promise import campaign, drawn, outcome, table


@pytest.mark.slow
def test_optimizer_and_state_faults_leave_no_trace():
    found = campaign(8, 1)
    for run, result in found:
        assert result == {"corrupted": False, "named": True, "same": True}, run
    assert table(found).count("\n") == len({run["kind"] for run, _ in found}) + 1


@pytest.mark.slow
def test_without_a_check_the_campaign_finds_the_damage(tmp_path):
    number = next(number for number in range(1, 99, 2) if drawn(number, 0)["kind"] == "norm restored")
    run = drawn(number, 0)
    assert outcome(run, tmp_path / "checked") == {"corrupted": False, "named": True, "same": True}
    run["overrides"].append("guard.check_update=false")
    result = outcome(run, tmp_path / "unchecked")
    assert result["corrupted"]
    assert not result["named"]
