"""Checks each rule for non-finite results against the operation itself, and on inputs to which it does not apply."""

import math

import pytest
import torch

from stabletrain.forensics.diagnosis.wording import FIXES
from stabletrain.forensics.trace.nonfinite_rules import RULES, inf_minus_inf, why

aten = torch.ops.aten
F64 = torch.float64
INF, NAN = math.inf, math.nan


def t(*values):
    return torch.tensor(values, dtype=F64)


CTC = torch.full((2, 2, 3), 1 / 3, dtype=F64).log()
"""Log-probabilities of 2 frames, 2 samples and 3 letters."""

UNDEFINED = {
    "log 0": (aten.log.default, (t(0.0, 1.0),), "log_of_zero", "log of 0 (1 of 2 values)"),
    "log -": (aten.log2.default, (t(-3.0, 0.0),), "log_of_negative",
              "log of a negative number (1 of 2 values, minimum -3)"),
    "log1p": (aten.log1p.default, (t(-1.0),), "log_of_zero", "log of 0 (1 of 1 values)"),
    "xlogy": (aten.xlogy.Tensor, (t(2.0), t(0.0)), "log_of_zero", "log of 0 (1 of 1 values)"),
    "logit": (aten.logit.default, (t(0.5, 1.0),), "log_of_zero", "log of 0 (1 of 2 values)"),
    "sqrt": (aten.sqrt.default, (t(-1.0, 4.0),), "root_of_negative", "root of a negative number (1 of 2 values)"),
    "rsqrt 0": (aten.rsqrt.default, (t(0.0),), "division_by_zero", "1 / sqrt(0) (1 of 1 values)"),
    "rsqrt -": (aten.rsqrt.default, (t(-1.0),), "root_of_negative", "root of a negative number (1 of 1 values)"),
    "1 / 0": (aten.reciprocal.default, (t(0.0, 2.0),), "division_by_zero", "1 / 0 (1 of 2 values)"),
    "x / 0": (aten.div.Tensor, (t(1.0, 2.0), t(0.0)), "division_by_zero", "division by 0 (2 of 2 values)"),
    "x / the number 0": (aten.div.Tensor, (t(1.0, 2.0), 0), "division_by_zero", "division by 0 (2 of 2 values)"),
    "0 / 0": (aten.div.Tensor, (t(0.0, 2.0), t(0.0, 0.0)), "zero_over_zero", "0 / 0 (1 of 2 values)"),
    "inf / inf": (aten.div.Tensor, (t(INF), t(INF)), "inf_over_inf", "inf / inf (1 of 1 values)"),
    "x % 0": (aten.fmod.Tensor, (t(1.0), t(0.0)), "division_by_zero",
              "remainder of a division by 0 (1 of 1 values)"),
    "0 ** -1": (aten.pow.Tensor_Scalar, (t(0.0, 1.0), -1.5), "zero_to_negative_power",
                "0 to a negative power (1 of 2 values)"),
    "- ** 0.5": (aten.pow.Tensor_Scalar, (t(-2.0), 0.5), "root_of_negative",
                 "a negative number to a fractional power (1 of 1 values)"),
    "1e200 ** 2": (aten.pow.Tensor_Scalar, (t(1e200), 2), "overflow",
                   "a power of numbers up to 1e+200 overflows every format"),
    "exp": (aten.exp.default, (t(1.0, 1000.0),), "exp_overflow", "exp of 1000 overflows every format"),
    "acos": (aten.acos.default, (t(1.5, 1.0),), "outside_domain", "an argument outside [-1, 1] (1 of 2 values)"),
    "atanh": (aten.atanh.default, (t(1.0, 0.5),), "outside_domain",
              "an argument at or beyond -1 or 1 (1 of 2 values)"),
    "acosh": (aten.acosh.default, (t(0.5),), "outside_domain", "an argument below 1 (1 of 1 values)"),
    "lgamma": (aten.lgamma.default, (t(-2.0, -2.5),), "outside_domain",
               "a pole at 0 or a negative integer (1 of 2 values)"),
    "polygamma": (aten.polygamma.default, (1, t(0.0)), "outside_domain",
                  "a pole at 0 or a negative integer (1 of 1 values)"),
    "masked row": (aten._softmax.default, (t(-INF, -INF, -INF, 1.0).view(2, 2), 1, False), "masked_row",
                   "every entry of a row is -Inf (1 of 2 rows): inf - inf"),
    "softmax of inf": (aten._softmax.default, (t(INF, 1.0), 0, False), "inf_minus_inf",
                       "softmax subtracts the largest entry, which is Inf: inf - inf (1 of 2 values)"),
    "mean of nothing": (aten.mean.default, (t(),), "mean_of_nothing",
                        "mean of an empty tensor, shape [0]: 0 / 0"),
    "targets ignored": (aten.nll_loss_forward.default,
                        (torch.zeros(2, 3, dtype=F64), torch.tensor([-100, -100]), None, 1, -100), "mean_of_nothing",
                        "mean over 0 targets, all 2 are ignored: 0 / 0"),
    "no targets": (aten.nll_loss_forward.default,
                   (torch.zeros(0, 3, dtype=F64), torch.zeros(0, dtype=torch.long), None, 1, -100), "mean_of_nothing",
                   "mean over 0 targets, because the batch is empty: 0 / 0"),
    "error of nothing": (aten.mse_loss.default, (torch.zeros(0, 3, dtype=F64), torch.zeros(0, 3, dtype=F64)),
                         "mean_of_nothing", "mean of an empty tensor, shape [0, 3]: 0 / 0"),
    "letters without frames": (aten._ctc_loss.default, (CTC, torch.tensor([[1, 2], [1, 1]]), [2, 2], [2, 2], 0),
                               "too_few_frames", "sample 1 has 2 frames, and its 2 letters need 3, so the loss is "
                               "infinite (1 of 2 samples)"),
    "letters in a row": (aten._ctc_loss.Tensor, (CTC, torch.tensor([1, 2, 1]), torch.tensor([2, 1]),
                         torch.tensor([1, 2]), 0), "too_few_frames", "sample 1 has 1 frames, and its 2 letters need 2, "
                         "so the loss is infinite (1 of 2 samples)"),
    "norm without eps": (aten.native_layer_norm.default, (t(5.0, 5.0), [2], None, None, 0.0), "zero_variance",
                         "the variance is 0 and eps is only 0: 1 / sqrt(0)"),
    "weight of norm 0": (aten._weight_norm_interface.default,
                           (t(0.0, 0.0, 1.0, 1.0).view(2, 2), t(1.0, 1.0).view(2, 1)),
                           "zero_over_zero", "a weight vector of norm 0 divided by its norm (1 of 2 values)"),
    "0 * inf": (aten.mul.Tensor, (t(0.0, 1.0), t(INF, 1.0)), "zero_times_inf", "0 * inf"),
    "0 * the number inf": (aten.mul.Tensor, (t(0.0), INF), "zero_times_inf", "0 * inf"),
    "inf - inf": (aten.sub.Tensor, (t(INF), t(INF)), "inf_minus_inf", "inf - inf"),
    "0 * inf in a product": (aten.mm.default, (t(0.0, 1.0).view(1, 2), t(INF, 1.0).view(2, 1)), "zero_times_inf",
                             "0 * inf in a sum of products"),
    "inf - inf in a product": (aten.mm.default, (t(INF, INF).view(1, 2), t(1.0, -1.0).view(2, 1)), "inf_minus_inf",
                               "inf - inf in a sum of products"),
    "sum of both inf": (aten.sum.dim_IntList, (t(INF, -INF), [0]), "inf_minus_inf", "inf - inf"),
    "sum of all, both inf": (aten.sum.default, (t(INF, -INF),), "inf_minus_inf", "inf - inf"),
    "cumsum of both inf": (aten.cumsum.default, (t(INF, -INF), 0), "inf_minus_inf", "inf - inf"),
}  # fmt: skip
"""Operations with arguments for which they have no finite result, and the expected key and words."""

