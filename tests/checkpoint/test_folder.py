"""Retention never removes the last healthy checkpoint, and a resume prefers it to a newer one that is not healthy."""

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from stabletrain.checkpoint import reader
from stabletrain.checkpoint.folder import by_val_loss, find, kept, superseded
from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.tracking.metrics import read_jsonl
from tests.checkpoint.given import Run, flip, rewrite_manifest, tree
from tests.runs import TINY_GPT, command


def known(*steps: int, sick: tuple[int, ...] = ()) -> list[Checkpoint]:
    return [Checkpoint(Path(str(step)), step, step not in sick, None, {}) for step in steps]


def numbers(paths) -> list[int]:
    return sorted(int(path.name) for path in paths)


# ------------------------------------------------------------------------------------------------- what stays


def test_the_newest_and_the_best_are_kept(run):
    for step, loss in [(10, 3.0), (20, 1.0), (30, 2.0), (40, 2.5), (50, math.nan)]:
        run.save(step, val_loss=loss)
    assert run.steps() == [20, 40, 50]
    best = run.checkpoints.best()
    assert best is not None
    assert best.step == 20
    assert run.newest().step == 50


@pytest.mark.parametrize("order", list(itertools.permutations([3.0, math.nan, 1.0, -math.inf])))
def test_a_loss_that_is_no_number_is_never_the_best(order):
    found = [Checkpoint(Path(str(i)), i, True, loss, {}) for i, loss in enumerate([*order, None])]
    assert [c.val_loss for c in by_val_loss(found)] == [1.0, 3.0]


def test_a_best_one_that_is_damaged_is_not_the_best(run):
    for step, loss in [(10, 1.0), (20, 2.0), (30, 3.0)]:
        run.save(step, val_loss=loss)
    flip(run.path(10) / "model.safetensors")
    assert run.checkpoints.best().step == 20


def test_without_keep_best_only_the_newest_are_kept(tmp_path):
    run = Run(tmp_path, keep_best=False, keep=1)
    for step in (10, 20, 30):
        run.save(step, val_loss=float(step))
    assert run.steps() == [30]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_whatever_is_healthy_or_not_the_newest_stay_and_the_last_healthy_ones(keep):
    for pattern in itertools.product([True, False], repeat=7):
        found = [Checkpoint(Path(str(step)), step, healthy, None, {}) for step, healthy in enumerate(pattern)]
        stays = numbers(kept(found, keep, False))
        healthy = [step for step, is_healthy in enumerate(pattern) if is_healthy]
        assert stays == sorted({*range(7 - keep, 7), *healthy[-min(keep, 2) :]})


def test_of_each_retained_state_the_newest_checkpoint_before_it_stays():
    """Not only of the oldest: steps from before a change of settings cannot be replayed to a state after it."""
    found = [Checkpoint(Path(str(step)), step, True, None, {}) for step in (4, 8, 12, 16, 20)]
    assert numbers(kept(found, 1, False, [5, 12])) == [4, 12, 20]
    assert numbers(kept(found, 1, False, [3])) == [20], "none is as old"


def test_the_last_healthy_ones_outlive_any_number_of_sick_ones(run):
    run.save(10)
    run.save(20)
    for step in range(30, 80, 10):
        run.save(step, healthy=False, val_loss=0.0)
    assert run.steps() == [10, 20, 60, 70]
    assert run.newest().step == 70
    assert run.newest(healthy_only=True).step == 20
    assert run.checkpoints.best() is None


@pytest.mark.parametrize("lost", [10, 20])
@pytest.mark.parametrize("harm", ["flip", "remove"])
def test_a_healthy_one_that_is_damaged_does_not_push_out_the_last_whole_one(run, lost, harm):
    run.save(10)
    run.save(20)
    file = run.path(lost) / "model.safetensors"
    flip(file) if harm == "flip" else file.unlink()
    for step in range(30, 80, 10):
        run.save(step, healthy=False)
    assert run.newest(healthy_only=True).step == 30 - lost
    assert run.preferred().step == 30 - lost


def test_what_was_found_damaged_does_not_count(tmp_path):
    Run(tmp_path, keep=3).save(10)
    for step in (20, 30):
        Run(tmp_path, keep=3).save(step)
    for step in (20, 30):
        flip(tmp_path / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
    run = Run(tmp_path)
    assert run.preferred().step == 10
    run.save(15)  # of 20 and 30 nothing more is known than that they are no good
    run.save(18, healthy=False)
    assert run.newest(healthy_only=True, at_most=14).step == 10
    run.save(20)  # whole again
    assert run.newest(healthy_only=True).step == 20


# --------------------------------------------------------------------------------------------- what is healthy


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["model", "moments"])
def test_weights_or_moments_that_are_not_finite_are_never_healthy(run, where, bad):
    sick = tree(10)
    sick["optimizer"]["state"]["w"] = {"exp_avg": torch.zeros(3)}
    (sick["model"]["w"] if where == "model" else sick["optimizer"]["state"]["w"]["exp_avg"])[2] = bad
    run.save(10, tree=sick)
    assert not run.newest().healthy
    [(kind, _, fields)] = run.events
    assert (kind, fields["healthy"]) == ("checkpoint", False)
    assert fields["reason"] == ("w is not finite" if where == "model" else "optimizer/w/exp_avg is not finite")


