"""Copies of the model that are no longer the same: a bit that flips on one rank is noticed before anything is saved."""

import copy
import hashlib
import json
import math
from contextlib import nullcontext

import pytest
import torch

from stabletrain.errors import ConfigError
from stabletrain.parallel import ddp as ddp_module
from stabletrain.parallel.ddp import DDP, checksums, describe
from stabletrain.parallel.ranks import Ranks
from stabletrain.records import IGNORE_INDEX, Batch, GradNorms, OwnNumbers, RankPart, TrainState
from stabletrain.stability.objective import CrossEntropy
from stabletrain.tracking.metrics import read_jsonl
from tests.parallel.launches import performed
from tests.runs import TINY_GPT, TINY_RESNET

pytestmark = pytest.mark.timeout(600)

QUICK = ["forensics=off", "monitors=none", "log_every=1", "precision=fp32", "schedule=constant", "warmup=none"]
GPT = [*TINY_GPT, *QUICK, "model.dropout=0.1", "steps=10", "checkpoint.every=4", "eval_every=8"]
ROLLBACK = ["guard.snapshot_every=5", "guard.healthy_after=2"]
FLIP = ["faults=bitflip", "faults.at=[6]", "faults.rank=1", "faults.bit=12"]
"""A bit of the mantissa: too small to show in the loss or the gradient norm."""
RESNET = [*TINY_RESNET, *QUICK, "model.depth=8", "guard.snapshot_every=2", "guard.healthy_after=1"]

CASES = {
    "whole": [*GPT, *ROLLBACK],
    "weight": [*GPT, *ROLLBACK, *FLIP],
    "moment": [*GPT, *ROLLBACK, *FLIP, "faults.where=exp_avg_sq"],
    "skip": [*GPT, *FLIP, "guard=skip"],
    "off": [*GPT, *FLIP, "guard=off"],
    "unseen": [*GPT, *ROLLBACK, *FLIP, "parallel.compare=false"],
    "again_and_again": [*GPT, *ROLLBACK, *FLIP, "faults.at=[6,9,12,15]", "guard.max_rollbacks=1", "steps=16"],
    "resnet": [*RESNET, "steps=6", "eval_every=3", *FLIP, "faults.at=[3]"],
    "nan_statistic": [*RESNET, "steps=16", "eval_every=8", "guard.patience=4"],
}


@pytest.fixture(scope="module")
def place(shared_place):
    return shared_place / "replicas"


@pytest.fixture(scope="module")
def two(place):
    cases = {name: {"overrides": [*chosen, "parallel=ddp"]} for name, chosen in CASES.items()}
    cases["nan_statistic"]["poke"] = [7, 1]  # between two states that are put by, in BatchNorm's running mean
    return performed(place, 2, cases)


def events(folder, kind):
    return [event for event in read_jsonl(folder / "events.jsonl") if event["event"] == kind]


@pytest.mark.beside
@pytest.mark.slow
@pytest.mark.parametrize("name", ["weight", "moment"])
def test_a_flipped_bit_of_one_rank_is_undone_and_the_run_ends_as_if_it_had_not_been(two, place, name):
    for seen in two:
        assert seen[name]["error"] is None, seen[name]["message"]
        assert seen[name]["weights"] == seen["whole"]["weights"]
        assert seen[name]["val"] == seen["whole"]["val"]
        assert (seen[name]["rollbacks"], seen[name]["machine_faults"]) == (0, 1)
    (event,) = events(place / name, "divergence")
    assert event["step"] == 8, "before the first state that would have been saved"
    assert "the ranks no longer have the same state: " in event["reason"]
    (back,) = events(place / name, "restore")
    assert (back["to"], back["loaded"]) == (8, 5), "replayed from the newest snapshot"


@pytest.mark.beside
@pytest.mark.slow
def test_a_resnet_goes_back_too(two):
    for seen in two:
        assert seen["resnet"]["error"] is None, seen["resnet"]["message"]
        assert (seen["resnet"]["rollbacks"], seen["resnet"]["machine_faults"]) == (0, 1)
    assert two[0]["resnet"]["weights"] == two[1]["resnet"]["weights"]


