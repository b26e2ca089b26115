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
from tests.laws.test_keys import OPTIONS, REFUSED_HERE, REFUSED_WITH_RESNET, lies_beside
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

CASES = [
    pytest.param(name, group, option, id=f"{name}-{group}={option}")
    for name in MODELS
    for group, option in OPTIONS
    if (group, option) != ("wandb", "online")  # needs a network
    if name == "gpt" or group in OF_BOTH
]


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
@pytest.mark.parametrize(("name", "group", "option"), CASES)
def test_every_option_does_what_the_table_says(tmp_path, bases, name, group, option):
    if group == "precision":
        need_torchao(option)
    folder, before = tmp_path / "run", (DEFAULTS[name] | OTHERS)[group]
    shutil.copytree(bases(name), folder)
    kind = row_of_option(group, before, option).kind if option != before else ""
    logged = "offline" if (group, option) == ("faults", "wandb") else "disabled"
    words = merged(Arguments([], MODELS[name]), parse_arguments([f"{group}={option}", "steps=4"])).overrides
    try:
        job = resumed(folder, *words, *([] if group == "wandb" else [f"wandb={logged}"]), "resume=auto")
    except ConfigError as error:
        with_resnet = REFUSED_WITH_RESNET | {"clipping=update_norm": "sgd.SGD does not show"}
        unfit = {**REFUSED_HERE, **(with_resnet if name == "resnet" else {})}.get(f"{group}={option}")
        expected = "which a resume cannot change" if kind == REFUSED else unfit or "a change that trains on"
        if expected not in str(error):
            raise
        return
    except ConfigCompositionException:  # the experiment's model does not have a key of the run's
        if group != "experiment":
            raise
        return
    assert kind != REFUSED
    assert job.state.step == 4
    told = event(folder)
    if kind:
        assert told["keys"][group] == [before, option]
        assert told["keys"][group] == json.loads((folder / "run.json").read_text())["changes"][0]["keys"][group]
    assert any(line.startswith(f"{group}={option}: ") for line in told["new"]) == (kind == NEW_STATE)
    if kind == NEW_STATE:
        assert told["loss_after"] == pytest.approx(told["loss_before"], abs=0.02)


def resumed(folder, *overrides):
    """Resumes a run as `cli/train.py` does."""
    with composed(*overrides) as cfg:
        check_resume(cfg.resume, settings(cfg, HydraConfig.get().runtime.choices), folder)
        check(cfg)
        job = build(cfg, folder)
        train(job)
    return job
