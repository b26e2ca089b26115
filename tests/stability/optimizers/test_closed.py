"""Checks the proofs that an update is finite: by a search that tries to break them, and by what is refused."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stabletrain.guard.guard import Guard
from stabletrain.guard.policy.limits import LARGEST_NORM
from stabletrain.monitors.tensor_norms import measure_all
from stabletrain.records import TrainState
from stabletrain.stability.after_update import AfterUpdate, InTurn
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
from stabletrain.stability.clipping.update_norm import StepScale
from stabletrain.stability.objective import MuCentering
from stabletrain.stability.optimizers import Muon
from stabletrain.stability.optimizers import muon as muon_module
from stabletrain.stability.optimizers.adamw import CappedAdamW, GatedAdamW, SpikeAwareAdamW
from stabletrain.stability.optimizers.closed import after_update_is_proven, clipping_is_proven, why_unproven
from stabletrain.stability.optimizers.muon import MuonAndAdamW
from stabletrain.stability.optimizers.sgd import zero_momentum_
from stabletrain.stability.precision.bf16_weights import Rounding
from stabletrain.stability.qkclip import NoQKClip, QKClip
from tests.stability.optimizers.given import MUON, Two

BETAS = [(0.9, 0.999), (0.9, 0.95), (0.0, 0.5), (0.0, 0.999998), (0.9, 0.999999), (0.9999, 0.9999), (0.8, 0.67)]
STEPS = 30


def adam(kind, rng, **options):
    """Draws settings of an Adam within their ranges: lr, betas, eps, weight decay."""
    l2 = kind is Adam
    lr = rng.choice([0.0, 1e-30, 1e-3, 1.0] if l2 else [0.0, 1e-30, 1e-3, 1.0, 1e3])
    decay = rng.choice([0.0, 1e-3, 1.0] if l2 else [0.0, 1e-3, 0.5 / max(lr, 1e-3), 1 / max(lr, 1e-30)])
    eps, betas = rng.choice([1e-15, 1e-8, 1.0, 1e10]), BETAS[rng.integers(len(BETAS))]
    chosen = {"lr": float(lr), "betas": betas, "eps": float(eps), "weight_decay": float(decay)}
    return lambda weights: kind(weights, **(chosen | options))


def with_amsgrad(kind, implementation):
    return lambda rng: adam(kind, rng, amsgrad=bool(rng.integers(2)), maximize=bool(rng.integers(2)), **implementation)


def ours(kind, **options):
    """Draws settings of one of this package's optimizers, which take them as a dict."""

    def draw(rng):
        chosen = {name: each[rng.integers(len(each))] for name, each in options.items()}
        return adam(lambda weights, **settings: kind(weights, settings), rng, **chosen)

    return draw


def sgd(implementation):
    def draw(rng):
        momentum = float(rng.choice([0.0, 0.5, 0.9, 0.98, 0.9999]))
        gap = 1 - momentum * (1 + 2.0**-8) ** 2
        lr = float(rng.choice([0.0, 1e-3, 1.0, 1e4 * abs(gap)]))
        decay = min(float(rng.choice([0.0, 1e-4, 1.0])), gap * gap / 4 / max(lr, 1e-30))
        nesterov = bool(momentum and rng.integers(2))
        chosen = {"lr": lr, "momentum": momentum, "weight_decay": decay, "nesterov": nesterov}
        dampening = 0.0 if nesterov else float(rng.choice([0.0, 0.5, 1.0]))

        def make(weights):
            optimizer = SGD(weights, **chosen, dampening=dampening, maximize=bool(lr == 1.0), **implementation)
            zero_momentum_(optimizer)
            return optimizer

        return make

    return draw


def muon(rng):
    settings = {"momentum": float(rng.choice([0.0, 0.95, 1.0])), "nesterov": True, "ns_steps": int(rng.integers(1, 9))}
    cautious = bool(rng.integers(2))

    def make(weights):
        rest = adam(lambda others, **chosen: [{"params": others, **chosen}], rng, fused=True)
        groups = rest([weight for weight in weights if weight.ndim != 2])
        hidden = {"params": [weight for weight in weights if weight.ndim == 2], "weight_decay": 1e-3, **settings}
        return MuonAndAdamW([hidden], groups, 1.0, cautious=cautious)

    return make


