"""The trace records every operation with its module and line, and changes nothing."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from stabletrain.forensics.trace.origin import find_origin
from stabletrain.forensics.trace.recorder import Trace, arguments_before
from stabletrain.stability.objective import CrossEntropy, ZLoss
from tests.monitors.watched import images, tiny_gpt, tiny_resnet, tokens

MODELS = {"gpt": (tiny_gpt, tokens), "resnet": (tiny_resnet, images)}
FORMATS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def step(model, batch, dtype, scale=1.0):
    """Forward, objective, backward."""
    torch.manual_seed(7)
    with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
        logits = model(batch.inputs)
    terms = CrossEntropy(ZLoss(1e-4))(logits, batch, torch.tensor(batch.targets.numel()))
    (terms.total * scale).backward()
    return terms.total.detach()


def bits(model):
    """Weights, buffers, gradients and the state of the random generator."""
    tensors = [*model.state_dict().values(), *[p.grad for p in model.parameters()], torch.get_rng_state()]
    return [tensor.clone() for tensor in tensors]


@pytest.mark.slow(unless=lambda kind, dtype: (kind, dtype) in (("gpt", "bf16"), ("resnet", "fp32")))
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_clean_step_has_no_accident_and_keeps_its_bits(kind, dtype):
    make, data = MODELS[kind]
    plain, watched, batch = make(), make(), data()
    loss = step(plain, batch, FORMATS[dtype], 256.0)
    with Trace(watched) as trace:
        seen = step(watched, batch, FORMATS[dtype], 256.0)
    assert torch.equal(loss, seen)
    assert all(torch.equal(a, b) for a, b in zip(bits(plain), bits(watched), strict=True))
    assert trace.accidents == []
    assert trace.ends == []
    assert find_origin(trace) is None
    assert trace.saw_leaves
    assert all(record.source for record in trace.records)
    assert {record.direction for record in trace.records} == {"forward", "backward"}


@pytest.mark.slow(unless=lambda kind: kind == "gpt")
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_with_accidents_keeps_its_bits_too(kind):
    make, data = MODELS[kind]
    plain, watched, batch = make(), make(), data()
    for model in (plain, watched):
        with torch.no_grad():
            next(model.parameters()).mul_(1e30)
        model.register_forward_hook(lambda module, inputs, output: F.dropout(output * 1e30, 0.5))
    step(plain, batch, None)
    with Trace(watched) as trace:
        step(watched, batch, None)
    assert trace.accidents
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(bits(plain), bits(watched), strict=True))
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(bits(plain), bits(watched), strict=True))


def test_a_trace_draws_no_random_numbers():
    def random_accident():
        torch.manual_seed(0)
        return torch.normal(torch.full((64,), 3.4e38), 1e38), torch.rand(3)

    model = nn.Identity()
    with Trace(model) as trace:
        watched = random_accident()
    plain = random_accident()
    assert [record.op for record in trace.accidents] == ["aten.normal"]
    assert trace.accidents[0].finding.why == "overflow"
    assert all(map(torch.equal, watched, plain))


def test_every_operation_is_attributed_to_its_module_and_line():
    model, batch = tiny_gpt(), tokens()
    with Trace(model) as trace:
        step(model, batch, None)
    modules = {name for name, _ in model.named_modules()} | {"objective"}
    assert {record.module for record in trace.records} <= modules
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in linears:
        products = [record.direction for record in trace.records if record.module == name and record.op == "aten.mm"]
        assert products == ["forward", "backward", "backward"], name
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            ops = [r.op for r in trace.records if r.module == name and "layer_norm" in r.op]
            assert ops == ["aten.native_layer_norm", "aten.native_layer_norm_backward"]
    losses = [record for record in trace.records if record.op in ("aten.nll_loss_forward", "aten.nll_loss_backward")]
    assert [record.module for record in losses] == ["objective"] * 2
    assert all("cross_entropy.py:" in record.source for record in losses)


def test_modules_keep_their_names_with_other_weights():
    model, batch = tiny_gpt(), tokens()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    with Trace(model) as trace:
        functional_call(model, weights, (batch.inputs,)).sum().backward()
    arrived = [r.module for r in trace.records if r.node == "torch::autograd::AccumulateGrad"]
    owners = {name.rpartition(".")[0] for name in weights}
    assert set(arrived) == owners
    assert all(p.grad is None for p in model.parameters())


class Views(nn.Module):
    """Writes into views, and uses functions, methods and its own parameter."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.inner = nn.Linear(3, 3)

    def twice(self, x):
        return F.relu(x * 2)

    def forward(self, x):
        x = self.inner(x) * self.gain
        x[0].mul_(3)
        x[:, 1] = 5.0
        y = torch.ones(3) + 1
        return self.twice(x).t() @ x + y


