"""Every arm of the catalogue, run for three steps: it changes what it says, and the other numbers are `nothing`'s."""

import json
import math

import pytest
import torch

from stabletrain.beside.whatif.arm_run import ArmRun, run_arm
from stabletrain.beside.whatif.arms import catalogue
from stabletrain.beside.whatif.base import read_base
from stabletrain.beside.whatif.start import start_of
from stabletrain.beside.whatif.trouble import Trouble
from stabletrain.checkpoint.folder import find
from stabletrain.config.resuming import acting
from stabletrain.tracking.metrics import read_jsonl

TROUBLE = Trouble(62, 62, 62, "")


class Ran:
    """An arm after steps 61 to 63: its state, and the numbers of its steps."""

    def __init__(self, folder):
        self.tree = find(folder / "checkpoints" / "step-00000063").load()
        self.lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line]
        self.record = json.loads((folder / "run.json").read_text())
        self.changed = {key for change in self.record["changes"] for key in change["keys"]}

    def of(self, name):
        return [line[name] for line in self.lines]

    @property
    def losses(self):
        return [repr(loss) for loss in self.of("train/loss")]

    @property
    def counter(self):
        return {float(each["step"]) for each in self.tree["optimizer"]["state"].values()}

    def weights(self):
        return torch.cat([weight.flatten().double() for weight in self.tree["model"].values()])


@pytest.fixture(scope="module")
def ran(shared_run, tmp_path_factory):
    """Runs an arm by its name, once."""
    folder, base = tmp_path_factory.mktemp("catalogue"), read_base(shared_run, 60)
    start = find(shared_run / "checkpoints" / "step-00000060")
    known = catalogue(base.settings.choices, base.settings.flat(), "fp16", 60, 62, (20, 40, 60), usual=0.001)
    arms, done = {arm.name: arm for arm in known}, {}

    def run(name):
        if name not in done:
            place = start_of(arms[name], start, TROUBLE, base, folder).path
            run_arm(ArmRun(base, arms[name], place, folder / name, 63), live=False)
            done[name] = Ran(folder / name)
        return done[name]

    run.names = {*arms}
    return run


def changes_no_step(arm, nothing):
    del nothing
    assert not acting(dict.fromkeys(arm.changed, ()))


def slower(factor):
    def holds(arm, nothing):
        assert arm.of("lr") == pytest.approx([factor * rate for rate in nothing.of("lr")], rel=1e-9)
        assert arm.losses[0] == nothing.losses[0]
        assert arm.losses[1:] != nothing.losses[1:]

    return holds


def skipped(arm, nothing):
    assert (arm.tree["skipped"], nothing.tree["skipped"]) == ([[60, 62]], [])
    assert arm.losses[0] != nothing.losses[0]


def rewarmed(arm, nothing):
    assert arm.of("lr") == pytest.approx([3e-3 * step / 120 for step in (61, 62, 63)], rel=1e-6)
    assert all(mine < other for mine, other in zip(arm.of("lr"), nothing.of("lr"), strict=True))


def clipped(arm, nothing):
    assert arm.of("clip/coef")[0] == pytest.approx(min(1, 0.3 / arm.of("grad/norm")[0]), rel=1e-4)
    assert arm.of("clip/coef")[0] < nothing.of("clip/coef")[0]


def clips_outliers(arm, nothing):
    assert arm.tree["parts"]["clipping"] != nothing.tree["parts"]["clipping"]


def has_gains(arm, nothing):
    gains = {name for name in arm.tree["model"] if "query_norm" in name or "key_norm" in name}
    assert gains == arm.tree["model"].keys() - nothing.tree["model"].keys()
    assert gains
    assert gains <= arm.tree["optimizer"]["state"].keys()


def in_force(key):
    def holds(arm, nothing):
        assert key in arm.changed
        assert key not in nothing.changed

    return holds


def penalizes(arm, nothing):
    assert all(value > 0 for value in arm.of("train/zloss"))
    assert not any(nothing.of("train/zloss"))
    assert arm.of("train/ce")[0] == pytest.approx(nothing.of("train/ce")[0], rel=1e-6)


def caps(arm, nothing):
    assert "softcap" in arm.changed
    assert arm.losses[0] != nothing.losses[0]
    assert arm.of("train/ce")[0] == pytest.approx(nothing.of("train/ce")[0], rel=0.1)


def updates_differ(arm, nothing):
    assert arm.losses[0] == nothing.losses[0]
    assert not torch.equal(arm.weights(), nothing.weights())
    assert arm.counter == nothing.counter == {63.0}, "the state is kept"


def starts_over(arm, nothing):
    assert (arm.counter, nothing.counter) == ({3.0}, {63.0})
    assert arm.losses[0] == nothing.losses[0]


def is_a_mean(arm, nothing):
    assert arm.losses[0] != nothing.losses[0]
    assert arm.counter == nothing.counter


CHANGES = {
    "nothing": changes_no_step,
    "skip": skipped,
    "lr_half_brief": slower(0.5),
    "lr_fifth_brief": slower(0.2),
    "lr_half": slower(0.5),
    "lr_fifth": slower(0.2),
    "lr_usual": slower(1 / 3),
    "rewarmup": rewarmed,
    "clip": clipped,
    "zclip": clips_outliers,
    "qknorm": has_gains,
    "qkclip": in_force("qkclip"),
    "zloss": penalizes,
    "softcap": caps,
    "stable_adamw": updates_differ,
    "moments": starts_over,
    "mean": is_a_mean,
    "bf16": in_force("precision"),
}


TESTED_FAST = ("nothing", "skip", "lr_half", "qknorm", "mean")
"""Arms that change a run's data, rate, weights and start; the slow tier has the others."""


@pytest.mark.slow(unless=lambda name: name in TESTED_FAST)
@pytest.mark.parametrize("name", CHANGES)
def test_an_arm_changes_what_it_says(ran, name):
    arm = ran(name)
    assert [line["step"] for line in arm.lines] == [61, 62, 63]
    assert all(map(math.isfinite, arm.of("train/loss")))
    CHANGES[name](arm, ran("nothing"))


def test_no_arm_is_missing_here(ran):
    assert ran.names - {*CHANGES} == {"fp32", "beta2"}, "the run has both"
