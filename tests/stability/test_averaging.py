"""Averages of the weights: their closed forms, what may enter, and what saves, restores and evaluates them."""

import contextlib
import copy
import math
import shutil

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import stabletrain
from stabletrain.checkpoint.capture import capture
from stabletrain.checkpoint.snapshots import state_bytes
from stabletrain.checkpoint.tree import to_host
from stabletrain.cli.commands import main
from stabletrain.errors import ConfigError
from stabletrain.guard.policy import SkipGuard
from stabletrain.models.resnet import CifarResNet
from stabletrain.records import TrainState
from stabletrain.stability import precision as precisions
from stabletrain.stability.averaging import EMA, NoAveraging, Snapshots, averaged
from stabletrain.step import train_step
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.evaluate import evaluate_now
from stabletrain.trainer.loop import train
from tests.runs import TINY_GPT, composed
from tests.trainer.given import batch
from tests.workloads import build_tools

CPU = torch.device("cpu")
OPEN, CLOSED = torch.tensor(True), torch.tensor(False)
SMALL = [*TINY_GPT, "model.n_layer=1", "report=false", "monitors=none", "forecast=off", "check=off", "compile=false"]


def state_of(averaging, model, steps=100, optimizer=None):
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return TrainState(model, optimizer, average=averaging.begin(model, steps))


def averages(state):
    assert state.average is not None
    return {name: tensor.clone() for name, tensor in state.average.tensors.items()}


def fed(averaging, steps, gates):
    """Returns the average after steps with random weights, and the weights of each step as float64."""
    torch.manual_seed(0)
    state, seen = state_of(averaging, nn.Linear(3, 2), steps), []
    for gate in gates:
        with torch.no_grad():
            state.model.weight.copy_(torch.randn(2, 3))
        averaging(state, torch.tensor(gate))
        state.step += 1
        seen.append(state.model.weight.detach().double())
    return state, seen


@pytest.mark.parametrize(("decay", "warmup", "every"), [(0.9, 10.0, 1), (0.99, 1.0, 1), (0.5, 4.0, 3), (0.0, 1.0, 1)])
def test_an_ema_is_the_sum_of_its_weights_times_their_shares(decay, warmup, every):
    gates = [bool(each) for each in np.random.default_rng(0).random(40) < 0.7]
    state, seen = fed(EMA(every, decay, warmup), 40, gates)
    entered = [w for step, w in enumerate(seen, 1) if step % every == 0 and gates[step - 1]]
    decays = [0.0, *(min(decay, (1 + n) / (warmup + n)) for n in range(1, len(entered)))]
    shares = [(1 - d) * math.prod(decays[i + 1 :]) for i, d in enumerate(decays)]
    assert sum(shares) == pytest.approx(1.0)
    wanted = sum(share * w for share, w in zip(shares, entered, strict=True))
    torch.testing.assert_close(state.average.tensors["weight"].double(), wanted, rtol=0, atol=1e-6)
    assert state.average.count == len(entered)


@pytest.mark.parametrize(("start_share", "every"), [(0.0, 1), (0.5, 1), (0.25, 4), (0.7, 3)])
def test_snapshots_are_the_mean_of_what_entered_since_the_start(start_share, every):
    gates = [bool(each) for each in np.random.default_rng(1).random(40) < 0.7]
    state, seen = fed(Snapshots(every, start_share), 40, gates)
    due = [step for step in range(1, 41) if step > int(40 * start_share) and step % every == 0 and gates[step - 1]]
    wanted = torch.stack([seen[step - 1] for step in due]).mean(dim=0)
    torch.testing.assert_close(state.average.tensors["weight"].double(), wanted, rtol=0, atol=1e-6)
    assert state.average.count == len(due)


@pytest.mark.parametrize("averaging", [EMA(1, 0.9, 10.0), Snapshots(1, 0.0)])
def test_the_first_weights_are_the_average_bit_for_bit(averaging):
    state, _ = fed(averaging, 5, [False, True])
    assert torch.equal(state.average.tensors["weight"], state.model.weight)