@pytest.mark.parametrize(("name", "healthy"), [("exp_avg_sq", False), ("exp_avg", True)])
def test_a_second_moment_below_0_is_never_healthy(run, name, healthy):
    state = tree(10)
    state["optimizer"]["state"]["w"] = {name: torch.tensor([0.0, 1.0, -1e-30])}
    run.save(10, tree=state)
    assert run.newest().healthy == healthy
    assert run.events[0][2].get("reason") == (None if healthy else f"optimizer/w/{name} is negative")


def test_the_callers_word_is_enough_to_be_unhealthy(run):
    run.save(10, healthy=False)
    assert not run.newest().healthy
    assert "reason" not in run.events[0][2]


# ------------------------------------------------------------------------------------ what a run continues from


def test_the_newest_is_preferred_in_silence_where_it_is_healthy(run, capfd):
    run.save(10, healthy=False)
    run.save(20)
    run.events.clear()
    assert run.preferred().step == 20
    assert find(run.folder).step == 20
    assert not run.events
    assert capfd.readouterr().err == ""


def test_a_healthy_one_is_preferred_to_newer_ones_and_a_line_says_so(tmp_path, capfd):
    run = Run(tmp_path, keep=4)
    for step in (10, 20, 30, 40):
        run.save(step, healthy=step < 30)
    run.events.clear()
    assert run.preferred().step == 20
    line = f"stabletrain: checkpoint skipped: {run.path(40)} is not healthy: continuing from step-00000020, which is\n"
    assert capfd.readouterr().err == line
    assert run.events == [("checkpoint_skipped", 40, {"path": "step-00000040", "reason": "not healthy"})]
    for path in (tmp_path, run.folder):
        assert find(path).step == 20
        assert capfd.readouterr().err == line
    assert find(run.path(40)).step == 40  # asked for by name
    assert capfd.readouterr().err == ""


def test_where_none_is_healthy_the_newest_is_used_and_a_line_says_so(tmp_path, capfd):
    run = Run(tmp_path, keep=3)
    for step in (10, 20, 30):
        run.save(step, healthy=False)
    flip(run.path(30) / "state.json")
    run.events.clear()
    assert run.preferred().step == 20
    damaged, sick = capfd.readouterr().err.splitlines()
    assert f"{run.path(30)}: state.json does not match" in damaged
    says = f"{run.path(20)} is not healthy, and no healthy one is left: continuing from it anyway"
    assert sick == f"stabletrain: {says}"
    assert [(kind, step) for kind, step, _ in run.events] == [("checkpoint_skipped", 30)]


def test_a_healthy_one_that_is_damaged_is_not_preferred(tmp_path):
    run = Run(tmp_path, keep=4)
    for step in (10, 20, 30):
        run.save(step, healthy=step < 30)
    flip(run.path(20) / "model.safetensors")
    assert run.preferred().step == 10
    flip(run.path(10) / "model.safetensors")
    assert run.preferred().step == 30


def test_newest_up_to_a_step(tmp_path):
    run = Run(tmp_path, keep=4)
    for step in (10, 20, 30):
        run.save(step, healthy=step != 20)
    assert [run.newest(at_most=step).step for step in (30, 29, 20, 19)] == [30, 20, 20, 10]
    assert run.newest(at_most=29, healthy_only=True).step == 10
    assert run.checkpoints.newest(at_most=9) is None


# ----------------------------------------------------------------------------------------- what is left behind


@pytest.mark.parametrize("healthy", [True, False])
def test_left_behind_is_all_that_is_later_and_the_last_healthy_one_is_not(healthy):
    for pattern in itertools.product([True, False], repeat=6):
        found = [Checkpoint(Path(str(step)), step, is_healthy, None, {}) for step, is_healthy in enumerate(pattern)]
        gone = numbers(superseded(found, 2, healthy))
        later = [step for step in (3, 4, 5) if pattern[step]]
        assert sorted({*gone, *([] if healthy else later[-1:])}) == [3, 4, 5]
        assert healthy or not later or later[-1] not in gone


def test_a_rollback_forgets_the_future_but_never_the_last_healthy_one(run):
    for step in (10, 20, 30):
        run.save(step)
    run.checkpoints.rewind(20)
    assert run.steps() == [20]
    run.checkpoints.rewind(10)
    assert run.steps() == [20]
    run.save(10, healthy=False)
    assert run.steps() == [10, 20]
    assert run.newest(healthy_only=True).step == 20
    run.save(11)  # which is the last healthy one now
    assert run.steps() == [10, 11]


