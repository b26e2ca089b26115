"""`guard.keep=all_but_guilty`: a bad step is applied without the samples at fault, as if it had never had them."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
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