def rounded(rng):
    """AdamW with `precision=bf16_params`: fp32 in its step, and weights that are rounded at random."""

    def make(weights):
        optimizer = adam(AdamW, rng, fused=True)(weights)
        Rounding([weight for weight in weights if weight.dtype == torch.bfloat16]).attach(optimizer)
        return optimizer

    return make


def scaled(draw):
    """Half of the searches clip the update; the gate is open, as in every search."""

    def with_scale(rng):
        make, clipping = draw(rng), UpdateNormClip(z_threshold=1e-3, alpha=0.1, warmup_steps=2)
        if rng.integers(2):
            return make

        def made(weights):
            optimizer = make(weights)

            def rescale(*_):
                optimizer.scale_update = StepScale(clipping, torch.device("cpu"))

            rescale.__module__ = "stabletrain.stability.optimizers.gated"
            optimizer.register_step_pre_hook(rescale)
            return optimizer

        return made

    return with_scale


DECAYS = "weight_decay", "peak_weight_decay"
WAYS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False}}
KINDS = {
    **{f"adamw {name}": with_amsgrad(AdamW, way) for name, way in WAYS.items()},
    **{f"adam {name}": with_amsgrad(Adam, way) for name, way in WAYS.items()},
    **{f"sgd {name}": sgd(way) for name, way in WAYS.items()},
    "rounded": rounded,
    "muon": muon,
    "own adamw": scaled(ours(GatedAdamW, cautious=[False, True])),
    "stable_adamw": scaled(ours(CappedAdamW, cautious=[False, True])),
    "spam": ours(SpikeAwareAdamW, theta=[1.0, 50.0, 1e30], reset_interval=[1, 3, 500], warmup_steps=[0, 2]),
}


class Course:
    """Gradients of a whole search: how large they are in each step, and how they are spread over the values.

    Sizes are drawn as exponents, from the smallest denormal to `largest`, the norm over all tensors.
    """

    def __init__(self, rng, dtype, largest):
        self.rng, self.dtype = rng, dtype
        self.largest = largest * (1 - 2.0**-7 if dtype == torch.bfloat16 else 1 - 1e-6)
        self.course = rng.choice(["random", "constant", "spike", "growing", "falling", "alternating"])
        self.sign = rng.choice([-1.0, 1.0])
        self.spiky = int(rng.integers(STEPS))

    def size(self, step):
        """Returns the norm of the gradient in a step."""
        low, high = math.log2(1e-45), math.log2(self.largest)
        exponents = {
            "random": self.rng.uniform(low, high),
            "constant": high,
            "alternating": high,
            "spike": high if step == self.spiky else self.rng.uniform(low, -20),
            "growing": low + (high - low) * (step + 1) / STEPS,
            "falling": high - (high - low) * step / STEPS,
        }
        return 2.0 ** exponents[self.course]

    def gradients(self, step, weights):
        size = self.size(step)
        drawn = []
        for weight in weights:
            shape = tuple(weight.shape)
            exponents = self.rng.choice([0.0, 1.0]) * self.rng.uniform(-150, 0, shape)
            signs = self.rng.choice([-1.0, 1.0], shape) if self.course == "random" else self.sign
            signs = signs * (-1) ** step if self.course == "alternating" else signs
            drawn.append(signs * 2.0**exponents * (self.rng.random(shape) < self.rng.choice([0.2, 1.0])))
        if self.rng.random() < 0.5:  # one tensor has the whole norm
            drawn = [each * (i == step % len(drawn)) for i, each in enumerate(drawn)]
        norm = math.sqrt(sum(float((each**2).sum()) for each in drawn))
        return [torch.tensor(each * (size / norm if norm else 0.0)).to(self.dtype) for each in drawn]


