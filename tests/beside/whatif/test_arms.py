"""The arms: what each changes for a run, which fixes come first, and what the user may type."""

import pytest

from stabletrain.beside.whatif.arms import Arm, catalogue, choose_arms, own_arm, split_at_commas, with_fixes
from stabletrain.errors import ConfigError

CHOICES = {"optimizer": "adamw", "warmup": "linear", "clipping": "norm", "guard": "rollback"}
VALUES = {
    "optimizer.lr": 3e-3,
    "optimizer.betas": [0.9, 0.999],
    "clipping.max_norm": 1.0,
    "warmup.steps": None,
    "steps": 1000,
}


def arms(choices=CHOICES, values=VALUES, precision="fp32", step=200, last=220, states=(100, 150, 200), usual=0.001):
    return {arm.name: arm for arm in catalogue(choices, values, precision, step, last, states, usual)}


def test_the_overrides_of_a_usual_run():
    found = arms()
    assert {name: arm.overrides for name, arm in found.items()} == {
        "nothing": (),
        "skip": (),
        "lr_half_brief": (),
        "lr_fifth_brief": (),
        "lr_half": ("optimizer.lr=0.0015",),
        "lr_fifth": ("optimizer.lr=0.0006",),
        "lr_usual": ("optimizer.lr=0.001",),
        "rewarmup": ("warmup.steps=400",),
        "clip": ("clipping.max_norm=0.3",),
        "zclip": ("clipping=zclip",),
        "qknorm": ("qknorm=layernorm",),
        "qkclip": ("qkclip=kimi",),
        "zloss": ("zloss=palm",),
        "softcap": ("softcap=gemma2",),
        "beta2": ("optimizer.betas=[0.9,0.95]",),
        "stable_adamw": ("optimizer=stable_adamw",),
        "moments": (),
        "mean": (),
        "fp32": ("precision=fp32",),
        "bf16": ("precision=bf16",),
    }
    assert [name for name, arm in found.items() if arm.refused] == ["fp32", "bf16"]
    assert [name for name, arm in found.items() if arm.edit] == [
        "skip",
        "lr_half_brief",
        "lr_fifth_brief",
        "moments",
        "mean",
    ]


def test_the_usual_rate_is_an_arm_only_if_the_run_has_a_higher_one():
    assert arms(usual=0.003)["lr_usual"].refused == "optimizer.lr=0.003 is not above the usual 0.003"
    assert "not known" in arms(usual=None)["lr_usual"].refused


def test_a_rate_that_is_low_for_a_while_needs_the_guard_and_steps_after_it():
    found = arms()["lr_fifth_brief"]
    assert (found.edit, found.factor, found.about) == (
        "brief",
        0.2,
        "the learning rate x 0.2 to step 270, and then x 1",
    )
    assert "guard=skip: only guard=rollback" in arms({**CHOICES, "guard": "skip"})["lr_half_brief"].refused
    assert "it would last to step 1000, and the run ends at step 1000" in arms(last=950)["lr_half_brief"].refused
    assert not arms(last=949)["lr_half_brief"].refused


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_a_wider_precision_is_for_narrow_ones(precision):
    found = arms(precision=precision)
    assert not found["fp32"].refused
    assert not found["bf16"].refused


def test_a_rewarmup_ends_at_twice_the_steps_done():
    assert arms(step=300)["rewarmup"].overrides == ("warmup.steps=600",)
    assert arms(step=0)["rewarmup"].overrides == ("warmup.steps=100",)  # twice the default warmup, 5 % of the run
    none = arms({**CHOICES, "warmup": "none"}, step=300)["rewarmup"]
    assert none.overrides == ("warmup=linear", "warmup.steps=600")
    assert "would end at step 1000, and the run ends at step 1000" in arms(step=500)["rewarmup"].refused


def test_without_a_bound_on_the_norm_there_is_one():
    values = {key: value for key, value in VALUES.items() if key != "clipping.max_norm"}
    assert arms(values=values)["clip"].overrides == ("clipping=norm", "clipping.max_norm=0.3")


def test_what_an_optimizer_lacks_is_said():
    found = arms({**CHOICES, "optimizer": "sgd"}, {"steps": 1000, "optimizer.momentum": 0.0})
    assert "no key lr" in found["lr_half"].refused
    assert "no beta2" in found["beta2"].refused
    assert "optimizer=sgd" in found["stable_adamw"].refused
    assert "no moments" in found["moments"].refused
    assert not arms({**CHOICES, "optimizer": "sgd"}, {"steps": 9, "optimizer.momentum": 0.9})["moments"].refused
    assert "not above 0.95" in arms(values={**VALUES, "optimizer.betas": [0.9, 0.95]})["beta2"].refused


