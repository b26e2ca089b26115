"""Rollback in whole runs: the weights go wrong, an older state comes back, and nothing that was measured is lost."""

import json
import math

import pytest
import torch

from stabletrain.checkpoint.folder import find
from stabletrain.data.order import position
from stabletrain.errors import TrainingHalted
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.reliability.ends import metrics
from tests.runs import TINY_GPT, composed
from tests.tracking import wandb_file

QUICK = [
    "guard=rollback",
    "guard.window=20",
    "guard.patience=3",
    "guard.snapshot_every=5",
    "guard.healthy_after=4",
    "guard.skip_batches=2",
    "guard.lr_steps=6",
    "log_every=1",
    "schedule=constant",
    "warmup=none",
    "seed=2",
    "forensics=off",
    "report=false",
    "precision=fp32",
    "model.n_layer=1",
    "monitors=none",
    "eval_batches=1",
]


class Crash(Exception):
    """What a killed process looks like from inside: nothing more runs."""


def wreck(job, ticks, factor=1e4):
    """Multiplies the last weight just before the forward pass of those ticks, as a hardware fault might."""

    def before(module, inputs):
        if job.state.executed_steps in ticks and module.training:
            with torch.no_grad():
                list(module.parameters())[-1].mul_(factor)

    job.state.model.register_forward_pre_hook(before)


def trained(folder, *overrides, wrecked=(), factor=1e4, crash_at_tick=None):
    with composed(*TINY_GPT, *QUICK, *overrides) as cfg:
        job = build(cfg, folder)
        wreck(job, wrecked, factor)
        get = job.data.batches.get

        def crashing(step):
            if job.state.executed_steps == crash_at_tick:
                raise Crash
            return get(step)

        job.data.batches.get = crashing
        if crash_at_tick is None:
            train(job)
        else:
            with pytest.raises(Crash):
                train(job)
    return job


def events(folder, kind):
    return [event for event in read_jsonl(folder / "events.jsonl") if event["event"] == kind]


