"""Optimizers that are proven *closed*: from finite values, a step that the gate lets through leaves finite values.

A proven optimizer needs no check after its step. It is proven for exact classes and for ranges of their settings.

**Assumed.**

- The gate is open: the gradient's L2 norm over all parameters is at most `LARGEST_NORM` = 1e18, so each value has
  |g| <= G = 1.000001e18. Sums of squares are rounded monotonically, so no value exceeds the measured norm by more than
  rounding. Clipping runs after the gate, and must only shorten (`clipping_is_proven`). What changes weights after the
  update must only shorten, or write what a run may start with (`after_update_is_proven`).
- Weights start at |w| <= 1e17, which `note_largest_weight` tells. Moments start as zeros, or were written by the same
  kind of optimizer with settings in range. A state from elsewhere is covered if it meets the invariants below, whatever
  wrote it.
- At most 1e9 updates, with all settings in range at each of them. They may change in between; if SGD's momentum and
  weight decay do, the largest ones used have to be in range with the largest rate used. Where a schedule changes the
  weight decay (`peak_weight_decay`), the check takes the larger one of the first and the present: schedules are
  monotone, or lower the decay together with the rate.
- Arithmetic rounds to nearest with unit roundoff u: 2^-24 in fp32, 2^-8 in bf16. Denormals are kept or flushed to 0.
- The step is called without a closure, which would compute gradients that the gate has not seen.

**Rounding.** (R1) x <- b x + (1 - b) y with |y| <= Y and b in [0, 1 - 1e-6] keeps |x| <= 20 Y, in any order of the
operations, also with b that changes. Let M be the power of two in [8Y(1+u), 16Y(1+u)], and |x| <= M. If 1 - b <= 8u,
then (1 - b)Y <= M u, half the distance from M to the next value, and M + M u rounds to M. Otherwise the three roundings
give at most (1 + u)^3 (b M + (1 - b) M / 8) <= M, as 1 - b > 8u pays for them. (R2) Rounding w + d moves w by at most
2|d|, because w itself is a candidate.

**Adam, AdamW**; also `GatedAdamW`, `CappedAdamW` (StableAdamW) and `SpikeAwareAdamW` (SPAM), whose module says what
they add.

- v: by R1 with Y = G^2, or (1.2 G)^2 with an L2 penalty (below): 0 <= v < 3e37. `amsgrad`'s maximum is one of these.
  No implementation squares g before it is finite: G^2 = 1e36. In fp32, 1.8e19 would be the largest with a finite
  square, and 4e18 the largest with 20 G^2 finite.
- m: by R1, |m| <= 20 * 1.2 G.
- The invariant m^2 <= K (v + z), K = 2e6, z = 2.4e-32. Cauchy-Schwarz: (b1 m + (1 - b1) g)^2 <=
  (b1^2 / b2 + (1 - b1)^2 / (K (1 - b2))) (b2 K (v + z) + (1 - b2) K g^2). The first factor is below 1 if `spread`
  <= 1e6; `spread` replaces b1, b2 by what rounding makes of them. g^2 and v lose at most 1.2e-38 each to underflow, and
  z (1 - b2) >= 2.4e-38 makes up for it. A reset of both to 0 keeps it; a gradient replaced by another keeps it.
- So |m| / (sqrt(v) + eps) <= 1415 (1 + sqrt(z) / eps) <= 1640 for eps >= 1e-15. With bias corrections of at least
  1 - b1 >= 1e-4 and at most 1, an update is at most lr * 1.7e7 <= 1.7e10.
- w: |1 - lr weight_decay| <= 1 by `lr * weight_decay <= 1`, so 1e9 updates (R2: doubled) end at |w| <= 1e17 + 3.4e19.
  With an L2 penalty (Adam's), lr <= 1 and weight_decay <= 1 keep |w| <= 1.4e17, so the penalty adds at most 0.2 G.
- Intermediate values: g / eps <= 1e33; lr / (1 - b1) * m <= 2e26; sqrt(v) / sqrt(1 - b2) <= 6e21. With `capturable`,
  the unfused kernels divide by the rate: at lr=0 that is 0 / 0, so lr >= 1e-30 there.
- Cautious weight decay subtracts lr weight_decay w or 0 from each weight, by a mask of exactly 0 or 1 (`cautious`: the
  product of two signs, plus 1, at most 1; both are finite here). Either shortens a weight or keeps it. The decay is
  added to the update first, as SGD's fused kernel does in the other optimizers of `gated.py`: R2 applies twice, which
  ends at |w| <= 1e17 + 6.8e19.
- A scaled update (`update_weights_`): where its norm is NaN, as at lr=0, or overflows, the factor is 1; else it is in
  [0, 1] (`clipping_is_proven`). What it multiplies is finite, so it only shortens the update; m and v are written.

**SGD.** B = 1e33 bounds |w|; c = weight_decay, p = momentum with its rounding (`1 - gap`).

- u <- p u + (1 - dampening)(g + c w): |u| <= V = (c B + G) / gap <= 2e37 by weight_decay <= 1 and gap >= 9e-5.
- Suppose w is the first to exceed B, upwards; let s be the last step with w <= B / 4. Since then w > 0, so decay only
  adds terms that bring w down, and what brings it up is the momentum from before, at most lr V / gap in all steps
  together, and -g, at most lr G / gap a step. (Nesterov's terms sum to the same: 1 + p / (1 - p)^2 <= 1 / (1 - p)^2.)
  With lr c <= gap^2 / 4 and lr / gap <= 1e4, 1e9 steps and R2: w <= B/4 + 2 (B/4 + 1e4 G / gap + 1e9 * 1e4 G) < B.
  This holds for rates that change from step to step, for which stability of a fixed rate proves nothing.
- A fused kernel whose first step is withheld leaves its momentum uninitialised, so it has to exist.

**torch.optim.Muon** is not proven. Its momentum is (R1), but then a polynomial of degree 5 is applied `ns_steps` times
to a bf16 matrix. It diverges if a singular value exceeds 1.26; the largest seen is 1.21, but the bound on what rounding
adds grows with the matrix. With eps=1e-30, a gradient of 1e-25 makes weights NaN, as its norm underflows to 0.
**MuonAndAdamW** holds back a hidden matrix, and its momentum, if a value of its direction is above D = 1e6, or NaN. NaN
and Inf in the new momentum would make the direction NaN, so momentum is finite. An update is at most lr * scale * D <=
1e3 * 1e5 * D for matrices of less than 1e10 rows, so that 1e9 updates (R2: doubled) end at |w| <= 1e17 + 2e23.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from stabletrain.several_optimizers import SeveralOptimizers, optimizers_of
from stabletrain.stability.after_update import LARGEST_INITIAL_WEIGHT, AfterUpdate, InTurn
from stabletrain.stability.clipping import (
    AGC,
    AdaGC,
    NoClip,
    NormClip,
    PerModuleClip,
    UpdateNormClip,
    ValueClip,
    ZClip,
)
from stabletrain.stability.objective.output_embeddings import Centering
from stabletrain.stability.optimizers.adamw import CappedAdamW, GatedAdamW, SpikeAwareAdamW
from stabletrain.stability.optimizers.muon import MuonAndAdamW
from stabletrain.stability.qkclip import NoQKClip, QKClip

Group = dict[str, Any]

ROUNDOFF = {torch.float64: 2.0**-21, torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8}
"""Relative error of a moment's update by dtype: bf16 rounds a result once per kernel, fp32 each of up to 8 operations.

