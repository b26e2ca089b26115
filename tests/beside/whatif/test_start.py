"""The state from which the arms start: the newest from before the trouble, the same bits, and its edited copies."""

import json
import shutil

import pytest
import torch
from torch import Tensor

from stabletrain.beside.whatif.arm_run import ArmRun, run_arm
from stabletrain.beside.whatif.arms import BRIEF_STEPS, Arm, catalogue
from stabletrain.beside.whatif.base import read_base
from stabletrain.beside.whatif.edits import apply_edit, lowered_rate, skipped_span
from stabletrain.beside.whatif.opening import origin_text
from stabletrain.beside.whatif.start import Origin, check_repeatable, find_origin, prepare, start_of
from stabletrain.beside.whatif.trouble import Target, Trouble, find_trouble
from stabletrain.checkpoint.folder import find
from stabletrain.checkpoint.tree import flatten
from stabletrain.errors import ConfigError
from stabletrain.tracking.metrics import read_jsonl

TROUBLE = Trouble(92, 95, 92, "")
EVERY = {"every": 20, "after": 5}


def bits(tree, *parts):
    return {part: flatten(tree[part])[0] for part in parts}


def same(one, other, *parts):
    for part in parts:
        left, right = flatten(one[part])[0], flatten(other[part])[0]
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_the_trouble_of_the_run(shared_run):
    found = find_trouble(Target(shared_run))
    assert (found.first, found.last, found.tick) == (92, 95, 92)


def test_the_state_of_a_rollback_is_not_one_from_before_the_trouble(shared_run):
    # There is a checkpoint of step 80, and the run wrote it after the trouble, when it had executed 95 steps.
    assert find(shared_run / "checkpoints" / "step-00000080").load()["tick"] == 95
    origin = find_origin(EVERY, shared_run, TROUBLE, None)
    assert (origin.step, origin.tick, origin.steps) == (80, 80, 20)
    assert origin.source is not None
    assert origin.source.step == 60


def test_a_checkpoint_of_that_time_is_taken_as_it_is(shared_run):
    origin = find_origin(EVERY, shared_run, Trouble(70, 70, 70, ""), None)
    assert (origin.step, origin.steps) == (60, 0)
    assert find_origin({"every": 50, "after": 5}, shared_run, Trouble(70, 70, 70, ""), None).step == 60


def test_the_user_may_name_any_step(shared_run):
    assert find_origin(EVERY, shared_run, TROUBLE, 40).steps == 0
    origin = find_origin(EVERY, shared_run, TROUBLE, 47)
    assert (origin.step, origin.tick, origin.steps) == (47, 47, 7)
    late = find_origin(EVERY, shared_run, Trouble(120, 120, 135, ""), 100)  # a state after the trouble, and its tick
    assert (late.step, late.tick, late.steps) == (100, 115, 0)


def test_a_run_in_trouble_at_its_beginning_starts_at_step_0(shared_run, tmp_path):
    origin = find_origin({"every": 50, "after": 20}, tmp_path, Trouble(9, 9, 9, ""), None)
    assert origin == Origin(0, 0, None)
    start = prepare(read_base(shared_run, 0), origin, tmp_path / "whatif")
    same(start.load(), find(shared_run / "checkpoints" / "step-00000000").load(), "model")
    assert start.step == 0


def test_a_state_that_was_not_kept_is_computed_again_bit_for_bit(shared_run, tmp_path):
    origin = find_origin(EVERY, shared_run, TROUBLE, None)
    start = prepare(read_base(shared_run, 80), origin, tmp_path / "whatif")
    tree = start.load()
    # The rollback has restored, and saved, the same weights and moments.
    same(tree, find(shared_run / "checkpoints" / "step-00000080").load(), "model", "optimizer")
    assert (tree["tick"], tree["skipped"], tree["parts"]["guard"]["rollbacks"]) == (80, [], 0)
    assert start.info["settings"]["values"]["log_every"] == 10, "the settings are those of the run"
    assert not (tmp_path / "whatif" / "again").exists()
    written = start.path.stat().st_mtime_ns
    assert prepare(read_base(shared_run, 80), origin, tmp_path / "whatif").path.stat().st_mtime_ns == written


def test_a_repetition_stops_at_the_step(shared_run, tmp_path):
    start = prepare(read_base(shared_run, 47), find_origin(EVERY, shared_run, TROUBLE, 47), tmp_path / "whatif")
    assert (start.step, start.load()["tick"]) == (47, 47)


def test_a_repetition_that_comes_out_differently_is_refused(run, tmp_path):
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["step"] == 70 and "train/loss" in line:
            line["train/loss"] *= 1 + 1e-7
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(ConfigError, match="the loss of step 70 came out differently"):
        prepare(read_base(run, 80), find_origin(EVERY, run, TROUBLE, None), tmp_path / "whatif")


ON_A_CARD = {"device": "cuda:0", "name": "NVIDIA A100"}


def on_a_card(run, change, **choices):
    """Records that a run computed on a card, and what its losses were after step 60."""
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "hardware": {**record["hardware"], **ON_A_CARD}}))
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["step"] > 60 and "train/loss" in line:
            line["train/loss"] = change(line["train/loss"])
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    base = read_base(run, 80)
    base.settings.choices.update(choices)
    return base


