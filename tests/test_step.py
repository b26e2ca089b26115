"""The step: skipped updates, gradient accumulation, clipping after unscaling, seeding by step number."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from stabletrain.guard.policy import NoGuard
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import IGNORE_INDEX, Batch, TrainState
from stabletrain.stability import precision
from stabletrain.stability.clipping import NoClip, NormClip
from stabletrain.stability.optimizers import SGD, SPAM, AdamW, Muon, StableAdamW
from stabletrain.stability.schedule import LearningRate, NoWarmup, Schedule
from stabletrain.step import (
    MOST_COUNTS,
    close_gate,
    commit,
    compute,
    count_targets,
    forward_backward,
    maximum,
    train_step,
)
from tests.workloads import build_tools

CPU = torch.device("cpu")
PRECISIONS = {
    "fp32": lambda: precision.fp32(CPU),
    "bf16": lambda: precision.bf16(CPU),
    "fp16": lambda: precision.fp16(CPU, init_scale=1024.0, growth_interval=2000, min_scale=1.0),
}
OPTIMIZERS = {
    "adamw": AdamW(1e-2, [0.9, 0.95], 1e-8, 0.1),
    "adamw-unfused": AdamW(1e-2, [0.9, 0.95], 1e-8, 0.1, fused=False),
    "sgd": SGD(1e-2, 0.9, False, 1e-4),
    "sgd-unfused": SGD(1e-2, 0.9, False, 1e-4, fused=False),
    "stable_adamw": StableAdamW(1e-2, [0.9, 0.95], 1e-8, 0.1),
    "spam": SPAM(1e-2, [0.9, 0.95], 1e-8, 0.1, theta=5000.0, reset_interval=2, warmup_steps=1),
    "muon": Muon(1e-2, 0.1, momentum=0.95, nesterov=True, ns_steps=5, betas=[0.9, 0.95], eps=1e-8),
}


class Tiny(nn.Module):
    """A convolution, BatchNorm, dropout, a hidden matrix and a head: one of each thing that a step can change."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten())
        self.hidden = nn.Linear(4 * 4, 4 * 4)
        self.head = nn.Linear(4 * 4, 3)

    def forward(self, inputs):
        return self.head(self.hidden(self.body(inputs)))


def tools(kind="fp32", clipping=None, guard=None):
    return build_tools(PRECISIONS[kind](), clipping=clipping, guard=guard)


def fresh(optimizer="adamw"):
    torch.manual_seed(0)
    model = Tiny()
    return TrainState(model, OPTIMIZERS[optimizer](model))


def batch(seed=0, size=8):
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(size, 1, 4, 4, generator=generator), torch.randint(3, (size,), generator=generator))


def bits(state):
    """Returns a copy of everything that a skipped step must not change."""
    moments = [value for p in state.model.parameters() for _, value in sorted(state.optimizer.state[p].items())]
    tensors = [*state.model.state_dict().values(), *[m for m in moments if isinstance(m, torch.Tensor)]]
    return [tensor.detach().clone() for tensor in tensors]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["input", "gradient"])
def test_a_withheld_update_changes_no_bit(kind, optimizer, bad, where):
    state, acting = fresh(optimizer), tools(kind)
    train_step(state, [batch(1)], acting)
    before, scale = bits(state), float(acting.precision.loss_scale())
    poisoned = batch(2)
    if where == "input":
        poisoned.inputs[3, 0, 1, 1] = bad
        reading = train_step(state, [poisoned], acting)
    else:
        handle = state.model.head.bias.register_hook(lambda g: torch.full_like(g, bad))
        reading = train_step(state, [poisoned], acting)
        handle.remove()
    assert not reading.applied
    assert same(bits(state), before)
    assert state.step == 2, "the step happened all the same"
    routine = kind == "fp16" and where == "gradient"
    assert reading.overflow == routine
    assert float(acting.precision.loss_scale()) == (scale / 2 if routine else scale)


def test_after_a_withheld_update_training_goes_on_as_if_that_step_had_not_been():
    skipping, plain = fresh(), fresh()
    acting = tools()
    poisoned = batch(9)
    poisoned.inputs[0] = float("nan")
    for number, each in enumerate([batch(1), poisoned, batch(2)]):
        skipping.step = number
        train_step(skipping, [each], acting)
    for number, each in [(0, batch(1)), (2, batch(2))]:
        plain.step = number
        train_step(plain, [each], acting)
    assert same(bits(skipping), bits(plain))


def test_without_a_guard_the_poison_reaches_the_weights():
    state = fresh()
    poisoned = batch(2)
    poisoned.inputs[3, 0, 1, 1] = float("nan")
    reading = train_step(state, [poisoned], tools(guard=NoGuard()))
    assert reading.applied
    assert not torch.isfinite(state.model.head.weight).all()