fp16 is missing: its smallest number is 6e-8, so eps=1e-8 and squares of gradients below 2e-4 are 0.
"""

DTYPE = attrgetter("dtype")

LARGEST_SPREAD = 1e6
"""Bound of `spread`: AdamW's update is then at most lr * 1640 / (1 - beta1)."""

Range = tuple[str, float, float]
ADAM_RANGES: tuple[Range, ...] = (("lr", 0.0, 1e3), ("eps", 1e-15, 1e10), ("weight_decay", 0.0, 1e30))
L2_RANGES: tuple[Range, ...] = (("lr", 0.0, 1.0), ("weight_decay", 0.0, 1.0))
CAPTURABLE_RANGES: tuple[Range, ...] = (("lr", 1e-30, 1e3),)
SPAM_RANGES: tuple[Range, ...] = (("theta", 1.0, 1e30), ("reset_interval", 1, math.inf), ("warmup_steps", 0, math.inf))
SGD_RANGES: tuple[Range, ...] = (
    ("lr", 0.0, 1e4),
    ("momentum", 0.0, 0.9999),
    ("dampening", 0.0, 1.0),
    ("weight_decay", 0.0, 1.0),
)
MUON_RANGES: tuple[Range, ...] = (("lr", 0.0, 1e3), ("momentum", 0.0, 1.0), ("weight_decay", 0.0, 1e30))