def search(draw, dtype, seeds, largest=LARGEST_NORM, proven=True):
    """Returns what was broken, by seed: a value that is not finite, or an invariant of the proof; empty if nothing.

    Args:
        draw: draws settings; with `proven` only those that are proven are tried.
        largest: bound of the gradient's norm.
    """
    broken = {}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            heights = rng.choice([0.0, 1e-45, 1.0, 1e17]), rng.choice([1e-3, 1e17])
            weights = [nn.Parameter(torch.tensor(h * rng.uniform(-1, 1, s)).to(dtype)) for h in heights for s in SHAPES]
            optimizer = draw(rng)(weights)
            if not proven or not (unproven := why_unproven(optimizer)):
                break
        else:
            raise AssertionError(f"no settings are proven: {unproven}")
        course, lr = Course(rng, dtype, largest), optimizer.param_groups[0]["lr"]
        for step in range(STEPS):
            for weight, gradient in zip(weights, course.gradients(step, weights), strict=True):
                weight.grad = gradient
            assert not proven or measure_all([weight.grad for weight in weights], [])[0].total <= LARGEST_NORM
            optimizer.param_groups[0]["lr"] = lr * float(rng.choice([0.0, 0.1, 1.0, 1.0]))
            optimizer.step()
            if wrong := broken_in(optimizer, weights, proven):
                broken[seed] = f"{wrong} after step {step} of {optimizer}"
                break
    return broken


SHAPES = [(3, 2), (5,), (1,)]


def broken_in(optimizer, weights, proven):
    """Names a value that is not finite; of a `proven` optimizer also an invariant that does not hold."""
    parts = {"weight": [weight.detach() for weight in weights]}
    for weight in weights:
        for name, each in optimizer.state[weight].items():
            parts.setdefault(name, []).append(each)
    values = {name: torch.cat([each.flatten() for each in every]).double() for name, every in parts.items()}
    for name, each in values.items():
        if not bool(each.isfinite().all()):
            return f"{name} is not finite"
    if not proven:
        return ""
    if not bool(values["weight"].abs().max() <= 1e33):
        return "|w| <= 1e33"
    if "exp_avg" in values:
        first, second = values["exp_avg"], values["exp_avg_sq"]
        if not bool(((second >= 0) & (second < 3e37)).all()):
            return "0 <= v < 3e37"
        if not bool(first.abs().max() <= 24 * LARGEST_NORM):
            return "|m| <= 24 G"
        if not bool((first**2 <= 2e6 * (second + 2.4e-32)).all()):
            return "m^2 <= K (v + z)"
    return ""


