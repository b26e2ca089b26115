"""A resume with changed settings: what is recorded, what starts anew, and what the loss does."""

import json
import shutil

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from stabletrain.checkpoint.folder import find
from stabletrain.config.make import Choice
from stabletrain.config.resuming import recorded_settings
from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.machine import hardware
from stabletrain.stability.qknorm import HeadLayerNorm, HeadRMSNorm
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.changes import check_data_of_checkpoint, option_fingerprint
from stabletrain.trainer.loop import train
from tests.reliability.ends import everything, metrics
from tests.runs import ROOT, TINY_GPT, composed
from tests.tracking import wandb_file

QUICK = [*TINY_GPT, "steps=12", "checkpoint.every=4", "eval_every=6", "log_every=1", "report=false", "precision=fp32"]
QUICK += ["checkpoint.keep=9", "schedule=constant", "warmup=none", "monitors=none", "eval_batches=1"]


class Crash(Exception):
    """Simulates a killed process."""


def begun(folder, *overrides, crash_at=None, crash_at_tick=None, wreck_at=()):
    """Trains a run in `folder`, as Hydra's job does; `crash_at` kills it before that step."""
    with composed(*overrides) as cfg:
        if not (folder / "run.json").exists():
            (folder / ".hydra").mkdir(parents=True)
            OmegaConf.save(cfg, folder / ".hydra/config.yaml")
            OmegaConf.save(
                {"hydra": {"runtime": {"choices": dict(HydraConfig.get().runtime.choices)}}},
                folder / ".hydra/hydra.yaml",
            )
        job = build(cfg, folder)
        get = job.data.batches.get

        def watched(step):
            if step == crash_at or job.state.executed_steps == crash_at_tick:
                raise Crash
            if job.state.executed_steps in wreck_at:
                with torch.no_grad():
                    list(job.state.model.parameters())[-1].mul_(1e5)
            return get(step)

        job.data.batches.get = watched
        if crash_at is None and crash_at_tick is None:
            train(job)
        else:
            with pytest.raises(Crash):
                train(job)
    return job


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "base"
    begun(folder, *QUICK, crash_at=8)
    return folder


@pytest.fixture
def run(base, tmp_path):
    """A copy of a run that was killed after 8 steps."""
    shutil.copytree(base, tmp_path / "run")
    return tmp_path / "run"


def event(folder, kind="changed"):
    found = [line for line in read_jsonl(folder / "events.jsonl") if line["event"] == kind]
    return found[-1] if found else None


# ---- recorded


def test_changed_keys_are_recorded_logged_and_shown(run, capsys):
    begun(run, *QUICK, "optimizer.lr=0.001", "steps=10", "resume=auto")
    keys = {"optimizer.lr": [0.003, 0.001], "steps": [12, 10]}
    assert json.loads((run / "run.json").read_text())["changes"] == [{"step": 8, "keys": keys}]
    assert (event(run)["step"], event(run)["keys"]) == (8, keys)
    assert "changed  optimizer.lr 0.003 -> 0.001, steps 12 -> 10; the learning-rate" in capsys.readouterr().out
    assert read_jsonl(run / "metrics.jsonl")[-1]["step"] == 10
    assert {line["lr"] for line in read_jsonl(run / "metrics.jsonl") if line["step"] > 8 and "lr" in line} == {0.001}


@pytest.mark.slow
def test_a_checkpoint_that_is_resumed_in_a_new_folder_records_them_too(run, tmp_path):
    begun(tmp_path / "new", *QUICK, "clipping=agc", f"resume={run / 'checkpoints/step-00000008'}")
    record = json.loads((tmp_path / "new/run.json").read_text())
    assert record["changes"][0]["keys"]["clipping"] == ["norm", "agc"] == event(tmp_path / "new")["keys"]["clipping"]


def test_an_unchanged_resume_and_another_device_are_no_change(run):
    begun(run, *QUICK, "report=true", "resume=auto")
    assert event(run) is None
    assert "changes" not in json.loads((run / "run.json").read_text())