def why_unproven(optimizer: Optimizer) -> str:
    """Returns why an optimizer's next step may leave finite values; empty if it is proven that it cannot.

    The module's docstring has the proof and what it assumes. Reads no tensor's values, and takes 0.1 us a parameter.
    """
    if isinstance(optimizer, SeveralOptimizers):
        return next(filter(None, map(why_unproven, optimizer.optimizers)), "")
    check = PROVEN.get(type(optimizer))
    if check is None:
        return f"{type(optimizer).__name__} is none of the optimizers that are proven to stay finite"
    if why := foreign_code(optimizer):
        return why
    seen = [identity_of(group) for group in optimizer.param_groups]
    looked_at = _CHECKED.get(optimizer)
    if looked_at is None or looked_at[0] != seen:
        looked_at = seen, *check_parameters(optimizer)
        _CHECKED[optimizer] = looked_at
    _, why, roundoffs = looked_at
    if why:
        return why
    if (largest := _LARGEST_WEIGHT.get(optimizer, 0.0)) > LARGEST_INITIAL_WEIGHT:
        return f"a weight of {largest:.3g} is larger than {LARGEST_INITIAL_WEIGHT:g}, for which nothing is proven"
    for group, roundoff in zip(optimizer.param_groups, roundoffs, strict=True):
        if why := check(optimizer, group, roundoff):
            return why
    return ""


def note_largest_weight(optimizer: Optimizer, value: float) -> None:
    """Notes the largest magnitude of a weight before the first step."""
    for each in optimizers_of(optimizer):
        _LARGEST_WEIGHT[each] = value


_LARGEST_WEIGHT: "WeakKeyDictionary[Optimizer, float]" = WeakKeyDictionary()

Identity = tuple[list[int], list[torch.dtype]]

_CHECKED: "WeakKeyDictionary[Optimizer, tuple[list[Identity], str, list[float]]]" = WeakKeyDictionary()
"""Results of `check_parameters`, with the `identity_of` the groups: the check takes longer than the comparison."""


def identity_of(group: Group) -> Identity:
    """Returns what changes if other parameters are in a group, or if one gets another dtype."""
    return [*map(id, group["params"])], [*map(DTYPE, group["params"])]


def check_parameters(optimizer: Optimizer) -> tuple[str, list[float]]:
    """Returns why a parameter is not covered by the proof, empty if all are; and each group's largest roundoff."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.dtype not in ROUNDOFF:
            kind = str(parameter.dtype).removeprefix("torch.")
            return f"a parameter is {kind}, and only fp32, fp64 and bf16 are proven", []
        if type(parameter).__module__.partition(".")[0] != "torch":
            return f"a parameter is a {type(parameter).__name__}, whose arithmetic is not PyTorch's", []
    return "", [max((ROUNDOFF[p.dtype] for p in group["params"]), default=0.0) for group in optimizer.param_groups]


# ---- the settings of a group


def out_of_range(group: Group, ranges: tuple[Range, ...]) -> str:
    """Names the first setting of a group that is no number within its range; empty if all are."""
    for name, low, high in ranges:
        value = group[name]
        if not isinstance(value, (float, int)):  # comparing a tensor would wait for the device
            return f"{name} is a {type(value).__name__}, and only numbers are proven"
        if not low <= value <= high:
            return f"{name}={value} is outside [{low:g}, {high:g}]"
    return ""


def spread(beta1: float, beta2: float, roundoff: float) -> float:
    """Returns a bound of m^2 / v for Adam's moments after rounding; inf if there is none."""
    up, down = (1 + roundoff) ** 2, (1 - roundoff) ** 2
    rest = beta2 * down - beta1 * beta1 * up
    return (1 - beta1) ** 2 * up * beta2 / ((1 - beta2) * (1 - roundoff) * rest) if rest > 0 else math.inf


