"""A run that halts and heals itself: it goes on as the arm that won, bit for bit, and says so."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import stabletrain
from stabletrain.beside.comparison.pages.charts import chart_data
from stabletrain.beside.comparison.reading.runs import read_run
from stabletrain.beside.whatif import driver, healing
from stabletrain.beside.whatif.arms import LR_USUAL, Arm, with_fixes
from stabletrain.beside.whatif.base import BaseRun
from stabletrain.beside.whatif.budget import FROM_0, BudgetedWhatIf
from stabletrain.beside.whatif.edits import MissingState
from stabletrain.beside.whatif.halts import Halt, HaltHistory, Healing, read_halt_history
from stabletrain.beside.whatif.plan import Plan
from stabletrain.beside.whatif.report import WhatIfResult
from stabletrain.beside.whatif.start import Origin
from stabletrain.beside.whatif.trouble import Trouble
from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.config.arguments import Arguments
from stabletrain.config.make import leaves
from stabletrain.config.resuming import Settings
from stabletrain.errors import ConfigError
from stabletrain.machine.signals import NoStopRequest
from stabletrain.stored.run_files import read_run_record
from stabletrain.tracking.metrics import read_jsonl
from tests.once import once
from tests.runs import TINY_GPT
from tests.tracking.wandb_file import read_file

HALTS = [*TINY_GPT, "steps=130", "precision=fp32", "optimizer.lr=3", "schedule=constant", "guard.max_rollbacks=0"]
HALTS += ["guard.patience=4", "log_every=1", "report=false", "wandb=disabled", "checkpoint.every=40", "eval_every=65"]


def losses(folder):
    """The losses that no rollback has undone, by step."""
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line]
    return {line["step"]: repr(line["train/loss"]) for line in lines if not line.get("rolled_back")}


def events(folder, kind):
    return [line for line in read_jsonl(folder / "events.jsonl") if line["event"] == kind]


@pytest.fixture(scope="module")
def healed(tmp_path_factory):
    """The folder of a run that was healed."""
    logged = [*(each for each in HALTS if not each.startswith(("wandb", "report"))), "wandb=offline"]
    logged += ["guard.escalate=whatif", "guard.whatif_steps=260"]
    return once(tmp_path_factory, "healed", lambda folder: stabletrain.train([*logged, f"hydra.run.dir={folder}"]))


@pytest.mark.slow
def test_a_run_that_halts_goes_on_with_the_arm_that_won(healed):
    assert read_run_record(healed)["status"] == "finished"
    (halt,), (heal,) = events(healed, "halt"), events(healed, "heal")
    assert (heal["tick"], heal["step"]) == (halt["tick"], halt["step"])
    place = healed / "whatif" / f"halt-{halt['tick']:08d}"
    found = json.loads((place / "whatif.json").read_text())
    assert heal["arm"] == found["winner"]
    arm = losses(place / next(each["folder"] for each in found["arms"] if each["arm"] == heal["arm"]))
    run = losses(healed)
    assert len(arm.keys() & run.keys()) >= 60
    assert {step: run[step] for step in arm if step in run} == {step: arm[step] for step in arm if step in run}
    assert max(run) == 130


@pytest.mark.slow
def test_a_healing_is_counted_in_the_record_and_shown_in_the_report_and_in_the_comparison(healed):
    (heal,) = events(healed, "heal")
    final = read_run_record(healed)["final"]
    assert (final["guard/healings"], final["guard/whatif_steps"]) == (1, heal["steps"])
    found = read_run(healed)
    assert (len(found.healings), found.rollbacks, found.last("val/loss")) == (1, 0, final["val/loss"])
    assert [len(steps) for steps, _ in found.abandoned("train/loss")] == [heal["step"] - heal["to"]]
    (step, _), drawn = chart_data(found, 500)["healings"][0], chart_data(found, 500)["rollbacks"]
    assert (step, drawn) == (heal["step"], [])
    assert f'<a href="whatif/halt-{heal["tick"]:08d}/whatif.html">' in (healed / "report.html").read_text()
    for key, _, value in (each.partition("=") for each in heal["settings"]):
        assert str(found.settings[key]) == value


@pytest.mark.slow
def test_wandb_has_a_healed_run_as_one_run_with_an_alert_and_the_settings_in_force(healed):
    first, second = map(read_file, sorted((healed / "wandb").rglob("run-*.wandb")))
    (heal,) = events(healed, "heal")
    assert first["id"] == second["id"] == read_run_record(healed)["id"]
    assert (first["exit_code"], second["exit_code"]) == (3, 0)
    assert ("heal", heal["text"]) in second["alerts"]
    names = ("status", "guard/healings", "guard/whatif_steps", "guard/healed_by")
    assert [second["summary"][name] for name in names] == ["finished", 1, heal["steps"], heal["arm"]]
    losses = [point for point in (*first["history"], *second["history"]) if "train/loss" in point]
    assert [point["tick"] for point in losses] == [*range(1, losses[-1]["tick"] + 1)], "no step is missing or twice"
    for key, _, value in (each.partition("=") for each in heal["settings"]):
        before, now = (str(dict(leaves(each["config"])).get(key)) for each in (first, second))
        assert now == value != before


@pytest.mark.slow
@pytest.mark.usefixtures("few_arms")
def test_without_room_for_an_arm_the_run_halts_and_says_what_to_type(tmp_path):
    shown = [each for each in HALTS if not each.startswith("report")]
    run = [*shown, "guard.escalate=whatif", "guard.whatif_steps=10", f"hydra.run.dir={tmp_path / 'run'}"]
    found = stabletrain.train(run)
    assert found.status == "halted"
    assert "10 of guard.whatif_steps are left; fix: raise it" in (found.reason or "")
    (unhealed,) = events(found.folder, "unhealed")
    assert (unhealed["arm"], unhealed["steps"]) == ("", 0)
    assert read_run_record(found.folder)["final"]["guard/whatif_steps"] == 0
    assert [each["why"] for each in read_run(found.folder).whatifs] == [unhealed["why"]]
    assert "none: trying a fix takes" in (found.folder / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("few_arms")
def test_the_steps_of_fixes_that_do_not_hold_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(healing, "winner_of", lambda result, tried: replace(tried, why="none of 1 fixes holds"))
    run = [*HALTS, "guard.escalate=whatif", "guard.whatif_steps=70", f"hydra.run.dir={tmp_path / 'run'}"]
    found = stabletrain.train(run)
    (unhealed,) = events(found.folder, "unhealed")
    assert unhealed["steps"] > 50
    final = read_run_record(found.folder)["final"]
    assert (final["guard/healings"], final["guard/whatif_steps"]) == (0, unhealed["steps"])


def steady_text(place):
    """A text on which gradients do not spike by themselves; Python's library is another one with each version."""
    (place / "text.txt").write_text("".join(f"line {number} of some text\n" for number in range(4000)))
    return ["data=text", f"data.path={place / 'text.txt'}"]