def test_compute_touches_no_weight():
    state, acting = fresh(), tools()
    weights = [p.detach().clone() for p in state.model.parameters()]
    compute(state, [batch(1)], acting)
    assert same([p.detach() for p in state.model.parameters()], weights)


def test_accumulation_gives_the_gradient_of_the_whole_batch_even_with_uneven_targets():
    whole, parts = fresh(), fresh()
    whole.model.eval()  # BatchNorm and dropout depend on how samples are batched
    parts.model.eval()
    each = batch(1)
    each.targets[:3] = IGNORE_INDEX
    one = train_step(whole, [each], tools(clipping=NoClip()))
    four = train_step(parts, each.split(4), tools(clipping=NoClip()))
    assert four.loss == pytest.approx(one.loss, rel=1e-6)
    assert four.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("parts", [1, 4])
def test_the_loss_is_the_mean_over_the_valid_targets(parts):
    state = fresh()
    state.model.eval()
    each = batch(1)
    each.targets[:3] = IGNORE_INDEX
    expected = cross_entropy(state.model(each.inputs), each.targets, ignore_index=IGNORE_INDEX)
    reading = train_step(state, each.split(parts), tools())
    assert reading.loss == pytest.approx(expected.item(), rel=1e-6)
    assert reading.rank == -1, "a single process has no rank to name"


def test_numbers_that_the_host_knows_are_counted_there():
    values = Batch(torch.zeros(2, 3), torch.zeros(2, 3))
    assert [int(each) for each in count_targets([values])] == [6, 0]
    assert [int(each) for each in count_targets([values, values])] == [12, 0]
    assert [int(each) for each in count_targets([replace(values, counted=0)])] == [1, 1], "no division by 0"


def test_without_a_valid_target_the_loss_is_divided_by_one_and_the_step_is_empty():
    nothing = Batch(torch.zeros(2, 3), torch.full((2, 3), IGNORE_INDEX))
    assert [int(each) for each in count_targets([nothing, nothing])] == [1, 1]
    assert [int(each) for each in count_targets([nothing, batch(1)])] == [8, 0]


@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_empty_micro_batch_is_as_if_it_were_not_there(where):
    several, two = ([batch(1), batch(2)] for _ in range(2))
    several.insert(where, batch(3, size=0))
    states, synchronized = [fresh(), fresh()], [[], []]
    for state, micro_batches, last in zip(states, (several, two), synchronized, strict=True):
        computed = compute(state, micro_batches, synchronizing(tools(), last))
        assert computed.forwards == 2
        commit(state, computed, tools()).wait()
    assert synchronized == [[False, True]] * 2, "gradients are synchronized after the last one that has samples"
    assert same(bits(states[0]), bits(states[1]))


def synchronizing(acting, last):
    """Tools whose ranks note which micro-batch is taken for the last one."""

    class Noting(SingleProcess):
        def gradient_sync(self, model, is_last):
            last.append(is_last)
            return super().gradient_sync(model, is_last)

    return replace(acting, parallel=Noting())


def test_a_step_of_empty_micro_batches_has_gradients_of_zero_but_for_frozen_parameters():
    state = fresh()
    state.model.head.bias.requires_grad_(False)
    computed = compute(state, [batch(3, size=0)], tools())
    assert (float(computed.terms.total), computed.forwards) == (0.0, 0)
    found = {name: p.grad for name, p in state.model.named_parameters()}
    assert found.pop("head.bias") is None
    assert all(grad is not None and not grad.any() for grad in found.values())


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("targets", [False, True])
def test_a_micro_batch_with_bad_inputs_or_bad_targets_is_bad(inputs, targets):
    each = batch(1)
    if inputs:
        each.inputs[3, 0, 1, 1] = float("nan")
    if targets:
        each.targets[2] = 7
    done = forward_backward(fresh().model, each, torch.tensor(8), tools())
    assert bool(done.bad_data) == (inputs or targets)


class Halving(Schedule):
    """0.5 at the first of four steps, 0.25 at the second."""

    def factor(self, progress):
        return 0.5 / (4 * progress + 1)


def test_the_guard_lowers_the_scheduled_learning_rate_and_one_process_is_not_asked_to_stop():
    acting = tools()
    acting.guard.lr_multiplier = lambda step: 0.25
    reading = train_step(fresh(), [batch(1)], replace(acting, learning_rate=LearningRate(NoWarmup(), Halving(), 4)))
    assert reading.lr == pytest.approx(1e-2 * 0.5 * 0.25)
    assert reading.stop is False


