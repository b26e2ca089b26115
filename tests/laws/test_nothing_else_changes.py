"""Law 10: nothing changes the state but the step. Any other change is withheld, named and undone, bit for bit."""

import json
from functools import cache

import pytest
import torch

from stabletrain.errors import TrainingHalted
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.runs import TINY_GPT, TINY_RESNET, composed

RUN = ["guard.checksum_every=1", "steps=12", "eval_every=6", "warmup=none", "checkpoint.every=6", "monitors=none"]
SNAPSHOTS = ["guard.snapshot_every=4", "guard.healthy_after=2"]
MODELS = {"gpt": TINY_GPT, "resnet": [*TINY_RESNET, "model.depth=8", "batch_size=4"]}


def some(tensors):
    """Returns the largest tensor."""
    return max(tensors, key=lambda each: each.numel())


def flip_lowest_bit(job, tensor):
    del job
    view = tensor.detach().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    view[(0,) * view.ndim] ^= 1


def permute_rows(job, tensor):
    del job
    tensor.detach().copy_(tensor.detach().flip(0).clone())


def and_a_snapshot(job, tensor):
    """Also changes the newest snapshot."""
    flip_lowest_bit(job, tensor)
    newest = max(job.saved.snapshots._trees)
    flip_lowest_bit(job, some(list(job.saved.snapshots._trees[newest]["model"].values())))


def weight(job):
    return some(list(job.state.model.parameters()))


def moment(job):
    states = job.state.optimizer.state.values()
    return some([each for state in states for each in state.values() if isinstance(each, torch.Tensor)])


def buffer(job):
    return some([each for each in job.state.model.buffers() if each.is_floating_point()])


def unsaved_buffer(job):
    """Returns a buffer that no checkpoint and no snapshot has."""
    saved = job.state.model.state_dict()
    return some([each for name, each in job.state.model.named_buffers() if name not in saved])


def trained(folder, *overrides, at=(), change=flip_lowest_bit, where=weight):
    """Trains a run in which a tensor changes after the last update, before the steps of these ticks."""
    with composed(*RUN, *overrides) as cfg:
        job = build(cfg, folder)
    get, left = job.data.batches.get, list(at)

    def changing(step):
        if job.state.executed_steps in left:
            left.remove(job.state.executed_steps)
            change(job, where(job))
        return get(step)

    job.data.batches.get = changing
    train(job)
    assert not left
    return job


def same(a, b):
    ours, theirs = ([*each.state_dict().values(), *each.buffers()] for each in (a, b))
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def events(folder, kind):
    return [event for event in read_jsonl(folder / "events.jsonl") if event["event"] == kind]


def evaluations(folder):
    """Returns all validation losses of a run, by step."""
    lines = read_jsonl(folder / "metrics.jsonl")
    return {(line["step"], line["val/loss"]) for line in lines if "val/loss" in line}


CASES = [
    ("gpt", weight, flip_lowest_bit, ""),
    ("gpt", moment, flip_lowest_bit, ""),
    ("gpt", weight, permute_rows, "precision=bf16"),
    ("gpt", weight, and_a_snapshot, ""),
    ("gpt", weight, flip_lowest_bit, "precision=bf16_params"),
    ("resnet", weight, flip_lowest_bit, ""),
    ("resnet", buffer, flip_lowest_bit, ""),
    ("gpt", unsaved_buffer, flip_lowest_bit, ""),
    ("resnet", moment, permute_rows, "optimizer=sgd"),
]


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory):
    """Returns the run and the folder of options without a change; each is trained once."""

    @cache
    def of(*overrides):
        folder = tmp_path_factory.mktemp("clean")
        return trained(folder, *overrides), folder

    return of