@pytest.mark.slow
@pytest.mark.usefixtures("few_arms")
def test_the_best_arm_is_tried_from_step_0(tmp_path):
    # Bad data from batch 130 on: without them the run from step 0 is the same up to there, bit for bit.
    late = ["optimizer.lr=0.01", "steps=180", "faults=poison", "faults.at=[130]", "faults.length=4", "forensics=off"]
    late += ["guard.snapshot_every=10", "guard.healthy_after=2", "guard.escalate=whatif", "guard.whatif_steps=1400"]
    found = stabletrain.train([*steady_text(tmp_path), *HALTS, *late, f"hydra.run.dir={tmp_path / 'run'}"])
    (heal,) = events(found.folder, "heal")
    assert heal["origin"] >= 50
    anew = heal["arms"][-1]
    assert anew == f"{FROM_0}:skip"
    place = found.folder / "whatif" / f"halt-{heal['tick']:08d}"
    ranking = json.loads((place / "whatif.json").read_text())["arms"]
    assert heal["arm"] == ranking[0]["arm"]
    assert heal["to"] == (0 if heal["arm"] == anew else heal["origin"])
    tried = losses(place / next(each["folder"] for each in ranking if each["arm"] == anew))
    lines = [line for line in read_jsonl(found.folder / "metrics.jsonl") if "train/loss" in line]
    first = {line["tick"]: repr(line["train/loss"]) for line in lines if line["tick"] <= 70}
    assert {step: tried[step] for step in first} == first
    assert len(first) == 70


@pytest.mark.slow
@pytest.mark.usefixtures("few_arms")
def test_the_arm_from_step_0_reads_the_batches_of_the_others(tmp_path):
    # The run has rolled back, and skipped data, before the state from which the arms start. The usual learning rate
    # from step 0 has no trouble, so it would read all of these data.
    high = ["model.n_layer=2", "model.n_head=2", "model.n_embd=32", "data.block_size=32", "batch_size=8", "steps=150"]
    high += ["optimizer.lr=7.5", "schedule=constant", "precision=fp32", "device=cpu", "forensics=off"]
    high += ["eval_every=1000", "eval_batches=2", "report=false", "wandb=disabled"]
    high += ["guard.escalate=whatif", "guard.whatif_steps=2200"]
    found = stabletrain.train([*high, f"hydra.run.dir={tmp_path / 'run'}"])
    (heal,) = events(found.folder, "heal")
    assert any(start < heal["origin"] for start, _ in heal["skipped"])
    told = json.loads((found.folder / "whatif" / f"halt-{heal['tick']:08d}" / "whatif.json").read_text())
    anew = next(each for each in told["arms"] if each["arm"].startswith(f"{FROM_0}:"))
    other = next(each for each in told["arms"] if f"{FROM_0}:{each['arm']}" == anew["arm"])
    first, last = told["rounds"]
    assert anew["difference"]["count"] == last - first, "it has read every batch that the others have read"
    assert 0 < other["difference"]["count"] <= last - first