CASES = pytest.mark.parametrize("kind", KINDS)
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.slow(unless=lambda kind, dtype: dtype == ("fp32", "bf16")[[*KINDS].index(kind) % 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@CASES
def test_no_gradient_that_the_gate_lets_through_breaks_a_proven_optimizer(kind, dtype):
    assert not search(KINDS[kind], DTYPES[dtype], range(4))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@CASES
def test_none_of_many_gradients_breaks_a_proven_optimizer(kind, dtype):
    assert not search(KINDS[kind], DTYPES[dtype], range(100, 110))


def with_settings(kind, **settings):
    return lambda rng: lambda weights: kind(weights, **settings)


def spam_with(**settings):
    chosen = {
        "lr": 1e-3,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "reset_interval": 3,
        "warmup_steps": 1,
    }
    return lambda rng: lambda weights: SpikeAwareAdamW(weights, chosen | settings)


@pytest.mark.parametrize(
    ("draw", "largest"),
    [
        (with_amsgrad(AdamW, {"fused": True}), 3e19),
        (with_amsgrad(Adam, {"foreach": True}), 3e19),
        (with_settings(AdamW, eps=0.0), LARGEST_NORM),
        (with_settings(Adam, weight_decay=1e20), LARGEST_NORM),
        (with_settings(AdamW, lr=1.0, weight_decay=1e4), LARGEST_NORM),
        (with_settings(SGD, lr=100.0, weight_decay=1.0), LARGEST_NORM),
        (with_settings(SGD, lr=1e20, momentum=0.9999), LARGEST_NORM),
        (spam_with(theta=math.nan), LARGEST_NORM),
        (spam_with(theta=0.0), LARGEST_NORM),
    ],
)
def test_the_search_finds_what_breaks_beyond_the_bounds(draw, largest):
    broken = search(draw, torch.float32, range(10), largest, proven=False)
    assert any("not finite" in wrong for wrong in broken.values()), broken
    if largest == LARGEST_NORM:
        assert why_unproven(draw(None)([nn.Parameter(torch.ones(2))]))


# ---- what is refused, and why


def why(kind=AdamW, dtype=torch.float32, **settings):
    """Returns why an optimizer is unproven. Its weights and, if given, its rate are on a device without memory."""
    weights = [nn.Parameter(torch.ones(2, dtype=dtype, device="meta")), nn.Parameter(torch.ones(3, device="meta"))]
    return why_unproven(kind(weights, **settings))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (AdamW, {}),
        (AdamW, {"amsgrad": True, "maximize": True, "lr": 1}),
        (AdamW, {"lr": 0.0}),
        (AdamW, {"eps": 1e-15, "lr": 1.6e-4}),
        (AdamW, {"betas": (0.95, 0.95)}),
        (AdamW, {"betas": (0.5, 0.9)}),
        (AdamW, {"dtype": torch.bfloat16}),
        (AdamW, {"dtype": torch.float64}),
        (Adam, {"weight_decay": 5e-4}),
        (Adam, {"capturable": True}),
        (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}),
        (SGD, {"lr": 0.1, "momentum": 0.99, "weight_decay": 1e-4}),
        (SGD, {"lr": 1.0, "weight_decay": 0.1, "dtype": torch.bfloat16}),
    ],
)
def test_usual_settings_are_proven_and_no_value_of_a_tensor_is_read(kind, settings):
    assert why(kind, **settings) == ""


class Scaled(AdamW):
    """A subclass, which may do anything."""


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (Scaled, {}, "Scaled is none"),
        (torch.optim.Adagrad, {}, "Adagrad is none"),
        (torch.optim.RMSprop, {}, "RMSprop is none"),
        (torch.optim.Adafactor, {}, "Adafactor is none"),
        (torch.optim.NAdam, {}, "NAdam is none"),
        (torch.optim.LBFGS, {}, "LBFGS is none"),
        (AdamW, {"eps": 0.0}, "eps=0.0 is outside [1e-15, 1e+10]"),
        (AdamW, {"eps": 1e-30}, "eps=1e-30"),
        (AdamW, {"lr": math.nan}, "lr=nan"),
        (AdamW, {"lr": math.inf}, "lr=inf"),
        (AdamW, {"lr": 2e3}, "lr=2000.0"),
        (AdamW, {"lr": "tensor"}, "lr is a Tensor"),
        (AdamW, {"weight_decay": math.inf}, "weight_decay=inf"),
        (AdamW, {"lr": 1.0, "weight_decay": 1.1}, "lr * weight_decay = 1.1"),
        (AdamW, {"betas": (0.9, 0.8)}, "betas=(0.9, 0.8)"),
        (AdamW, {"betas": (0.99999, 0.99999)}, "betas=(0.99999"),
        (AdamW, {"betas": (0.999, 0.999), "dtype": torch.bfloat16}, "betas="),
        (AdamW, {"differentiable": True}, "differentiable"),
        (AdamW, {"capturable": True, "lr": 0.0}, "lr=0.0 is outside"),
        (AdamW, {"dtype": torch.float16}, "float16"),
        (AdamW, {"dtype": torch.complex64}, "complex64"),
        (Adam, {"weight_decay": 2.0}, "weight_decay=2.0"),
        (Adam, {"lr": 2.0, "weight_decay": 0.1}, "lr=2.0"),
        (SGD, {"lr": math.nan}, "lr=nan"),
        (SGD, {"momentum": 1.0}, "momentum=1.0"),
        (SGD, {"momentum": 0.99, "weight_decay": 0.01, "dtype": torch.bfloat16}, "(1 - momentum)^2 / 4"),
        (SGD, {"momentum": 0.9, "lr": 0.1, "weight_decay": 0.1}, "(1 - momentum)^2 / 4"),
        (SGD, {"momentum": 0.9, "lr": 0.1, "weight_decay": 0.0, "peak_weight_decay": 0.1}, "(1 - momentum)^2 / 4"),
        (SGD, {"momentum": 0.9, "lr": 1e4}, "10000 (1 - momentum)"),
        (SGD, {"momentum": 0.9, "dampening": 2.0}, "dampening=2.0"),
        (SGD, {"weight_decay": math.inf}, "weight_decay=inf"),
    ],
)
def test_what_is_not_proven_is_named(kind, settings, expected):
    settings = {name: torch.ones((), device="meta") if value == "tensor" else value for name, value in settings.items()}
    group = {name: settings.pop(name) for name in ("lr", "eps", *DECAYS) if name in settings}
    found = [why_of_changed(kind, settings, group)]
    assert expected in found[0], found