def test_backward_lines_are_the_forward_lines_of_each_node():
    model = Views()
    with Trace(model) as trace:
        model(torch.randn(4, 3)).sum().backward()
    first = Views.forward.__code__.co_firstlineno
    at = {
        "MulBackward0": {first + 1, Views.twice.__code__.co_firstlineno + 1},
        "torch::autograd::CopySlices": {first + 2, first + 3},
        "ReluBackward0": {Views.twice.__code__.co_firstlineno + 1},
        "MmBackward0": {first + 5},
    }
    for node, expected in at.items():
        records = [record for record in trace.records if record.node == node]
        assert {int(record.source.rpartition(":")[2]) for record in records} == expected, node
        assert {record.module for record in records} == {""}, node
    assert {record.module for record in trace.records if record.node == "AddmmBackward0"} == {"inner"}
    leaves = [record.module for record in trace.records if record.node == "torch::autograd::AccumulateGrad"]
    assert sorted(leaves) == ["", "inner", "inner"]


class Twice(nn.Module):
    """A block with activation checkpointing."""

    def __init__(self, reentrant):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointings_second_forward_is_forward(reentrant):
    model = Twice(reentrant)
    with Trace(model) as trace:
        model(torch.randn(4, 3, requires_grad=True)).sum().backward()
    tanh = [record for record in trace.records if "tanh" in record.op]
    assert [record.op for record in tanh] == ["aten.tanh", "aten.tanh", "aten.tanh_backward"]
    assert [record.direction for record in tanh] == ["forward", "forward", "backward"]
    assert [record.recomputed for record in tanh] == [False, True, False]
    assert {record.module for record in tanh} == {"block.1"}
    products = [record for record in trace.records if record.node == "AddmmBackward0" and record.op == "aten.mm"]
    assert {record.module for record in products} == {"block.0"}


def test_each_input_knows_the_record_that_wrote_it():
    model, inputs = Views(), torch.randn(4, 3)
    with Trace(model) as trace:
        model(inputs)
    product = next(record for record in trace.records if record.op == "aten.mm")
    relu, written = [trace.records[writer].op for writer in product.writers]
    assert (relu, written) == ("aten.relu", "aten.fill_")
    first = next(record for record in trace.records if record.op == "aten.addmm")
    assert first.writers == (None, None, None)


def test_parts_are_counted_by_backward_passes():
    model = Views()
    with Trace(model) as trace:
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
    parts = [record.part for record in trace.records]
    assert sorted(set(parts)) == [0, 1, 2]
    assert parts == sorted(parts)
    assert len({parts.count(part) for part in (1, 2)}) == 1


def test_a_trace_keeps_no_tensor_alive():
    model = copy.deepcopy(tiny_gpt())
    with Trace(model) as trace:
        step(model, tokens(), torch.bfloat16)

    def held(value):
        if isinstance(value, tuple | list | frozenset):
            return any(map(held, value))
        return isinstance(value, torch.Tensor)

    assert not any(held(getattr(record, name)) for record in trace.records for name in record.__slots__)


def test_a_sparse_gradient_is_traced():
    model = nn.Embedding(5, 3, sparse=True)
    with Trace(model) as trace:
        model(torch.tensor([1, 2])).sum().backward()
    assert model.weight.grad.is_sparse
    assert find_origin(trace) is None


def test_arguments_that_an_operation_modifies_are_copied_also_in_lists_and_no_others():
    written, read = torch.ones(3), torch.ones(3)
    call = torch.ops.aten._foreach_add_.List
    (first, second), _ = arguments_before(call, ([written], [read]), {})
    call([written], [read])
    assert torch.equal(first[0], torch.ones(3))
    assert second[0] is read
