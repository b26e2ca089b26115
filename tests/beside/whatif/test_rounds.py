"""Arms as runs: each is the resume that the user could type, goes on where it stopped, and ends early if it breaks."""

import json
import multiprocessing
import operator
import shutil
import signal

import pytest

import stabletrain
from stabletrain.beside.whatif import arm_run, rounds
from stabletrain.beside.whatif.arm_run import ArmRun
from stabletrain.beside.whatif.arms import Arm
from stabletrain.beside.whatif.base import read_base
from stabletrain.beside.whatif.job import NOT_FINITE
from stabletrain.beside.whatif.outcome import StartFacts, is_over, read_outcome
from stabletrain.beside.whatif.rounds import run_arms
from stabletrain.errors import Interrupted
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer import step_graph

SLOWER = Arm("lr_half", ("optimizer.lr=0.0015",))
START = StartFacts(60, 60, 0.0, [])


def arm_to(run, folder, stop, arm=SLOWER):
    return ArmRun(read_base(run, 60), arm, run / "checkpoints" / "step-00000060", folder, stop)


def losses(folder):
    """Returns the losses by tick, with every bit."""
    lines = read_jsonl(folder / "metrics.jsonl")
    return {line["tick"]: repr(line["train/loss"]) for line in lines if "train/loss" in line}


def resumes(folder):
    """Returns the steps after which a run was resumed."""
    return [line["step"] for line in read_jsonl(folder / "events.jsonl") if line["event"] == "resume"]


def ended(arm_runs, jobs=1):
    told = []
    run_arms(arm_runs, jobs, told.append)
    return told


def record(folder):
    return json.loads((folder / "run.json").read_text())


def test_an_arm_is_the_resume_that_can_be_typed(shared_run, tmp_path, monkeypatch):
    mine = arm_to(shared_run, tmp_path / "arm", 66)
    assert ended([mine]) == [mine]
    typed = ["log_every=1", *SLOWER.overrides, f"hydra.run.dir={tmp_path / 'typed'}"]
    compute = step_graph.compute

    def until_67(state, *rest):
        if state.step == 67:
            raise KeyboardInterrupt
        return compute(state, *rest)

    monkeypatch.setattr(step_graph, "compute", until_67)
    with pytest.raises(KeyboardInterrupt):
        stabletrain.train([f"resume={mine.start}", *typed])
    whole = losses(tmp_path / "typed")
    assert losses(mine.folder) == {tick: whole[tick] for tick in range(61, 67)}
    assert record(mine.folder)["status"] == "preempted"
    [changed] = record(mine.folder)["changes"]
    assert changed["keys"]["optimizer.lr"] == [0.003, 0.0015]


def test_an_arm_that_goes_on_is_the_same_as_one_that_did_not_stop(shared_run, tmp_path):
    ended([arm_to(shared_run, tmp_path / "whole", 68)])
    for stop in (63, 68):
        ended([arm_to(shared_run, tmp_path / "parts", stop)])
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert resumes(tmp_path / "parts") == [60, 63], "it goes on, and does not begin again"
    assert len(losses(tmp_path / "whole")) == 8
    found = read_outcome(SLOWER, tmp_path / "parts", START, 68)
    assert found.val_loss == read_outcome(SLOWER, tmp_path / "whole", START, 68).val_loss
    assert found.val_loss > 0
    earlier = read_outcome(SLOWER, tmp_path / "parts", START, 63)
    assert earlier.step == 63
    assert 0 < earlier.val_loss != found.val_loss, "that at the end of the earlier round"


def test_an_arm_that_is_over_is_not_run_again(shared_run, tmp_path, monkeypatch):
    mine = arm_to(shared_run, tmp_path / "arm", 61)
    ended([mine])
    monkeypatch.setattr(arm_run, "train_until", None)
    assert ended([mine]) == [mine]
    assert not arm_to(shared_run, tmp_path / "arm", 62).over


@pytest.mark.slow
def test_an_arm_stopped_by_a_signal_goes_on(shared_run, tmp_path, monkeypatch):
    reached = arm_run.ReachedStep.__call__

    def signalled(self, run):
        if run.state.step == 62:
            signal.raise_signal(signal.SIGTERM)
        return reached(self, run)

    monkeypatch.setattr(arm_run.ReachedStep, "__call__", signalled)
    mine, later = arm_to(shared_run, tmp_path / "arm", 66), arm_to(shared_run, tmp_path / "later", 66)
    with pytest.raises(Interrupted, match="SIGTERM"):
        ended([mine, later])
    assert 62 <= record(mine.folder)["final"]["steps"] < 66
    assert not mine.over
    assert not later.folder.exists()
    monkeypatch.setattr(arm_run.ReachedStep, "__call__", reached)
    stopped = record(mine.folder)["final"]["steps"]
    assert ended([mine]) == [mine]
    # An arm that began again would have the same losses: a step is a pure function.
    assert resumes(mine.folder) == [60, stopped]
    ended([arm_to(shared_run, tmp_path / "whole", 66)])
    assert losses(mine.folder) == losses(tmp_path / "whole")


