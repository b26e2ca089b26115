"""The options of a run: one typed field for each group and key of the configuration, made once."""

import inspect
from dataclasses import FrozenInstanceError, fields
from typing import get_type_hints

import pytest
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf

from stabletrain.config.checks import check
from stabletrain.config.make import Choice, missing_parts, plain
from stabletrain.errors import ConfigError
from stabletrain.stability.objective import CrossEntropy, Custom, NoZLoss
from stabletrain.trainer import memory
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from stabletrain.trainer.options import ForwardOptions, Options, StepOptions, read
from tests.runs import CONF, TINY_GPT, TINY_RESNET, composed
from tests.trainer.given import options_of

LATER = {"model", "precision", "data", "optimizer"}
"""Groups whose objects need something that is known only later."""

PRESETS = {"stability", "experiment"}
"""Groups that only choose options of others."""


def test_each_group_and_each_key_of_the_configuration_is_a_field_and_there_are_no_others():
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()} - PRESETS
    keys = OmegaConf.load(CONF / "config.yaml").keys() - {"defaults", "hydra"}
    assert {each.name for each in fields(Options)} == groups | keys | {"config", "choices"}


@pytest.mark.parametrize("chosen", [TINY_GPT, [*TINY_RESNET, "clipping=zclip", "guard=skip", "wandb=disabled"]])
def test_each_field_is_the_object_that_its_yaml_names_or_will_be(chosen):
    with composed(*chosen) as cfg:
        options, values = options_of(cfg), plain(cfg)
    assert options.config == values
    assert options.choices["guard"] == ("skip" if "guard=skip" in chosen else "rollback")
    assert not [group for group in options.choices if "hydra" in group]
    for name, value in values.items():
        made = getattr(options, name)
        if name in LATER:
            assert (made.group, made.node, made.option) == (name, value, options.choices[name])
        elif not isinstance(value, dict):
            assert made == value
        elif name not in ("parallel", "forecast", "check"):  # their targets are functions
            assert type(made) is get_class(value["_target_"])


def test_the_options_fit_their_types_and_cannot_be_set():
    with composed(*TINY_GPT) as cfg:
        options = options_of(cfg)
    types = get_type_hints(Options)
    roles = {name: types[name] for name in options.choices.keys() - LATER - PRESETS}
    assert len(roles) == 24
    assert not [name for name, role in roles.items() if missing_parts(getattr(options, name), role)]
    with pytest.raises(FrozenInstanceError):
        options.steps = 3


def test_printed_options_have_a_line_for_each_field():
    with composed(*TINY_GPT, "steps=7") as cfg:
        lines = dict(line.split(maxsplit=1) for line in str(options_of(cfg)).splitlines())
    assert lines.keys() == {each.name for each in fields(Options)} - {"config", "choices"}
    assert lines["steps"] == "7"
    assert lines["guard"] == "rollback: stabletrain.guard.policy.rollback.RollbackGuard"
    assert lines["optimizer"] == "adamw: stabletrain.stability.optimizers.adamw.AdamW, not built yet"


def test_a_run_makes_each_object_once(tmp_path, monkeypatch):
    made, whole = [], Choice.build
    monkeypatch.setattr(Choice, "build", lambda choice, **given: made.append(choice.group) or whole(choice, **given))
    monkeypatch.setattr(memory, "on_meta", inspect.unwrap(memory.on_meta))  # without what the tests keep
    with composed(*TINY_GPT, "steps=2", "eval_every=2") as cfg:
        check(cfg)
        checked = made.copy()
        train(build(cfg, tmp_path))
        groups = {name for name, value in plain(cfg).items() if isinstance(value, dict)}
    assert checked == ["warmup", "schedule"], "tried before torch is imported, to refuse a bad one at once"
    built = made[len(checked) :]
    assert sorted(built) == sorted([*groups, "model"]), "the model once more, without memory, to count its bytes"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("clipping.max_norm=-1", "clipping.max_norm=-1"),
        ("guard._target_=builtins.dict", "guard=rollback: builtins.dict gives a dict, which has no .*gate"),
        (
            "+faults.banana=1",
            "faults=none cannot be built from stabletrain.extension.NoFaults: NoFaults.. takes no arg",
        ),
        ("qknorm._target_=builtins.dict", "qknorm=none: builtins.dict gives a dict, which has no __call__"),
        ("objective._target_=builtins.dict", "objective: builtins.dict gives a dict, which cannot be called with"),
        ("label_smoothing=1", r"label_smoothing=1 is outside \[0, 1\)"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_by_its_name(typed, message):
    with composed(*TINY_GPT, typed) as cfg, pytest.raises(ConfigError, match=f"^{message}"):
        options_of(cfg)


def own_loss(outputs, batch, n_valid, scale=2.0):
    """A loss of the user's own."""
    return scale * outputs.sum() / n_valid


def test_the_objective_has_the_z_loss_and_the_smoothing_or_is_the_users_function():
    with composed(*TINY_GPT, "zloss=palm", "label_smoothing=0.25") as cfg:
        options = options_of(cfg)
    assert options.objective == CrossEntropy(options.zloss, 0.25)
    assert options.zloss != NoZLoss()
    with composed(*TINY_GPT, f"objective._target_={__name__}.own_loss", "+objective.scale=3.0") as cfg:
        objective = options_of(cfg).objective
    assert isinstance(objective, Custom)
    assert objective.function(torch.ones(4), None, torch.tensor(2)) == 6


def test_what_an_older_record_lacks_has_its_meaning_of_then():
    with composed(*TINY_GPT, "zloss=palm", "label_smoothing=0.25") as cfg:
        values = plain(cfg)
    for key in ("objective", "zloss", "label_smoothing", "loss_chunk"):
        del values[key]
    options = read(StepOptions, values)
    assert options.objective == CrossEntropy(NoZLoss(), 0.0)
    assert options.loss_chunk == "none"


def test_options_of_a_forward_pass_build_nothing_else():
    with composed(*TINY_GPT) as cfg:
        values = plain(cfg) | {"guard": {"_target_": "gone.Guard"}, "clipping": {"_target_": "gone.Clipping"}}
    assert read(ForwardOptions, values).model.node["n_layer"] == 2
    with pytest.raises(ConfigError, match="clipping=clipping cannot be built from gone.Clipping"):
        read(StepOptions, values)
