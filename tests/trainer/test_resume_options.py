"""Every option of every group, typed at a resume of a run with the defaults: what the table says happens.

The option trains on, with its change recorded and its new state named, or it is refused with the table's sentence.
"""

import json
import shutil

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException

from stabletrain.config.arguments import Arguments, merged, parse_arguments
from stabletrain.config.checks import check
from stabletrain.config.resuming import NEW_STATE, REFUSED, check_resume, row_of_option, settings
from stabletrain.errors import ConfigError
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.devices import need_torchao
from tests.laws.test_keys import (
    OPTIONS,
    REFUSED_HERE,
    REFUSED_WITH_RESNET,
    in_rows,
    lies_beside,
    row_lies_beside,
    typed,
)
from tests.runs import composed
from tests.trainer.test_changes import begun, event

SMALL = ["batch_size=4", "eval_every=9", "eval_batches=1", "log_every=1", "device=cpu", "report=false", "steps=2"]
MODELS = {
    "gpt": ["model.n_layer=2", "model.n_head=2", "model.n_embd=16", "data.block_size=16", *SMALL],
    "resnet": ["experiment=resnet_digits", "model.depth=8", *SMALL],
}
DEFAULTS = {
    "gpt": {"optimizer": "adamw", "model": "gpt_nano", "data": "stdlib", "init": "gpt2", "experiment": "gpt_stdlib"},
    "resnet": {
        "optimizer": "sgd",
        "model": "resnet20",
        "data": "digits",
        "init": "torch",
        "experiment": "resnet_digits",
    },
}
OTHERS = {
    "activation_checkpointing": "none",
    "attention_gate": "none",
    "averaging": "none",
    "checkpoint": "default",
    "clipping": "norm",
    "determinism": "seeded",
    "faults": "none",
    "forecast": "default",
    "check": "first_step",
    "forensics": "default",
    "guard": "rollback",
    "monitors": "default",
    "norm_placement": "pre",
    "objective": "cross_entropy",
    "parallel": "auto",
    "precision": "auto",
    "qkclip": "none",
    "qknorm": "none",
    "schedule": "cosine",
    "softcap": "none",
    "softmax": "plain",
    "stability": "none",
    "wandb": "disabled",
    "warmup": "linear",
    "zloss": "none",
}
FAST = {
    ("gpt", "qknorm", "layernorm"),
    ("gpt", "optimizer", "muon"),
    ("gpt", "data", "digits"),
    ("resnet", "precision", "fp16"),
    ("resnet", "model", "gpt_nano"),
}
OF_BOTH = {*DEFAULTS["gpt"], "precision", "clipping", "guard"}
"""Groups of which a ResNet has another default, or another state to keep."""

ALONE = ("stability", "wandb", "experiment", "qkclip")
"""Groups whose options choose others, write elsewhere, or are refused beside many: each is typed alone."""

ASKED = {
    name: [
        (group, option)
        for group, option in OPTIONS
        if (group, option) != ("wandb", "online")  # needs a network
        and (name == "gpt" or group in OF_BOTH)
    ]
    for name in MODELS
}


def before(name, group):
    """Returns the option that the run of a model has before the resume."""
    return (DEFAULTS[name] | OTHERS)[group]


def kind_of(name, group, option):
    """Returns what the table says; empty for the option that the run has already."""
    return row_of_option(group, before(name, group), option).kind if option != before(name, group) else ""


def unfit(name, group, option):
    """Returns part of the message with which an option is refused that fits neither device nor model, or None."""
    with_resnet = REFUSED_WITH_RESNET | {"clipping=update_norm": "sgd.SGD does not show"}
    return {**REFUSED_HERE, **(with_resnet if name == "resnet" else {})}.get(f"{group}={option}")


def trains_on(name, group, option):
    """Whether a resume with an option is to train on."""
    return kind_of(name, group, option) != REFUSED and unfit(name, group, option) is None