def test_a_rollback_counts_only_a_healthy_one_that_verifies(tmp_path):
    run = Run(tmp_path, keep=5)
    for step in (10, 20, 30, 40, 50):
        run.save(step, healthy=step < 50)
    flip(run.path(10) / "model.safetensors")
    flip(run.path(20) / "training.safetensors")
    flip(run.path(40) / "state.json")
    run.checkpoints.rewind(20)
    assert run.newest(healthy_only=True).step == 30
    assert 50 not in run.steps()


def test_a_rollback_reads_through_only_what_this_process_has_not(tmp_path, monkeypatch):
    """Training waits for it, and to read a checkpoint through takes as long as many steps on a card."""
    run, read = Run(tmp_path, keep=5), []
    for step in (10, 20, 30):
        run.save(step)

    def counted(run):
        folder = run.checkpoints._folder
        verify = folder._verify
        monkeypatch.setattr(folder, "_verify", lambda path: read.append(path.name[-2:]) or verify(path))

    counted(run)
    run.checkpoints.rewind(20)
    assert (run.steps(), read) == ([10, 20], [])
    assert run.newest().step == 20
    assert read == ["20"], "what is continued from is always read through"
    flip(run.path(20) / "model.safetensors")
    run.checkpoints.rewind(20)
    assert read == ["20", "20"], "it was touched; the one before it was not"
    again = Run(tmp_path, keep=5)
    counted(again)
    again.checkpoints.rewind(20)
    again.checkpoints.rewind(20)
    assert read[2:] == ["20", "10", "20"], "another process has read nothing yet"


def test_sick_ones_before_a_rollbacks_step_do_not_stand_in_for_a_healthy_one(tmp_path):
    run = Run(tmp_path, keep=5)
    for step in (10, 20, 30, 40):
        run.save(step, healthy=step > 20)
    run.checkpoints.rewind(20)
    assert run.steps() == [10, 20, 40]


def test_a_run_that_went_back_is_not_continued_from_what_it_left_behind(tmp_path):
    run = Run(tmp_path, keep=4)
    for step in (10, 20, 30, 40):
        run.save(step, healthy=step < 30)
    again = Run(tmp_path, keep=4)
    assert again.preferred().step == 20
    again.save(25)
    assert again.steps() == [10, 20, 25]
    assert Run(tmp_path).preferred().step == 25


def test_a_step_reached_again_is_replaced(run):
    run.save(10, val_loss=1.0)
    run.save(10, val_loss=2.0, tree=tree(10, 11))
    assert run.steps() == [10]
    assert run.newest().val_loss == 2.0
    assert run.newest().load()["model"]["w"][0, 0] == 11


def test_a_rejected_checkpoint_is_skipped_until_it_is_written_again(run, capsys):
    for step in (10, 20):
        run.save(step)
    newest = run.newest()
    assert run.checkpoints.accept(newest, "")
    assert not run.checkpoints.accept(newest, "the checkpoint has no state of 'guard'")
    assert capsys.readouterr().err.count("checkpoint skipped") == 1
    assert (run.newest().step, run.preferred().step) == (10, 10)
    run.save(20)
    assert run.newest().step == 20


# ---------------------------------------------------------------------------------------- as a user sees it


@pytest.mark.slow
def test_resume_prefers_the_healthy_one_and_says_so(tmp_path):
    chosen = [*TINY_GPT, "hydra.run.dir=run", "checkpoint.every=3", "eval_every=3", "log_every=1"]
    done = command(*chosen, "steps=6", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    rewrite_manifest(newest, healthy=False)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    done = command(*chosen, "steps=9", "resume=auto", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    line = f"stabletrain: checkpoint skipped: {newest} is not healthy: continuing from step-00000003, which is"
    assert [each for each in done.stderr.splitlines() if "checkpoint" in each] == [line]
    assert "resumed after step 3, from" in done.stdout
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert [(e["step"], e["reason"]) for e in events if e["event"] == "checkpoint_skipped"] == [(6, "not healthy")]
    assert reader.verify(newest).healthy  # made anew
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"
    named = command(*chosen[:-4], "hydra.run.dir=new", "steps=9", "resume=other", cwd=tmp_path)
    assert named.returncode == 0, named.stderr
    assert "step-00000006 is not healthy: continuing from step-00000003" in named.stderr
    assert "resumed after step 3, from" in named.stdout
    named = command(*chosen[:-4], "hydra.run.dir=newer", "steps=9", f"resume={newest}", cwd=tmp_path / "other")
    assert "resumed after step 6, from" in named.stdout