@pytest.mark.slow
@pytest.mark.usefixtures("few_arms")
def test_a_run_heals_itself_twice(tmp_path):
    # The second bad data come after the second round of the first what-if.
    twice = ["optimizer.lr=0.01", "steps=272", "faults=poison", "faults.length=4", "faults.at=[130,250]"]
    twice += ["forensics=off"]
    twice += ["guard.snapshot_every=10", "guard.healthy_after=2", "guard.escalate=whatif", "guard.whatif_steps=8000"]
    found = stabletrain.train([*steady_text(tmp_path), *HALTS, *twice, f"hydra.run.dir={tmp_path / 'run'}"])
    assert found.status == "finished"
    first, second = events(found.folder, "heal")
    assert first["origin"] < 130 < second["origin"]
    assert second["base"] == first["settings"], "it goes on with what the first healing changed"
    final = read_run_record(found.folder)["final"]
    assert (final["guard/healings"], final["guard/whatif_steps"]) == (2, first["steps"] + second["steps"])
    place = found.folder / "whatif" / f"halt-{second['tick']:08d}"
    ranking = json.loads((place / "whatif.json").read_text())["arms"]
    arm = losses(place / next(each["folder"] for each in ranking if each["arm"] == second["arm"]))
    run = losses(found.folder)
    assert {step: run[step] for step in arm} == arm
    assert max(arm) == max(run) == 272


def planned(step, arms, rounds, changes=()):
    """A plan whose arms start after a step that is computed again from step 0."""
    base = BaseRun(Path("run"), step, {}, Arguments([], []), Settings({}, {}), changes)
    return Plan(base, Trouble(9, 9, 9, ""), Origin(step, step, None), [Arm(name) for name in arms], [], rounds, 2)


def within(budget, origin=100):
    """A what-if of arms of 150 steps, and 300 in the second round."""
    plan = planned(origin, ["a", "b"], [origin + 150, origin + 450])
    return BudgetedWhatIf(plan, budget=budget, show=print, live=False, signals=NoStopRequest())


def shares(budget):
    what_if = within(budget)
    return what_if.first_round_steps, what_if.second_round_steps, what_if.steps_from_zero


def test_the_budget_is_shared_by_the_rounds_and_the_arm_from_step_0():
    assert shares(4000) == (150, 300, 550)
    assert shares(2000) == (150, 300, 0), "550 steps are more than a quarter"
    assert shares(1000) == (150, 300, 0)
    assert shares(999) == (150, 0, 0), "the state, two arms and a second round of two"
    assert (within(250).affordable, within(249).affordable) == (True, False)
    assert within(4000, origin=0).steps_from_zero == 0, "all arms start there"
    resumed = within(4000)
    resumed.plan.base.record["overrides"] = ["steps=900", "resume='other/checkpoints/step-00000050'"]
    assert resumed.steps_from_zero == 0, "step 0 is not in this run"


def startable(what_if, monkeypatch, missing=()):
    """Returns the arms that may start, whose starts are made without a run; those of `missing` cannot be made."""

    def start_of(arm, *given):
        if arm.name in missing:
            raise MissingState(f"{arm.name} needs a state that is gone")
        return SimpleNamespace(path=Path(arm.name))

    monkeypatch.setattr(driver, "start_of", start_of)
    return what_if.startable(object.__new__(Checkpoint), 250)


def test_no_arm_starts_when_what_is_left_is_set_aside_but_the_first_one_may(monkeypatch):
    what_if = within(4000)
    set_aside = 2 * 300 + 550
    what_if.spent = 4000
    runs = startable(what_if, monkeypatch)
    assert next(runs).arm.name == "a"
    what_if.spent = 4000 - set_aside - 150 + 1
    assert [*runs] == []
    what_if.starts.clear()
    runs = startable(what_if, monkeypatch)
    next(runs)
    what_if.spent = 4000 - set_aside - 150
    assert [run.arm.name for run in runs] == ["b"]