BOUNDS = [
    (AdamW, "lr", 1e3, 1.001e3, {"weight_decay": 0.0}),
    (AdamW, "eps", 1e-15, 0.999e-15, {}),
    (AdamW, "eps", 1e10, 1.001e10, {}),
    (AdamW, "weight_decay", 1e30, 1.001e30, {"lr": 0.0}),
    (AdamW, "weight_decay", 1.0, 1.001, {"lr": 1.0}),
    (AdamW, "betas", (0.9999, 0.999999), (0.99991, 0.999999), {}),
    (AdamW, "betas", (0.9, 0.999999), (0.9, 0.9999991), {}),
    (Adam, "weight_decay", 1.0, 1.001, {}),
    (Adam, "lr", 1.0, 1.001, {"weight_decay": 0.1}),
    (Adam, "lr", 1e-30, 0.999e-30, {"capturable": True}),
    (SpikeAwareAdamW, "theta", 1.0, 0.999, {}),
    (SpikeAwareAdamW, "reset_interval", 1, 0, {}),
    (SpikeAwareAdamW, "warmup_steps", 0, -1, {}),
    (SGD, "dampening", 1.0, 1.001, {"momentum": 0.5}),
    (SGD, "dampening", 0.0, -0.001, {"momentum": 0.5}),
    (SGD, "momentum", 0.9999, 0.99991, {"lr": 1e-6}),
    (SGD, "lr", 1e4, 1.001e4, {}),
    (SGD, "weight_decay", 1.0, 1.001, {"lr": 0.1}),
    (SGD, "weight_decay", 0.5, 0.501, {"lr": 0.5}),
]
"""Settings at a bound of the proof and beyond it, with other settings that allow them."""


@pytest.mark.parametrize(("kind", "name", "bound", "beyond", "others"), BOUNDS)
def test_a_setting_is_proven_up_to_its_bound(kind, name, bound, beyond, others):
    weights = [nn.Parameter(torch.ones(2, device="meta"))]
    optimizer = spam_with(theta=50.0)(None)(weights) if kind is SpikeAwareAdamW else kind(weights, lr=1e-3)
    (group,) = optimizer.param_groups
    group.update({name: bound, **others})
    assert why_unproven(optimizer) == ""
    group[name] = beyond
    assert str(beyond) in why_unproven(optimizer) or "lr *" in why_unproven(optimizer)


@pytest.mark.parametrize("beta1", [0.5, 0.9, 0.99])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2.0**-21), (torch.bfloat16, 2.0**-8)])
def test_the_first_moment_is_bounded_by_the_root_of_the_second_up_to_one_to_a_million(beta1, dtype, rounding):
    up, down = (1 + rounding) ** 2, (1 - rounding) ** 2

    def betas_at(ratio):  # beta2 at which the bound of m^2 / v is `ratio`, by bisection: it falls with beta2
        low, high = beta1 * beta1 * up / down, 0.99999
        for _ in range(100):
            beta2 = (low + high) / 2
            found = (1 - beta1) ** 2 * up * beta2 / ((1 - beta2) * (1 - rounding) * (beta2 * down - beta1**2 * up))
            low, high = (beta2, high) if found > ratio else (low, beta2)
        return beta1, high

    assert why(betas=betas_at(0.99e6), dtype=dtype) == ""
    assert "nothing bounds the first moment" in why(betas=betas_at(1.01e6), dtype=dtype)


