"""The verdict of a replay: what an override changed, and what is still wrong with a step that was finite before."""

import math
from dataclasses import replace

import pytest

from stabletrain.cli.replay_report import ReplayReport
from stabletrain.records import RankPart
from tests.forensics.diagnosis.given import BAD, FINE, NAN, READING

LIMITS = {"limits": {"loss": 6.0, "grad_norm": 20.0}}
LABEL = {"verdict": "sample 3: target 9 is outside [0, 3)", "samples": [{"index": 3, "fault": "label"}]}
BROKEN = READING._replace(loss=math.nan, grad_norm=math.nan)
MISLABELLED = READING._replace(loss=4.0, grad_norm=1.0, bad_data=True)


def report(then, now, *overrides, **more):
    return ReplayReport(then, now, overrides, [], **more)


@pytest.mark.parametrize(
    ("then", "now", "verdict", "sentence"),
    [
        (BROKEN, FINE, "fixed", "with precision=fp32 the step is finite"),
        (BROKEN, NAN, "not_fixed", "with precision=fp32 the step is not finite"),
        (
            BROKEN,
            replace(FINE, grad_norm=0.0),
            "not_fixed",
            "with precision=fp32 the step is finite, but its gradient norm is 0, so nothing is learnt from it",
        ),
        (READING, NAN, "not_fixed", "with precision=fp32 the step is not finite, but it was finite before"),
        (None, FINE, None, "with precision=fp32 the step is finite"),
    ],
)
def test_an_override_fixes_a_step_that_was_not_finite_and_is_now(then, now, verdict, sentence):
    assert report(then, now, "precision=fp32").conclusion() == (verdict, sentence)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("label", "the label is"), ("input", "the input is"), ("ignored", "the targets are"), ("empty", "the batch is")],
)
def test_bad_data_is_not_fixed_by_an_override(fault, words):
    known = {**LABEL, "samples": [{"fault": fault}]}
    assert report(MISLABELLED, FINE, "precision=fp32", diagnosis=known).conclusion() == (
        "not_fixed",
        f"with precision=fp32 the step is finite, as it was before; {words} still wrong: {LABEL['verdict']}",
    )


def test_the_unchanged_replay_names_the_fault_too():
    same = replace(FINE, bitwise_equal_to_reading=True)
    assert report(MISLABELLED, same, diagnosis=LABEL).conclusion() == (
        "reproduced",
        f"bitwise equal: the step is finite, as in the run; the label is still wrong: {LABEL['verdict']}",
    )
    assert report(MISLABELLED, FINE, diagnosis=LABEL).conclusion()[1].endswith(LABEL["verdict"])


@pytest.mark.parametrize("known", [{}, {"samples": None}, {"samples": [{"index": 3}]}])
def test_bad_data_without_a_named_sample_is_still_bad_data(known):
    verdict, sentence = report(MISLABELLED, FINE, "precision=fp32", diagnosis=known).conclusion()
    assert verdict is None
    assert sentence.endswith("; it was skipped because its batch held bad data")


@pytest.mark.parametrize(
    ("now", "verdict", "clause"),
    [
        (BAD, "not_fixed", "it is still a spike: its loss is above the guard's limit, 6 and its gradient norm is"),
        (replace(BAD, loss=4.0), "not_fixed", "it is still a spike: its gradient norm is above the guard's limit, 20"),
        (FINE, "fixed", "it is no longer a spike: its loss and gradient norm are within the guard's limits"),
    ],
)
def test_a_spike_is_compared_with_the_guards_limits(now, verdict, clause):
    found = report(READING, now, "zloss=palm", diagnosis=LIMITS).conclusion()
    assert found[0] == verdict
    assert f"with zloss=palm the step is finite, as it was before; {clause}" in found[1]


def test_limits_that_are_not_finite_are_read_as_numbers():
    known = {"limits": {"loss": 6.0, "grad_norm": "Infinity"}}
    assert report(READING, BAD, "zloss=palm", diagnosis=known).conclusion()[1].count("limit") == 1


