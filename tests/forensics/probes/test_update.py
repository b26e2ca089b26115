"""An optimizer's step that is not finite is traced to the operation, its line, the parameter and the reason."""

import copy
import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from stabletrain.forensics.diagnosis.diagnose import diagnose
from stabletrain.forensics.diagnosis.evidence import Evidence
from stabletrain.forensics.probes.update import trace_update
from tests.forensics.diagnosis.given import READING, SETTING
from tests.stability.optimizers.test_all import KINDS, bits, equal, fill, fresh


class Fragile(Optimizer):
    """Applies `change` to each parameter."""

    def __init__(self, parameters, lr=0.1, **more):
        super().__init__(parameters, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(parameter, parameter.grad, self.state[parameter], group)


class RowNorm(Fragile):
    """Normalises each row of the momentum and restores its norm."""

    def change(self, p, g, state, group):
        m = state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g)
        u = m.sign() * m.abs().sqrt()
        u = u * (m.norm(dim=-1, keepdim=True) / u.norm(dim=-1, keepdim=True))  # here: RowNorm
        p.add_(u, alpha=-group["lr"])


class RsqrtFirst(Fragile):
    """Takes the reciprocal root before eps."""

    def change(self, p, g, state, group):
        v = state.setdefault("v", torch.zeros_like(p))
        v.mul_(0.9).addcmul_(g, g, value=0.1)
        p.sub_(g * (v.rsqrt() + 1e-8))  # here: RsqrtFirst


class Factored(Fragile):
    """A second moment from the means of rows and columns."""

    def change(self, p, g, state, group):
        if p.ndim < 2:
            return
        square = g.square()
        rows, columns = square.mean(1), square.mean(0)
        v = torch.outer(rows, columns) / rows.mean()  # here: Factored
        p.sub_(g / (v.sqrt() + 1e-8), alpha=group["lr"])


class KeepsNorm(AdamW):
    """AdamW that gives each matrix back the norm it had."""

    @torch.no_grad()
    def step(self, closure=None):
        before = [[p.norm() for p in group["params"]] for group in self.param_groups]
        super().step()
        for group, norms in zip(self.param_groups, before, strict=True):
            for p, norm in zip(group["params"], norms, strict=True):
                p.mul_(norm / p.norm())  # here: KeepsNorm


class LogGradient(Fragile):
    """Moves by the logarithm of the gradient."""

    def change(self, p, g, state, group):
        p.sub_(g.abs().log(), alpha=group["lr"])  # here: LogGradient


class Numpy(Fragile):
    """Computes in numpy, in the memory of the parameter."""

    def change(self, p, g, state, group):
        weights, gradient = p.numpy(), g.numpy()
        with np.errstate(all="ignore"):
            weights -= group["lr"] * gradient / np.abs(gradient)


class NumpyCopy(Fragile):
    """Computes in numpy, and copies the result."""

    def change(self, p, g, state, group):
        with np.errstate(all="ignore"):
            new = p.numpy() - g.numpy() / np.abs(g.numpy())
        p.copy_(torch.from_numpy(new))  # here: NumpyCopy


class Unwritten(Fragile):
    """Adds to a moment that was never written."""

    def change(self, p, g, state, group):
        if not state:
            state["m"] = torch.empty_like(p)  # here: Unwritten
            state["m"].view(-1).numpy()[0] = np.nan  # what the memory happened to hold
        p.sub_(state["m"].mul_(0.9).add_(g), alpha=group["lr"])


class Lookahead(Optimizer):
    """Wraps an optimizer, and interpolates; it does not call its base class's constructor."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.slow = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step()
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, s in zip(group["params"], slow, strict=True):
                s.lerp_(p, 0.5)
                p.copy_(s)


class Net(nn.Module):
    """Two named parts, as the names in a report."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.to(dtype)
        for parameter in self.parameters():
            parameter.grad = torch.randn_like(parameter)


def line_of(mark):
    source = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    return f"{__file__}:{1 + next(i for i, text in enumerate(source) if text.endswith(f'# here: {mark}'))}"


def traced(model, optimizer):
    """Traces a step and puts everything back, as a caller does."""
    fault = trace_update(model, optimizer, optimizer.step)
    told = diagnose(Evidence("update", READING, update=fault, update_ran=True, setting=SETTING, origin=fault.origin))
    assert not any(" rate" in fix or fix.startswith("optimizer.lr") for fix in told.fix)
    return fault, told


def zero(model, rows=slice(None)):
    model.query.weight.grad[rows] = 0
    return model