def weights(job):
    return {name: value.clone() for name, value in job.state.model.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_put_back_at_once_and_exactly(tmp_path, factor):
    clean = trained(tmp_path / "clean", "steps=50")
    job = trained(tmp_path / "run", "steps=50", wrecked=[32], factor=factor)
    assert same(weights(job), weights(clean))
    (event,) = events(tmp_path / "run", "restore")
    assert (event["step"], event["to"], event["loaded"]) == (33, 32, 30), "the newest snapshot, and two steps replayed"
    assert not events(tmp_path / "run", "rollback")
    assert not job.state.skipped
    assert (job.tools.guard.machine_faults, sum(job.tools.guard.skips.values())) == (1, 0)


@pytest.fixture(scope="module")
def rolled(tmp_path_factory):
    """A run whose weights went wrong at tick 32."""
    folder = tmp_path_factory.mktemp("rolled") / "run"
    return trained(folder, "steps=50", "optimizer.lr=0.002", "eval_every=30", wrecked=[32]), folder


@pytest.mark.slow
def test_wrecked_weights_are_put_back(rolled):
    job, folder = rolled
    assert job.state.step == 50
    (event,) = events(folder, "rollback")
    # The state after 25 steps has been followed by clean ones; that after 30 has not yet.
    assert (event["step"], event["to"], event["loaded"]) == (35, 25, 25)
    # Read since: 25 ... 34; and two more.
    assert event["skipped"] == [25, 37]
    assert job.state.skipped == [(25, 37)]
    assert job.state.executed_steps == 60
    assert all(torch.isfinite(value).all() for value in weights(job).values())
    assert job.tools.guard.skips["spike"] == 3


def test_after_a_rollback_the_run_is_the_one_that_never_read_that_data(tmp_path):
    """The weights at the end are those of a run over the remaining data with the same learning rates."""
    quiet = ["steps=36", "forensics=off", "monitors=none", "checkpoint=off", "eval_every=99"]
    job = trained(tmp_path / "a", *quiet, "guard.lr_factor=1", wrecked=[32])
    with composed(*TINY_GPT, *QUICK, *quiet) as cfg:
        other = build(cfg, tmp_path / "b")
        other.state.skipped = [(25, 37)]
        train(other)
    assert same(weights(job), weights(other))
    assert [position(step, job.state.skipped) for step in (24, 25)] == [24, 37]


@pytest.mark.slow
def test_the_learning_rate_is_lowered_for_a_while(rolled):
    rates = {line["step"]: line["lr"] for line in metrics(rolled[1]) if "lr" in line and not line.get("rolled_back")}
    assert [step for step, lr in rates.items() if lr == 0.001] == [26, 27, 28, 29, 30, 31]
    assert {rates[step] for step in rates if not 26 <= step <= 31} == {0.002}


@pytest.mark.slow
def test_nothing_that_was_measured_is_dropped_and_the_stretch_is_marked(rolled):
    found = [line for line in metrics(rolled[1]) if "train/loss" in line]
    assert [line["tick"] for line in found] == list(range(1, 61))
    assert [line["step"] for line in found] == [*range(1, 36), *range(26, 51)]
    assert [line["tick"] for line in found if line.get("rolled_back")] == list(range(26, 36))
    assert [line["guard/rollbacks"] for line in found] == [0] * 35 + [1] * 25
    evaluated = [(line["step"], line.get("rolled_back", False)) for line in metrics(rolled[1]) if "val/loss" in line]
    assert evaluated == [(30, True), (30, False), (50, False)]


SAVING = ["steps=42", "checkpoint.every=12", "eval_every=20", "forensics=default"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same with checkpoints."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    return trained(folder, *SAVING, wrecked=[32]), folder


@pytest.mark.slow
@pytest.mark.parametrize("crash_at_tick", [29, 34, 36, 48])
def test_a_run_that_was_killed_rolls_back_exactly_as_one_that_was_not(saved, tmp_path, crash_at_tick):
    """Law 4 with a rollback inside: before it, within the trouble, just after it, later."""
    whole, folder = saved
    trained(tmp_path / "cut", *SAVING, wrecked=[32], crash_at_tick=crash_at_tick)
    resumed = trained(tmp_path / "cut", *SAVING, "resume=auto", wrecked=[32])
    assert same(weights(whole), weights(resumed))
    assert metrics(tmp_path / "cut") == metrics(folder)
    for name in ("guard", "recent", "clipping", "precision"):
        assert str(whole.saved.parts[name].state_dict()) == str(resumed.saved.parts[name].state_dict()), name
    assert (whole.state.executed_steps, whole.state.skipped) == (resumed.state.executed_steps, resumed.state.skipped)


@pytest.mark.slow
def test_a_state_lost_with_the_process_is_computed_again(tmp_path, capsys):
    """Killed at tick 29 and resumed from step 24: the wanted state, after 25 steps, is in no memory and on no disk."""
    chosen = ["steps=50", "checkpoint.every=12"]
    trained(tmp_path, *chosen, wrecked=[40], crash_at_tick=37)
    capsys.readouterr()
    trained(tmp_path, *chosen, "resume=auto", wrecked=[37])
    (event,) = events(tmp_path, "rollback")
    assert (event["to"], event["loaded"]) == (30, 24)
    assert "steps 25 to 30 are run again to reach that state" in capsys.readouterr().out


@pytest.mark.slow
def test_a_state_that_is_computed_again_is_the_one_that_was_lost(tmp_path):
    """Law 4 where the wanted state, after 20 steps, is neither in memory nor on the disk, which has 13 and 26."""
    chosen = ["steps=50", "checkpoint.every=13", "eval_every=50"]
    whole = trained(tmp_path / "whole", *chosen, wrecked=[27])
    trained(tmp_path / "cut", *chosen, wrecked=[27], crash_at_tick=27)
    resumed = trained(tmp_path / "cut", *chosen, "resume=auto", wrecked=[27])
    assert [(event["to"], event["loaded"]) for event in events(tmp_path / "whole", "rollback")] == [(20, 20)]
    assert [(event["to"], event["loaded"]) for event in events(tmp_path / "cut", "rollback")] == [(20, 13)]
    assert same(weights(whole), weights(resumed))
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    for name in ("guard", "recent", "clipping", "precision"):
        assert str(whole.saved.parts[name].state_dict()) == str(resumed.saved.parts[name].state_dict()), name
    a, b = (find(tmp_path / run / "checkpoints" / "step-00000039").load() for run in ("whole", "cut"))
    assert str(a["parts"]["guard"]) == str(b["parts"]["guard"])


@pytest.mark.slow
def test_rollbacks_in_vain_go_further_back_and_then_halt(tmp_path):
    with pytest.raises(TrainingHalted, match=r"guard\.max_rollbacks=2"):
        trained(tmp_path, "steps=80", "guard.max_rollbacks=2", wrecked=range(42, 1000))
    found = events(tmp_path, "rollback")
    assert [event["to"] for event in found] == [35, 30]
    assert [event["lr_factor"] for event in found] == [0.5, 0.25]
    assert len(events(tmp_path, "halt")) == 1


@pytest.mark.slow
def test_what_a_halt_leaves_is_the_last_healthy_state(tmp_path):
    with pytest.raises(TrainingHalted):
        trained(tmp_path, "steps=80", "guard.max_rollbacks=0", wrecked=range(42, 1000))
    left = find(tmp_path)
    assert (left.step, left.healthy) == (35, True)
    clean = trained(tmp_path / "clean", "steps=35")
    assert all(torch.equal(value, clean.state.model.state_dict()[name]) for name, value in left.load_model().items())


@pytest.mark.slow
def test_progress_gives_the_budget_back(tmp_path):
    job = trained(tmp_path, "steps=160", "guard.max_rollbacks=1", wrecked=[32, 100, 150])
    assert job.tools.guard.rollbacks == 3
    assert job.state.step == 160


@pytest.mark.slow
def test_checkpoints_of_the_rolled_back_stretch_are_gone_and_the_new_course_is_saved(tmp_path):
    trained(tmp_path, "steps=36", "checkpoint.every=11", "checkpoint.keep=9", wrecked=[31])
    # 11, 22 and 33 were due; the trouble began at 32 and was over after 34, so 33 was saved in it and went with it.
    steps = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    # With the first went the state that a rollback would have asked for then, as nothing so old was on the disk.
    assert steps == [f"step-{step:08d}" for step in (0, 11, 22, 25, 33, 36)]
    saved = find(tmp_path / "checkpoints" / "step-00000025")
    assert saved.healthy
    assert saved.load()["parts"]["guard"]["rollbacks"] == 1
    assert saved.load()["skipped"] == [[25, 36]]
    assert find(tmp_path / "checkpoints" / "step-00000033").load()["parts"]["guard"]["rollbacks"] == 1


@pytest.mark.slow
def test_an_end_that_says_what_the_guard_did(rolled):
    job, _ = rolled
    said = job.output.closing()
    assert "guard    50 updates in 50 steps, 60 executed, 3 skipped (spike), 1 rollback, 10 steps" in said
    assert "batches never read again 25-36" in said
    assert job.history.lost_seconds > 0


@pytest.mark.slow
def test_wandb_drops_nothing_after_a_rollback(tmp_path, monkeypatch):
    """Its own step counter would refuse whatever goes back; here the step is a metric, and the tick never goes back."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    trained(tmp_path, "steps=40", "wandb=offline", wrecked=[32])
    found = wandb_file.read(tmp_path)
    rows = [row for row in found["history"] if "train/loss" in row]
    assert [row["tick"] for row in rows] == list(range(1, 51))
    assert [row["step"] for row in rows] == [*range(1, 36), *range(26, 41)]
    assert [row["guard/rollbacks"] for row in rows] == [0] * 35 + [1] * 15
    assert ("rollback", True) in [(title, "to step 25" in text) for title, text in found["alerts"]]
    assert found["summary"]["guard/rollbacks"] == 1


@pytest.mark.slow
def test_trouble_in_the_last_steps_is_no_end(tmp_path):
    """Patience would outlast the run: it goes back at once, and ends well."""
    job = trained(tmp_path, "steps=40", "guard.patience=9", wrecked=[37])
    (event,) = events(tmp_path, "rollback")
    assert event["step"] == 40
    assert "the run is at its end" in event["reason"]
    assert job.state.step == 40
    assert job.tools.guard.healthy
    assert math.isfinite(job.history.val["val/loss"])


def test_a_run_that_ends_in_trouble_says_so(tmp_path, capsys):
    with composed(
        *TINY_GPT, *[o for o in QUICK if not o.startswith("guard")], "guard=skip", "steps=40", "monitors=none"
    ) as cfg:
        job = build(cfg, tmp_path)
        wreck(job, [35])
        train(job)
    reason = json.loads((tmp_path / "run.json").read_text())["reason"]
    assert reason.startswith("the run ended in trouble: 5 of its last steps were skipped (loss ")
    assert reason in capsys.readouterr().out


@pytest.mark.slow
def test_a_halt_keeps_what_was_spent(tmp_path):
    """Budgets, passed-over data and metrics are still there when a halted run is resumed."""
    with pytest.raises(TrainingHalted):
        trained(tmp_path, "steps=80", "guard.max_rollbacks=1", wrecked=range(42, 1000))
    left = find(tmp_path)
    assert left.load()["parts"]["guard"]["rollbacks"] == 1
    logged = [line for line in metrics(tmp_path) if "train/loss" in line]
    # The wreck acts on each forward pass of its tick, so its first step comes out otherwise, and is taken again.
    assert left.load()["tick"] == len(logged) + len(events(tmp_path, "restore")) == len(logged) + 1
    assert left.load()["skipped"] == [[35, 47]]
    before = [line["tick"] for line in metrics(tmp_path)]
    job = trained(tmp_path, "steps=80", "guard.max_rollbacks=1", "resume=auto")
    assert [line["tick"] for line in metrics(tmp_path)][: len(before)] == before
    assert job.state.step == 80


@pytest.mark.beside
@pytest.mark.slow
def test_after_a_restart_a_ruined_checkpoint_is_not_gone_back_to_again_and_again(tmp_path):
    """The newest checkpoint was taken after the ruin and before the ruin was noticed; an older one must be there."""
    chosen = ["checkpoint.every=29", "checkpoint.keep=1"]
    chosen += ["faults=learning_rate", "faults.at=[31]", "faults.factor=1e5"]
    trained(tmp_path, *chosen, "steps=32")  # its last update ruins the weights
    assert find(tmp_path).healthy, "no step has shown the ruin yet"
    job = trained(tmp_path, *chosen, "steps=60", "resume=auto")
    assert job.state.step == 60
    assert job.tools.guard.healthy
    assert job.tools.guard.rollbacks == 1


@pytest.mark.slow
def test_a_state_knows_the_evaluation_of_its_own_step(tmp_path):
    """Evaluated, put by and gone back to, all after 25 steps: the best loss is still that one."""
    job = trained(tmp_path, "steps=30", "eval_every=25", "checkpoint.every=25", wrecked=[29], factor=1.0)
    evaluated = {line["step"]: line["val/loss"] for line in metrics(tmp_path) if "val/loss" in line}
    assert find(tmp_path / "checkpoints" / "step-00000025").val_loss == evaluated[25]
    assert job.saved.snapshots.newest(25)["parts"]["history"]["val_step"] == 25


@pytest.mark.slow
def test_the_checkpoint_of_a_rollback_claims_no_other_states_loss(tmp_path):
    trained(tmp_path, "steps=36", "eval_every=20", "checkpoint.every=10", "checkpoint.keep=9", wrecked=[32])
    assert find(tmp_path / "checkpoints" / "step-00000025").val_loss is None, "the loss is that of step 20"


@pytest.mark.slow
def test_a_run_begun_from_another_runs_checkpoint_has_states_of_its_own(tmp_path):
    trained(tmp_path / "a", "steps=27")
    job = trained(tmp_path / "b", "steps=60", f"resume={tmp_path / 'a' / 'checkpoints'}", wrecked=[28])
    (event,) = events(tmp_path / "b", "rollback")
    assert (event["to"], event["loaded"]) == (27, 27)
    assert job.state.step == 60


@pytest.mark.slow
def test_no_state_is_put_by_in_trouble(tmp_path):
    """Every second step is withheld for long: the states in memory do not pile up."""
    with composed(*TINY_GPT, *QUICK, "guard.snapshot_every=1", "steps=120") as cfg:
        job = build(cfg, tmp_path)
    most = 0
    keep = job.saved.snapshots.retain

    def counting(steps):
        nonlocal most
        keep(steps)
        most = max(most, len(job.saved.snapshots._trees))

    job.saved.snapshots.retain = counting
    parameter = list(job.state.model.parameters())[-1]
    odd = range(31, 90, 2)
    parameter.register_hook(lambda gradient: gradient * (math.nan if job.state.step in odd else 1))
    train(job)
    assert job.tools.guard.skips["nonfinite"] == 30
    assert most <= 3 + 5, "the healthy ones, and those that wait to become so"


def test_a_skipped_step_that_is_computed_again_costs_the_next_one_nothing(tmp_path, monkeypatch):
    """The next step's gradients are at hand by then, and are computed anew."""

    def run(name):
        with composed(*TINY_GPT, *QUICK, "steps=12", "forensics=off", "monitors=none", "eval_every=100") as cfg:
            job = build(cfg, tmp_path / name)
        parameter = [*job.state.model.parameters()][-1]
        parameter.register_hook(lambda gradient: gradient * (math.nan if job.state.step in (6, 8) else 1))
        train(job)
        assert job.tools.guard.skips["nonfinite"] == 2
        assert job.tools.guard.machine_faults == 0
        return weights(job)

    once_more = run("computed again")
    monkeypatch.setattr("stabletrain.trainer.incidents.StepOfRun.differs_when_repeated", lambda *_: False)
    assert same(once_more, run("not"))