def why_of_changed(kind, settings, group):
    """Changes settings of a group after the optimizer is made, as a schedule does."""
    dtype = settings.pop("dtype", torch.float32)
    optimizer = kind([nn.Parameter(torch.ones(2, dtype=dtype, device="meta"))], **settings)
    if kind in (AdamW, Adam, SGD) and dtype == torch.float32 and not settings:
        assert why_unproven(optimizer) == ""
    optimizer.param_groups[0].update(group)
    return why_unproven(optimizer)


def test_pytorchs_muon_is_not_proven():
    assert "Muon is none" in why_unproven(torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]))


def test_a_wrapper_is_not_proven():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    assert "Wrapper is none" in why_unproven(Wrapper(AdamW([nn.Parameter(torch.ones(2))])))


def test_what_changes_after_the_first_look_is_seen():
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    assert why_unproven(optimizer) == ""
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "eps": 0.0})
    assert "eps=0.0" in why_unproven(optimizer)
    optimizer.param_groups[1]["eps"] = 1e-8
    assert why_unproven(optimizer) == ""
    optimizer.param_groups[1]["params"].append(nn.Parameter(torch.ones(2).half()))
    assert "float16" in why_unproven(optimizer)
    del optimizer.param_groups[1]["params"][1]
    assert why_unproven(optimizer) == ""
    model.half()
    assert "float16" in why_unproven(optimizer)
    optimizer.param_groups.clear()
    assert why_unproven(optimizer) == ""


def test_a_fused_momentum_has_to_exist():
    weight = nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=0.1, momentum=0.9, fused=True)
    assert "momentum does not exist" in why_unproven(optimizer)
    zero_momentum_(optimizer)
    assert why_unproven(optimizer) == ""
    optimizer.state.clear()
    assert "momentum does not exist" in why_unproven(optimizer)


def test_a_loss_scale_in_the_step_is_named():
    optimizer = AdamW([nn.Parameter(torch.ones(2))], fused=True)
    optimizer.grad_scale = torch.ones(())
    assert "loss scale" in why_unproven(optimizer)
    optimizer.grad_scale = None
    assert why_unproven(optimizer) == ""


# ---- code of others in the step


def made():
    return AdamW([nn.Parameter(torch.ones(2))])


def test_hooks_of_others_are_named():
    optimizer = made()
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: None)
        assert "<lambda> is hooked into its step" in why_unproven(optimizer)
        handle.remove()
        assert why_unproven(optimizer) == ""
    handle = optimizer.register_step_post_hook(functools.partial(print))
    assert "is hooked into its step" in why_unproven(optimizer)
    handle.remove()


@pytest.mark.beside
def test_hooks_of_this_package_keep_the_proof_but_not_an_injected_fault():
    from stabletrain.beside.faults import in_step

    optimizer = made()
    Rounding([]).attach(optimizer)
    assert why_unproven(optimizer) == ""
    fault = in_step.LearningRate(at=[0], factor=1e30)
    handles = fault.inject(TrainState(nn.Linear(1, 1), optimizer), None)
    assert "raise_rates is hooked into its step" in why_unproven(optimizer)
    for handle in handles:
        handle()
    assert why_unproven(optimizer) == ""