HARMLESS = {
    "log": (aten.log.default, (t(0.5),)),
    "logit": (aten.logit.default, (t(0.5),)),
    "sqrt": (aten.sqrt.default, (t(0.0),)),
    "rsqrt": (aten.rsqrt.default, (t(2.0),)),
    "div": (aten.div.Tensor, (t(0.0), t(1.0))),
    "fmod": (aten.fmod.Tensor, (t(1.0), t(2.0))),
    "acos": (aten.acos.default, (t(1.0),)),
    "lgamma": (aten.lgamma.default, (t(-2.5),)),
    "softmax": (aten._softmax.default, (t(-INF, 0.0), 0, False)),
    "mean": (aten.mean.default, (t(1.0),)),
    "targets": (aten.nll_loss_forward.default, (torch.zeros(1, 3, dtype=F64), torch.tensor([0]), None, 1, -100)),
    "letters": (aten._ctc_loss.default, (CTC, torch.tensor([[1, 2], [1, 1]]), [2, 2], [2, 1], 0)),
    "norm": (aten.native_layer_norm.default, (t(5.0, 5.0), [2], None, None, 1e-5)),
    "mul": (aten.mul.Tensor, (t(0.0), t(1.0))),
    "sub": (aten.sub.Tensor, (t(1.0), t(1.0))),
    "mm": (aten.mm.default, (t(0.0).view(1, 1), t(1.0).view(1, 1))),
}


