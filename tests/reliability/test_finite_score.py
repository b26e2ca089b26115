"""Recordings of finite faults: kept on disk, and scored."""

import math

import pytest

from tests.reliability.finite import store
from tests.reliability.finite.cases import Case
from tests.reliability.finite.replay import SLOW as SLOW_ALARMS
from tests.reliability.finite.replay import replayed
from tests.reliability.finite.score import aims, by_kind, report, scored
from tests.runs import ROOT


def made(case, final=2.0, events=(), **more):
    """A small recording."""
    fields = {"part": case.part, "model": case.model, "precision": case.precision, "seed": case.seed}
    fields |= {"kind": case.kind, "mode": case.mode, "extra": [], "name": case.name, "status": "finished"}
    fields |= {"at": 100, "group": "training"} if case.kind else {}
    return fields | {"final": final, "events": [*events], "val": [[20, final]], "series": {}, "reason": None} | more


SHUFFLED = Case("faulty", "gpt", "fp32", 0, "labels_shuffled")
SLOW = Case("faulty", "gpt", "fp32", 0, "lr_x10")
CHEAP = Case("faulty", "gpt", "fp32", 0, "lr_x0")
FOUND = [
    made(SHUFFLED.partner),
    made(SHUFFLED, 2.6, [[140, "skip", "spike"], [103, "alarm", "slow_loss"]]),
    made(Case("faulty", "gpt", "fp32", 0, "labels_shuffled", "act"), 2.03),
    made(SLOW, 2.2, [[100, "alarm", "slow_loss"]]),
    made(CHEAP, 2.01),
]


def test_what_was_seen_and_what_it_cost():
    shuffled, slow, cheap = scored(FOUND)
    assert shuffled.cost == pytest.approx(0.6)
    assert shuffled.back == pytest.approx(0.03)
    assert shuffled.seen == {"spike": 40, "slow_loss": 3}
    assert shuffled.costly
    # An event at tick 100 is of the last step before the fault: step 101 is the first damaged one.
    assert (slow.seen, slow.false, slow.back) == ({}, 1, None)
    assert not cheap.costly
    assert cheap.back == cheap.cost  # nothing was seen, so nothing would have been done


def test_a_run_that_ends_with_nan_is_costly():
    (run,) = scored([made(SHUFFLED.partner), made(SHUFFLED, math.nan)])
    assert run.costly
    assert run.cost == math.inf


def test_events_that_the_partner_has_too_are_not_seen():
    known = [[150, "alarm", "vanishing"]]
    (run,) = scored([made(SHUFFLED.partner, events=known), made(SHUFFLED, 2.6, known)])
    assert not run.seen


def test_advice_on_a_setting_sees_no_fault():
    (run,) = scored([made(SHUFFLED.partner), made(SHUFFLED, 2.6, [[150, "alarm", "clipping"]])])
    assert not run.seen
    assert run.back == run.cost


def test_the_report_has_each_run():
    false = made(Case("clean", "gpt", "fp32", 100, mode="act"), events=[[9, "skip", "spike"]])
    text = report([*FOUND, false, made(Case("clean", "gpt", "fp32", 101, mode="act"))])
    assert "| training | labels_shuffled | 1 | 1 | slow_loss 1 | 3 | +0.600 | +0.600 | 1 | 1 | +0.030 |" in text
    assert "other faults that cost more than 0.05 seen: 1 of 2 (50 %)" in text
    assert "clean runs with an event: 1 of 2 (50 %)" in text
    assert "| lr_x10 | gpt fp32 0 | +0.200 |" in text


def test_recordings_come_back_reduced(tmp_path):
    series = {"loss": [2.123456789, math.nan, 3.0], "weights": [12.3456789, math.inf, 0.0], "buffers": [1.0, 1.0, 1.0]}
    kept = Case("faulty", "gpt", "fp32", 3, "labels_shuffled")
    for recording in (made(kept, series=series), made(SLOW, series=series)):
        store.append(tmp_path / "work", recording)
    with (tmp_path / "work" / "faulty_alarm.jsonl").open("a") as file:
        file.write('{"name": "half')  # a kill in the middle of a write
    store.append(tmp_path / "work", made(CHEAP, 2.01))
    (file,) = store.pack(store.read(tmp_path / "work"), tmp_path / "packed")
    found = {one["name"]: one for one in store.read(file.parent)}
    assert list(found) == [CHEAP.name, SLOW.name, kept.name]
    loss, weights = found[kept.name]["series"].values()
    assert (loss[0], loss[2], weights[:2]) == (2.1235, 3.0, [12.34568, math.inf])
    assert math.isnan(loss[1])
    assert found[kept.name]["val"] == [[20, 2.0]]
    assert found[CHEAP.name]["final"] == 2.01
    assert not any(found[case.name][name] for case in (SLOW, CHEAP) for name in ("series", "val"))


def recorded(loss):
    """The recording of a run whose loss is `loss(tick)`, with an alarm that the code of that time raised."""
    series = {"loss": [loss(tick) for tick in range(1, 181)]}
    series |= {name: [1.0] * 180 for name in ("grad_norm", "lr", "update", "weights")}
    events = [[101, "skip", "spike"], [130, "alarm", "slow_gradient"]]
    return made(SHUFFLED, events=events, series=series, val=[])


def test_recordings_are_judged_again_by_the_present_search_for_slow_spikes():
    def noisy(tick):
        return 3 - tick / 200 + 0.05 * (-1) ** tick

    (clean,), (risen,) = replayed([recorded(noisy)]), replayed([recorded(lambda tick: noisy(tick) + (tick > 120))])
    assert clean["events"] == [[101, "skip", "spike"]]
    assert risen["events"][0] == [101, "skip", "spike"]
    ((tick, event, kind),) = risen["events"][1:]
    assert (event, kind) == ("alarm", "slow_loss")
    assert 120 < tick < 140
    acted = recorded(noisy) | {"mode": "act"}
    assert [*replayed([acted])] == [acted]


def test_the_present_search_for_slow_spikes_says_what_the_committed_recordings_say():
    judged = [one for one in store.read(store.COMMITTED) if one["series"]]
    assert len(judged) == 40
    assert sum(kind in SLOW_ALARMS for one in judged for _, event, kind in one["events"]) > 40
    for one, again in zip(judged, replayed(judged), strict=True):
        assert again["events"] == one["events"], one["name"]


def test_the_page_says_what_the_committed_recordings_score():
    found = [*store.read(store.COMMITTED)]
    page = (ROOT / "docs" / "evidence" / "reliability.md").read_text()
    lines = [*aims(scored(found)), *("| " + " | ".join(row) + " |" for row in by_kind(scored(found)))]
    assert len(lines) > 70
    for line in lines:
        assert line in page


def test_the_page_says_how_long_the_recordings_take():
    found = [*store.read(store.COMMITTED)]
    hours = sum(one["seconds"] for one in found) / 3600
    assert (
        f"{len(found):,} runs, {hours:.1f} hours of CPU time"
        in (ROOT / "docs" / "evidence" / "reliability.md").read_text()
    )