@pytest.mark.slow
def test_an_arm_without_a_checkpoint_begins_at_its_start_again(shared_run, tmp_path):
    # A resume=auto without a checkpoint would begin at step 0.
    mine = arm_to(shared_run, tmp_path / "arm", 62)
    ended([mine])
    shutil.rmtree(mine.folder / "checkpoints")
    (mine.folder / "run.json").write_text(json.dumps({**record(mine.folder), "status": "running"}))
    ended([mine])
    assert min(losses(mine.folder)) == 61


def test_an_arm_whose_loss_is_not_finite_ends_early(shared_run, tmp_path):
    lost = Arm("lost", ("guard=off", "optimizer.lr=1e30", "clipping=none"))
    mine = arm_to(shared_run, tmp_path / "arm", 120, lost)
    ended([mine])
    found = read_outcome(lost, mine.folder, START, 120)
    assert found.broke.startswith(NOT_FINITE)
    assert found.step < 75
    assert is_over(mine.folder, 120)


def test_a_halted_arm_is_over(shared_run, tmp_path):
    halting = Arm("halting", ("optimizer.lr=3", "guard.max_rollbacks=0", "guard.sigma=2"))
    mine = arm_to(shared_run, tmp_path / "arm", 150, halting)
    ended([mine])
    assert record(mine.folder)["status"] == "halted"
    assert is_over(mine.folder, 150)
    assert read_outcome(halting, mine.folder, START, 150).broke.startswith("step ")


def test_an_arm_that_cannot_be_built_says_why(shared_run, tmp_path):
    mine = arm_to(shared_run, tmp_path / "arm", 70, Arm("model", ("model=gpt_mini",)))
    ended([mine])
    found = read_outcome(mine.arm, mine.folder, START, 70)
    assert found.broke.startswith("model=gpt_mini: the run in ")
    assert not mine.over, "it is tried again: the reason may be gone"


@pytest.mark.slow
def test_the_outcome_knows_which_batch_a_step_read(shared_run, tmp_path):
    # The run's own fault at tick 90 makes this arm roll back, and skip data.
    mine = arm_to(shared_run, tmp_path / "arm", 110, Arm("nothing"))
    ended([mine])
    found = read_outcome(mine.arm, mine.folder, START, 110)
    assert (found.rollbacks, found.skips, found.came_back) == (1, 4, "1 rollback, 4 skips")
    assert {*range(60, 80)} <= found.losses.keys()
    assert not found.losses.keys() & {*range(80, 97)}, "they are never read again"
    assert {*range(97, 127)} <= found.losses.keys()
    assert found.seconds > 0
    assert max(read_outcome(mine.arm, mine.folder, START, 70).losses) == 69


@pytest.mark.slow
def test_the_loss_of_a_skipped_step_does_not_count(shared_run, tmp_path):
    mine = arm_to(shared_run, tmp_path / "arm", 100, Arm("guard", ("guard=skip",)))
    ended([mine])
    found = read_outcome(mine.arm, mine.folder, START, 100)
    skipped = {step - 1 for step in found.run.skips}
    assert skipped >= {91, 92, 93}
    assert found.losses.keys() == {*range(60, 100)} - skipped


@pytest.mark.slow
def test_several_at_once_are_the_same_as_one_after_the_other(shared_run, tmp_path):
    arms = [SLOWER, Arm("zclip", ("clipping=zclip",))]
    alone, together = (
        [arm_to(shared_run, tmp_path / place / arm.folder, 66, arm) for arm in arms] for place in ("alone", "together")
    )
    ended(alone)
    assert {each.arm.name for each in ended(together, jobs=2)} == {arm.name for arm in arms}
    assert [losses(each.folder) for each in together] == [losses(each.folder) for each in alone]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python 3.12 and up: the forks do nothing
def test_an_arm_that_waited_for_a_process_runs_too(shared_run, tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "run_in_process", operator.is_)  # ends at once
    context = multiprocessing.get_context("fork")  # needs no import of torch
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)
    arms = [arm_to(shared_run, tmp_path / name, 66, Arm(name)) for name in ("first", "second", "third")]
    assert {each.arm.name for each in ended(arms, jobs=2)} == {"first", "second", "third"}