def adam_moments(group: Group, roundoff: float) -> str:
    """Returns why the moments of an Adam may not bound its update."""
    if why := out_of_range(group, ADAM_RANGES):
        return why
    beta1, beta2 = betas = group["betas"]
    if not isinstance(beta1, (float, int)) or not isinstance(beta2, (float, int)):
        return "betas are tensors, and only numbers are proven"
    if not (0 <= beta1 <= 0.9999 and 0 <= beta2 <= 0.999999 and spread(beta1, beta2, roundoff) <= LARGEST_SPREAD):
        return f"betas={betas}: nothing bounds the first moment by the root of the second"
    return ""


def unproven_mode(optimizer: Optimizer, group: Group) -> str:
    """Returns why a mode of PyTorch's optimizers is not proven; empty if it is."""
    if group["differentiable"]:
        return "differentiable=True is not proven"
    if getattr(optimizer, "grad_scale", None) is not None:
        return "its step divides gradients by a loss scale after they were judged"
    return ""


def adam(optimizer: Optimizer, group: Group, roundoff: float) -> str:
    """Returns why a group of `torch.optim.Adam` or `AdamW` is not proven."""
    if why := adam_moments(group, roundoff) or unproven_mode(optimizer, group):
        return why
    if group["capturable"] and not group["fused"] and (why := out_of_range(group, CAPTURABLE_RANGES)):
        return f"{why}, with capturable=True and without fused=True"
    if not group["weight_decay"]:
        return ""
    return decoupled(group) if group["decoupled_weight_decay"] else out_of_range(group, L2_RANGES)


def decoupled(group: Group) -> str:
    """Returns why decoupled weight decay may enlarge a weight."""
    product = group["lr"] * group["weight_decay"]
    return "" if product <= 1 else f"lr * weight_decay = {product:g} is above 1"


def capped(optimizer: Optimizer, group: Group, roundoff: float) -> str:
    """Returns why a group of `GatedAdamW` or `CappedAdamW` is not proven."""
    return adam_moments(group, roundoff) or decoupled(group)


def spike_aware(optimizer: Optimizer, group: Group, roundoff: float) -> str:
    """Returns why a group of `SpikeAwareAdamW` is not proven."""
    return out_of_range(group, SPAM_RANGES) or capped(optimizer, group, roundoff)


def muon_and_adamw(optimizer: Optimizer, group: Group, roundoff: float) -> str:
    """Returns why a group of `MuonAndAdamW` is not proven."""
    if "ns_steps" not in group:
        return adam(optimizer, group, roundoff)
    return out_of_range(group, MUON_RANGES) or decoupled(group)


def sgd(optimizer: Optimizer, group: Group, roundoff: float) -> str:
    """Returns why a group of `torch.optim.SGD` is not proven."""
    if why := out_of_range(group, SGD_RANGES) or unproven_mode(optimizer, group):
        return why
    lr, momentum = group["lr"], group["momentum"]
    decay = max(group["weight_decay"], group.get("peak_weight_decay", 0.0))
    gap = 1 - momentum * (1 + roundoff) ** 2
    if not lr <= 1e4 * gap:
        return f"lr={lr} is above 10000 (1 - momentum), with momentum={momentum}"
    if not lr * decay <= gap * gap / 4:
        return f"lr * weight_decay = {lr * decay:g} is above (1 - momentum)^2 / 4, with momentum={momentum}"
    if (
        momentum
        and group["fused"]
        and not all("momentum_buffer" in optimizer.state.get(p, ()) for p in group["params"])
    ):
        return "its momentum does not exist yet, and a fused step that is withheld leaves it uninitialised"
    return ""