@pytest.mark.slow
def test_a_statistic_of_one_rank_that_is_nan_does_not_stay(two):
    for seen in two:
        found = seen["nan_statistic"]
        assert found["error"] is None, found["message"]
        assert (found["rollbacks"], found["machine_faults"]) == (0, 1)
        assert found["readings"][-1]["applied"]
        assert math.isfinite(found["readings"][-1]["buffers"])
    for field in ("weights", "verdicts", "val"):
        assert two[0]["nan_statistic"][field] == two[1]["nan_statistic"][field], field


@pytest.mark.beside
@pytest.mark.slow
def test_without_snapshots_the_run_halts_and_what_is_saved_is_from_before(two, place):
    for seen in two:
        assert seen["skip"]["error"] == "TrainingHalted"
        assert seen["skip"]["message"].startswith("step 8: the ranks no longer have the same state: ")
        assert "resume=auto continues from the last checkpoint" in seen["skip"]["message"]
    assert [path.name for path in (place / "skip" / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert json.loads((place / "skip" / "run.json").read_text())["status"] == "halted"


@pytest.mark.beside
@pytest.mark.slow
def test_guard_off_tells_and_goes_on(two, place):
    assert two[0]["off"]["error"] is None
    assert two[0]["off"]["weights"] != two[1]["off"]["weights"]
    assert events(place / "off", "divergence")


@pytest.mark.beside
@pytest.mark.slow
def test_ranks_that_do_not_compare_see_nothing(two, place):
    assert two[0]["unseen"]["weights"] != two[1]["unseen"]["weights"], "or the fault would be none"
    assert two[0]["unseen"]["readings"] == two[1]["unseen"]["readings"], "no number of a step shows it"
    assert not events(place / "unseen", "divergence")


@pytest.mark.beside
@pytest.mark.slow
def test_a_rank_that_keeps_erring_halts_the_run(two):
    for seen in two:
        assert seen["again_and_again"]["error"] == "TrainingHalted"
        assert "guard.max_rollbacks=1 times without progress" in seen["again_and_again"]["message"]


def test_every_bit_of_every_tensor_counts():
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
    model[0].weight.data = model[0].weight.data.bfloat16()
    optimizer = torch.optim.AdamW([model[0].bias, *model[1].parameters()])
    model[1].weight.grad = torch.ones(3)
    optimizer.step()
    state = TrainState(model, optimizer)
    before = checksums(state)
    assert {"0.weight", "1.running_var", "exp_avg of 1.weight", "step of 1.weight"} <= before.keys()
    for tensor in [*model.parameters(), model[1].running_mean, *optimizer.state[model[1].weight].values()]:
        whole = tensor.detach().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
        last, before_it = (-1,) * whole.ndim, whole.clone()
        for bit in range(8 * tensor.element_size() - 1):
            whole[last] ^= 1 << bit
            assert sum(checksums(state)[name] != before[name] for name in before) == 1
            whole.copy_(before_it)
    assert checksums(state) == before


def test_a_state_that_is_another_on_one_rank_is_told_unless_nobody_compares(monkeypatch):
    """The others' hashes and sums, as they would be told: on rank 1 those of a state of which one bit is another."""
    model = torch.nn.Linear(2, 2)
    state, other = TrainState(model, torch.optim.SGD(model.parameters())), copy.deepcopy(model)
    other.bias.data.view(torch.int32)[0] ^= 1 << 3
    there = checksums(TrainState(other, torch.optim.SGD(other.parameters())))

    def told(mine):
        theirs = there if isinstance(mine, dict) else hashlib.sha256(repr(there).encode()).hexdigest()
        return [mine, theirs, mine]

    monkeypatch.setattr("stabletrain.parallel.ddp.all_gather_object", told)
    said = "rank 1 no longer has the state of the other ranks: 'bias' differs"
    assert DDP(Ranks(0, 3, 0, launched=True)).find_divergence(state) == said
    assert DDP(Ranks(0, 3, 0, launched=True), compare=False).find_divergence(state) == ""
    monkeypatch.setattr("stabletrain.parallel.ddp.all_gather_object", lambda mine: [mine] * 3)
    assert DDP(Ranks(0, 3, 0, launched=True)).find_divergence(state) == ""


def test_gradients_of_all_micro_batches_but_the_last_are_not_exchanged(group_of_one, monkeypatch):
    model, ddp, met = torch.nn.Linear(2, 1), DDP(group_of_one), []
    ddp.wrap(model)
    wrapped = ddp.wrapped(model)
    monkeypatch.setattr(ddp_module, "allreduce_hook", lambda group, bucket: met.append(1) or reduced(bucket))
    for last in (False, True):
        with ddp.gradient_sync(model, last):
            wrapped(torch.ones(3, 2)).sum().backward()
        assert len(met) == last
    assert torch.equal(model.weight.grad, torch.full((1, 2), 6.0)), "and those of both add up"


def test_a_rank_measures_its_own_gradients_before_they_are_averaged(group_of_one, monkeypatch):
    """Of all micro-batches together; the step's own numbers are those after averaging."""
    model, ddp = torch.nn.Linear(2, 1, bias=False), DDP(Ranks(0, 4, 0, launched=True))
    ddp.wrap(model)
    wrapped = ddp.wrapped(model)
    monkeypatch.setattr(ddp_module, "allreduce_hook", lambda group, bucket: reduced(bucket, 100.0))
    for last in (False, True):
        with ddp.gradient_sync(model, last):
            ddp.scale_for_averaging(wrapped(torch.tensor([[3.0, 4.0]])).sum()).backward()
    assert model.weight.grad.tolist() == [[100.0, 100.0]]
    assert model.weight.grad._is_view(), "the gradient lies in the bucket that was reduced: there is no second copy"
    norms = GradNorms(torch.tensor(9.0), torch.tensor([9.0]))
    own = ddp.own_grad_norm(norms)
    assert own == 4 * 2 * 5, "four ranks, two micro-batches, a gradient of [3, 4] each"
    assert ddp.own_grad_norm(norms) == 0, "a step without a backward pass has no gradient"
    batch = Batch(torch.zeros(4, 1), torch.tensor([1, 1, IGNORE_INDEX, 1]), counted=12)
    part = ddp.rank_part(OwnNumbers(torch.tensor(0.5), own), CrossEntropy().own_factor(batch), 8.0)
    assert part == RankPart(0, 2.0, 5.0), "40 / 4 ranks / a loss scale of 8, and 4 times fewer targets than the batch"
    assert ddp.rank_part(None, CrossEntropy().own_factor(batch), 8.0) is None


def reduced(bucket, value=None):
    """A bucket of gradients, as all ranks' would come back."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer() if value is None else torch.full_like(bucket.buffer(), value))
    return future


class WithSpare(torch.nn.Module):
    """Two layers, of which a forward pass leaves one out."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("finds", [False, True])
def test_a_parameter_that_a_step_leaves_out_is_named_unless_ddp_looks_for_such(group_of_one, finds):
    model, ddp = WithSpare(), DDP(group_of_one, find_unused_parameters=finds)
    ddp.wrap(model)
    named = pytest.raises(ConfigError, match="'spare.weight' got no gradient in a step")
    with nullcontext() if finds else named, ddp.gradient_sync(model, last=True):
        ddp.wrapped(model)(torch.ones(3, 2)).sum().backward()


def test_weights_that_others_stand_in_for_are_refused():
    ddp = DDP(Ranks(0, 2, 0, launched=True))
    ddp.check({"precision": "bf16"})
    with pytest.raises(ConfigError, match="precision=bf16_params trains in one process only: use precision=bf16"):
        ddp.check({"precision": "bf16_params"})


def test_the_norm_is_the_largest_that_a_rank_has_found_and_nan_if_one_is():
    ddp, mine = DDP(Ranks(0, 2, 0, launched=True)), GradNorms(torch.tensor(3.0), torch.tensor([3.0]))
    assert ddp.gradient_row(mine).tolist() == [3.0]
    found = ddp.norms_from_rows(mine, torch.tensor([[3.0], [5.0]]))
    assert (found.total.item(), found.each.tolist()) == (5.0, [3.0])
    assert ddp.norms_from_rows(mine, torch.tensor([[3.0], [math.nan]])).total.isnan()


def test_the_rank_that_differs_from_most_is_named():
    right, wrong = {"a": 1, "b": 2}, {"a": 1, "b": 3}
    assert describe("xxyx", [right, right, wrong, right]) == (
        "rank 2 no longer has the state of the other ranks: 'b' differs"
    )
    assert describe("yxxxz", [wrong, right, right, right, {"a": 0, "b": 0}]) == (
        "ranks 0, 4 no longer have the state of the other ranks: 'a' and 1 more of its tensors differ"
    )
    assert describe("xy", [right, wrong]) == (
        "the ranks no longer have the same state: 'b' differs, and no majority of them says which is right"
    )
