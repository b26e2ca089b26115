"""Rules for operations that have no finite result for some inputs, in any number format.

Each rule checks the values that the operation read, and returns `(key, words)`, or None if it does not apply. Keys:

    log_of_zero, log_of_negative, root_of_negative, division_by_zero, zero_over_zero, zero_to_negative_power,
    exp_overflow, overflow, outside_domain, zero_variance, variance_of_one, mean_of_nothing, masked_row,
    singular_matrix, inf_minus_inf, inf_over_inf, zero_times_inf, too_few_frames
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stabletrain.forensics.trace.values import is_float, tensors

RuleResult = tuple[str, str] | None


def why(func: Any, name: str, args: tuple, kwargs: dict, output: Tensor, node: str) -> RuleResult:
    """Explains the non-finite result of the operation `name` (`log`, not `aten.log_`); None if no rule applies."""
    names = [argument.name for argument in getattr(getattr(func, "_schema", None), "arguments", [])]
    named = dict(zip(names, args, strict=False)) | kwargs
    rule = RULES.get(name)
    found = rule(args, named) if rule is not None and args else None
    if found is None:
        found = inf_minus_inf(list(tensors((args, kwargs))), output)
    if found and node and found[0] in ("division_by_zero", "zero_over_zero", "zero_to_negative_power"):
        return found[0], f"{found[1]}: the derivative has no finite value there"
    return found


def count(hits: Tensor) -> str:
    """`3 of 12 values`."""
    return f"{int(hits.sum())} of {hits.numel()} values"


def at(hits: Tensor, key: str, words: str) -> RuleResult:
    """The key, and the words with the number of values that `hits` marks; None if there are none."""
    return (key, f"{words} ({count(hits)})") if bool(hits.any()) else None


def log(args: tuple, named: dict) -> RuleResult:
    """log of 0 or a negative number."""
    x = args[0]
    if bool((x < 0).any()):
        return "log_of_negative", f"log of a negative number ({count(x < 0)}, minimum {float(x.min()):.4g})"
    return at(x == 0, "log_of_zero", "log of 0")


def log1p(args: tuple, named: dict) -> RuleResult:
    """log(1 + x) for x <= -1."""
    return log((args[0] + 1,), named)


def xlogy(args: tuple, named: dict) -> RuleResult:
    """x log(y)."""
    return log((args[1],), named) if isinstance(args[1], Tensor) else None


def logit(args: tuple, named: dict) -> RuleResult:
    """log(x / (1 - x)) outside (0, 1)."""
    x = args[0]
    return log((torch.minimum(x, 1 - x),), named)


def sqrt(args: tuple, named: dict) -> RuleResult:
    """Square root of a negative number."""
    return at(args[0] < 0, "root_of_negative", "root of a negative number")


def rsqrt(args: tuple, named: dict) -> RuleResult:
    """1 / sqrt(x)."""
    return sqrt(args, named) or at(args[0] == 0, "division_by_zero", "1 / sqrt(0)")


def reciprocal(args: tuple, named: dict) -> RuleResult:
    """1 / x."""
    return at(args[0] == 0, "division_by_zero", "1 / 0")


def div(args: tuple, named: dict) -> RuleResult:
    """x / y; either may be a Python number."""
    x, y = (torch.as_tensor(value) for value in args[:2])
    if x.device != y.device:
        x, y = (value.cpu() if value.dim() == 0 else value for value in (x, y))
    zero = torch.broadcast_tensors(x, y == 0)[1]
    return (
        at((x == 0) & zero, "zero_over_zero", "0 / 0")
        or at(zero, "division_by_zero", "division by 0")
        or at(torch.isinf(x) & torch.isinf(y), "inf_over_inf", "inf / inf")
    )


def addcdiv(args: tuple, named: dict) -> RuleResult:
    """x + value * y / z."""
    return div(args[1:3], named)


def remainder(args: tuple, named: dict) -> RuleResult:
    """Remainder of a division by 0."""
    x, y = (torch.as_tensor(value) for value in args[:2])
    zero = torch.broadcast_tensors(x, y == 0)[1]
    return at(zero, "division_by_zero", "remainder of a division by 0")


def polygamma(args: tuple, named: dict) -> RuleResult:
    """n-th derivative of digamma; n is the first argument."""
    return RULES["digamma"]((args[1],), named)


def weight_norm(args: tuple, named: dict) -> RuleResult:
    """g v / |v| for v = 0."""
    v, over = args[0], named.get("dim", 0)
    length = v.movedim(over, 0).flatten(1).norm(dim=1)
    return at(length == 0, "zero_over_zero", "a weight vector of norm 0 divided by its norm")


def power(args: tuple, named: dict) -> RuleResult:
    """x ** y; either may be a Python number."""
    x, y = (torch.as_tensor(value) for value in args[:2])
    zero, negative = (x == 0) & (y < 0), (x < 0) & (y != y.floor() if is_float(y) else y != y)
    found = at(zero, "zero_to_negative_power", "0 to a negative power")
    found = found or at(negative, "root_of_negative", "a negative number to a fractional power")
    if found or not bool(torch.isfinite(x).all() and torch.isfinite(y).all()):
        return found
    return "overflow", f"a power of numbers up to {float(x.abs().max()):.4g} overflows every format"


def exp(args: tuple, named: dict) -> RuleResult:
    """exp above the range of fp64: x > 709."""
    return "exp_overflow", f"exp of {float(args[0].max()):.4g} overflows every format"


def outside(hit: Callable[[Tensor], Tensor], words: str) -> Callable[[tuple, dict], RuleResult]:
    """The rule of a function that has no finite value where `hit` is true."""
    return lambda args, named: at(hit(args[0]), "outside_domain", words)


def softmax(args: tuple, named: dict) -> RuleResult:
    """A row that is fully masked, or that holds +Inf."""
    x, over = args[0], named.get("dim", -1)
    dims = over if isinstance(over, list | tuple) else [over]
    if x.dim() == 0:
        return None
    if bool(torch.isposinf(x).any()):
        return "inf_minus_inf", f"softmax subtracts the largest entry, which is Inf: inf - inf ({count(x == math.inf)})"
    masked = torch.isneginf(x).all(dim=dims[0])
    if bool(masked.any()):
        return "masked_row", f"every entry of a row is -Inf ({int(masked.sum())} of {masked.numel()} rows): inf - inf"
    return None


def variance(args: tuple, named: dict) -> RuleResult:
    """Variance of too few values for its correction."""
    x, over = args[0], named.get("dim")
    dims = range(x.dim()) if not over and over != 0 else over if isinstance(over, list | tuple) else [over]
    number = math.prod(x.shape[dim] for dim in dims)
    correction = named.get("correction", 1 if named.get("unbiased", True) else 0)
    if number <= (1 if correction is None else correction):
        return "variance_of_one", f"variance of {number} value{'s' * (number != 1)}: 0 / 0"
    return None


def mean(args: tuple, named: dict) -> RuleResult:
    """Mean of an empty tensor."""
    shape = list(args[0].shape)
    return ("mean_of_nothing", f"mean of an empty tensor, shape {shape}: 0 / 0") if 0 in shape else None


def nll(args: tuple, named: dict) -> RuleResult:
    """Mean over no target: there is none, or all are ignored."""
    ignored = args[1] == named.get("ignore_index", -100)
    if not ignored.numel():
        return "mean_of_nothing", "mean over 0 targets, because the batch is empty: 0 / 0"
    if bool(ignored.all()):
        return "mean_of_nothing", f"mean over 0 targets, all {ignored.numel()} are ignored: 0 / 0"
    return None


def ctc(args: tuple, named: dict) -> RuleResult:
    """CTC loss of samples that have fewer frames than their targets need: one a letter, and one between equal ones."""
    targets, frames, letters = args[1], *([int(length) for length in lengths] for lengths in args[2:4])
    rows = targets if targets.dim() > 1 else targets.split([*letters, targets.numel() - sum(letters)])
    short = []
    for number, (row, length, available) in enumerate(zip(rows, letters, frames, strict=False)):
        row = row[:length]
        if (needed := length + int((row[1:] == row[:-1]).sum())) > available:
            short.append(f"sample {number} has {available} frames, and its {length} letters need {needed}")
    if not short:
        return None
    return "too_few_frames", f"{short[0]}, so the loss is infinite ({len(short)} of {len(frames)} samples)"


def norm(args: tuple, named: dict) -> RuleResult:
    """Normalisation of equal values with eps = 0."""
    eps = named.get("eps", named.get("epsilon"))
    if eps is None or eps > 1e-30:
        return None
    return "zero_variance", f"the variance is 0 and eps is only {eps:.3g}: 1 / sqrt(0)"


def singular_matrix(args: tuple, named: dict) -> RuleResult:
    """Inverse of a singular matrix."""
    x = args[0].double()
    hits = torch.linalg.matrix_rank(x) < x.shape[-1]
    return ("singular_matrix", f"a singular matrix ({int(hits.sum())} of {hits.numel()})") if bool(hits.any()) else None


def inf_minus_inf(read: list[Tensor], output: Tensor) -> RuleResult:
    """Inf and -Inf among the inputs of any other operation."""
    read = [x for x in read if is_float(x)]
    if not any(bool(torch.isinf(x).any()) for x in read) or not bool(torch.isnan(output).any()):
        return None
    both = any(bool(torch.isposinf(x).any()) for x in read) and any(bool(torch.isneginf(x).any()) for x in read)
    return ("inf_minus_inf", "inf - inf") if both else None


def times(args: tuple, named: dict) -> RuleResult:
    """0 * inf; either may be a Python number."""
    x, y = (torch.as_tensor(value) for value in args[:2])
    some = bool((x == 0).any() and torch.isinf(y).any()) or bool((y == 0).any() and torch.isinf(x).any())
    return ("zero_times_inf", "0 * inf") if some else None


def minus(args: tuple, named: dict) -> RuleResult:
    """inf - inf."""
    x, y = (torch.as_tensor(value) for value in args[:2])
    return ("inf_minus_inf", "inf - inf") if bool(torch.isinf(x).any() and torch.isinf(y).any()) else None


def product(args: tuple, named: dict) -> RuleResult:
    """Matrix product with an Inf: 0 * inf, or inf - inf in a sum."""
    read = [x for x in tensors(args) if is_float(x)]
    if not any(bool(torch.isinf(x).any()) for x in read):
        return None
    if any(bool((x == 0).any()) for x in read):
        return "zero_times_inf", "0 * inf in a sum of products"
    return "inf_minus_inf", "inf - inf in a sum of products"


RULES: dict[str, Callable[[tuple, dict], RuleResult]] = {
    **dict.fromkeys(("log", "log2", "log10"), log),
    **dict.fromkeys(("xlogy", "special_xlog1py"), xlogy),
    "log1p": log1p,
    "logit": logit,
    "sqrt": sqrt,
    "rsqrt": rsqrt,
    "reciprocal": reciprocal,
    "div": div,
    "addcdiv": addcdiv,
    **dict.fromkeys(("remainder", "fmod"), remainder),
    "polygamma": polygamma,
    "_weight_norm_interface": weight_norm,
    "pow": power,
    **dict.fromkeys(("exp", "expm1", "exp2", "sinh", "cosh"), exp),
    **dict.fromkeys(("acos", "asin"), outside(lambda x: x.abs() > 1, "an argument outside [-1, 1]")),
    **dict.fromkeys(("atanh", "erfinv"), outside(lambda x: x.abs() >= 1, "an argument at or beyond -1 or 1")),
    "acosh": outside(lambda x: x < 1, "an argument below 1"),
    **dict.fromkeys(
        ("lgamma", "digamma"),
        outside(lambda x: (x <= 0) & (x == x.floor()), "a pole at 0 or a negative integer"),
    ),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "logsumexp"), softmax),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), variance),
    **dict.fromkeys(
        (
            *("mean", "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"),
            *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
        ),
        mean,
    ),
    **dict.fromkeys(("_ctc_loss", "_cudnn_ctc_loss"), ctc),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), nll),
    **dict.fromkeys(
        (
            *("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit"),
            *("_batch_norm_with_update", "cudnn_batch_norm", "miopen_batch_norm", "_fused_rms_norm", "batch_norm"),
        ),
        norm,
    ),
    **dict.fromkeys(("linalg_inv_ex", "_linalg_slogdet", "_linalg_solve_ex"), singular_matrix),
    "mul": times,
    # sum and cumsum read one tensor: `inf_minus_inf` finds both signs in it
    **dict.fromkeys(("add", "sub", "rsub"), minus),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "matmul", "convolution", "dot", "mv"), product),
}
"""The rule of each operation."""
