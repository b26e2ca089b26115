"""Explains a non-finite result by computing the operation again in wider formats, on the same inputs."""

import math

import pytest
import torch
from torch import Tensor, nn

from stabletrain.forensics.trace.arithmetic import explain_nonfinite, forward_name, recompute, widened

aten = torch.ops.aten
INF = math.inf


def explained(func, *args, node=""):
    """The explanation of an operation on these arguments."""
    out = func(*args)
    return explain_nonfinite(func, args, {}, 0, out[0] if isinstance(out, tuple) else out, node)


def fp16(*values):
    return torch.tensor(values, dtype=torch.float16)


def test_an_overflow_is_explained_with_the_value_it_should_have_been():
    found = explained(aten.mul.Tensor, fp16(300.0, 1.0), fp16(400.0, 2.0))
    assert found.why == "overflow"
    assert found.reason == (
        "overflow of fp16: inputs up to 300 and 400 give 1.2e+05, 1.83 times the largest fp16 number (65504)"
    )
    assert found.should_have_been == found.in_fp32 == 120_000.0


def test_a_value_beyond_fp32_is_finite_only_in_fp64():
    found = explained(aten.mul.Tensor, torch.tensor([1e38]), torch.tensor([5.0]))
    assert found.why == "overflow"
    assert "overflow of fp32" in found.reason
    assert found.should_have_been == pytest.approx(5e38, rel=1e-6)
    assert found.in_fp32 == INF


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (
            100.0,
            "exp overflows fp32: inputs up to 100 give 2.688e+43, 7.9e+04 times the largest fp32 number (3.40282e+38)",
        ),
        (1000.0, "exp of 1000 overflows every format"),
    ],
)
def test_exp_overflows_its_own_format_or_every_format(x, reason):
    found = explained(aten.exp.default, torch.tensor([x]))
    assert (found.why, found.reason) == ("exp_overflow", reason)


def test_an_intermediate_value_overflows_although_the_format_can_hold_the_result():
    x = fp16(40000.0, 40000.0, -40000.0)
    found = explain_nonfinite(aten.sum.dim_IntList, (x, [0]), {}, 0, fp16(INF), "")
    assert found.why == "overflow"
    assert found.reason == (
        "overflow of fp16 inside sum: inputs up to 4e+04 give 4e+04, which fp16 can hold, but an intermediate value "
        "cannot be held"
    )


def test_an_undefined_result_does_not_depend_on_the_format():
    found = explained(aten.log.default, fp16(0.0, 1.0))
    assert (found.why, found.reason) == ("log_of_zero", "log of 0 (1 of 2 values)")
    assert found.should_have_been == found.in_fp32 == INF


def test_without_a_rule_the_reason_gives_inputs_and_output():
    found = explained(aten.tanh.default, torch.tensor([math.nan]))
    assert found.why == "unknown"
    assert found.reason == "produced NaN from inputs up to nan; fp64 gives no finite result either"
    shifted = explain_nonfinite(aten.bitwise_not.default, (torch.tensor([1.5]),), {}, 0, torch.tensor([INF]), "")
    assert shifted.reason == "produced Inf from inputs up to 1.5; it has no fp64 kernel to compare with"
    assert shifted.should_have_been is None


def test_a_backward_operation_is_named_by_the_forward_one():
    found = explained(aten.div.Tensor, torch.tensor([1.0]), torch.tensor([0.0]), node="SqrtBackward0")
    assert found.reason == (
        "division by 0 (1 of 1 values): the derivative has no finite value there, in the backward of sqrt"
    )


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("SqrtBackward0", "sqrt"),
        ("NllLossBackward0", "nll_loss"),
        ("torch::autograd::PowBackward1", "pow"),
        ("MineBackward", "Mine"),
        ("torch::autograd::AccumulateGrad", "AccumulateGrad"),
    ],
)
def test_a_node_is_named_after_its_function(node, name):
    assert forward_name(node) == name


def test_the_node_of_a_users_function_is_named_after_its_class():
    class TakesRoots(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    x = nn.Parameter(torch.ones(1))
    assert forward_name(TakesRoots.apply(x).grad_fn.name()) == "TakesRoots"
    assert forward_name(x.sqrt().grad_fn.name()) == "sqrt"


def test_computing_an_operation_again_leaves_the_random_generator_unchanged():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert recompute(aten.bernoulli.p, (torch.ones(50), 0.5), {}, 0, torch.float64) == 1.0
    assert torch.equal(torch.rand(3), expected)


def test_the_requested_one_of_several_results_is_computed_again():
    halves = (torch.tensor([1.0, -7.0]), 1)
    found = [recompute(aten.split.Tensor, halves, {}, place, torch.float64) for place in range(3)]
    assert found == [1.0, 7.0, None], "split gives only two results"


def test_arguments_are_copied_in_the_wider_format_and_integers_keep_theirs():
    x, index = fp16(1.5), torch.tensor([3])
    found = widened([x, index, torch.float16, torch.int32, 2.5, None], "", torch.float64)
    assert [each.dtype if isinstance(each, Tensor) else each for each in found] == [
        *(torch.float64, torch.int64, torch.float64, torch.int32, 2.5, None)
    ]
    found[0].zero_()
    assert x.item() == 1.5
    assert widened(torch.ones(1, dtype=torch.complex64), "", torch.float32).dtype == torch.complex128
    assert widened(True, "half_to_float", torch.float32) is False
