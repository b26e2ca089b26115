"""The head's product over a padded vocabulary: faster shapes, and the same logits, gradients and names."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from stabletrain.forensics.trace.origin import find_origin
from stabletrain.forensics.trace.recorder import Trace
from stabletrain.models.head import ROWS_MULTIPLE, Head, TiedHead, weight_for_product
from stabletrain.stability.objective import CrossEntropy, ZLoss
from stabletrain.stability.objective.chunked_loss import ChunkedLoss
from stabletrain.stability.precision.autocast import Unscaled
from stabletrain.stability.precision.bf16_weights import layers_to_store, store_in_bf16
from tests.stability.objective.test_chunked_loss import VOCAB, Run, chunk_example, gpt, gradients

HALF = [torch.bfloat16, torch.float16]


class Products(TorchDispatchMode):
    """Records the shapes of the operands of every matrix product, and of every tensor that has -inf in it."""

    def __init__(self):
        super().__init__()
        self.shapes, self.infinite = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0] in ("mm", "bmm", "addmm"):
            self.shapes += [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
        if isinstance(made, torch.Tensor) and made.is_floating_point() and not torch.isfinite(made).all():
            self.infinite.append(func.__name__)
        return made


def stepped(model, context):
    inputs, targets = chunk_example()
    with Products() as seen:
        with context:
            logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}, seen


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("dtype", HALF)
def test_every_product_with_the_vocabulary_runs_over_a_multiple_of_64(tied, dtype):
    """Forward, the gradient of the features, and the gradient of the weight."""
    logits, gradients, seen = stepped(gpt(tied), torch.autocast("cpu", dtype))
    odd = [shape for shape in seen.shapes if VOCAB in shape]
    padded = [shape for shape in seen.shapes if ROWS_MULTIPLE in shape]
    assert not odd
    assert len(padded) >= 3
    assert logits.shape[-1] == VOCAB
    assert gradients["embedding.weight"].shape[0] == VOCAB
    assert not seen.infinite, "the padding is cut off, not -inf: a trace of non-finite values would blame the head"


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_logits_and_gradients_are_those_of_the_rows_of_the_vocabulary(tied):
    model = gpt(tied)
    exact = copy.deepcopy(model)
    name = "embedding.weight" if tied else "head.weight"
    assert {key: value.shape for key, value in model.state_dict().items()}[name] == (VOCAB, 8)
    features = torch.randn(5, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    given = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(4)).bfloat16()
    weight = model.classifier().weight
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.logits(features)
    logits.backward(given)
    cast = exact.classifier().weight.detach().bfloat16()
    assert torch.equal(logits, features @ cast.T)
    assert torch.equal(weight.grad, (given.T @ features).float()), "in fp32, from the product in bf16"


@pytest.mark.parametrize("context", [nullcontext(), torch.autocast("cpu", enabled=False)])
def test_nothing_is_padded_or_copied_in_fp32(context):
    head = Head(8, VOCAB)
    with context:
        assert weight_for_product(head.weight) is head.weight
    wide = Head(8, VOCAB).double()
    with torch.autocast("cpu", torch.bfloat16):
        assert weight_for_product(wide.weight) is wide.weight


def test_a_vocabulary_that_is_a_multiple_is_only_cast():
    head = Head(8, 2 * ROWS_MULTIPLE)
    features = torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert weight_for_product(head.weight).shape == head.weight.shape
        assert torch.equal(head(features), F.linear(features, head.weight))


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_a_head_kept_in_fp32_is_not_padded(tied):
    model = gpt(tied)
    precision = Unscaled("bf16", torch.device("cpu"), torch.bfloat16, fp32_modules=["head"])
    assert precision.wrap_fp32_modules(model) == ["head"]
    with precision.autocast():
        assert model.head_weight() is model.classifier().weight
        assert model(chunk_example()[0]).dtype == torch.float32
    assert isinstance(model.head, TiedHead if tied else Head)


@pytest.mark.slow(unless=lambda tied, dtype: tied == (dtype is HALF[0]))
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("dtype", HALF)
def test_a_trace_names_the_head_whose_product_overflows(tied, dtype):
    """Half precision, an odd vocabulary: the operations around the product are the head's too."""
    model = gpt(tied)
    inputs, targets = chunk_example()
    with torch.no_grad():  # finite in both formats; the logits are not
        model.norm.weight.fill_(6e3 if dtype == torch.float16 else 1e30)
        model.classifier().weight[5] = torch.arange(1.0, 9.0) * (1e3 if dtype == torch.float16 else 1e12)
    with Trace(model) as trace:
        with torch.autocast("cpu", dtype):
            logits = model(inputs)
        F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
    origin = find_origin(trace)
    assert (origin.module, origin.op, origin.direction) == ("head", "aten.mm", "forward")


def test_a_head_stored_in_bf16_gives_the_bits_of_one_that_is_cast():
    plain, stored = CrossEntropy(ZLoss(1e-2)), gpt()
    _, wanted = gradients(Run(gpt(), lambda: torch.autocast("cpu", torch.bfloat16)), plain)
    assert any(weight is stored.head.weight for weight in store_in_bf16(layers_to_store(stored), "cpu"))
    _, found = gradients(Run(stored, lambda: torch.autocast("cpu", torch.bfloat16)), plain)
    assert found["head.weight"].dtype == torch.bfloat16
    assert all(torch.equal(found[name].float(), right) for name, right in wanted.items())
    for autocast in (lambda: torch.autocast("cpu", torch.bfloat16), nullcontext):  # the fp32 replay has no autocast
        _, whole = gradients(Run(stored, autocast), plain)
        _, found = gradients(Run(stored, autocast), ChunkedLoss(plain, 4, VOCAB))
        for name, right in whole.items():
            assert (found[name] - right).float().norm() < 0.02 * right.float().norm()
