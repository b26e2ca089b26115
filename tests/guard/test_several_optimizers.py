"""Several optimizers in one guard: a step updates all of them or none."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.guard.checks.repeats import next_tensor
from stabletrain.guard.checks.written import weights_of
from stabletrain.guard.guard import Guard
from stabletrain.guard.incidents import settings
from stabletrain.guard.policy import RollbackGuard
from stabletrain.several_optimizers import SeveralOptimizers
from stabletrain.stability.optimizers.closed import note_largest_weight, why_unproven
from tests.guard.given import batches, bits, same


class Words(nn.Module):
    """An embedding with sparse gradients, a matrix, BatchNorm and dropout: something for each kind of optimizer."""

    def __init__(self, sparse=True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 8, sparse=sparse)
        self.matrix = nn.Linear(8, 8, bias=False)
        self.rest = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))

    def forward(self, x):
        return self.rest(self.matrix(self.embedding((x * 4).long().clamp(0, 11)).mean(1) + x.sum(1, keepdim=True)))


class Bare(torch.optim.Optimizer):
    """Divides by the gradient's own length: not finite where a whole gradient is 0."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
            parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=self.param_groups[0]["lr"])


def sparse_and_adamw(model):
    """Embeddings with SparseAdam, which is not proven to stay finite."""
    dense = [*model.matrix.parameters(), *model.rest.parameters()]
    return [torch.optim.SparseAdam(model.embedding.parameters(), lr=1e-2), torch.optim.AdamW(dense, lr=1e-2)]