@pytest.mark.parametrize("gate", [OPEN, CLOSED])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_nothing_enters_through_a_closed_gate_and_nothing_that_is_not_finite_through_an_open_one(gate, value):
    averaging = EMA(1, 0.9, 10.0)
    state, _ = fed(averaging, 9, [True, True])
    before, count = averages(state), int(state.average.count)
    with torch.no_grad():
        state.model.weight[0, 0] = value
    averaging(state, gate)
    assert all(torch.equal(before[name], now) for name, now in averages(state).items())
    assert state.average.count == count


# ---- which tensors


class Odd(nn.Module):
    """A tied weight, a frozen one, a mask, a count, an unsaved buffer, and one that a forward pass replaces."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3).requires_grad_(False)
        self.second.weight = self.first.weight
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean = self.mean + 1
        return self.frozen(self.second(self.first(x)))


def test_shared_weights_count_once_and_only_what_is_trained_or_counted_in_forward_is_averaged():
    from stabletrain.buffers import note_masks

    averaging, model = Snapshots(1, 0.0), Odd()
    note_masks(model)
    state = state_of(averaging, model)
    assert set(averages(state)) == {"first.weight", "first.bias", "second.bias", "mean"}
    for _ in range(3):
        model(torch.zeros(1, 4))
        averaging(state, OPEN)
        state.step += 1
    assert state.average.tensors["mean"] == 2.0  # of 1, 2 and 3, which are three tensors
    with averaged(state.average):
        assert model.mean == 2.0
        assert model.second.weight is model.first.weight
    assert model.mean == 3.0


def test_small_changes_of_bf16_weights_are_averaged_in_fp32():
    averaging, model = Snapshots(1, 0.0), nn.Linear(1, 1, bias=False).bfloat16()
    state = state_of(averaging, model)
    for value in (1.0, 1.0078125):  # neighbours in bf16
        model.weight.data.fill_(value)
        averaging(state, OPEN)
        state.step += 1
    assert state.average.tensors["weight"].dtype == torch.float32
    assert state.average.tensors["weight"] == 1.00390625
    with averaged(state.average):
        assert model.weight.dtype == torch.bfloat16
    assert model.weight == 1.0078125


def test_a_model_has_its_averaged_weights_only_inside_the_context_even_if_it_raises():
    state, seen = fed(Snapshots(1, 0.0), 9, [True] * 5)
    with contextlib.suppress(KeyError), averaged(state.average):
        assert torch.equal(state.model.weight, state.average.tensors["weight"])
        raise KeyError
    assert torch.equal(state.model.weight.double(), seen[-1])
    empty, seen = fed(Snapshots(1, 0.5), 9, [True])  # nothing has entered: the live weights
    with averaged(empty.average):
        assert torch.equal(empty.model.weight.double(), seen[0])


# ---- steps that are withheld


class Breaks(torch.optim.SGD):
    """Writes NaN in its third step."""

    calls = 0

    def step(self, closure=None):
        super().step()
        self.calls += 1
        if self.calls == 3:
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(math.nan)


@pytest.mark.parametrize("kind", ["bad data", "overflow", "bad update, undone", "bad update, found later"])
def test_the_average_is_that_of_the_applied_updates_alone(kind):
    torch.manual_seed(0)
    model, averaging, guard = nn.Linear(4, 3), Snapshots(1, 0.0), SkipGuard(max_consecutive=100)
    precision = precisions.fp32(CPU)
    if kind == "overflow":
        precision = precisions.fp16(CPU, init_scale=2.0**17, growth_interval=1000, min_scale=1.0)
    optimizer = Breaks(model.parameters(), lr=0.1) if "update" in kind else torch.optim.SGD(model.parameters(), lr=0.1)
    state = state_of(averaging, model, optimizer=optimizer)
    precision.prepare()
    precision.attach(model, optimizer)
    tools = build_tools(precision, guard=guard, averaging=averaging)
    guard.update_check.copies = kind != "bad update, found later"
    entered, applied, counts = [], [], []
    for step in range(6):
        some = batch(step)
        if kind == "bad data" and step == 2:
            some.inputs[0, 0] = math.nan
        weights = model.weight.detach().clone()
        applied.append(train_step(state, [some], tools).applied)
        counts.append(int(state.average.count))
        if applied[-1]:
            entered.append(model.weight.detach().double())
        elif kind == "bad update, found later":
            model.weight.data.copy_(weights)  # as the loop does, from a snapshot
    assert 0 < len(entered) < 6
    assert counts == list(np.cumsum(applied))
    torch.testing.assert_close(
        state.average.tensors["weight"].double(), torch.stack(entered).mean(dim=0), rtol=0, atol=1e-6
    )


# ---- whole runs


class Crash(Exception):
    """A killed process."""


def trained(folder, *overrides, crash_at=None):
    with composed(*SMALL, *overrides) as cfg:
        if not (folder / ".hydra").exists():
            (folder / ".hydra").mkdir(parents=True)
            OmegaConf.save(cfg, folder / ".hydra/config.yaml")
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


def lines(folder):
    clock = ("time", "tokens_per_s", "data/wait_share")
    found = {line["step"]: line for line in read_jsonl(folder / "metrics.jsonl") if "val/loss" in line}
    return {step: {key: value for key, value in line.items() if key not in clock} for step, line in found.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, trained(folder, "averaging=ema", "steps=6", "eval_every=2")


def same_average(a, b):
    return a.average.count == b.average.count and all(
        torch.equal(a.average.tensors[name], tensor) for name, tensor in b.average.tensors.items()
    )


def test_a_run_trains_as_without_it_and_evaluates_both_weights(tmp_path, whole):
    folder, job = whole
    plain = trained(tmp_path / "run", "steps=6", "eval_every=2")
    assert plain.state.average is None
    assert "average" not in capture(plain.state, {})
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state.model.parameters(), job.state.model.parameters(), strict=True)
    )
    before, after = lines(tmp_path / "run"), lines(folder)
    for step, line in after.items():
        mine = {key: value for key, value in line.items() if not key.startswith("averaging/")}
        assert mine == before[step]
        assert mine.keys() < line.keys()
    assert {key for key in after[6] if key.startswith("averaging/")} == {"averaging/val_loss"}
    assert job.history.best_loss == plain.history.best_loss
    # the loss of a model that has the averaged weights for good
    other = copy.deepcopy(job.state.model)
    for name, parameter in other.named_parameters():
        parameter.data.copy_(job.state.average.tensors[name])
    job.state.model, live = other, job.state.model
    assert evaluate_now(job)["val/loss"] == after[6]["averaging/val_loss"]
    job.state.model = live


@pytest.mark.parametrize("crash_at", [5])
def test_a_resumed_run_has_the_average_of_one_that_was_never_stopped(tmp_path, whole, crash_at):
    folder, job = whole
    chosen = ["averaging=ema", "steps=6", "eval_every=2", "checkpoint.every=3"]
    trained(tmp_path / "run", *chosen, crash_at=crash_at)
    again = trained(tmp_path / "run", *chosen, "resume=auto")
    assert again.state.average.count == 6
    assert same_average(again.state, job.state)
    assert lines(tmp_path / "run") == lines(folder)


def test_a_snapshot_holds_the_average_and_a_damaged_one_is_found(whole):
    _, job = whole
    saved, average = job.saved, job.state.average
    saved.take_snapshot()
    before = to_host(capture(job.state, {}))["average"]
    for tensor in (*average.tensors.values(), average.count):
        tensor.add_(1)
    kept = saved.newest_intact(job.state.step, step=job.state.step)
    assert average.count == before["count"]
    assert all(torch.equal(before["tensors"][name], tensor) for name, tensor in average.tensors.items())
    damaged = next(iter(kept["average"]["tensors"].values())).view(-1).view(torch.int32)
    damaged[0] ^= 1
    assert not saved._is_intact(kept)
    damaged[0] ^= 1
    assert saved._is_intact(kept)


def test_a_fault_of_memory_in_the_average_is_found_before_the_next_update(whole):
    _, job = whole
    check, state = job.tools.guard.state_check, job.state
    from stabletrain.buffers import buffers_of

    check.every = 1
    check.after_update(state, buffers_of(state.model).save())
    assert check.holds(state)
    tensor = state.average.tensors["head.weight"]
    tensor.view(torch.int32)[0, 0] ^= 1
    assert not check.holds(state)
    assert ("average", "head.weight") in [(each.what, each.name) for each in check.changes(state.model)]
    tensor.view(torch.int32)[0, 0] ^= 1


@pytest.mark.parametrize(("then", "now"), [("none", "ema"), ("ema", "snapshots"), ("snapshots", "none")])
@pytest.mark.slow(unless=lambda then, now: then == "none")
def test_a_resume_that_changes_it_begins_anew_with_the_live_weights(tmp_path, capsys, then, now):
    trained(tmp_path / "run", f"averaging={then}", "steps=3")
    job = trained(tmp_path / "run", f"averaging={now}", "steps=4", "resume=auto")
    if now == "none":
        assert job.state.average is None
        return
    assert job.state.average.count == 1
    for name, parameter in job.state.model.named_parameters():
        assert torch.equal(job.state.average.tensors[name], parameter)


def test_the_average_of_a_resnet_has_batchnorms_statistics():
    model = CifarResNet(depth=8, num_classes=10, in_channels=1)
    names = {name.rpartition(".")[2] for name in averages(state_of(EMA(1, 0.9, 10.0), model))}
    assert names == {"weight", "bias", "running_mean", "running_var"}


def test_its_memory_is_counted(whole):
    _, job = whole
    state = job.state
    without = copy.copy(state)
    without.average = None
    numbers = sum(each.numel() for each in state.model.parameters())
    assert 4 * numbers <= state_bytes(state) - state_bytes(without) < 4 * numbers + 256 * 20


def test_the_averaged_weights_of_a_checkpoint_are_loaded_and_sampled_from(whole, tmp_path, capsys):
    folder, job = whole
    model = stabletrain.load(folder, averaged=True)
    assert all(torch.equal(job.state.average.tensors[name], each) for name, each in model.named_parameters())
    assert not torch.equal(stabletrain.load(folder).head.weight, model.head.weight)
    typed = ["sample", str(folder), "--prompt", "the", "--tokens", "9", "--temperature", "0"]
    assert main(typed) == 0
    live = capsys.readouterr().out
    assert main([*typed, "--averaged"]) == 0
    assert capsys.readouterr().out.startswith(live[:3])
    shutil.copytree(folder, tmp_path / "run")
    trained(tmp_path / "run", "averaging=none", "steps=7", "resume=auto")
    with pytest.raises(ConfigError, match="step-00000007 has no averaged weights: it was trained with averaging=none"):
        stabletrain.load(tmp_path / "run", averaged=True)


@pytest.mark.beside
def test_the_averaged_weights_of_a_checkpoint_are_exported(whole, tmp_path, capsys):
    folder, job = whole
    assert main(["export", str(folder), "--to", "safetensors", "--averaged", "--out", str(tmp_path / "out")]) == 0
    assert "step-00000006, the averaged weights" in capsys.readouterr().out
    model = stabletrain.load(tmp_path / "out", trust=True)
    assert all(torch.equal(job.state.average.tensors[name], each) for name, each in model.named_parameters())
    with pytest.raises(ConfigError, match="is an export, which holds the live or the averaged weights"):
        stabletrain.load(tmp_path / "out", averaged=True)


# ---- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMA(1, 1.0, 10.0), "averaging.decay=1.0 is outside"),
        (lambda: EMA(1, 0.9, 0.5), "averaging.warmup=0.5 is below 1"),
        (lambda: EMA(0, 0.9, 1.0), "averaging.every=0 is below 1"),
        (lambda: Snapshots(1, 1.0), "averaging.start_share=1.0 is outside"),
        (lambda: Snapshots(8, 0.5).begin(nn.Linear(1, 1), 7), "none of the steps 4 to 7 .* lower averaging.every"),
    ],
)
def test_what_could_average_nothing_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_no_averaging_has_no_state():
    assert NoAveraging().begin(nn.Linear(1, 1), 5) is None


@pytest.mark.parametrize("other", [None, (Snapshots(1, 0.0), 2), (EMA(1, 0.9, 1.0), 3)], ids=["none", "kind", "shapes"])
def test_what_belongs_to_another_average_empties_it(other):
    def filled(kind, size):
        average = kind.begin(nn.Linear(size, 1), 5)
        for tensor in (*average.tensors.values(), average.count):
            tensor.fill_(7)
        return average

    average = filled(EMA(1, 0.9, 1.0), 2)
    average.restore(other and filled(*other).captured(), lambda live, saved: saved)
    assert not average.count
    assert not any(tensor.any() for tensor in average.tensors.values())
    average.restore(filled(EMA(1, 0.5, 1.0), 2).captured(), lambda live, saved: saved)
    assert average.count == 7
    assert all((tensor == 7).all() for tensor in average.tensors.values())
