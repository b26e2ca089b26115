"""Law 4: resume is exact. A run interrupted anywhere and resumed ends bit-identical to an uninterrupted one."""

import json
import os
import shutil
import signal

import pytest
import torch

from stabletrain.errors import ConfigError, Interrupted
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.conftest import HAS_BESIDE
from tests.devices import need_torchao
from tests.reliability import kills
from tests.reliability.ends import everything, metrics
from tests.runs import TINY_GPT, TINY_RESNET, composed

STEPS = 12
DROPOUT = [*TINY_GPT, "model.dropout=0.1"]
CRASHES = [
    *(pytest.param(DROPOUT, precision, 7, id=f"gpt-{precision}-7") for precision in ("fp32", "bf16", "fp16", "fp8")),
    *(pytest.param(TINY_RESNET, precision, 11, id=f"resnet-{precision}-11") for precision in ("fp32", "bf16", "fp16")),
    pytest.param(DROPOUT, "fp16", 1, id="gpt-fp16-1"),  # before the first checkpoint
    pytest.param(DROPOUT, "fp16", 11, id="gpt-fp16-11"),
]
"""Model, precision, and the step of the crash: after the checkpoint of step 5, and after that of step 10."""


class Crash(Exception):
    """Simulates a killed process: no further code of the run executes."""


def trained(folder, *overrides, crash_at=None):
    with composed(*overrides) as cfg:
        job = build(cfg, folder)
        get = job.data.batches.get

        def crashing(step):
            if step == crash_at:
                raise Crash
            return get(step)

        job.data.batches.get = crashing
        if crash_at is None:
            train(job)
        else:
            with pytest.raises(Crash):
                train(job)
    return job


def newest(folder):
    return everything(max((folder / "checkpoints").glob("step-*")))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the folder of a run of four steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    trained(folder, *TINY_GPT, "steps=4")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [3, 4])
def test_a_stop_at_a_step_that_is_evaluated_loses_neither_the_state_nor_the_evaluation(tmp_path, stop_after):
    chosen = [*TINY_GPT, f"steps={STEPS}", "eval_every=4", "checkpoint.every=5", "log_every=1"]
    trained(tmp_path / "whole", *chosen)
    with composed(*chosen) as cfg:
        job = build(cfg, tmp_path / "cut")
        get = job.data.batches.get

        def signalling(step):
            if step == stop_after - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return get(step)

        job.data.batches.get = signalling
        with pytest.raises(Interrupted):
            train(job)
    trained(tmp_path / "cut", *chosen, "resume=auto")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert newest(tmp_path / "cut").keys() == newest(tmp_path / "whole").keys()
    for name, value in newest(tmp_path / "whole").items():
        assert str(newest(tmp_path / "cut")[name]) == str(value), name


MUON = ["optimizer=muon", "optimizer.per_head=true", "optimizer.momentum_warmup=6", "optimizer.momentum_cooldown=5",
        "optimizer.cautious_decay=true", "optimizer.decay=corrected", "schedule.weight_decay=cosine"]  # fmt: skip