@pytest.mark.slow(unless=lambda first: first == "avx2")
@pytest.mark.parametrize(("first", "kept"), [("avx512_bf16", "bf16"), ("avx2", "fp32")])
def test_auto_keeps_its_precision_on_a_machine_where_it_would_choose_another(
    tmp_path, monkeypatch, capsys, first, kept
):
    machine = lambda flag: monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset([flag]))  # noqa: E731
    auto, other = [*QUICK, "precision=auto", "steps=6"], {"avx512_bf16": "avx2", "avx2": "avx512_bf16"}[first]
    machine(first)
    begun(tmp_path / "whole", *auto)
    begun(tmp_path / "run", *auto, crash_at=5)
    machine(other)
    capsys.readouterr()
    assert begun(tmp_path / "run", *auto, "resume=auto").tools.precision.name == kept
    assert "auto: kept from the start of the run" in capsys.readouterr().out
    assert event(tmp_path / "run") is None
    assert json.loads((tmp_path / "run" / "run.json").read_text())["hardware"]["precision"] == kept
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_auto_typed_for_a_run_of_another_option_chooses_by_itself(run, monkeypatch):
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset(["avx512_bf16"]))
    assert begun(run, *QUICK, "precision=auto", "resume=auto").tools.precision.name == "bf16"


@pytest.mark.slow
def test_a_change_is_recorded_once_and_dropped_if_the_run_goes_back_behind_it(run):
    changed = [*QUICK, "optimizer.lr=0.001", "resume=auto"]
    recorded = lambda: json.loads((run / "run.json").read_text())["changes"]  # noqa: E731
    for crash_at in (8, 11):
        begun(run, *changed, crash_at=crash_at)
        assert recorded() == [{"step": 8, "keys": {"optimizer.lr": [0.003, 0.001]}}]
    begun(run, *QUICK, "resume=auto", crash_at=9)  # from step 8 again, where the rate was still the first one
    assert recorded() == []
    begun(run, *changed)
    begun(run, *QUICK, "steps=13", "resume=auto")
    assert [change["keys"].get("optimizer.lr") for change in recorded()] == [[0.003, 0.001], [0.001, 0.003]]


@pytest.mark.slow
def test_wandb_gets_the_configuration_as_it_is_now(run):
    begun(run, *QUICK, "wandb=offline", "optimizer.lr=0.001", "clipping=agc", "resume=auto")
    config = wandb_file.read(run)["config"]
    assert (config["optimizer"]["lr"], config["groups"]["clipping"]) == (0.001, "agc")
    assert "max_norm" not in config["clipping"]


@pytest.mark.slow
def test_a_run_of_an_older_version_is_resumed_without_a_change(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "tests/fixtures")  # its data lie there
    shutil.copytree(ROOT / "tests/fixtures/rollback", tmp_path / "run")
    first = OmegaConf.load(tmp_path / "run/.hydra/hydra.yaml").hydra
    with composed(*first.overrides.task, "resume=auto") as cfg:
        build(cfg, tmp_path / "run")
    assert event(tmp_path / "run") is None


# ---- the state


@pytest.mark.slow(unless=lambda qknorm: qknorm == "rmsnorm")
@pytest.mark.parametrize(("qknorm", "kind"), [("rmsnorm", HeadRMSNorm), ("layernorm", HeadLayerNorm)])
def test_qknorm_starts_near_the_identity_and_keeps_all_other_state(run, qknorm, kind):
    with composed(*QUICK, f"qknorm={qknorm}", "resume=auto") as cfg:
        job = build(cfg, run)
        saved = find(run).load()
        state = job.state.model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in saved["model"].items())
        named = dict(job.state.model.named_parameters())
        assert all(
            torch.equal(job.state.optimizer.state[named[name]]["exp_avg"], values["exp_avg"])
            for name, values in saved["optimizer"]["state"].items()
        )
        norms = [module for module in job.state.model.modules() if isinstance(module, kind)]
        assert len(norms) == 4
        assert all(norm.weight not in job.state.optimizer.state for norm in norms)
        assert all((norm.weight > 0).all() and not (norm.weight == 1).any() for norm in norms)
        train(job)
    told = event(run)
    assert "blocks.*.attention.query_norm.weight" in told["new"][0]
    assert told["loss_before"] == pytest.approx(told["loss_after"], abs=2e-3)


@pytest.mark.slow
def test_sinks_start_at_0_in_a_run_that_had_none_and_are_dropped_again(run):
    begun(run, *QUICK, "softmax=sink", "resume=auto")
    told = event(run)
    assert told["keys"]["softmax"] == ["plain", "sink"]
    assert told["new"][0].startswith("softmax=sink: sinks start at 0")
    assert told["new"][0].endswith("(blocks.*.attention.dot_product.sink)")
    assert told["loss_before"] == pytest.approx(told["loss_after"], abs=0.02)
    assert all(find(run).load()["model"][f"blocks.{i}.attention.dot_product.sink"].all() for i in (0, 1)), "they learn"
    begun(run, *QUICK, "steps=14", "resume=auto")
    assert event(run)["dropped"] == [f"blocks.{i}.attention.dot_product.sink" for i in (0, 1)]