@pytest.mark.parametrize(
    ("kind", "rows", "op", "says", "fix"),
    [
        (RowNorm, 2, "aten.div", "`u.norm(dim=-1, keepdim=True)` is 0 in 1 of 6 values: 1 of 6 rows of", "floor"),
        (RowNorm, slice(None), "aten.div", "is 0: the gradient of query.weight is exactly zero", "(u.norm(dim=-1"),
        (RsqrtFirst, 2, "aten.rsqrt", "1 / sqrt(0)", "1 / (v.sqrt() + eps)"),
        (Factored, slice(None), "aten.div", "`rows.mean()` is 0: the gradient of query.weight is", "floor"),
        (LogGradient, 2, "aten.log", "log of 0 (6 of 36 values)", "log(x + eps)"),
        (Unwritten, (), "aten.empty_like", "was read before anything was written to it", "torch.zeros"),
    ],
)  # fmt: skip
def test_the_operation_its_line_and_the_zero_are_named(kind, rows, op, says, fix):
    model = zero(Net(), rows)
    fault, told = traced(model, kind(model.parameters()))
    assert fault.origin.op == op
    assert fault.origin.source == line_of(kind.__name__)
    assert (fault.parameter, fault.origin.module, fault.origin.direction) == (*["query.weight"] * 2, "update")
    assert says in fault.reason
    assert told.cause == "unsafe_optimizer"
    assert told.confidence > 0.9
    assert fix in told.fix[0]
    assert line_of(kind.__name__) in told.fix[0]


def test_a_norm_that_is_given_back_to_a_zero_matrix():
    """At rate 0, so that the matrix stays zero; at any other rate it is the same."""
    model = Net()
    with torch.no_grad():
        model.head.weight.zero_()
    fault, told = traced(model, KeepsNorm(model.parameters(), lr=0.0))
    assert fault.origin.source == line_of("KeepsNorm")
    assert "`p.norm()` is 0: head.weight is exactly zero" in fault.reason
    assert fault.zero_weights == ["head.weight"]
    assert "floor the denominator: (p.norm())" in told.fix[0]
    assert "initialise head.weight" in told.fix[1]


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_adam_without_eps_and_with_a_gradient_of_zero(kind):
    model = zero(Net())
    fault, told = traced(model, Adam(model.parameters(), eps=0, **kind))
    assert (fault.parameter, fault.tensor, fault.why, fault.count) == ("query.weight", "parameter", "zero_eps", 1)
    assert "torch/optim/adam.py:" in fault.origin.source
    assert "0 / 0 (36 of 36 values)" in fault.reason
    assert "is 0: eps=0, and the gradient of query.weight is exactly zero" in fault.reason
    assert told.fix[0] == "Adam(eps=1e-08): eps is 0 in group 0"
    assert fault.fused == ("fused" in kind)


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}])
def test_the_eps_of_fp16(kind):
    model = Net(torch.float16)
    for parameter in model.parameters():
        parameter.grad.mul_(1e-3)
    fault, told = traced(model, AdamW(model.parameters(), **kind))
    assert (fault.parameter, fault.dtype, fault.why, fault.count) == ("query.weight", "float16", "lost_eps", 4)
    assert "eps=1e-08 is 0 in fp16, and a product of the gradient of query.weight" in fault.reason
    assert "below the smallest fp16 number, 5.96e-08" in fault.reason
    assert "fp32 master weights" in told.fix[0]
    model = Net(torch.float16)
    optimizer = AdamW(model.parameters(), fused=True)  # computes in fp32
    assert trace_update(model, optimizer, optimizer.step) is None


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_a_second_moment_that_overflows(kind):
    model = Net()
    model.head.weight.grad[1, 2] = 3e30
    fault, told = traced(model, Adam(model.parameters(), **kind))
    assert (fault.parameter, fault.tensor, fault.count) == ("head.weight", "exp_avg_sq", 1)
    assert "the second moment (exp_avg_sq) of head.weight overflowed fp32: an element of the gradient" in fault.reason
    assert "3e+30, squared is above 3.403e+38" in fault.reason
    assert "limit the gradient of head.weight" in told.fix[0]


def test_what_numpy_computes_in_place_is_known_by_the_parameter_only():
    model = zero(Net())
    fault, told = traced(model, Numpy(model.parameters()))
    assert (fault.origin, fault.parameter, fault.why) == (None, "query.weight", "untraced")
    assert "no operation on tensors shows" in fault.reason
    assert "the gradient of query.weight is exactly zero" in fault.reason
    assert told.confidence < 0.7


def test_what_numpy_computes_and_copies_is_known_by_the_line_of_the_copy():
    model = zero(Net(), 1)
    fault, told = traced(model, NumpyCopy(model.parameters()))
    assert fault.origin.source == line_of("NumpyCopy")
    assert "6 of 36 elements" in fault.reason
    assert (fault.parameter, told.cause) == ("query.weight", "unsafe_optimizer")
    assert told.confidence < 0.7