STATEFUL = {
    "zclip": ["clipping=zclip", "clipping.warmup_steps=3", "clipping.z_threshold=0.5", "optimizer=stable_adamw"],
    "adagc": ["clipping=adagc", "clipping.warmup_steps=3", "optimizer=spam", "optimizer.reset_interval=5"],
    "update_norm": [
        "clipping=update_norm",
        "clipping.warmup_steps=3",
        "clipping.z_threshold=0.1",
        "clipping.alpha=0.1",
        "optimizer.cautious_decay=true",
        "precision=bf16_params",
    ],
    "muon": [
        *(*MUON, "qkclip=kimi", "qkclip.max_logit=1e-3", "precision=bf16_params", "monitors=full"),
        *("softmax=sink", "attention_gate=sigmoid", "zloss=mu_centering", "norm_placement=sandwich"),
    ],
    "lengths": [
        *("data.length_warmup=9", "data.length_start=2", "schedule=wsd", "warmup=cosine", "init=small"),
        *("schedule.weight_decay=with_lr", "zloss=mu", "zloss.coefficient=1", "norm_placement=post"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "crash_at"), [("zclip", 7), ("adagc", 11), ("update_norm", 11), ("muon", 7), ("lengths", 11)]
)
def test_every_kind_of_memory_survives_a_crash(tmp_path, kind, crash_at):
    chosen = [*TINY_GPT, *STATEFUL[kind], f"steps={STEPS}", "eval_every=4", "checkpoint.every=5", "log_every=1"]
    chosen += ["optimizer.warmup_steps=2"] if kind == "adagc" else []
    chosen += ["monitors.every=2"]
    whole = trained(tmp_path / "whole", *chosen)
    trained(tmp_path / "cut", *chosen, crash_at=crash_at)
    resumed = trained(tmp_path / "cut", *chosen, "resume=auto")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    for (name, a), b in zip(whole.state.model.named_parameters(), resumed.state.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert str(whole.tools.clipping.state_dict()) == str(resumed.tools.clipping.state_dict())


@pytest.mark.slow(unless=lambda crash_at, precision: crash_at == 7 and precision == "bf16")
@pytest.mark.parametrize(("tiny", "precision", "crash_at"), CRASHES)
def test_crash_and_resume_equals_never_having_stopped(tmp_path, tiny, precision, crash_at):
    need_torchao(precision)
    chosen = [*tiny, f"precision={precision}", f"steps={STEPS}", "eval_every=4", "checkpoint.every=5", "log_every=1"]
    chosen += ["monitors.every=2"]  # looks for the forecast, whose series are in the states compared below
    if precision == "fp16":
        chosen += ["precision.init_scale=3e5", "precision.growth_interval=3"]  # makes the loss scale change
    trained(tmp_path / "whole", *chosen)
    trained(tmp_path / "cut", *chosen, crash_at=crash_at)
    resumed = trained(tmp_path / "cut", *chosen, "resume=auto")
    assert newest(tmp_path / "cut") == newest(tmp_path / "whole")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert resumed.state.step == STEPS


def test_the_example_would_notice_a_lost_scale_guard_or_moment(tmp_path):
    """The states compared above include the loss scale, the guard and the optimizer's moments."""
    chosen = [*TINY_GPT, "precision=fp16", "precision.init_scale=1e7", "steps=9", "checkpoint.every=9"]
    trained(tmp_path, *chosen)
    kept = newest(tmp_path)
    assert kept["state"]["training"]["parts"]["guard"]["skips"]["overflow"] > 0
    assert any("exp_avg" in name for name in kept["names"])
    assert any("precision" in name for name in kept["names"])
    assert not HAS_BESIDE or kept["state"]["training"]["parts"]["forecast"]["series"]["loss_scale|"]


def test_a_resumed_run_keeps_its_identity_and_says_so(tmp_path, capsys):
    chosen = [*TINY_GPT, "steps=6", "checkpoint.every=3"]
    trained(tmp_path, *chosen, crash_at=4)
    first = json.loads((tmp_path / "run.json").read_text())
    assert first["status"] == "failed"
    shutil.copytree(tmp_path, without_record := tmp_path.with_name("without_record"))
    trained(tmp_path, *chosen, "resume=auto")
    assert f"resumed after step 3, from {tmp_path / 'checkpoints' / 'step-00000003'}" in capsys.readouterr().out
    second = json.loads((tmp_path / "run.json").read_text())
    assert (second["id"], second["status"], len(second["resumed"])) == (first["id"], "finished", 1)
    assert [start["hours"] > 0 for start in second["starts"]] == [True, True]
    assert "gpu_hours" not in second, "there are no GPUs"
    (event,) = [e for e in read_jsonl(tmp_path / "events.jsonl") if e["event"] == "resume"]
    assert (event["step"], event["checkpoint"]) == (3, "step-00000003")
    (without_record / "run.json").unlink()
    trained(without_record, *chosen, "resume=auto")
    assert json.loads((without_record / "run.json").read_text())["id"] == first["id"], "the checkpoint has it too"


def test_a_finished_run_is_not_trained_again(tmp_path, finished):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    before = newest(tmp_path), metrics(tmp_path)
    job = trained(tmp_path, *TINY_GPT, "steps=4", "resume=auto")
    assert (newest(tmp_path), metrics(tmp_path)) == before
    assert job.history.val["val/loss"] == before[1][-1]["val/loss"]


@pytest.mark.slow
def test_resuming_with_another_learning_rate_uses_it(tmp_path):
    """A changed key takes effect: the checkpoint's optimizer must not restore its old learning rate."""
    chosen = [*TINY_GPT, "steps=6", "checkpoint.every=3", "schedule=constant", "warmup=none", "log_every=1"]
    trained(tmp_path, *chosen, crash_at=4)
    trained(tmp_path, *chosen, "resume=auto", "optimizer.lr=0.125")
    assert [line["lr"] for line in metrics(tmp_path) if "lr" in line] == [3e-3] * 3 + [0.125] * 3


@pytest.mark.slow
def test_kill_minus_nine_at_random_moments(tmp_path):
    """Two real kills of a real process; `python -m tests.reliability.kills` does thirty."""
    report = kills.campaign(tmp_path, kills=2, seed=0, steps=100)
    assert report.kills == 2
    assert report.identical, report.difference
    assert report.resumed_from, "no kill came after a checkpoint: the campaign shows nothing"


def test_a_checkpoint_of_another_model_is_refused_with_the_first_difference(tmp_path, finished):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    before = (tmp_path / "run.json").read_text()

    with (
        composed(*TINY_GPT, "steps=4", "model.n_embd=32", "resume=auto") as cfg,
        pytest.raises(ConfigError, match="does not fit the model: 'embedding.weight' is \\[256, 16\\]"),
    ):
        build(cfg, tmp_path)
    assert json.loads((tmp_path / "run.json").read_text()) == json.loads(before), "the finished run is what it was"


def test_fewer_steps_than_are_done_are_refused(tmp_path, finished):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    with (
        composed(*TINY_GPT, "steps=3", "resume=auto") as cfg,
        pytest.raises(ConfigError, match="steps=3 is below the 4 steps already done"),
    ):
        build(cfg, tmp_path)


def test_a_run_that_is_alive_is_not_joined(tmp_path):
    with composed(*TINY_GPT, "steps=4") as cfg:
        alive = build(cfg, tmp_path)
    with (
        composed(*TINY_GPT, "steps=4", "resume=auto") as cfg,
        pytest.raises(ConfigError, match=rf"is in use by process {os.getpid()} on "),
    ):
        build(cfg, tmp_path)
    train(alive)


@pytest.mark.slow
def test_checkpoints_that_are_gone_are_not_passed_over_in_silence(tmp_path, finished, capsys):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints")
    trained(tmp_path, *TINY_GPT, "steps=4", "resume=auto")
    assert "no usable checkpoint is left here; the run starts again from step 0" in capsys.readouterr().out
    assert "restart" in [event["event"] for event in read_jsonl(tmp_path / "events.jsonl")]


def test_an_alarm_that_was_raised_before_a_stop_is_not_raised_again(tmp_path):
    chosen = [*TINY_GPT, "checkpoint.every=2", "monitors.every=1"]
    with composed(*chosen, "steps=2") as cfg:
        job = build(cfg, tmp_path)
        job.monitoring.monitors.load_state_dict({"raised": ["attention"], "starving": 0})
        train(job)
    resumed = trained(tmp_path, *chosen, "steps=4", "resume=auto")
    assert resumed.monitoring.monitors.state_dict()["raised"] == ["attention"]