def test_named_fixes_come_first_and_only_once():
    found = with_fixes(catalogue(CHOICES, VALUES, "fp32", 200), ["qknorm=layernorm", "qkclip=kimi optimizer.lr=0.001"])
    assert [arm.name for arm in found[:4]] == ["nothing", "qknorm", "qkclip=kimi,optimizer.lr=0.001", "skip"]
    assert [arm.named for arm in found[:4]] == ["", "diagnosis or forecast", "diagnosis or forecast", ""]
    assert [arm.name for arm in found].count("qknorm") == 1
    assert found[2].overrides == ("qkclip=kimi", "optimizer.lr=0.001")


@pytest.mark.parametrize(
    ("fixes", "usual", "wanted"),
    [
        (["optimizer.lr=0.5"], 0.0001, ["nothing", "lr_usual", "optimizer.lr=0.5", "skip"]),
        (["zloss=palm", "qknorm=layernorm optimizer.lr=0.3"], 0.0001, ["nothing", "lr_usual", "zloss"]),
        (["optimizer.lr=0.0001", "zloss=palm"], 0.0001, ["nothing", "lr_usual", "zloss", "skip"]),
        (["qknorm=layernorm"], 0.0001, ["nothing", "qknorm", "skip"]),
        ([], 0.0001, ["nothing", "skip", "lr_half_brief"]),
        (["optimizer.lr=0.5"], 3.0, ["nothing", "optimizer.lr=0.5", "skip"]),  # the run's rate is lower already
        (["optimizer.lr=0.5"], None, ["nothing", "optimizer.lr=0.5", "skip"]),
    ],
)
def test_where_the_rate_is_suspected_the_usual_one_is_tried_first(fixes, usual, wanted):
    found = with_fixes(catalogue(CHOICES, VALUES, "fp32", 200, usual=usual), fixes)
    assert [arm.name for arm in found[: len(wanted)]] == wanted
    assert [arm.name for arm in found].count("lr_usual") == 1
    assert ("suspected" in found[1].about) == (wanted[1] == "lr_usual")


def test_commas_in_brackets_belong_to_the_value():
    assert split_at_commas("a=[1,2],b='x,y',c={d:1,e:2}") == ["a=[1,2]", "b='x,y'", "c={d:1,e:2}"]
    assert own_arm("optimizer.betas=[0.9,0.95],zloss=palm").overrides == ("optimizer.betas=[0.9,0.95]", "zloss=palm")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("qknorm", "'qknorm' is not key=value"),
        ("zloss=palm,", "'' is not key=value"),
        ("seed=1", "cannot change seed: the arms read identical batches"),
        ("data.path=x", "cannot change data.path: the arms read identical batches"),
        ("batch_size=3", "cannot change batch_size"),
        ("steps=10", "cannot change steps"),
        ("resume=x", "cannot change resume"),
        ("log_every=3", "sets log_every itself"),
        ("hydra.run.dir=x", "sets hydra.run.dir itself"),
    ],
)
def test_what_is_no_arm_is_refused(word, said):
    with pytest.raises(ConfigError, match="fix: ") as refused:
        own_arm(word)
    assert said in str(refused.value)


def test_nothing_is_always_an_arm_and_own_arms_are_added():
    there = catalogue(CHOICES, VALUES, "fp32", 200)
    assert [arm.name for arm in choose_arms(there, ["zclip"], [own_arm("zloss=olmo")])] == [
        "nothing",
        "zclip",
        "zloss=olmo",
    ]
    assert len(choose_arms(there, None, [])) == len(there)
    with pytest.raises(ConfigError, match="--arms zlos: there is no such arm; did you mean zloss"):
        choose_arms(there, ["zlos"], [])


def test_every_arm_has_a_folder_of_its_own():
    there = with_fixes(catalogue(CHOICES, VALUES, "fp32", 200), ["optimizer.betas=[0.9,0.95]", "init=gpt2"])
    folders = [arm.folder for arm in there]
    assert len({*folders}) == len(folders)
    assert Arm("a=[b/../c]").folder == "a-b-..-c"