@pytest.mark.parametrize(
    ("then", "known", "clause"),
    [
        (READING, {}, "it was skipped as a spike: compare the numbers above"),
        (READING._replace(loss=4.0, grad_norm=1.0, inputs=1e30), LIMITS, "because its inputs are up to 1e+30"),
        (READING._replace(buffers=math.inf), LIMITS, "its buffers were not finite, which a replay does not measure"),
    ],
    ids=["an earlier version", "inputs", "buffers"],
)
def test_what_a_replay_cannot_tell_has_no_verdict(then, known, clause):
    verdict, sentence = report(then, FINE, "zloss=palm", diagnosis=known).conclusion()
    assert verdict is None
    assert sentence.endswith(clause)


def test_the_unchanged_step_is_reproduced_or_different():
    assert report(BROKEN, replace(NAN, bitwise_equal_to_reading=True)).conclusion()[0] == "reproduced"
    verdict, sentence = report(BROKEN, replace(FINE, bitwise_equal_to_reading=False)).conclusion()
    assert verdict == "different"
    assert "suspect a hardware fault" in sentence
    assert report(BROKEN, FINE).conclusion()[0] is None
    assert report(None, FINE).as_json()["verdict"] is None


MINE = "/home/me/mine.py"


@pytest.mark.parametrize(
    ("then", "now", "verdict", "sentence"),
    [
        (BROKEN, FINE, "fixed", f"fixed by the change in {MINE}: the step is finite, and was not in the run"),
        (BROKEN, NAN, "not_fixed", f"not fixed by the change in {MINE}: the step is still not finite"),
        (READING, NAN, "not_fixed", f"with the changed {MINE} the step is not finite, but it was finite before"),
        (None, FINE, None, f"with the changed {MINE} the step is finite"),
    ],
)
def test_a_change_of_the_users_code_is_named_instead_of_the_machine(then, now, verdict, sentence):
    now = replace(now, bitwise_equal_to_reading=False)
    found = report(then, now, changed=[MINE])
    assert found.conclusion() == (verdict, sentence)
    assert found.as_json()["changed_files"] == [MINE]


def test_a_changed_file_and_an_override_are_both_named():
    found = report(BROKEN, FINE, "precision=bf16", changed=[*"abcde"]).conclusion()
    assert found == ("fixed", "with precision=bf16 and the changed a, b, c and 2 more the step is finite")


def test_bad_data_and_spikes_are_judged_with_changed_code_as_with_an_override():
    start = f"with the changed {MINE} the step is finite, as it was before; "
    verdict, sentence = report(MISLABELLED, FINE, changed=[MINE], diagnosis=LABEL).conclusion()
    assert (verdict, sentence) == ("not_fixed", f"{start}the label is still wrong: {LABEL['verdict']}")
    assert report(READING, FINE, changed=[MINE], diagnosis=LIMITS).conclusion()[0] == "fixed"


def test_a_step_that_was_finite_when_the_run_replayed_it_is_not_fixed_by_a_change():
    """A bit had flipped, or a fault was injected: the code had nothing to do with it."""
    known = {"replays": {"same": {"finite": True}}}
    assert report(BROKEN, FINE, changed=[MINE], diagnosis=known).conclusion() == (
        None,
        f"with the changed {MINE} the step is finite, as it was when the run replayed it unchanged",
    )
    assert report(BROKEN, FINE, "precision=fp32", diagnosis=known).conclusion()[0] is None
    failed = {"replays": {"same": {"finite": False}}}
    assert report(BROKEN, FINE, changed=[MINE], diagnosis=failed).conclusion()[0] == "fixed"


def test_on_several_ranks_the_numbers_of_the_replayed_part_are_shown():
    found = report(BROKEN, FINE, part=RankPart(1, 4.5, None))
    first, _, then, *_ = str(found).splitlines()
    assert first == "rank 1's own part of the step:"
    assert then.split() == ["then", "4.5", "unknown"]
    assert found.as_json()["then"] == {"loss": 4.5, "grad_norm": None}
    known = report(BROKEN, FINE, part=RankPart(1, 4.5, 1.5))
    assert str(known).splitlines()[2].split() == ["then", "4.5", "1.5"]


def test_a_file_written_while_the_run_trained_may_explain_other_bits():
    other = replace(FINE, bitwise_equal_to_reading=False)
    verdict, sentence = report(BROKEN, other, unsure=[MINE]).conclusion()
    assert verdict == "different"
    assert f"{MINE} may have changed while the run trained" in sentence
    same = replace(NAN, bitwise_equal_to_reading=True)
    assert report(BROKEN, same, unsure=[MINE]).conclusion() == report(BROKEN, same).conclusion()
