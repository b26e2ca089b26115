"""The finite faults of `tests/reliability/finite`: each changes what it says, and nothing else."""

import pytest
import torch
from torch import nn

from stabletrain.records import Batch, TrainState
from tests.reliability.finite import kinds
from tests.reliability.finite.arithmetic import Output, Update
from tests.reliability.finite.cases import Case, clean, faulty
from tests.reliability.finite.inject import Finite
from tests.reliability.finite.memory import Flip, Permuted
from tests.reliability.finite.record import record
from tests.reliability.finite.subject import Bits, Subject

MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.enable_grad()
def trained(dtype=torch.float32):
    """A small model of all kinds of layers, after two updates, with gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 8))
    model = model.to(dtype)
    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
    for _ in range(2):
        step(state)
    return state


@torch.enable_grad()
def step(state, inputs=None):
    state.optimizer.zero_grad()
    inputs = torch.randn(16, 8) if inputs is None else inputs
    state.model(inputs.to(state.model[0].weight.dtype)).square().sum().backward()
    state.optimizer.step()
    state.executed_steps += 1


def everything(state):
    """Copies of weights, moments, buffers and gradients, by what they are."""
    found = {f"weight {name}": each for name, each in state.model.named_parameters()}
    found |= {f"gradient {name}": each.grad for name, each in state.model.named_parameters()}
    found |= {f"buffer {name}": each for name, each in state.model.named_buffers()}
    for number, kept in enumerate(state.optimizer.state.values()):
        found |= {f"moment {number} {name}": kept[name] for name in MOMENTS}
    return {name: each.detach().clone() for name, each in found.items()}


def changed(before, after):
    return {name for name, each in before.items() if not torch.equal(each, after[name])}


def of_fault(name):
    """What a fault of memory may change."""
    if "moment" in name:
        return "moment"
    return "buffer" if "buffer" in name else "weight"


@pytest.mark.parametrize("name", kinds.MEMORY)
@torch.no_grad()
def test_a_fault_of_memory_changes_only_what_it_names(name):
    state, fault = trained(), kinds.MEMORY[name].fault
    subject = Subject(state, seed=1)
    fault.remember(subject)
    step(state)
    if frozen := "frozen" in name:
        fault.state(subject, 0)
        step(state)  # this update is what does not arrive
    before = everything(state)
    fault.state(subject, int(frozen))
    after = everything(state)
    found = changed(before, after)
    assert found
    assert {each.split()[0] for each in found} == {of_fault(name)}
    assert all(each.isfinite().all() for each in after.values())
    if "weights_x" not in name and of_fault(name) == "weight":
        assert len(found) == (2 if "exchanged" in name else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_flips_change_exactly_their_bits(dtype):
    state = trained(dtype)
    subject = Subject(state, 0)
    before = subject.matrix().data.clone()
    Flip("weight", (18, 22, 25), elements=1).state(subject, 0)
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    now = subject.matrix().data
    difference = (before.view(whole) ^ now.view(whole)).to(torch.int64)
    shift = 0 if dtype == torch.float32 else 16
    assert difference.sum().item() == sum(1 << (bit - shift) for bit in (18, 22, 25))
    Flip("weight", (31,)).state(subject, 0)
    assert (before.sign() != now.sign()).sum() == 1  # the highest bit is the sign


@pytest.mark.parametrize("dim", [0, 1])
@torch.no_grad()
def test_a_permutation_keeps_rows_or_columns(dim):
    subject = Subject(trained(), 0)
    before = subject.matrix().data.clone()
    Permuted(dim).state(subject, 0)
    assert not torch.equal(before, subject.matrix())
    rows = {tuple(row) for row in before.movedim(dim, 0).tolist()}
    assert rows == {tuple(row) for row in subject.matrix().movedim(dim, 0).tolist()}


@pytest.mark.parametrize("name", [name for name in kinds.KINDS if name.startswith("gradient")])
@torch.no_grad()
def test_a_fault_of_gradients_changes_only_gradients(name):
    state, fault = trained(), kinds.KINDS[name].fault
    subject = Subject(state, 0)
    fault.gradients(subject, 0)
    step(state)
    before = everything(state)
    fault.gradients(subject, 1)
    found = changed(before, everything(state))
    assert found
    assert {each.split()[0] for each in found} == {"gradient"}
    if "layer" in name or "bit" in name:
        assert len(found) == 1


@pytest.mark.parametrize("damage", ["element", "tile", "row", "scaled"])
def test_a_wrong_output_is_right_the_second_time(damage):
    state = trained()
    inputs, model = torch.randn(16, 8), state.model.eval()
    right = model(inputs)
    hooks = Output(damage).hooks(Subject(state, 0), 0)
    with torch.no_grad():  # evaluations are right
        assert torch.equal(model(inputs), right)
    assert not torch.equal(model(inputs), right)
    assert torch.equal(model(inputs), right)
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("factor", [0.0, 2.0, -1.0])
def test_an_update_is_lost_doubled_or_turned(factor):
    state, twin = trained(), trained()
    before = Subject(state, 0).matrix().detach().clone()
    inputs = torch.randn(16, 8)
    with Update(factor).update(Subject(state, 0), 0):
        step(state, inputs)
    step(twin, inputs)
    update = Subject(twin, 0).matrix().detach() - before
    torch.testing.assert_close(Subject(state, 0).matrix().detach() - before, factor * update)


class Data:
    """Four classes."""

    num_classes = 4

    def batch(self, step, size, split):
        generator = torch.Generator().manual_seed(step)
        return Batch(torch.randn(size, 1, 8, 8, generator=generator), torch.randint(4, (size,), generator=generator))


class Words:
    """Four tokens."""

    vocab_size = 4

    def batch(self, step, size, split):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(4, (size, 9), generator=generator)
        return Batch(tokens[:, :-1], tokens[:, 1:])


OF_DATA = [name for name in kinds.TRAINING if name.startswith(("labels", "inputs", "batch", "rows"))]


@pytest.mark.parametrize("data", [Data(), Words()], ids=["images", "words"])
@pytest.mark.parametrize("name", OF_DATA)
def test_a_fault_of_data_changes_planned_training_batches_only(name, data):
    spoilt = Finite(name, at=5).data(data)
    assert torch.equal(spoilt.batch(5, 16, "val").targets, data.batch(5, 16, "val").targets)
    outside, planned, right = spoilt.batch(4, 16, "train"), spoilt.batch(5, 16, "train"), data.batch(5, 16, "train")
    assert torch.equal(outside.inputs, data.batch(4, 16, "train").inputs)
    same = (torch.equal(planned.inputs, right.inputs), torch.equal(planned.targets, right.targets))
    assert same == {"labels": (True, False), "inputs": (False, True)}.get(name.partition("_")[0], (False, False))
    assert 0 <= planned.targets.min() <= planned.targets.max() < 4
    assert torch.equal(planned.inputs, spoilt.batch(5, 16, "train").inputs)  # a position is read again as it was


@pytest.mark.parametrize("name", ["lr_x10", "weight_decay_x1000", "beta2_0.5", "eps_0.1"])
def test_wrong_settings_are_put_back_after_the_update(name):
    state, fault = trained(), kinds.TRAINING[name].fault
    before = [dict(group) for group in state.optimizer.param_groups]
    with fault.update(Subject(state, 0), 0):
        assert state.optimizer.param_groups != before
    assert [dict(group) for group in state.optimizer.param_groups] == before


@pytest.mark.parametrize("seed", [0, 1])
def test_a_fault_of_memory_comes_before_the_forward_pass_or_after_the_backward_pass(seed):
    state = trained()
    Finite("weights_x2", at=2, seed=seed).state(state, None)
    weight = state.model[0].weight
    before = weight.detach().clone()
    state.optimizer.zero_grad()
    assert torch.equal(weight, 2 * before if seed == 0 else before)
    state.model(torch.randn(16, 8)).square().sum().backward()
    assert torch.equal(weight, 2 * before)


def test_the_campaign_is_as_large_as_it_says():
    runs = faulty()
    assert len({case.kind for case in runs}) >= 30
    assert {(case.model, case.precision, case.seed) for case in runs} == {
        (model, precision, seed)
        for model in ("gpt", "resnet")
        for precision in ("fp32", "bf16", "bf16_params")
        for seed in (3, 4, 5)
    }
    assert len({case.name for case in [*runs, *clean()]}) == len(runs) + 200


@pytest.mark.slow
def test_a_faulty_run_equals_its_partner_until_the_fault():
    case = Case("faulty", "resnet", "fp32", 1, "rows_permuted")
    damaged, right = record(case), record(case.partner)
    for name, values in damaged["series"].items():
        assert values[: case.at] == right["series"][name][: case.at]
    assert damaged["series"]["loss"][case.at + 1 :] != right["series"]["loss"][case.at + 1 :]
    assert damaged["digest"] != right["digest"]
    assert len(damaged["series"]["update"]) == 240


@torch.no_grad()
def test_flips_reach_tensors_of_any_strides():
    tensor = torch.ones(4, 3, 2).transpose(0, 2)  # as gradients of convolutions can be
    before = tensor.clone()
    Bits(tensor).flip_(7, 31)
    assert (tensor != before).sum() == 1
    assert tensor.flatten()[7] == -1