PROVEN: dict[type, Callable[[Any, Group, float], str]] = {
    torch.optim.SGD: sgd,
    torch.optim.Adam: adam,
    torch.optim.AdamW: adam,
    GatedAdamW: capped,
    CappedAdamW: capped,
    SpikeAwareAdamW: spike_aware,
    MuonAndAdamW: muon_and_adamw,
}
"""By optimizer, the check that returns why a group is not proven. Exact classes: a subclass may do anything."""


# ---- foreign code in the step

TRUSTED_HOOKS = ("stabletrain.stability.", "stabletrain.checkpoint.", "stabletrain.guard.", "torch.profiler")
"""Modules whose step hooks keep the proof. Those of `stabletrain.beside.faults` change the rate or the weights."""

INNER_STEP = {"torch.optim.lr_scheduler": "func", "stabletrain.guard.attach": "inner", "torch._compile": "fn"}
"""By module, the variable in which a function that replaced an optimizer's `step` keeps the step that it calls."""


TYPE_CHECKERS = ("jaxtyping.", "beartype.")
"""Modules whose wrappers check types, in tests, and change nothing."""


def foreign_code(optimizer: Optimizer) -> str:
    """Names code that runs in the optimizer's step besides the step that is proven; empty if there is none."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    of_all = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    for hook in (hook for hooks in (*own, *of_all) for hook in hooks.values()):
        if not (getattr(hook, "__module__", None) or "").startswith(TRUSTED_HOOKS):
            return f"{getattr(hook, '__qualname__', hook)} is hooked into its step"
    step: Any = type(optimizer).step
    replaced = vars(optimizer).get("step")
    if replaced is not None and innermost_step(replaced) is not step:
        return "its step was replaced"
    return "" if is_known_code(step) else f"{type(optimizer).__name__}.step was replaced"


def innermost_step(replaced: Any) -> Any:
    """Returns the step inside of those that learning rate schedulers and `Guard.attach` put around it."""
    function = getattr(replaced, "__func__", replaced)
    # Not `__module__`: `functools.wraps` copies that of the function inside.
    while module := module_of(function):
        if module.startswith(TYPE_CHECKERS):
            function = function.__wrapped__
        elif (name := INNER_STEP.get(module)) in (variables := function.__code__.co_freevars):
            inner = function.__closure__[variables.index(name)].cell_contents
            function = getattr(inner, "__func__", inner)
        else:
            break
    return function


def module_of(function: Any) -> str:
    """Returns the name of the module whose code a function is; empty for other objects."""
    return getattr(function, "__globals__", {}).get("__name__") or ""


@lru_cache
def is_known_code(step: Any) -> bool:
    """Returns whether a class's `step`, and all that is wrapped around it, is code of PyTorch or of this package."""
    while step is not None:
        if not module_of(step).startswith(("torch.", "stabletrain.", *TYPE_CHECKERS)):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


# ---- other changes of gradients and weights in a step


def clipping_is_proven(clipping: Any) -> bool:
    """Returns whether a clipping is proven to make no value of a gradient larger, nor NaN.

    Each of this package's multiplies by factors in [0, 1] or clamps. `clip_factor` divides only where the norm is
    finite and above the bound, so the quotient is at most 1 and never 0 / 0; a bound of NaN, as of statistics that
    went wrong, fails that comparison and gives 1. `NormClip` divides by the norm + 1e-6. `UpdateNormClip` changes no
    gradient; the factor of its `StepScale` is that of `clip_factor`, or 1.
    """
    return type(clipping) in (NoClip, NormClip, ValueClip, PerModuleClip, AGC, AdaGC, ZClip, UpdateNormClip)


def after_update_is_proven(after_update: Any) -> bool:
    """Returns whether what follows an update is proven to keep the bounds of the weights.

    QK-clip multiplies by sqrt(max_logit / S) where S is finite and above max_logit, so at most 1, and by 1 elsewhere.
    Centering leaves a weight as it is, or all that it writes is at most 1e17, as at the start. From there the bounds
    of Adam's and of SGD's weights begin anew: the former adds updates to the start, and the latter looks at the steps
    since |w| <= B / 4.
    """
    parts = after_update.parts if type(after_update) is InTurn else (after_update,)
    return all(type(part) in (AfterUpdate, NoQKClip, QKClip, Centering) for part in parts)