@pytest.mark.slow
def test_a_repetition_of_a_run_on_a_card_may_round_differently(run, tmp_path):
    origin = find_origin(EVERY, run, TROUBLE, None)
    base = on_a_card(run, lambda loss: loss * (1 + 1e-5))
    assert origin_text(origin, base.repeats_exactly).endswith(
        "without determinism=strict it will be alike, not the same bits"
    )
    assert prepare(base, origin, tmp_path / "whatif").step == 80
    strict = on_a_card(run, lambda loss: loss, determinism="strict")
    assert origin_text(origin, strict.repeats_exactly) == "which was not kept: computed again from step-00000060"
    with pytest.raises(ConfigError, match="came out differently"):
        prepare(strict, origin, tmp_path / "strict")


@pytest.mark.parametrize("change", [lambda loss: loss + 0.5, lambda loss: 4.0 - loss], ids=["higher", "other"])
def test_a_repetition_of_a_run_on_a_card_whose_losses_are_others_is_refused(run, tmp_path, change):
    base = on_a_card(run, change)
    with pytest.raises(
        ConfigError, match=r"losses of steps \d+ to 80 came out .* so the state is another one: .*--from"
    ):
        prepare(base, find_origin(EVERY, run, TROUBLE, None), tmp_path / "whatif")


def test_steps_with_other_settings_cannot_be_repeated(run):
    record = json.loads((run / "run.json").read_text())
    record["changes"] = [{"step": 70, "keys": {"optimizer.lr": [3e-3, 1e-3]}}]
    (run / "run.json").write_text(json.dumps(record))
    base = read_base(run, 80)
    assert base.arguments.value("optimizer.lr") == "0.001"
    with pytest.raises(ConfigError, match=r"after step 70 a resume changed optimizer.lr; fix: --from step-"):
        check_repeatable(base, find_origin(EVERY, run, TROUBLE, None))
    check_repeatable(read_base(run, 60), find_origin(EVERY, run, TROUBLE, 60))


# ---- edited copies


def test_skip_never_reads_the_data_of_the_trouble():
    tree = {"step": 80, "skipped": []}
    assert apply_edit(tree, Arm("skip", edit="skip"), TROUBLE)["skipped"] == [
        [81, 95]
    ]  # step 95 reads the batch of step number 94
    assert skipped_span({"step": 90, "skipped": []}, TROUBLE) == (90, 95)
    assert skipped_span({"step": 80, "skipped": [[10, 30]]}, TROUBLE) == (101, 115)
    longer = Trouble(92, 95, 92, "", read=140)  # its rollbacks have skipped data beyond step 95
    assert skipped_span({"step": 90, "skipped": []}, longer) == (90, 140)
    assert tree["skipped"] == []


def test_moments_and_counters_start_at_0_and_the_weights_are_kept(shared_run):
    tree = find(shared_run / "checkpoints" / "step-00000060").load()
    found = apply_edit(tree, Arm("moments", edit="moments"), TROUBLE)
    values = flatten(found["optimizer"]["state"])[0]
    assert values
    assert not any(value.any() for value in values.values() if isinstance(value, Tensor))
    assert values.keys() == flatten(tree["optimizer"]["state"])[0].keys()
    same(tree, found, "model")
    assert flatten(tree["optimizer"]["state"])[0]["head.weight/exp_avg_sq"].any(), "the original is as it was"


def test_an_edited_copy_is_a_run_that_can_be_resumed(shared_run, tmp_path):
    base = read_base(shared_run, 60)
    start = find(shared_run / "checkpoints" / "step-00000060")
    made = start_of(Arm("skip", edit="skip"), start, TROUBLE, base, tmp_path)
    assert made.path == tmp_path / "start-skip" / "checkpoints" / "step-00000060"
    assert made.load()["skipped"] == [[81, 95]]
    assert json.loads((tmp_path / "start-skip" / "run.json").read_text())["overrides"] == base.arguments.overrides
    assert start_of(Arm("zclip", ("clipping=zclip",)), start, TROUBLE, base, tmp_path) == start
    shutil.rmtree(made.path)
    with pytest.raises(ConfigError):
        start_of(Arm("skip", edit="skip"), start, TROUBLE, base, tmp_path)


def test_what_is_left_of_a_lowered_rate_is_lowered_further():
    assert lowered_rate([0, 0, 1.0], 80, 145, 0.5) == [80, 145, 0.5]
    assert lowered_rate([60, 80, 0.5], 80, 145, 0.5) == [80, 145, 0.5], "it is over at step 80"
    assert lowered_rate([60, 160, 0.5], 80, 145, 0.2) == [80, 160, 0.1]


@pytest.mark.slow
def test_a_brief_arm_trains_at_the_lowered_rate_and_then_at_the_whole_one(shared_run, tmp_path):
    # The trouble is far enough from the fault at tick 90, so that no rollback of the guard lowers the rate.
    base, start = read_base(shared_run, 20), find(shared_run / "checkpoints" / "step-00000020")
    known = catalogue(base.settings.choices, base.settings.flat(), "fp32", 20, last=22)
    found = {}
    for arm in known:
        if arm.name in ("nothing", "lr_half_brief", "lr_fifth_brief"):
            made = start_of(arm, start, Trouble(22, 22, 22, ""), base, tmp_path)
            run_arm(ArmRun(base, arm, made.path, tmp_path / arm.name, 80), live=False)
            lines = read_jsonl(tmp_path / arm.name / "metrics.jsonl")
            found[arm.name] = {line["step"]: line["lr"] for line in lines if "lr" in line}
    assert [*found["nothing"]] == [*range(21, 81)]
    for name, factor in (("lr_half_brief", 0.5), ("lr_fifth_brief", 0.2)):
        for step, whole in found["nothing"].items():
            assert found[name][step] == pytest.approx(whole * (factor if step <= 22 + BRIEF_STEPS else 1), rel=1e-12)