@pytest.mark.parametrize(
    ("fixes", "first"),
    [
        (["optimizer.lr=0.5"], LR_USUAL),
        (["zloss=palm", "qknorm=layernorm optimizer.lr=0.5"], LR_USUAL),
        (["zloss=palm"], "zloss=palm"),
        ([], "skip"),
    ],
)
def test_a_budget_for_one_arm_goes_to_the_usual_rate_where_the_rate_is_suspected(fixes, first, tmp_path, monkeypatch):
    known = [Arm("nothing"), Arm("skip"), Arm("lr_half", ("optimizer.lr=1.5",)), Arm(LR_USUAL, ("optimizer.lr=0.01",))]
    found = replace(planned(100, [], [250, 550]), arms=with_fixes(known, fixes))
    monkeypatch.setattr(healing, "plan", lambda asked: found)
    halt = Halt(9, 9, "spike", {})
    left = healing.plan_after(halt, HaltHistory(halt), tmp_path, tmp_path / "x")
    what_if = BudgetedWhatIf(left, budget=250, show=print, live=False, signals=NoStopRequest(), spent=100)
    assert what_if.affordable
    runs = startable(what_if, monkeypatch)
    assert next(runs).arm.name == first
    what_if.spent += 150
    assert [*runs] == [], "the budget is spent"


def test_an_arm_whose_start_cannot_be_made_is_refused_and_the_others_run(monkeypatch):
    what_if = within(4000)
    assert [run.arm.name for run in startable(what_if, monkeypatch, missing=["a"])] == ["b"]
    assert [(arm.name, arm.refused) for arm in what_if.unusable] == [("a", "a needs a state that is gone")]
    assert [*what_if.starts] == ["b"], "it was not tried"


def test_what_was_decided_is_read_back_and_a_damaged_file_decides_nothing(tmp_path):
    decided = Healing(arm="clip", base=["optimizer.lr=0.1"], skipped=[[3, 9]], steps=99)
    file = tmp_path / healing.HEALING
    file.write_text(json.dumps({**asdict(decided), "added_later": 1}))
    assert healing.read_healing(tmp_path) == decided
    file.write_text(json.dumps({**asdict(decided), "steps": "99"}))
    assert healing.read_healing(tmp_path) is None


def test_a_second_fix_keeps_what_the_first_has_set(tmp_path, monkeypatch):
    state = SimpleNamespace(path=tmp_path, step=9, load=lambda: {"skipped": [(3, 5)]})
    for name, value in {"write_json": None, "write_whatif_page": tmp_path, "find": state}.items():
        monkeypatch.setattr(healing, name, lambda _, value=value: value)
    outcome = SimpleNamespace(arm=Arm("agc", ("clipping=agc",)))
    ranking = SimpleNamespace(winner="agc", verdict="best", places=[SimpleNamespace(outcome=outcome)])
    result = Mock(spec=WhatIfResult, ranking=ranking, starts={"agc": tmp_path})
    won = healing.winner_of(result, Healing(base=["optimizer.lr=0.1"]))
    assert (won.settings, won.base) == (["optimizer.lr=0.1", "clipping=agc"], ["optimizer.lr=0.1"])
    assert (won.arm, won.to, won.skipped) == ("agc", 9, [[3, 5]])


def test_no_arm_is_tried_twice_from_one_state_with_the_same_settings(tmp_path, monkeypatch):
    known = planned(5, ["nothing", "clip", "skip", "zclip"], [109], ("optimizer.lr=0.1",))
    monkeypatch.setattr(healing, "plan", lambda asked: known)
    halt = Halt(9, 9, "spike", {})

    def left(*healings):
        return [
            arm.name for arm in healing.plan_after(halt, HaltHistory(halt, healings), tmp_path, tmp_path / "x").arms
        ]

    told = Healing(origin=5, to=5, arm="clip", base=["optimizer.lr=0.1"], arms=["clip", "skip"], steps=99)
    assert left() == ["clip", "skip", "zclip"], "nothing is what has halted"
    assert left(told) == ["zclip"]
    assert left(replace(told, to=0)) == ["zclip"], "the run went on from step 0, and the arms began here"
    assert left(replace(told, origin=6), replace(told, base=[])) == ["clip", "skip", "zclip"]


def test_the_course_names_the_arms_that_healed_and_counts_the_steps_of_all(tmp_path):
    told = {"step": 9, **asdict(Healing(origin=5, to=5, arms=["clip", "skip"], steps=300))}
    arms = [("heal", "clip"), ("unhealed", ""), ("heal", "skip")]
    lines = [{**told, "event": kind, "tick": 9 + n, "arm": arm} for n, (kind, arm) in enumerate(arms)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = read_halt_history(tmp_path)
    assert (history.healed_by, history.spent) == (["clip", "skip"], 900)


def test_without_checkpoints_there_is_nothing_to_go_on_from(tmp_path):
    kept = [each for each in HALTS if not each.startswith("checkpoint.")]
    with pytest.raises(ConfigError, match=r"guard\.escalate=whatif goes on from a checkpoint"):
        stabletrain.train([*kept, "guard.escalate=whatif", "checkpoint=off", f"hydra.run.dir={tmp_path / 'run'}"])