@pytest.mark.parametrize(("bad_numbers", "bad_update", "named"), [(-1, 2, 2), (1, -1, 1), (-1, -1, -1)])
def test_the_rank_with_bad_numbers_or_a_bad_update_is_named(bad_numbers, bad_update, named):
    state, acting = fresh(), tools()
    computed = compute(state, [batch(1)], acting)
    checks = replace(computed.checks, rank=torch.tensor(bad_numbers))
    gated = close_gate(computed.terms, computed.norms, checks, acting.parallel, acting.precision, acting.guard.gate)
    clipped = acting.clipping(state.model, gated.norms, gated.gate)
    known = {"loss_scale": 1.0, "lr": 1e-2, "withheld": 0.0}
    found = gated.numbers(1, clipped, bad_update_rank=torch.tensor(bad_update), **known)
    assert int(found.rank) == named


def test_the_largest_of_several_micro_batches_counts_and_nan_is_above_all():
    numbers = [torch.tensor(1.0), torch.tensor(3.0), torch.tensor(2.0)]
    assert float(maximum(numbers)) == float(maximum(numbers[:2])) == 3.0
    assert float(maximum([torch.tensor(True), 0.0])) == 1.0
    assert maximum([0.0, 0.0]) == 0.0
    assert torch.isnan(maximum([*numbers, torch.tensor(float("nan"))]))


def test_a_parameter_that_a_step_does_not_use_is_not_updated():
    """A gradient of zeros would move it all the same: by weight decay, and by its moments."""
    state, acting = fresh(), tools()
    train_step(state, [batch(1)], acting)
    state.model.hidden.forward = lambda inputs: inputs
    before = state.model.hidden.weight.detach().clone()
    train_step(state, [batch(2)], acting)
    assert torch.equal(state.model.hidden.weight, before)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="8 samples does not divide into 3"):
        batch().split(3)


@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_the_clipped_norm_is_the_true_norm_in_every_precision(max_norm):
    """Clipping before unscaling would shrink fp16's gradients 1024 times too much."""
    norms = {}
    for kind in PRECISIONS:
        state = fresh()
        state.model.eval()
        reading = train_step(state, [batch(1)], tools(kind, clipping=NormClip(max_norm)))
        clipped = torch.cat([p.grad.flatten() for p in state.model.parameters()]).norm().item()
        norms[kind] = clipped
        assert clipped == pytest.approx(min(max_norm, reading.grad_norm), rel=1e-3)
        assert reading.clip_coef == pytest.approx(min(1.0, max_norm / reading.grad_norm), rel=1e-3)
        assert reading.clip_active == float(max_norm < reading.grad_norm)
    assert norms["bf16"] == pytest.approx(norms["fp32"], rel=0.03)
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.01)


def test_a_step_is_a_pure_function_of_state_and_number():
    state = fresh()
    train_step(state, [batch(1)], tools())
    again = TrainState(copy.deepcopy(state.model), AdamW(1e-2, [0.9, 0.95], 1e-8, 0.1)(state.model), step=1)
    again.optimizer = AdamW(1e-2, [0.9, 0.95], 1e-8, 0.1)(again.model)
    again.optimizer.load_state_dict(copy.deepcopy(state.optimizer.state_dict()))
    first = train_step(state, [batch(2)], tools())
    torch.rand(1000)
    second = train_step(again, [batch(2)], tools())
    assert first == second
    assert same(bits(state), bits(again))


def test_the_learning_rate_of_every_group_follows_the_schedule():
    state = fresh()
    state.optimizer.param_groups[1]["lr"] = 5e-3
    half = tools()
    half = replace(half, learning_rate=LearningRate(NoWarmup(), Halving(), 4))
    readings = [train_step(state, [batch(i)], half) for i in range(2)]
    assert [r.lr for r in readings] == [5e-3, 2.5e-3]
    assert [g["lr"] for g in state.optimizer.param_groups] == [2.5e-3, 1.25e-3]


def test_a_count_of_targets_is_made_once_and_few_are_kept():
    earlier = {}
    for number in [*range(1, 3 * MOST_COUNTS), 7, 7]:
        batch = Batch(torch.zeros(number, 1), torch.zeros(number, dtype=torch.int64)).examined()
        found, empty = count_targets([batch], earlier)
        assert (int(found), empty) == (number, False)
        assert len(earlier) <= MOST_COUNTS
    assert count_targets([batch], earlier)[0] is found


@pytest.mark.parametrize(
    ("numbers", "largest"),
    [
        ([], 0.0),
        ([2.5, 1.0, False], 2.5),
        ([torch.tensor(1.5), 2.5], 2.5),
        ([torch.tensor(3.5), 2.5, torch.tensor(0.5)], 3.5),
        ([torch.tensor(True), False], 1.0),
        ([torch.tensor(math.nan), 2.5], math.nan),
        ([torch.tensor([2.0])[0], torch.tensor(math.inf)], math.inf),
    ],
)
def test_the_largest_of_what_the_device_and_the_host_know(numbers, largest):
    found = maximum(numbers)
    assert isinstance(found, torch.Tensor) == any(isinstance(each, torch.Tensor) for each in numbers)
    assert float(found) == largest or (math.isnan(float(found)) and math.isnan(largest))
