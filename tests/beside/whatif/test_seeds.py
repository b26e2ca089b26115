"""The last round with other seeds: other batches, the same for all arms of a seed, and an arm's edit is in force."""

import json
import shutil

import pytest

import stabletrain
from stabletrain.cli.commands import main
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer import step_graph
from tests.once import once

TYPED = ["--arms", "lr_fifth_brief,skip", "--past", "16", "--steps", "0", "--best", "3", "--seeds", "2"]


@pytest.fixture(scope="module")
def done(shared_run, tmp_path_factory):
    """A copy of the run after a what-if that starts at step 20, where the guard has not rolled back yet."""

    def make(run):
        shutil.copytree(shared_run, run)
        (run / "events.jsonl").write_text('{"event": "skip", "step": 26, "tick": 26, "kind": "spike"}\n')
        assert main(["whatif", str(run), *TYPED]) == 0

    return once(tmp_path_factory, "whatif_seeds", make) / "whatif" / "step-00000020"


def lines(folder):
    return {line["step"]: line for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line}


def losses(folder):
    return {step: repr(line["train/loss"]) for step, line in lines(folder).items()}


@pytest.mark.slow
def test_an_arm_of_another_seed_is_the_resume_with_that_seed(done, tmp_path, monkeypatch):
    start, compute = done / "start" / "checkpoints" / "step-00000020", step_graph.compute

    def until_43(state, *rest):
        if state.step == 43:
            raise KeyboardInterrupt
        return compute(state, *rest)

    monkeypatch.setattr(step_graph, "compute", until_43)
    typed = [f"resume={start}", "seed=1", "steps=160", "log_every=1", f"hydra.run.dir={tmp_path / 'typed'}"]
    with pytest.raises(KeyboardInterrupt):
        stabletrain.train(typed)
    mine, whole = losses(done / "seed-1" / "nothing"), losses(tmp_path / "typed")
    assert [*mine] == [*range(21, 43)]
    assert mine == {step: whole[step] for step in mine}
    assert not {*mine.items()} & {*losses(done / "nothing").items()}, "other batches than those of seed 0"


@pytest.mark.slow
def test_a_brief_rate_and_skipped_data_are_in_force_with_every_seed(done):
    for folder in (done, done / "seed-1"):
        arm, nothing = lines(folder / "lr_fifth_brief"), lines(folder / "nothing")
        assert all(arm[step]["lr"] == pytest.approx(0.2 * nothing[step]["lr"]) for step in range(21, 43))
        assert arm[21]["train/loss"] == nothing[21]["train/loss"], "the same batch"
        checkpoint = next((folder / "skip" / "checkpoints").iterdir())
        assert json.loads((checkpoint / "state.json").read_text())["training"]["skipped"] == [[20, 26]]


@pytest.mark.slow
def test_the_numbers_of_each_seed_are_in_the_file(done):
    found = json.loads((done / "whatif.json").read_text())
    assert (found["seeds"], found["rounds"], len(found["arms"])) == ([0, 1], [42], 3)
    for each in found["arms"]:
        one, other = each["seeds"]
        assert (one["seed"], other["seed"]) == (0, 1)
        assert other["folder"].endswith(f"seed-1/{each['arm']}")
        counts = [one["difference"]["count"], other["difference"]["count"]]
        assert each["difference"]["count"] == sum(counts) >= 32
        means = [one["difference"]["mean"], other["difference"]["mean"]]
        pooled = sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)
        assert each["difference"]["mean"] == pytest.approx(pooled)
        assert each["val_loss"] == pytest.approx((one["val_loss"] + other["val_loss"]) / 2)


@pytest.mark.slow
def test_the_same_command_runs_nothing_again(done, monkeypatch, capsys):
    first = json.loads((done / "whatif.json").read_text())
    for place in ("arm_run", "start", "rounds"):
        monkeypatch.setattr(f"stabletrain.beside.whatif.{place}.train_until", None)
    assert main(["whatif", str(done.parent.parent), *TYPED]) == 0
    assert json.loads((done / "whatif.json").read_text()) == first
    out = capsys.readouterr().out
    assert "price    first round 3 x 22 = 66 steps, with seed 1 at most 3 x 22 = 66 steps" in out
    assert "loss and val loss: means over the seeds 0, 1" in out