@pytest.mark.slow(unless=lambda case: case == CASES[0])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(getattr(each, "__name__", each) for each in case))
def test_a_change_between_two_updates_is_undone(tmp_path, clean_run, case):
    model, where, change, more = case
    overrides = [*MODELS[model], *([more] if more else [])]
    clean, _ = clean_run(*SNAPSHOTS, *overrides)
    job = trained(tmp_path / "run", *SNAPSHOTS, *overrides, at=[10], change=change, where=where)
    assert same(job.state.model, clean.state.model), "the run must end as if nothing had been"
    assert job.tools.guard.machine_faults == 1
    assert clean.tools.guard.machine_faults == 0
    (skip,), (restore,) = events(tmp_path / "run", "skip"), events(tmp_path / "run", "restore")
    assert skip["kind"] == "state"
    assert skip["step"] == 11
    assert skip["tensors"]
    assert restore["to"] == 10, "the state before that step"
    assert job.tools.guard.skips["state"] == job.tools.guard.rollbacks == 0
    (incident,) = events(tmp_path / "run", "incident")
    record = json.loads((tmp_path / "run" / incident["path"] / "diagnosis.json").read_text())
    assert (record["kind"], record["cause"]) == ("state", "corrupt_state")
    names = {name for name, tensor in [*job.state.model.named_parameters(), *job.state.model.named_buffers()]}
    assert record["damage"]
    assert all(each["name"] in names for each in record["damage"])
    assert bool(events(tmp_path / "run", "corrupt_snapshot")) == (change is and_a_snapshot)


def test_a_change_right_after_a_state_was_put_back_is_seen_too(tmp_path, clean_run):
    clean, _ = clean_run(*SNAPSHOTS, *TINY_GPT)
    with composed(*RUN, *SNAPSHOTS, *TINY_GPT) as cfg:
        job = build(cfg, tmp_path / "run")
    get, put_back = job.data.batches.get, job.rollback.put_back
    ticks, fresh = [10], []

    def changing(step):
        if job.state.executed_steps in ticks or fresh:
            ticks.clear()
            fresh.clear()
            flip_lowest_bit(job, weight(job))
        return get(step)

    def putting_back(*arguments, **options):
        put_back(*arguments, **options)
        if job.tools.guard.machine_faults == 1:
            fresh.append(1)

    job.data.batches.get, job.rollback.put_back = changing, putting_back
    train(job)
    assert same(job.state.model, clean.state.model)
    assert job.tools.guard.machine_faults == 2


@pytest.mark.slow(unless=lambda tick: tick == 6)
@pytest.mark.parametrize("tick", [6, 12], ids=["before an evaluation", "at the end"])
def test_a_state_that_changed_is_neither_evaluated_nor_saved(tmp_path, clean_run, tick):
    """The change comes after the update, and before the state is used."""
    clean, folder = clean_run(*TINY_GPT)
    with composed(*TINY_GPT, *RUN) as cfg:
        job = build(cfg, tmp_path / "run")
    add, left = job.monitoring.rolling.add, [tick]

    def changing(reading, skipped_spike):
        if job.state.executed_steps in left:
            left.clear()
            flip_lowest_bit(job, weight(job))
        return add(reading, skipped_spike)

    job.monitoring.rolling.add = changing
    train(job)
    assert same(job.state.model, clean.state.model)
    assert not left
    (event,) = events(tmp_path / "run", "state_changed")
    assert event["step"] == tick
    assert event["tensors"]
    assert evaluations(tmp_path / "run") == evaluations(folder)


def test_without_snapshots_the_run_halts_and_says_what_changed(tmp_path):
    with pytest.raises(TrainingHalted, match=r"not what the last update left.*resume=auto"):
        trained(tmp_path, *TINY_GPT, "guard=skip", at=[5])


@pytest.mark.slow
def test_without_the_check_nobody_notices(tmp_path):
    clean = trained(tmp_path / "clean", *TINY_GPT, "guard.checksum_every=0")
    job = trained(tmp_path / "run", *TINY_GPT, "guard.checksum_every=0", at=[10])
    assert not same(job.state.model, clean.state.model)
