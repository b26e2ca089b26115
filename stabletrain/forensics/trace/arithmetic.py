"""Explains why one operation gave NaN or Inf, and what its result should have been.

The operation is recomputed in fp64 and fp32 on the values that it read. A result that is finite there overflowed its
format: fp16 ends at 65504, bf16 at 3.39e38, fp32 at 3.40e38. Otherwise the inputs show the reason, such as log(0),
x / 0 or 0 * inf; see `nonfinite_rules.py`.
"""

import contextlib
import math
import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stabletrain.forensics.trace import nonfinite_rules
from stabletrain.forensics.trace.values import is_float, leaves, measure, tensors, unscaled

DTYPE_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
DTYPE_NAMES |= {"float8_e4m3fn": "fp8 (e4m3)", "float8_e5m2": "fp8 (e5m2)"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Why an operation gave a non-finite result.

    Attributes:
        why: `describe_overflow`, or a key of `nonfinite_rules.py` (`log_of_zero`, ...); `unknown` if no rule applies.
        reason: the explanation in words, with the numbers.
        should_have_been: absmax of the result recomputed in fp64; Inf or NaN if the fp64 result is not finite either;
            None if the operation cannot run in fp64.
        in_fp32: absmax of the result recomputed in fp32, with the same special values.
    """

    why: str
    reason: str
    should_have_been: float | None
    in_fp32: float | None


def explain_nonfinite(func: Any, args: tuple, kwargs: dict, place: int, output: Tensor, node: str) -> Finding:
    """Explains why `func(*args, **kwargs)` gave the non-finite tensor `output`.

    Args:
        args, kwargs: arguments with their values from before the call.
        place: position of `output` among the tensors that the call returned.
        node: the autograd node that made the call; empty in the forward pass.
    """
    args, kwargs, output = unscaled(args), unscaled(kwargs), unscaled(output)
    in_fp64 = recompute(func, args, kwargs, place, torch.float64)
    in_fp32 = recompute(func, args, kwargs, place, torch.float32)
    name = str(getattr(func, "overloadpacket", func)).rpartition(".")[2].rstrip("_")
    found = None
    if in_fp64 is not None and math.isfinite(in_fp64):
        found = describe_overflow(name, args, output, in_fp64)
    else:
        with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):  # arguments unknown to the rule
            found = nonfinite_rules.why(func, name, args, kwargs, output, node)
    if found is None:
        fp64 = "it has no fp64 kernel to compare with" if in_fp64 is None else "fp64 gives no finite result either"
        found = ("unknown", f"produced {made(output)} from {input_sizes(args)}; {fp64}")
    why, words = found
    behind = f", in the backward of {forward_name(node)}" if node else ""
    return Finding(why, words + behind, in_fp64, in_fp32)


def recompute(func: Any, args: tuple, kwargs: dict, place: int, dtype: torch.dtype) -> float | None:
    """Recomputes result number `place` in `dtype`; returns its absmax, or None without a kernel or memory.

    Random operations draw other numbers. The state of the random generators is restored.
    """
    cards = sorted({t.device.index for t in tensors((args, kwargs)) if t.device.type == "cuda"})
    random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    try:
        with (
            warnings.catch_warnings(),
            torch.random.fork_rng(cards) if random else contextlib.nullcontext(),
        ):
            warnings.simplefilter("ignore")  # the original operation warned already
            names = [argument.name for argument in func._schema.arguments]
            wide = [widened(value, name, dtype) for value, name in zip(args, names, strict=False)]
            out = func(*wide, **{name: widened(value, name, dtype) for name, value in kwargs.items()})
        return measure(list(tensors(out))[place]).absmax
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, AttributeError):
        return None


def widened(value: Any, name: str, dtype: torch.dtype) -> Any:
    """Converts floating-point tensors, which are copied, and dtypes in an argument to `dtype`."""
    if isinstance(value, Tensor):
        kind = torch.complex128 if value.is_complex() else dtype if value.is_floating_point() else value.dtype
        return value.detach().to(kind, copy=True)
    if isinstance(value, torch.dtype):
        return dtype if value.is_floating_point else value
    if isinstance(value, list | tuple):
        return [widened(each, name, dtype) for each in value]
    return False if name == "half_to_float" else value


def describe_overflow(name: str, args: tuple, output: Tensor, exact: float) -> tuple[str, str]:
    """Describes an overflow: the exact result is finite, but it or an intermediate value exceeds the format."""
    dtype = str(output.dtype).removeprefix("torch.")
    kind, largest = DTYPE_NAMES.get(dtype, dtype), torch.finfo(output.dtype).max
    if exact > largest * (1 - torch.finfo(output.dtype).eps):
        what = {"exp": "exp overflows", "exp2": "exp2 overflows", "expm1": "expm1 overflows"}.get(name, "overflow of")
        why = "exp_overflow" if name in ("exp", "exp2", "expm1") else "overflow"
        return why, (
            f"{what} {kind}: {input_sizes(args)} give {exact:.4g}, {exact / largest:.3g} times the largest "
            f"{kind} number ({largest:.6g})"
        )
    return "overflow", (
        f"overflow of {kind} inside {name}: {input_sizes(args)} give {exact:.4g}, which {kind} can hold, but an "
        "intermediate value cannot be held"
    )


def input_sizes(args: Any) -> str:
    """The absmax of each input: `inputs up to 3 and 0.5`."""
    found = [
        abs(leaf) if isinstance(leaf, float) else measure(leaf).absmax for leaf in leaves(args) if measurable(leaf)
    ]
    return f"inputs up to {' and '.join(f'{absmax:.4g}' for absmax in found if absmax is not None)}"


def measurable(leaf: Any) -> bool:
    """Whether an argument is a float or a floating-point tensor, not an index or a dimension."""
    return isinstance(leaf, float) or (isinstance(leaf, Tensor) and is_float(leaf))


def made(output: Tensor) -> str:
    """`NaN` or `Inf`; NaN if the output holds both."""
    return "NaN" if bool(torch.isnan(output).any()) else "Inf"


def forward_name(node: str) -> str:
    """The forward function of an autograd node: `sqrt` for `SqrtBackward0`, `Mine` for `MineBackward`."""
    name, _, number = node.rpartition("::")[2].partition("Backward")
    if not number:  # a class of the user
        return name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
