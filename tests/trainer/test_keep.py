"""`guard.keep=all_but_guilty`: a bad step is applied without the samples at fault, as if it had never had them."""

import copy
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from stabletrain.errors import ConfigError
from stabletrain.forensics.repro import Repro, load_repro, save_repro
from stabletrain.step import train_step
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.banner import guard_summary
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.forensics.given import replay
from tests.reliability.ends import difference
from tests.runs import OFF, TINY_GPT, TINY_RESNET, composed

KEEP = ["guard=skip", "guard.keep=all_but_guilty", "guard.recheck_every=0"]
PLAIN = [option for option in OFF if option != "guard=off"]
STEPS, BAD = 6, 3


class Crash(Exception):
    """Simulates a killed process: no further code of the run executes."""


def spoilt(job, spoil, at=(BAD,)):
    """Has `spoil` change the batches of these data positions."""
    get = job.data.batches._load
    job.data.batches._load = lambda step: spoil(get(step)) if step in at else get(step)


def bad_label(*rows):
    def spoil(batch):
        targets = batch.targets.clone()
        targets[list(rows), ..., -1:] = 10**6
        return replace(batch, targets=targets)

    return spoil


def nan_image(*rows):
    def spoil(batch):
        inputs = batch.transformed().inputs.clone()
        inputs[list(rows), ..., 0] = torch.nan
        return replace(batch.transformed(), inputs=inputs)

    return spoil


def huge_image(*rows):
    """A spike: its values are finite."""

    def spoil(batch):
        batch = batch.transformed()
        inputs = batch.inputs.clone()
        inputs[list(rows)] *= 1e4
        return replace(batch, inputs=inputs)

    return spoil


def trained(folder, *overrides, spoil=None, at=(BAD,), crash_at_tick=None):
    with composed(*overrides, f"steps={STEPS}", "log_every=1") as cfg:
        job = build(cfg, folder)
        if spoil is not None:
            spoilt(job, spoil, at)
        if crash_at_tick is not None:
            get = job.data.batches.get

            def crashing(step):
                if job.state.executed_steps == crash_at_tick:
                    raise Crash
                return get(step)

            job.data.batches.get = crashing
        try:
            train(job)
        except Crash:
            assert crash_at_tick is not None
    return job