def test_a_scheduler_and_an_attached_guard_keep_the_proof(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert why_unproven(optimizer) == ""
    guard = Guard.attach(model, optimizer, folder=tmp_path)
    assert why_unproven(optimizer) == ""
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert why_unproven(optimizer) == ""
    guard.detach()
    assert why_unproven(optimizer) == ""


@pytest.mark.parametrize("inside", [False, True])
def test_a_replaced_step_is_named(inside):
    optimizer = made()
    if not inside:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    own = optimizer.step

    @functools.wraps(own)
    def step(*arguments):
        return own(*arguments)

    optimizer.step = step.__get__(optimizer)
    if inside:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert "its step was replaced" in why_unproven(optimizer)
    optimizer.step = print
    assert "its step was replaced" in why_unproven(optimizer)


def test_a_class_whose_step_was_replaced_is_named(monkeypatch):
    optimizer = made()
    own = AdamW.step

    @functools.wraps(own)
    def step(*arguments):
        return own(*arguments)

    monkeypatch.setattr(AdamW, "step", step)
    assert "AdamW.step was replaced" in why_unproven(optimizer)
    monkeypatch.undo()
    assert why_unproven(optimizer) == ""


# ---- Muon, clipping, and what follows an update


@pytest.mark.parametrize("diverged", [math.inf, 1e7])
@pytest.mark.parametrize("cautious", [False, True])
def test_a_hidden_matrix_whose_direction_diverges_keeps_its_bits(monkeypatch, cautious, diverged):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4), nn.Linear(4, 2))
    optimizer = Muon(**MUON, cautious_decay=cautious)(model)
    assert why_unproven(optimizer) == ""
    own, first, second = muon_module.orthogonal, model[0].weight, model[1].weight

    def step(diverges):
        def orthogonal(update, *options):
            return own(update, *options) * (diverged if diverges and update.shape == first.shape else 1.0)

        monkeypatch.setattr(muon_module, "orthogonal", orthogonal)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        momenta = [
            optimizer.state[weight].get("momentum_buffer", torch.zeros(())).clone() for weight in (first, second)
        ]
        optimizer.step()
        moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
        kept = [
            torch.equal(optimizer.state[weight]["momentum_buffer"], momentum)
            for weight, momentum in zip((first, second), momenta, strict=True)
        ]
        return moved, kept

    everything = {*model.state_dict()}
    assert step(diverges=False) == (everything, [False, False])
    assert step(diverges=True) == (everything - {"0.weight"}, [True, False])
    assert step(diverges=False) == (everything, [False, False])


class OwnAfterUpdate(AfterUpdate):
    """A class that the proofs do not know."""


class OwnClip(NormClip):
    """A subclass, which may do anything."""


def test_exact_classes_of_clipping_and_of_qk_clip_are_proven():
    clippings = [NoClip(), NormClip(1.0), ValueClip(1.0), PerModuleClip(1.0), AGC(), AdaGC(), ZClip(), UpdateNormClip()]
    assert all(clipping_is_proven(each) for each in clippings)
    assert not any(clipping_is_proven(each) for each in (OwnClip(1.0), None, print))
    assert after_update_is_proven(NoQKClip())
    assert after_update_is_proven(InTurn((QKClip(100.0), MuCentering.after_update)))
    assert not after_update_is_proven(print)
    assert not after_update_is_proven(InTurn((QKClip(100.0), OwnAfterUpdate())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "make",
    [
        lambda bound: NormClip(bound),
        lambda bound: ValueClip(bound),
        lambda bound: PerModuleClip(bound),
        lambda bound: AGC(bound, eps=1e-30),
        lambda bound: AdaGC(bound, warmup_steps=3),
        lambda bound: ZClip(bound, warmup_steps=3),
    ],
    ids=["norm", "value", "per_module", "agc", "adagc", "zclip"],
)
def test_clipping_makes_no_value_larger(make, dtype):
    rng = np.random.default_rng(0)
    for bound in (1e-38, 1e-3, 1.0, 1e30, math.inf):
        model, clipping = Two().to(dtype), make(bound)
        with torch.no_grad():
            model.up.weight.mul_(float(rng.choice([0.0, 1e-30, 1e17])))
        course, parameters = Course(rng, dtype, LARGEST_NORM), [*model.parameters()]
        course.course = "random"
        for step in range(12):
            gradients = course.gradients(step, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            norms = measure_all([parameter.grad for parameter in parameters], [])[0]
            clipping(model, norms, norms.total <= LARGEST_NORM)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                assert bool((parameter.grad.abs() <= gradient.abs()).all()), (clipping, step)