def test_a_wrapper_without_hooks_shows_the_line_of_the_optimizer_inside():
    model = zero(Net())
    fault, _ = traced(model, Lookahead(RowNorm(model.parameters())))
    assert fault.optimizer == "Lookahead"
    assert fault.origin.source == line_of("RowNorm")
    assert fault.parameter == "query.weight"


def test_a_caller_may_put_everything_back_at_once():
    model = zero(Net())
    optimizer = RowNorm(model.parameters())
    before = copy.deepcopy([*model.parameters()])

    def run():
        optimizer.step()
        with torch.no_grad():
            for live, old in zip(model.parameters(), before, strict=True):
                live.copy_(old)
        optimizer.state.clear()

    assert trace_update(model, optimizer, run).origin.source == line_of("RowNorm")


def test_gradients_that_share_memory_are_told_apart():
    """As in the buckets of DDP."""
    model = Net()
    flat = torch.randn(sum(p.numel() for p in model.parameters()))
    at = 0
    for parameter in model.parameters():
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    model.head.weight.grad.zero_()
    fault, _ = traced(model, Adam(model.parameters(), eps=0))
    assert fault.parameter == "head.weight"
    assert "the gradient of head.weight is exactly zero" in fault.reason


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda p: Adam(p, foreach=True), torch.bfloat16),
        (lambda p: AdamW(p, fused=True, amsgrad=True), torch.float32),
        (lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True), torch.bfloat16),
        (lambda p: torch.optim.Adafactor(p), torch.float32),
        (RowNorm, torch.bfloat16),
    ],
)
def test_a_healthy_step_has_no_fault_and_the_same_bits(make, dtype):
    model, other = Net(dtype), Net(dtype)
    optimizer, plain = make([*model.parameters()]), make([*other.parameters()])
    for _ in range(2):
        assert trace_update(model, optimizer, optimizer.step) is None
        plain.step()
    for traced_one, one in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(traced_one, one)


@pytest.mark.slow(unless=lambda kind: kind == "stable_adamw")
@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizers_of_this_package_take_the_same_step_under_the_recorder(kind):
    states = [fresh(kind), fresh(kind)]
    for seed in range(2):  # the first step makes the state
        for state in states:
            fill(state, seed)
            if getattr(state.optimizer, "_step_supports_amp_scaling", False):
                state.optimizer.found_inf = torch.tensor(0.0)  # the gate is open
        assert trace_update(states[0].model, states[0].optimizer, states[0].optimizer.step) is None
        states[1].optimizer.step()
    assert equal(bits(states[0]), bits(states[1]))


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        ({"lr": math.nan}, "lr", "lr of parameter group 1 of SGD is nan, not a finite number"),
        ({"weight_decay": math.inf}, "weight_decay", "is inf"),
        ({"momentum": math.nan}, "momentum", "not a finite number"),
        ({"betas": (0.9, math.nan)}, "betas[1]", "betas[1] of parameter group 1 of Adam is nan"),
        ({"betas": (0.9, 1.5)}, "betas[1]", "is 1.5, outside [0, 1]"),
        ({"alpha": 2.0}, "alpha", "is 2, outside [0, 1]"),
        ({"lr": torch.tensor(math.nan)}, "lr", "is nan"),
    ],
)
def test_a_setting_that_is_no_usable_number(change, key, says):
    model = Net()
    groups = [{"params": [*part.parameters()]} for part in (model.query, model.head)]
    adam = "betas" in change
    optimizer = Adam(groups, fused=change["betas"] == (0.9, 1.5)) if adam else SGD(groups, lr=0.1, momentum=0.9)
    if "alpha" in change:
        optimizer = torch.optim.RMSprop(groups)
    optimizer.step()
    optimizer.param_groups[1].update(change)
    fault, told = traced(model, optimizer)
    assert (fault.bad_settings[0].group, fault.bad_settings[0].key) == (1, key)
    assert fault.parameter.startswith("head.")
    assert told.cause == "bad_setting"
    assert told.confidence > 0.9
    assert says in told.verdict
    assert f"{key} of parameter group 1" in told.fix[0]
    assert "scheduler" in told.fix[0]


def test_a_beta_of_exactly_one_divides_by_zero():
    model = Net()
    optimizer = Adam(model.parameters())
    optimizer.param_groups[0]["betas"] = (0.9, 1.0)
    fault, told = traced(model, optimizer)
    assert (fault.why, told.cause) == ("zero_number", "bad_setting")
    assert "bias correction" in told.verdict