def muon_and_adamw(model):
    """Muon for the matrix, AdamW for the rest, in two groups."""
    rest = [{"params": [*model.rest.parameters()]}, {"params": [*model.embedding.parameters()], "lr": 1e-3}]
    return [torch.optim.Muon(model.matrix.parameters(), lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


def adamw_and_sgd(model):
    """Two that are proven to stay finite."""
    rest = [*model.matrix.parameters(), *model.embedding.parameters()]
    return [torch.optim.AdamW(model.rest.parameters(), lr=1e-2), torch.optim.SGD(rest, lr=1e-2, momentum=0.9)]


KINDS = [sparse_and_adamw, muon_and_adamw, adamw_and_sgd]


class Loop:
    """A model with several optimizers, and a guard of all."""

    def __init__(self, folder, kind=adamw_and_sgd, **options):
        self.model = Words(sparse=kind is sparse_and_adamw)
        self.optimizers = kind(self.model)
        self.guard = None if folder is None else Guard(self.model, self.optimizers, folder=folder, **options)

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def bits(self):
        return bits(self.model, *self.optimizers)

    def rates(self):
        return [group["lr"] for each in self.optimizers for group in each.param_groups]

    def run(self, data):
        torch.manual_seed(2)
        return [float(self.guard.step(self.loss, batch)) for batch in data]

    def run_plainly(self, data, max_norm=math.inf, scaler=None, dtype=None):
        """The same loop without a guard."""
        torch.manual_seed(2)
        losses = []
        scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        for x, y in data:
            for each in self.optimizers:
                each.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = self.loss(x, y)
            scaler.scale(loss).backward()
            for each in self.optimizers:
                scaler.unscale_(each)
            if max_norm < math.inf:
                nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            for each in self.optimizers:
                scaler.step(each)
            scaler.update()
            losses.append(loss.item())
        return losses


def with_nan(data, *at):
    """The data with a NaN in some batches."""
    data = [(x.clone(), y) for x, y in data]
    for each in at:
        data[each][0][3, 1] = math.nan
    return data


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_steps_have_the_bits_of_the_loop_without_a_guard(tmp_path, kind):
    data, plain = batches(12), Loop(None, kind)
    guarded = Loop(tmp_path, kind, rollback=True, checksum_every=1, recheck_every=2)
    assert guarded.run(data) == plain.run_plainly(data)
    assert same(guarded.bits(), plain.bits())
    assert not guarded.guard.skipped


@pytest.mark.parametrize("kind", [muon_and_adamw, adamw_and_sgd])
def test_gradients_are_clipped_by_one_norm_over_all(tmp_path, kind):
    data, plain, guarded = batches(6), Loop(None, kind), Loop(tmp_path, kind, max_norm=0.3)
    assert guarded.run(data) == plain.run_plainly(data, max_norm=0.3)
    assert guarded.guard.last.clip_coef < 1
    assert same(guarded.bits(), plain.bits())


def test_one_gradscaler_steps_all(tmp_path):
    data, plain = batches(6), Loop(None)
    mine, theirs = (torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2))
    guarded = Loop(tmp_path, scaler=mine)
    half = torch.float16
    guarded_loss = guarded.loss
    guarded.loss = lambda x, y: torch.autocast("cpu", half)(guarded_loss)(x, y)
    assert guarded.run(data) == plain.run_plainly(data, scaler=theirs, dtype=half)
    assert same(guarded.bits(), plain.bits())
    assert mine.get_scale() == theirs.get_scale() == 2.0**13
    before = guarded.bits()
    guarded.run(with_nan(batches(1), 0))
    assert same(before, guarded.bits())


@pytest.mark.parametrize("options", [{}, {"precision": "fp16"}, {"precision": "bf16", "max_norm": 0.5}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_withheld_step_changes_no_bit_of_any(tmp_path, kind, options):
    loop = Loop(tmp_path, kind, **options)
    loop.run(batches(3))
    for bad in (with_nan(batches(1), 0), with_nan(batches(1, seed=5), 0)):
        before = loop.bits()
        loop.run(bad)
        assert same(before, loop.bits())
        assert not loop.guard.last.applied
    assert loop.guard.incidents[0].cause == "poison_input"
    loop.run(batches(1, seed=7))
    assert loop.guard.last.applied


def with_bare(model):
    """The second optimizer's update is not finite where the gradient of the embedding is 0."""
    rest = [*model.matrix.parameters(), *model.rest.parameters()]
    return [torch.optim.AdamW(rest, lr=1e-2), Bare(model.embedding.parameters(), lr=1e-2)]


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_an_update_of_one_that_is_not_finite_undoes_all(tmp_path, order):
    loop = Loop(tmp_path, lambda model: with_bare(model)[order])
    loop.run(batches(3))
    before, usual = loop.bits(), loop.loss
    loop.loss = lambda x, y: (
        F.cross_entropy(loop.model.rest(loop.model.matrix(x @ torch.ones(4, 8))), y)
        + (0 * loop.model.embedding.weight.sum())
    )
    loop.run(batches(1))
    assert same(before, loop.bits())
    assert loop.guard.skips["update"] == 1
    [incident] = loop.guard.incidents
    assert incident.cause == "unsafe_optimizer"
    assert "embedding.weight" in incident.verdict, "the parameter of the optimizer at fault"
    assert "group 0: lr=0.01" in (incident.path / "report.md").read_text()
    assert "betas" not in (incident.path / "report.md").read_text(), "settings of the other optimizer"
    loop.loss = usual
    loop.run(batches(1))
    assert loop.guard.last.applied


def test_the_fix_names_the_optimizer_at_fault(tmp_path):
    loop = Loop(tmp_path, lambda model: [with_bare(model)[0], torch.optim.RMSprop(model.embedding.parameters(), eps=0)])
    loop.run(batches(1))  # it uses some rows of the embedding only
    assert loop.guard.skips["update"] == 1
    assert [*loop.guard.incidents[0].fix] == ["RMSprop(eps=1e-08): eps is 0 in group 0"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollback_restores_the_moments_of_all_and_lowers_all_rates(tmp_path, kind):
    policy = RollbackGuard(snapshot_every=4, healthy_after=1, patience=2, lr_factor=0.5, lr_steps=4)
    loop = Loop(tmp_path, kind, policy=policy)
    loop.run(batches(4))
    wanted, rates, used = loop.bits(), loop.rates(), []
    loop.run(batches(2, seed=3))
    assert not same(wanted, loop.bits())
    loop.run(with_nan(batches(2), 0, 1))
    assert loop.guard.rolled_back
    assert same(wanted, loop.bits())
    for each in loop.optimizers:
        each.register_step_pre_hook(lambda *_: used.append(loop.rates()))
    loop.run(batches(1))
    assert used == [[rate / 2 for rate in rates]] * 2
    assert loop.rates() == rates


@pytest.mark.parametrize("which", [0, 1])
def test_a_moment_that_memory_has_changed_is_noticed_in_each(tmp_path, which):
    loop = Loop(tmp_path, checksum_every=1)
    loop.run(batches(3))
    state = next(iter(loop.optimizers[which].state.values()))
    moment = next(each for each in state.values() if each.ndim)
    with torch.no_grad():
        moment.view(-1)[0] += 1.0
    with pytest.raises(TrainingHalted, match="not what the last update left"):
        loop.run(batches(1))
    assert ("exp_avg rest.0.weight", "momentum_buffer embedding.weight")[which] in loop.guard.incidents[0].verdict


@pytest.mark.parametrize("which", [0, 1])
def test_loading_the_state_of_one_is_no_fault_of_memory(tmp_path, which):
    loop = Loop(tmp_path, checksum_every=1)
    loop.run(batches(2))
    kept = copy.deepcopy(loop.optimizers[which].state_dict())
    loop.run(batches(2))
    loop.optimizers[which].load_state_dict(kept)
    loop.run(batches(1))
    assert loop.guard.last.applied
    assert not loop.guard.skipped


@pytest.mark.parametrize("left_out", [0, 1, None])
def test_one_that_is_not_restored_is_told(tmp_path, left_out):
    first = Loop(tmp_path / "first")
    first.run(batches(4))
    second = Loop(tmp_path / "second")
    second.model.load_state_dict(first.model.state_dict())
    for number, (new, old) in enumerate(zip(second.optimizers, first.optimizers, strict=True)):
        if number != left_out:
            new.load_state_dict(copy.deepcopy(old.state_dict()))
    second.guard.load_state_dict(first.guard.state_dict())
    data = batches(4, seed=8)
    losses = first.run(data), second.run(data)
    told = [alarm.text for alarm in second.guard.alarms]
    if left_out is None:
        assert losses[0] == losses[1]
        assert same(first.bits(), second.bits())
        assert not told
    else:
        assert [text.split(" ")[0] for text in told] == [type(second.optimizers[left_out]).__name__]


def test_a_step_of_one_outside_the_guard_is_refused(tmp_path):
    loop = Loop(tmp_path)
    loop.run(batches(1))
    for each in loop.optimizers:
        with pytest.raises(ConfigError, match="outside the guard"):
            each.step()


def test_a_newer_guard_of_one_ends_the_older_guard(tmp_path):
    loop = Loop(tmp_path)
    Guard(loop.model, loop.optimizers[1], folder=tmp_path)
    with pytest.raises(ConfigError, match="a newer Guard"):
        loop.run(batches(1))


def test_schedulers_and_added_groups_work_as_before(tmp_path):
    data, plain, guarded = batches(8), Loop(None), Loop(tmp_path)
    ends = []
    for loop, run in ((plain, plain.run_plainly), (guarded, guarded.run)):
        extra = nn.Parameter(torch.ones(3))
        loop.model.register_parameter("extra", extra)
        usual = loop.loss
        loop.loss = lambda x, y, usual=usual, extra=extra: usual(x, y) + extra.square().sum()
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in loop.optimizers]
        run(data[:4])
        loop.optimizers[1].add_param_group({"params": [extra], "lr": 0.1})
        for each in schedules:
            each.step()
        run(data[4:])
        ends.append(loop.bits())
    assert same(*ends)
    assert not torch.equal(guarded.model.extra, torch.ones(3))


def test_several_are_proven_if_each_is():
    assert not why_unproven(SeveralOptimizers(adamw_and_sgd(Words())))
    for kind in (sparse_and_adamw, muon_and_adamw):
        optimizers = kind(Words())
        assert why_unproven(SeveralOptimizers(optimizers)) == why_unproven(optimizers[0]) != ""
        assert why_unproven(SeveralOptimizers(optimizers[::-1])) == why_unproven(optimizers[0])
    proven = SeveralOptimizers(adamw_and_sgd(Words()))
    note_largest_weight(proven, 1e18)
    assert "a weight of 1e+18" in why_unproven(proven)


def test_an_infinity_from_the_start_is_no_fault_of_an_update(tmp_path):
    loop = Loop(tmp_path, with_bare)
    loop.optimizers[1].best = torch.tensor(math.inf)
    loop.run(batches(2))
    assert loop.guard.last.applied


def test_a_hook_of_any_may_write_frozen_weights():
    model = Words()
    model.matrix.requires_grad_(False)
    several = SeveralOptimizers(with_bare(model))
    assert not any(each is model.matrix.weight for each in weights_of(model, several))
    several.optimizers[1].register_step_post_hook(lambda *_: None)
    assert any(each is model.matrix.weight for each in weights_of(model, several))


def test_a_spike_of_several_rates_is_explained_with_all_of_them(tmp_path):
    loop = Loop(tmp_path)
    loop.optimizers[1].param_groups[0]["lr"] = 3e-3
    loop.run(batches(80))
    usual = loop.loss
    loop.loss = lambda x, y: 1e4 * usual(x, y)
    loop.run(batches(1))
    assert loop.guard.skips["spike"] == 1
    assert "lower the learning rates to 0.0033, 0.001" in loop.guard.incidents[0].fix


def test_only_settings_that_all_have_are_known():
    groups = [{"lr": 1e-2, "eps": 1e-8, "betas": (0.9, 0.99)}, {"lr": 1e-3, "eps": 1e-8}]
    assert settings("", groups, clips=False, best_loss=1.0).values == {
        "optimizer.eps": 1e-8,
        "optimizer.lr": [0.01, 0.001],
    }
    assert settings("", groups[:1], clips=False, best_loss=1.0).values["optimizer.lr"] == 1e-2


def test_updates_of_all_take_turns_to_be_repeated():
    model = Words(sparse=False)
    optimizers = adamw_and_sgd(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    turns = [next_tensor(SeveralOptimizers(optimizers), turn) for turn in range(6)]
    held = [(id(each), id(p)) for each in optimizers for group in each.param_groups for p in group["params"]]
    assert [(id(optimizer), id(weight)) for _, weight, optimizer in turns] == held


def test_what_cannot_be_held_together_is_refused(tmp_path):
    model = Words()
    first, second = adamw_and_sgd(model)
    again = torch.optim.SGD(model.rest.parameters(), lr=0.1)
    for given, message in (
        ([first, second, again], r"rest\.0\.weight is in two of the optimizers: 4 parameters"),
        ([first, first], "in two of the optimizers"),
        (adamw_and_sgd(Words())[:1] * 2, "a parameter is in two of the optimizers"),
        ([first, torch.optim.LBFGS(model.matrix.parameters())], r"LBFGS\(\.\.\.\)\]\).*a guard of its own"),
        ([], "give at least one optimizer"),
    ):
        with pytest.raises(ConfigError, match=message):
            Guard(model, given, folder=tmp_path)
    assert Guard(model, [first], folder=tmp_path)._loop.optimizer is first, "a list of one is that one"


def test_an_attached_guard_takes_one(tmp_path, request):
    if request.config.getoption("--types"):
        pytest.skip("where types are checked, that check refuses it first")
    model = Words()
    with pytest.raises(ConfigError, match=r"Guard\.attach\(model, \[\.\.\.\]\): the loop steps one .* after the other"):
        Guard.attach(model, adamw_and_sgd(model), folder=tmp_path)