def called(func, args):
    """Returns the key and words for an operation, and its output."""
    out = func(*args)
    first = out[0] if isinstance(out, tuple) else out
    return why(func, str(func.overloadpacket).rpartition(".")[2].rstrip("_"), args, {}, first, ""), out


@pytest.mark.parametrize("name", UNDEFINED)
def test_the_rule_applies_and_the_operation_has_no_finite_result(name):
    func, args, key, words = UNDEFINED[name]
    found, out = called(func, args)
    assert found == (key, words)
    results = out if isinstance(out, tuple) else (out,)
    assert not all(torch.isfinite(result).all() for result in results), "not finite in fp64, so in no format"


@pytest.mark.parametrize("name", HARMLESS)
def test_no_rule_applies_to_inputs_with_a_finite_result(name):
    found, out = called(*HARMLESS[name])
    assert found is None
    assert torch.isfinite(out[0] if isinstance(out, tuple) else out).all()


@pytest.mark.parametrize(
    ("func", "args", "is_known"),
    [
        (aten.var.default, (t(1.0),), True),
        (aten.var.dim, (t(1.0, 2.0).view(2, 1), [1]), True),
        (aten.var.dim, (t(1.0, 2.0).view(2, 1), [0]), False),
        (aten.var.dim, (t(1.0), [0], False), False),
    ],
    ids=["all", "rows of one", "columns of two", "not corrected"],
)
@pytest.mark.filterwarnings("ignore:var\\(\\). degrees of freedom")
def test_a_variance_of_too_few_values_for_its_correction_is_0_over_0(func, args, is_known):
    found, out = called(func, args)
    assert found == (("variance_of_one", "variance of 1 value: 0 / 0") if is_known else None)
    assert bool(out.isnan().any()) is is_known


def test_a_singular_matrix_is_named():
    singular = torch.stack([torch.ones(2, 2, dtype=F64), torch.eye(2, dtype=F64)])
    assert RULES["linalg_inv_ex"]((singular,), {}) == ("singular_matrix", "a singular matrix (1 of 2)")
    assert RULES["linalg_inv_ex"]((singular[1],), {}) is None


def test_a_division_by_0_in_a_backward_pass_is_explained_by_the_derivative():
    args = (t(1.0), t(0.0))
    words = "division by 0 (1 of 1 values): the derivative has no finite value there"
    assert why(aten.div.Tensor, "div", args, {}, t(INF), "SqrtBackward0") == ("division_by_zero", words)
    of_log = why(aten.log.default, "log", (t(0.0),), {}, t(-INF), "LogBackward0")
    assert of_log == ("log_of_zero", "log of 0 (1 of 1 values)")


def test_an_operation_without_a_rule_is_explained_by_infinite_inputs():
    assert inf_minus_inf([t(INF, 1.0), t(-INF)], t(NAN)) == ("inf_minus_inf", "inf - inf")
    assert inf_minus_inf([t(INF)], t(NAN)) is None
    assert inf_minus_inf([t(INF, -INF)], t(INF)) is None
    assert why(aten.tanh.default, "tanh", (t(1.0),), {}, t(NAN), "") is None


def test_every_key_except_overflow_and_zero_variance_has_a_fix():
    keys = {key for _, _, key, _ in UNDEFINED.values()}
    assert keys - {*FIXES} == {"overflow", "zero_variance"}