@pytest.mark.parametrize("kind", [HeadRMSNorm, HeadLayerNorm])
def test_no_other_gains_are_nearer_to_the_identity(kind):
    x = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.5, 4, 8)
    norm, wide = kind(8, 1e-6), x - x.mean(dim=-1, keepdim=True) if kind is HeadLayerNorm else x
    norm.load_state_dict(norm.start_near(x))
    least = (norm(x) - wide).square().sum()
    with torch.no_grad():
        for channel in range(8):
            for factor in (0.98, 1.02):
                other = kind(8, 1e-6)
                other.load_state_dict(norm.state_dict())
                other.weight[channel] *= factor
                assert (other(x) - wide).square().sum() > least
    same = torch.ones(4, 8)  # all of one length
    assert kind is HeadLayerNorm or HeadRMSNorm(8, 1e-6).start_near(3 * same)["weight"].tolist() == pytest.approx(
        [3] * 8
    )


@pytest.mark.slow
def test_dropped_parts_are_named(run):
    begun(run, *QUICK, "qknorm=rmsnorm", "resume=auto")
    begun(run, *QUICK, "steps=14", "resume=auto")
    assert event(run)["dropped"] == [
        f"blocks.{i}.attention.{part}_norm.weight" for i in (0, 1) for part in ("query", "key")
    ]


@pytest.mark.slow
def test_another_optimizer_starts_anew_and_a_related_one_keeps_its_moments(run, tmp_path):
    shutil.copytree(run, tmp_path / "other")
    with composed(*QUICK, "optimizer=stable_adamw", "resume=auto") as cfg:
        job = build(cfg, run)
        assert len(job.state.optimizer.state) > 10
        assert {state["step"].item() for state in job.state.optimizer.state.values()} == {8.0}
        train(job)
    with composed(*QUICK, "optimizer=sgd", "resume=auto") as cfg:
        job = build(cfg, tmp_path / "other")
        assert not any(state["momentum_buffer"].any() for state in job.state.optimizer.state.values())
        train(job)
    assert (event(run)["new"], event(tmp_path / "other")["new"]) == (
        [],
        ["optimizer=sgd: moments and step counters start at 0"],
    )


@pytest.mark.slow
def test_measuring_changes_nothing(run, tmp_path):
    """The run after a change equals one whose loss was not measured, with dropout and BatchNorm's kind of state."""
    shutil.copytree(run, tmp_path / "other")
    one = begun(run, *QUICK, "zloss=palm", "model.dropout=0.1", "resume=auto")
    from stabletrain.trainer import changes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes.Resumption, "_is_measured", lambda self, keys: False)
        two = begun(tmp_path / "other", *QUICK, "zloss=palm", "model.dropout=0.1", "resume=auto")
    assert "loss_before" in event(run)
    assert "loss_before" not in event(tmp_path / "other")
    assert all(map(torch.equal, one.state.model.state_dict().values(), two.state.model.state_dict().values()))


@pytest.mark.slow
def test_a_cap_is_compared_with_the_largest_logits(run, capsys):
    begun(run, *QUICK, "softcap=gemma2", "softcap.final_cap=0.1", "resume=auto")
    told = event(run)
    assert told["loss_after"] > told["loss_before"] + 1e-4, "a cap below the logits moves the loss"
    assert "its cap 0.1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_loss_above_the_limit_begins_the_windows_anew(run):
    with composed(*QUICK, "zloss=palm", "zloss.coefficient=100", "resume=auto") as cfg:
        job = build(cfg, run)
        assert event(run)["loss_after"] > 100
        assert not job.tools.guard.limits.loss.state_dict()["first"]
        train(job)
    assert event(run, "skip") is None


# ---- law 4 and rollbacks

CHANGES = {
    "recorded": ["optimizer.lr=0.001", "clipping=agc"],
    "new state": ["qknorm=layernorm", "optimizer=sgd", "optimizer.lr=0.01", "clipping=zclip"],
}


