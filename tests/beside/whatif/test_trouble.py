"""What the user names, and where a run was in trouble."""

import json
import shutil

import pytest

from stabletrain.beside.whatif.trouble import (
    MAX_GAP,
    Event,
    Target,
    clusters,
    events_of,
    find_target,
    find_trouble,
    trouble_of,
)
from stabletrain.errors import ConfigError
from tests.runs import ROOT

ROLLED_BACK = ROOT / "tests" / "fixtures" / "rollback"
INCIDENT = ROOT / "tests" / "fixtures" / "incident"


def run_with(tmp_path, *events, losses=()):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    lines = [{"step": number, "train/loss": loss} for number, loss in enumerate(losses, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return Target(tmp_path)


def skip(step, tick=None, kind="spike", **more):
    return {"event": "skip", "step": step, "tick": step if tick is None else tick, "kind": kind, **more}


def rollback(step, to, tick=None):
    return {"event": "rollback", "step": step, "to": to, "tick": step if tick is None else tick}


# ---- the target


def test_a_run_an_incident_and_a_checkpoint_are_told_apart():
    assert find_target(ROLLED_BACK) == Target(ROLLED_BACK)
    incident = next((INCIDENT / "incidents").iterdir())
    assert find_target(incident) == Target(INCIDENT, incident=incident)
    checkpoint = next((ROLLED_BACK / "checkpoints").iterdir())
    assert find_target(checkpoint) == Target(ROLLED_BACK, checkpoint=int(checkpoint.name[5:]))


def test_anything_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; fix: name a run folder"):
        find_target(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"neither a run folder.*fix: name a run folder"):
        find_target(tmp_path)
    lone = tmp_path / "incidents" / "step-00000002"
    shutil.copytree(next((INCIDENT / "incidents").iterdir()), lone)
    with pytest.raises(ConfigError, match="does not lie in a run folder"):
        find_target(lone)


# ---- the trouble


def test_events_that_follow_closely_are_one_trouble():
    far = 11 + MAX_GAP + 1
    found = clusters(events_of([skip(10), skip(11), skip(far), skip(far + MAX_GAP)]))
    assert [[event.step for event in each] for each in found] == [[10, 11], [far, far + MAX_GAP]]


def test_a_rollback_turns_the_step_back_and_not_the_tick():
    lines = [skip(30), rollback(30, 20), skip(22, tick=32), {"event": "halt", "step": 25, "reason": "over"}]
    found = events_of(lines)
    assert found[-1] == Event("halt", 25, 35, "over", 25, 25, ((20, 10),))  # step 25 after 10 lost steps
    whole = trouble_of(found)
    assert (whole.first, whole.last, whole.tick_of(29)) == (30, 30, 29)
    later = trouble_of(found[2:])
    assert (later.first, later.tick, later.tick_of(21)) == (22, 32, 31)


def test_a_step_that_was_taken_again_is_no_skip_and_takes_a_tick_more():
    again = {"event": "restore", "step": 12, "tick": 12, "to": 11, "loaded": 11, "reason": "loss is nan"}
    assert events_of([skip(12, tick=12), again]) == []
    (event,) = events_of([skip(12, tick=12), again, skip(12, tick=13)])
    assert (event.step, event.tick) == (12, 13), "it was wrong again"
    trouble = trouble_of(events_of([skip(12, tick=12), again, skip(20, tick=21)]))
    assert [trouble.tick_of(step) for step in (11, 12, 19)] == [11, 13, 20]


def test_the_tick_of_a_step_from_before_a_rollback_is_that_of_then():
    lines = [skip(30), rollback(30, 20), {"event": "halt", "step": 200, "tick": 210, "since": 15, "reason": "diverged"}]
    halt = trouble_of([each for each in events_of(lines) if each.kind == "halt"])
    assert (halt.first, halt.last, halt.tick) == (15, 200, 15)
    assert (halt.tick_of(10), halt.tick_of(20)) == (10, 20)
    after = trouble_of(events_of([*lines[:2], {**lines[2], "since": 25}])[-1:])
    assert (after.first, after.tick, after.tick_of(21), after.tick_of(20)) == (25, 35, 31, 20)


def test_the_data_that_were_read_count_what_rollbacks_have_skipped():
    lines = [skip(30), {**rollback(30, 20), "skipped": [20, 50]}, skip(24, tick=34)]
    assert [event.read for event in events_of(lines)] == [30, 30, 54]
    healed = {"event": "heal", "step": 24, "tick": 34, "to": 10, "skipped": []}
    assert events_of([*lines, healed, skip(12, tick=36)])[-1].read == 12


def test_a_slow_spike_begins_before_it_is_found():
    alarm = {"event": "alarm", "step": 90, "since": 70, "kind": "update_length", "text": "slow spike"}
    [found] = events_of([alarm, {"event": "alarm", "step": 95, "kind": "attention", "text": "large"}])
    assert (found.step, found.tick) == (70, 70)


def test_the_last_trouble_counts_and_overflows_do_not(tmp_path):
    target = run_with(tmp_path, skip(10), skip(500), skip(501), skip(900, kind="overflow"))
    found = find_trouble(target)
    assert (found.first, found.last, found.text) == (500, 501, "2 skipped steps")
    assert find_trouble(target, after=5).first == 10
    assert find_trouble(target, after=600) == type(found)(600, 600, 600, "none after this step")


def test_forecasts_count_only_without_other_trouble(tmp_path):
    forecast = {"event": "forecast", "step": 700, "text": "ahead", "fix": ["qknorm=layernorm optimizer.lr=1", "buy it"]}
    found = find_trouble(run_with(tmp_path, forecast))
    assert (found.first, found.fixes) == (700, ("qknorm=layernorm optimizer.lr=1",))
    assert find_trouble(run_with(tmp_path, skip(10), forecast)).first == 10


def test_a_run_without_a_guard_is_in_trouble_from_its_first_bad_loss(tmp_path):
    assert find_trouble(run_with(tmp_path, losses=[1.0, 2.0, "NaN", 1.0])).first == 3


def test_a_healthy_run_needs_a_step(tmp_path):
    target = run_with(tmp_path, losses=[1.0, 2.0])
    with pytest.raises(ConfigError, match="no trouble to start before; fix: name the step"):
        find_trouble(target)
    assert find_trouble(target, after=1).first == 1


def test_the_diagnosis_names_fixes_that_can_be_typed():
    found = find_trouble(find_target(ROLLED_BACK))
    assert (found.first, found.last, found.fixes) == (25, 27, ("optimizer.lr=0.001",))
    assert found.text.startswith("3 skipped steps, 1 rollback: loss ")


def test_an_incident_names_its_own_trouble(tmp_path):
    shutil.copytree(ROLLED_BACK / "incidents" / "step-00000025", tmp_path / "incidents" / "step-00000025")
    run_with(tmp_path, {"event": "incident", "step": 25, "tick": 25}, skip(25), skip(26), skip(600))
    target = find_target(tmp_path / "incidents" / "step-00000025")
    found = find_trouble(target)
    assert (found.first, found.last) == (25, 26)
    assert "optimizer.lr=0.001" in found.fixes