def hand_written(model, batches, kind, left_out, parts=1):
    """Trains with a plain PyTorch loop whose step `BAD` never had the samples `left_out`."""
    decayed = [p for name, p in model.named_parameters() if p.ndim >= 2 and "embedding" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embedding" in name]
    if kind == "adamw":
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    else:
        groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)
    for step, batch in enumerate(batches):
        size = len(batch) // parts
        kept = [row for row in range(len(batch)) if step != BAD or row not in left_out]
        count = batch.targets[kept].numel()
        optimizer.zero_grad()
        for part in range(parts):
            rows = [row for row in kept if row // size == part]
            if not rows:
                continue
            logits = model(batch.inputs[rows])
            targets = batch.targets[rows].flatten()
            if parts == 1:
                loss = F.cross_entropy(logits.flatten(0, -2), targets)
            else:
                loss = F.cross_entropy(logits.flatten(0, -2), targets, reduction="sum") / count
            loss.backward()
        optimizer.step()


CASES = {
    "gpt": (TINY_GPT, "adamw", bad_label, [2], 1),
    "gpt two": (TINY_GPT, "adamw", bad_label, [0, 3], 1),
    "gpt micro-batches": (TINY_GPT, "adamw", bad_label, [1], 2),
    "gpt a whole micro-batch": (TINY_GPT, "adamw", bad_label, [0, 1], 2),
    "resnet": ([*TINY_RESNET, "model.depth=8"], "sgd", nan_image, [5], 1),
    "resnet spike": ([*TINY_RESNET, "model.depth=8"], "sgd", huge_image, [1, 6], 1),
}


@pytest.mark.slow(unless=lambda name: name in ("gpt micro-batches", "resnet spike"))
@pytest.mark.parametrize("name", CASES)
def test_the_step_is_that_of_a_plain_loop_that_never_had_the_guilty_samples(tmp_path, name):
    tiny, kind, spoil, guilty, parts = CASES[name]
    chosen = [*tiny, *PLAIN, *KEEP, f"optimizer={kind}", f"grad_accum_steps={parts}"]
    with composed(*chosen, f"steps={STEPS}", "log_every=1") as cfg:
        job = build(cfg, tmp_path)
        batches = [job.data.batches.get(step) for step in range(STEPS)]
        plain = copy.deepcopy(job.state.model)
        job.data.batches.forget()
        spoilt(job, spoil(*guilty))
        train(job)
    hand_written(plain, batches, kind, guilty, parts)
    ours = job.state.model.state_dict()
    for key, value in plain.state_dict().items():
        assert torch.equal(ours[key], value), key
    guard = job.tools.guard
    assert (guard.kept_steps, guard.samples_left_out) == (1, len(guilty))
    assert sum(guard.skips.values()) == 0
    assert job.history.updates == STEPS


GPT = [*TINY_GPT, *KEEP, "precision=fp32", "warmup=none"]


def events(folder, kind):
    return [event for event in read_jsonl(folder / "events.jsonl") if event["event"] == kind]


def test_a_run_says_what_it_left_out(tmp_path):
    job = trained(tmp_path, *GPT, spoil=bad_label(2))
    (line,) = [line for line in read_jsonl(tmp_path / "metrics.jsonl") if line.get("guard/left_out")]
    assert (line["step"], line["guard/left_out"], line["guard/applied"]) == (BAD + 1, 1, 1)
    (again,), (kept,) = events(tmp_path, "restore"), events(tmp_path, "kept")
    (sample,) = again["left_out"]
    assert (sample["index"], kept["left_out"]) == (2, 1)
    assert sample["id"] == int(job.data.load(BAD).ids[2])
    final = json.loads((tmp_path / "run.json").read_text())["final"]
    assert (final["guard/kept_steps"], final["guard/samples_left_out"], final["guard/skipped"]) == (1, 1, 0)
    assert final["guard/updates"] == STEPS
    summary = guard_summary(job.state, job.history, job.tools.guard)
    assert summary == f"{STEPS} updates in {STEPS} steps, {STEPS + 1} executed, 1 kept without 1 sample"
    page = (tmp_path / "incidents" / f"step-{BAD + 1:08d}" / "report.md").read_text()
    assert "The rest of the step was applied, without 1 of its samples: loss" in page
    assert "a bad step is applied without its guilty samples" in job.tools.guard.note


def test_without_the_option_nothing_is_said_of_it(tmp_path):
    job = trained(tmp_path, *[each for each in GPT if "guard.keep" not in each], spoil=bad_label(2))
    assert job.tools.guard.skips["bad_data"] == 1
    assert not any(
        "left_out" in key or "kept" in key for line in read_jsonl(tmp_path / "metrics.jsonl") for key in line
    )
    assert "kept" not in (tmp_path / "run.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "reason"), [(bad_label(0, 1, 2), "most samples"), (lambda batch: batch.rows(slice(0, 0)), "no samples")]
)
def test_a_step_is_skipped_if_most_of_it_is_at_fault(tmp_path, spoil, reason):
    guard = trained(tmp_path, *GPT, spoil=spoil).tools.guard
    assert (guard.kept_steps, guard.skips["bad_data"]) == (0, 1), reason


def test_a_step_that_fails_again_is_skipped_and_not_tried_a_third_time(tmp_path):
    """A label is bad, which is known at once; and a module gives NaN in this step, whatever the samples are."""
    with composed(*GPT, f"steps={STEPS}") as cfg:
        job = build(cfg, tmp_path)
        spoilt(job, bad_label(2))
        job.state.model.head.register_forward_hook(
            lambda module, inputs, output: output * torch.nan if job.state.step == BAD and module.training else None
        )
        train(job)
    guard = job.tools.guard
    assert (guard.kept_steps, guard.skips["nonfinite"], guard.skips["bad_data"]) == (0, 1, 0)
    assert job.state.executed_steps == STEPS + 1


@pytest.mark.slow
def test_a_fault_of_the_whole_step_is_no_fault_of_samples(tmp_path):
    with composed(*GPT, f"steps={STEPS}") as cfg:
        job = build(cfg, tmp_path)
        job.state.model.head.register_forward_hook(
            lambda module, inputs, output: output * torch.nan if job.state.step == BAD and module.training else None
        )
        train(job)
    assert (job.tools.guard.kept_steps, job.tools.guard.skips["nonfinite"]) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("crash_at_tick", [BAD + 1, BAD + 3])
def test_a_killed_run_that_is_resumed_equals_one_that_was_not(tmp_path, crash_at_tick):
    """Killed after the kept step was held, and after it was applied; two kept steps, dropout, and the counts."""
    chosen = [*GPT, "model.dropout=0.1", "checkpoint.every=2", "monitors.every=2"]
    wanted = trained(tmp_path / "whole", *chosen, spoil=bad_label(1), at=(1, BAD))
    trained(tmp_path / "cut", *chosen, spoil=bad_label(1), at=(1, BAD), crash_at_tick=crash_at_tick)
    resumed = trained(tmp_path / "cut", *chosen, "resume=auto", spoil=bad_label(1), at=(1, BAD))
    assert wanted.tools.guard.kept_steps == 2
    assert resumed.tools.guard.state_dict() == wanted.tools.guard.state_dict()
    assert difference(tmp_path / "whole", tmp_path / "cut") == ""


def test_a_replay_from_an_older_state_takes_the_step_without_the_same_samples(tmp_path):
    """Damaged weights are put back from a snapshot before the kept step, which is replayed."""
    chosen = [*GPT, "guard=rollback", "guard.snapshot_every=100", "guard.checksum_every=1", "checkpoint=off"]
    wanted = trained(tmp_path / "whole", *chosen, spoil=bad_label(2), at=(1,))
    with composed(*chosen, f"steps={STEPS}", "log_every=1") as cfg:
        job = build(cfg, tmp_path / "damaged")
        spoilt(job, bad_label(2), at=(1,))
        done = []

        def damage(module, inputs):
            if job.state.step == BAD and not done:
                done.append(module.weight.data.mul_(2))

        job.state.model.head.register_forward_pre_hook(damage)
        train(job)
    assert job.tools.guard.machine_faults == 1
    assert job.tools.guard.kept_steps == 1, "a replay counts nothing twice"
    for mine, other in zip(job.state.model.parameters(), wanted.state.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.slow(unless=lambda parts: parts == 2)
@pytest.mark.parametrize("parts", [1, 2])
def test_the_rest_of_a_step_can_be_saved_and_replayed(tmp_path, parts):
    """As an incident of a step that was applied without some samples would be."""
    with composed(*GPT, f"grad_accum_steps={parts}") as cfg:
        job = build(cfg, tmp_path)
        batch = job.data.batches.get(0).without({1}, parts)
        model = copy.deepcopy(job.state.model)
        reading = train_step(job.state, batch.split(parts), job.tools)
        assert [len(part) for part in batch.split(parts)] == ([3] if parts == 1 else [1, 2])
        repro = Repro(model, [*model.buffers()], 0, batch, parts, job.tools, 1.0, torch.device("cpu"))
        save_repro(tmp_path / "repro", repro)
        loaded = load_repro(tmp_path / "repro", copy.deepcopy(model), job.tools)
        for each in (repro, loaded):
            outcome = replay(each, "same")
            assert (outcome.loss, outcome.grad_norm) == (reading.loss, reading.grad_norm)


def test_an_alarm_says_that_many_samples_are_left_out(tmp_path):
    trained(tmp_path, *GPT, "guard.window=24", spoil=bad_label(0), at=(1, 2))
    (alarm,) = [event for event in events(tmp_path, "alarm") if event["kind"] == "left_out"]
    assert alarm["step"] == 2
    assert alarm["text"].startswith("1.0% of the samples of the last 24 steps were left out, more than 1%")


def test_what_cannot_be_kept_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"guard.keep=some is not one of none, all_but_guilty"):
        trained(tmp_path, *GPT, "guard.keep=some")