@pytest.mark.slow
def test_a_changed_run_that_is_killed_and_resumed_equals_one_that_was_not(run, tmp_path):
    shutil.copytree(run, tmp_path / "whole")
    changed = [*QUICK, "steps=16", *CHANGES["new state"], "resume=auto"]
    begun(tmp_path / "whole", *changed)
    for crash_at in (9, 14):  # before and after the first checkpoint of the changed run
        begun(run, *changed, crash_at=crash_at)
    begun(run, *changed)
    ends = [everything(folder / "checkpoints/step-00000016") for folder in (tmp_path / "whole", run)]
    assert ends[0] == ends[1]
    assert metrics(tmp_path / "whole") == metrics(run)


ROLLBACK = ["guard.window=20", "guard.patience=2", "guard.healthy_after=2", "guard.skip_batches=1"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "target"), [("recorded", 8), ("new state", 8), ("new state", 10)])
def test_a_rollback_goes_back_to_a_changed_state_and_so_it_does_after_a_kill(run, tmp_path, kind, target):
    shutil.copytree(run, tmp_path / "whole")
    changed = [*QUICK, *ROLLBACK, f"guard.snapshot_every={50 if target == 8 else 10}", "checkpoint.keep=1"]
    changed += ["steps=20", "forensics=off", *CHANGES[kind], "resume=auto"]
    begun(tmp_path / "whole", *changed, wreck_at=[14])
    back = event(tmp_path / "whole", "rollback")
    assert (back["to"], back["loaded"]) == (target, target)
    # Killed before the trouble: the snapshots are lost. The checkpoint of step 8 has the old layout.
    begun(run, *changed, crash_at=13)
    begun(run, *changed, wreck_at=[14])
    back = event(run, "rollback")
    assert (back["to"], back["loaded"]) == (target, 8)
    ends = [everything(folder / "checkpoints/step-00000020") for folder in (tmp_path / "whole", run)]
    assert ends[0]["tensors"] == ends[1]["tensors"]


@pytest.mark.slow
def test_steps_from_before_the_change_are_not_replayed_with_the_new_settings(run):
    changed = [*QUICK, *ROLLBACK, "steps=20", "forensics=off", "optimizer.lr=0.001", "resume=auto"]
    begun(run, *changed, crash_at=13)
    shutil.rmtree(run / "checkpoints/step-00000008")  # what the rollback needs
    with pytest.raises(TrainingHalted, match="the state of step 8, from which the run was resumed with other settings"):
        begun(run, *changed, wreck_at=[14])
    kept = [int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")]
    assert min(kept) < 8, "what was trained with the old settings is still there"


@pytest.mark.slow
@pytest.mark.parametrize("again", [[], ["optimizer.lr=0.002"]])
def test_the_record_keeps_a_change_at_the_step_of_a_rollback(run, again):
    changed = [*QUICK, *ROLLBACK, "steps=20", "forensics=off", "optimizer.lr=0.001", "resume=auto"]
    begun(run, *changed, wreck_at=[10], crash_at_tick=14)
    assert event(run, "rollback")["to"] == 8
    begun(run, *changed, *again, crash_at=11)
    assert event(run, "resume")["step"] == 8
    last = recorded_settings(run, 100).flat()["optimizer.lr"]
    assert last == (0.002 if again else 0.001)
    assert recorded_settings(run, 8).flat()["optimizer.lr"] == 0.003


# ---- refused


def test_refused_before_anything_is_built_or_written(run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(ConfigError, match=r"model.n_embd=32: the run in .* has model.n_embd=16, which a resume cannot"):
        begun(run, *QUICK, "model.n_embd=32", "resume=auto")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_checkpoint_of_other_data_is_refused_and_one_of_the_same_taken(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run.json").write_text(json.dumps({"data": {"name": "stdlib", "hash": "aaaa"}}))
    check_data_of_checkpoint(str(checkpoint), {"name": "stdlib", "hash": "aaaa"})
    check_data_of_checkpoint("auto", {"name": "own", "hash": "bbbb"})
    with pytest.raises(ConfigError, match="was trained on stdlib"):
        check_data_of_checkpoint(str(checkpoint), {"name": "own", "hash": "bbbb"})


def test_data_without_a_fingerprint_are_identified_by_their_keys():
    assert option_fingerprint(Choice("data", {"_target_": "mine.Data", "path": "/a"}, "mine")) == {
        "name": "mine",
        "keys": {"_target_": "mine.Data", "path": "/a"},
    }