def refused_like_with_a_gpt(group, option):
    """Whether the table and the models say the same of an option for a GPT and for a ResNet: one of them is asked."""
    said = [
        (row_of_option(group, before(name, group), option), unfit(name, group, option))
        for name in MODELS
        if (group, option) in ASKED[name] and option != before(name, group)
    ]
    return len(said) == 2 and said[0] == said[1]


def together(name):
    """Returns the options that train on in rows, of each group at most one."""
    rows = in_rows(each for each in ASKED[name] if trains_on(name, *each) and each[0] not in ALONE)
    alone = [[each] for each in ASKED[name] if trains_on(name, *each) and each[0] in ALONE]
    fast = [[(group, option)] for of, group, option in sorted(FAST) if of == name and trains_on(name, group, option)]
    return rows + alone + fast


REFUSALS = [
    (name, *each)
    for name in MODELS
    for each in ASKED[name]
    if not trains_on(name, *each) and not (name == "resnet" and refused_like_with_a_gpt(*each))
]
ROWS = [pytest.param(name, row, id=f"{name}-{typed(row)}") for name in MODELS for row in together(name)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A finished run of two steps with the defaults, for each model; each is trained when it is first needed."""
    known = {}

    def base(name):
        if name not in known:
            known[name] = tmp_path_factory.mktemp("bases") / name
            begun(known[name], *MODELS[name], "wandb=disabled")
        return known[name]

    return base


@pytest.mark.beside(when=lambda group, option: lies_beside(group, option))
@pytest.mark.slow(unless=lambda name, group, option: (name, group, option) in FAST)
@pytest.mark.parametrize(("name", "group", "option"), REFUSALS)
def test_an_option_that_a_resume_cannot_take_is_refused_with_the_tables_sentence(tmp_path, bases, name, group, option):
    refused = kind_of(name, group, option) == REFUSED
    run = bases(name)
    if not refused:  # by the table, which comes before anything is written
        run = shutil.copytree(run, tmp_path / "run")
    expected = "which a resume cannot change" if refused else unfit(name, group, option)
    with pytest.raises((ConfigError, ConfigCompositionException)) as told:
        resumed(run, *words(name, [(group, option)]))
    if isinstance(told.value, ConfigError):
        assert expected in str(told.value)
    else:
        assert group == "experiment", "its model does not have a key of the run's"


@pytest.mark.beside(when=row_lies_beside)
@pytest.mark.slow(unless=lambda name, row: len(row) == 1 and (name, *row[0]) in FAST)
@pytest.mark.parametrize(("name", "row"), ROWS)
def test_every_other_option_does_what_the_table_says(tmp_path, bases, name, row):
    for group, option in row:
        if group == "precision":
            need_torchao(option)
    folder = tmp_path / "run"
    shutil.copytree(bases(name), folder)
    job = resumed(folder, *words(name, row))
    assert job.state.step == 4
    kinds = {(group, option): kind_of(name, group, option) for group, option in row}
    told, recorded = event(folder), json.loads((folder / "run.json").read_text()).get("changes")
    for (group, option), kind in kinds.items():
        if kind:
            assert told["keys"][group] == recorded[0]["keys"][group] == [before(name, group), option]
        assert any(line.startswith(f"{group}={option}: ") for line in told["new"]) == (kind == NEW_STATE)
    if NEW_STATE in kinds.values():
        assert told["loss_after"] == pytest.approx(told["loss_before"], abs=0.02)


def words(name, row):
    """Returns what is typed to resume the run of a model with a row of options."""
    chosen = parse_arguments([*typed(row).split(), "steps=4"])
    logged = "offline" if ("faults", "wandb") in row else "disabled"
    wandb = [] if any(group == "wandb" for group, _ in row) else [f"wandb={logged}"]
    return [*merged(Arguments([], MODELS[name]), chosen).overrides, *wandb, "resume=auto"]


def resumed(folder, *overrides):
    """Resumes a run as `cli/train.py` does."""
    with composed(*overrides) as cfg:
        check_resume(cfg.resume, settings(cfg, HydraConfig.get().runtime.choices), folder)
        check(cfg)
        job = build(cfg, folder)
        train(job)
    return job
