"""The table of what a resume may change covers every group and key, and the check follows it."""

import json
import shutil

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from stabletrain.config import resuming
from stabletrain.config.resuming import FREE, NEW_STATE, RECORDED, REFUSED, check_resume, row_of, row_of_key, settings
from stabletrain.errors import ConfigError
from tests.runs import CONF, TINY_GPT, composed

GROUPS = {folder.name for folder in CONF.iterdir() if folder.is_dir()}
TOP = set(OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"))) - {"defaults", "hydra"}


def test_every_group_and_every_top_level_key_has_a_row():
    assert set(resuming.GROUPS) >= GROUPS, "say in config/resuming.py what a resume with another option does"
    assert set(resuming.KEYS) >= TOP, "say in config/resuming.py what a resume with another value does"


def test_rows_of_options_name_options_that_exist():
    named = {*resuming.CHANGED_TO, *resuming.CHANGED_FROM}
    named |= {(group, option) for group, pair in resuming.CHANGED_BETWEEN for option in pair}
    assert all((CONF / group / f"{option}.yaml").is_file() for group, option in named)


def test_every_refusal_says_what_to_do_instead():
    rows = [*resuming.GROUPS.values(), *resuming.CHANGED_TO.values(), *resuming.KEYS.values()]
    assert all(bool(row.fix) == (row.kind == REFUSED) for row in rows)
    assert {row.kind for row in rows} == {FREE, RECORDED, NEW_STATE, REFUSED}


@pytest.mark.parametrize(
    ("key", "before", "now", "kind"),
    [
        ("optimizer", "adamw", "sgd", NEW_STATE),
        ("optimizer", "stable_adamw", "adamw", RECORDED),
        ("optimizer", "adamw", "mine", NEW_STATE),
        ("clipping", "norm", "agc", RECORDED),
        ("clipping", "zclip", "norm", NEW_STATE),
        ("clipping", "norm", "adagc", NEW_STATE),
        ("precision", "bf16", "fp16", NEW_STATE),
        ("precision", "fp16", "bf16", NEW_STATE),
        ("qknorm", "layernorm", "rmsnorm", RECORDED),
        ("model", "gpt_nano", "gpt_mini", REFUSED),
        ("optimizer.lr", 1, 2, RECORDED),
        ("guard.sigma", 1, 2, FREE),
        ("model.n_layer", 1, 2, REFUSED),
        ("model.dropout", 0.0, 0.1, RECORDED),
        ("model.swiglu_limit", None, 7, RECORDED),
        ("norm_placement", "pre", "reordered", REFUSED),
        ("data.block_size", 1, 2, REFUSED),
        ("data.workers", 1, 2, FREE),
        ("mine.key", 1, 2, RECORDED),
    ],
)
def test_a_change_has_the_kind_of_its_row(key, before, now, kind):
    assert row_of(key, before, now).kind == kind


def test_a_key_in_a_group_follows_its_group_if_that_is_free_or_refused():
    assert row_of_key("monitors.every").kind == FREE
    assert row_of_key("init.std").kind == REFUSED
    assert row_of_key("clipping.max_norm").kind == RECORDED, "the option stays, so its state does too"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The records of a run, without the run."""
    folder = tmp_path_factory.mktemp("begun")
    with composed(*TINY_GPT, "steps=10") as cfg:
        (folder / ".hydra").mkdir()
        OmegaConf.save(cfg, folder / ".hydra/config.yaml")
        choices = dict(HydraConfig.get().runtime.choices)
    OmegaConf.save({"hydra": {"runtime": {"choices": choices}}}, folder / ".hydra/hydra.yaml")
    (folder / "run.json").write_text(json.dumps({"status": "preempted", "reason": "SIGTERM", "final": {"steps": 5}}))
    return folder


def checked(folder, *overrides, **how):
    with composed(*TINY_GPT, "steps=10", "resume=auto", *overrides) as cfg:
        check_resume(cfg.resume, settings(cfg, HydraConfig.get().runtime.choices), folder, **how)


def test_a_refusal_names_key_both_values_reason_and_fix(begun):
    with pytest.raises(ConfigError) as refused:
        checked(begun, "model.n_layer=3")
    assert str(refused.value) == (
        f"model.n_layer=3: the run in {begun} has model.n_layer=2, which a resume cannot change: the checkpoint's "
        f"weights have the sizes of its own model; resume without it, or: init_from={begun} takes its weights into a "
        "new run"
    )


@pytest.mark.parametrize(
    "override", ["qknorm=layernorm", "seed=1", "optimizer=sgd", "batch_size=8", "data.val_fraction=0.04"]
)
def test_the_rest_is_not_refused_nor_are_equal_values(begun, override):
    assert checked(begun, override) is None


def test_an_option_is_named_before_its_keys(begun):
    with pytest.raises(ConfigError, match="^data=text:"):
        checked(begun, "data=text", "data.path=somewhere")
    with pytest.raises(ConfigError, match="^init=small: .* start a new run without resume"):
        checked(begun, "init=small")


def test_an_older_run_without_a_group_or_key_had_what_computes_the_same(begun, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    recorded = OmegaConf.load(tmp_path / "run/.hydra/config.yaml")
    del recorded.norm_placement, recorded.model.norm_placement, recorded.model.swiglu_limit
    OmegaConf.save(recorded, tmp_path / "run/.hydra/config.yaml")
    hydra = OmegaConf.load(tmp_path / "run/.hydra/hydra.yaml")
    del hydra.hydra.runtime.choices.norm_placement
    OmegaConf.save(hydra, tmp_path / "run/.hydra/hydra.yaml")
    checked(tmp_path / "run")
    with pytest.raises(
        ConfigError, match="norm_placement=reordered: the run in .* has norm_placement=pre, which a res"
    ):
        checked(tmp_path / "run", "norm_placement=reordered")
    older = resuming.recorded_settings(tmp_path / "run", 1)
    with composed(*TINY_GPT, "steps=10", "model.mlp=swiglu", "model.swiglu_limit=7") as cfg:
        changes = resuming.changed_keys(older, settings(cfg, HydraConfig.get().runtime.choices))
    assert changes == {"model.mlp": ["gelu", "swiglu"], "model.swiglu_limit": [None, 7]}


def test_a_new_key_of_an_old_option_is_a_change_of_an_older_run(begun):
    with composed(*TINY_GPT, "steps=10") as cfg:
        older = settings(cfg, HydraConfig.get().runtime.choices)
    for name in ("no_decay", "cautious_decay"):
        del older.values["optimizer"][name]
    for name in ("weight_decay", "weight_decay_final_ratio"):
        del older.values["schedule"][name]
    typed = ["optimizer.cautious_decay=true", "optimizer.no_decay=[norms]", "schedule.weight_decay=cosine"]
    for overrides in ([], typed):
        with composed(*TINY_GPT, "steps=10", *overrides) as cfg:
            now = settings(cfg, HydraConfig.get().runtime.choices)
        changes = resuming.changed_keys(older, now)
        assert set(changes) == {override.partition("=")[0] for override in overrides}
        assert set(changes) <= set(resuming.values_before(older, now)), "so the user is shown them"


def test_a_group_that_is_newer_than_the_run_is_recorded_as_an_option(begun, tmp_path):
    """A run without `averaging` is resumed with it: its settings at a later step are those of the resumed run."""
    shutil.copytree(begun, tmp_path / "run")
    hydra = OmegaConf.load(tmp_path / "run/.hydra/hydra.yaml")
    del hydra.hydra.runtime.choices.averaging
    OmegaConf.save(hydra, tmp_path / "run/.hydra/hydra.yaml")
    recorded = OmegaConf.load(tmp_path / "run/.hydra/config.yaml")
    del recorded.averaging
    OmegaConf.save(recorded, tmp_path / "run/.hydra/config.yaml")
    change = {"step": 4, "keys": {"averaging": ["none", "ema"], "averaging.decay": [None, 0.99]}}
    (tmp_path / "run/run.json").write_text(json.dumps({"changes": [change]}))
    early, late = (resuming.recorded_settings(tmp_path / "run", step) for step in (4, 7))
    assert early.options()["averaging"] == "none"
    assert late is not None, "its record is not damaged"
    assert (late.options()["averaging"], late.values["averaging"]["decay"]) == ("ema", 0.99)


def test_a_checkpoint_stands_for_the_run_that_wrote_it(begun, tmp_path):
    typed = [*TINY_GPT, f"resume={begun}/checkpoints/step-00000004", "model.n_embd=32"]
    with composed(*typed) as cfg, pytest.raises(ConfigError, match="has model.n_embd=16"):
        check_resume(cfg.resume, settings(cfg, HydraConfig.get().runtime.choices), tmp_path)


def test_without_a_resume_or_a_record_nothing_is_checked(begun, tmp_path):
    checked(tmp_path, "model.n_embd=32")
    with composed(*TINY_GPT, "model.n_embd=32") as cfg:
        check_resume(cfg.resume, settings(cfg, HydraConfig.get().runtime.choices), begun)


def test_a_finished_run_with_another_key_needs_more_steps(begun, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    record = {"status": "finished", "reason": None, "final": {"steps": 10}}
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    with pytest.raises(
        ConfigError, match=r"steps=10: .* has finished its 10 steps, so .*guard would train nothing: raise"
    ):
        checked(tmp_path / "run", "guard=skip")
    checked(tmp_path / "run", "guard=skip", "steps=20")
    checked(tmp_path / "run", "guard=skip", unfinished=False)
    checked(tmp_path / "run")


def test_settings_are_those_of_the_step(begun, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    changes = [{"step": 4, "keys": {"optimizer.lr": [0.003, 0.1]}}, {"step": 6, "keys": {"clipping": ["norm", "agc"]}}]
    (tmp_path / "run/run.json").write_text(json.dumps({"changes": changes}))
    early, late = (resuming.recorded_settings(tmp_path / "run", step) for step in (4, 7))
    assert early.values["optimizer"]["lr"] == 0.003, "a checkpoint at the step was written before the change"
    assert (late.values["optimizer"]["lr"], late.choices["clipping"]) == (0.1, "agc")


@pytest.mark.parametrize(
    ("changes", "acts"),
    [
        ({"eval_every": [1, 2], "checkpoint.keep": [1, 2], "forensics": ["off", "default"]}, False),
        ({"optimizer.lr": [1, 2], "eval_every": [1, 2]}, True),
        ({"faults": ["kill", "none"], "faults.after": [3, None]}, False),
        ({"faults": ["none", "label"], "faults.steps": [None, 3]}, True),
        ({"faults": ["kill", "label"]}, True),
        ({"faults.steps": [3, 4]}, True),
    ],
)
def test_only_what_changes_a_step_keeps_older_steps_from_being_replayed(changes, acts):
    assert bool(resuming.acting(changes)) == acts
