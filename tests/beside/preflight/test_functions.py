"""Autograd functions alone, as people write them: right ones, wrong ones, and those whose gradient is another one on
purpose."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from stabletrain.beside.preflight.functions import check_call, recorded_calls
from stabletrain.beside.preflight.plain import gradient_of
from tests.beside.preflight.small import Net, maker


class Swish(Function):
    """x * sigmoid(x), with a context of its own."""

    @staticmethod
    def forward(x):
        return x * x.sigmoid()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        [x] = ctx.saved_tensors
        sigmoid = x.float().sigmoid()
        return (grad * (sigmoid + x * sigmoid * (1 - sigmoid))).to(x.dtype)


class HalfSwish(Swish):
    """Swish; the backward pass returns half."""

    @staticmethod
    def backward(ctx, grad):
        return Swish.backward(ctx, grad) / 2


class ShortSwish(Swish):
    """Swish; the backward pass misses a term."""

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].sigmoid()


class Scaled(Function):
    """A product; the backward pass knows nothing of the second factor."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class KeptMask(Function):
    """Dropout that draws its mask again with the random state of the forward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.state = torch.get_rng_state()
        return F.dropout(x, 0.3)

    @staticmethod
    def backward(ctx, grad):
        with torch.random.fork_rng():
            torch.set_rng_state(ctx.state)
            return F.dropout(grad, 0.3)


class RedrawnMask(KeptMask):
    """Dropout that draws another mask."""

    @staticmethod
    def backward(ctx, grad):
        return F.dropout(grad, 0.3)


class Recomputed(Function):
    """A module that is run again in the backward pass, with other dropout."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(grad)
        return None, x.grad


class RecomputedByHand(Function):
    """A checkpoint by hand: differentiates the parameters of what it runs, which are its inputs only by name."""

    keeps, factor = True, 1.0

    @classmethod
    def forward(cls, ctx, run, x, *parameters):
        ctx.run, ctx.x, ctx.parameters, ctx.drawn = run, x, parameters, torch.get_rng_state()
        with torch.no_grad():
            return run(x)

    @classmethod
    def backward(cls, ctx, grad):
        x = ctx.x.detach().requires_grad_()
        with torch.random.fork_rng(), torch.enable_grad():
            if cls.keeps:
                torch.set_rng_state(ctx.drawn)
            out = ctx.run(x)
        gradients = torch.autograd.grad(out, [x, *ctx.parameters], grad)
        return None, gradients[0], *(cls.factor * each for each in gradients[1:])


class RedrawnByHand(RecomputedByHand):
    """The same with other dropout."""

    keeps = False


class HalfByHand(RecomputedByHand):
    """The same with half of the gradient of its parameters."""

    factor = 0.5


class OnClass(Function):
    """A product that keeps the factor on the class."""

    @staticmethod
    def forward(ctx, x, factor):
        OnClass.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * OnClass.factor, None


class OnStack(Function):
    """The same with a stack, which the backward passes empty in the reverse order."""

    factors: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x, factor):
        OnStack.factors.append(factor)
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * OnStack.factors.pop(), None


class Reversed(Function):
    """Returns its input, and reverses the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Rounded(Function):
    """Rounds, with a straight-through gradient."""

    @staticmethod
    def forward(ctx, x):
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx, grad):
        return grad


class Clamped(Function):
    """Clamps, with a straight-through gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(-0.1, 0.1)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Sketched(Function):
    """A product of matrices whose backward pass estimates the gradient from random columns."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 4 * grad * (torch.rand_like(grad) < 0.5)


def found_in(between):
    """Returns what is found of the functions that a model calls between its layers."""
    loop = maker(lambda: Net(between))()
    with recorded_calls(loop) as calls:
        gradient_of(loop, loop.batch(0))
    [found] = [check_call(each) for each in calls]
    return found


@pytest.mark.parametrize("function", [Swish, KeptMask])
def test_a_right_backward_pass_is_not_found(function):
    assert found_in(lambda net, x: function.apply(x)) is None


def test_a_factor_is_named_with_function_and_line():
    found = found_in(lambda net, x: HalfSwish.apply(x))
    assert found.verdict == "fault"
    assert "HalfSwish.backward is not the gradient" in found.text
    assert "input 0 is 0.5 times the right one" in found.text
    assert found.places == ("HalfSwish",)
    # From the decorator on.
    assert found.line == f"{__file__}:{HalfSwish.backward.__code__.co_firstlineno}"
    assert "gradcheck(HalfSwish.apply" in found.fix


def test_a_missing_term_and_a_missing_gradient_are_found():
    assert "another direction" in found_in(lambda net, x: ShortSwish.apply(x)).text
    found = found_in(lambda net, x: Scaled.apply(x, net.second.bias))
    assert found.verdict == "fault"
    assert "input 1 gets no gradient, though the output depends on it" in found.text


@pytest.mark.parametrize("between", [lambda net, x: RedrawnMask.apply(x), lambda net, x: Recomputed.apply(net.drop, x)])
def test_a_backward_pass_that_draws_again_is_found(between):
    found = found_in(between)
    assert found.verdict == "fault"
    assert "draws other random numbers than the forward pass" in found.text


@pytest.mark.parametrize("function", [Reversed, Rounded, Clamped])
def test_what_may_be_meant_is_only_noted(function):
    found = found_in(lambda net, x: function.apply(x))
    assert found.verdict == "note"
    assert "may be meant" in found.text


def test_a_random_estimate_of_a_gradient_is_only_noted():
    found = found_in(lambda net, x: Sketched.apply(x))
    assert found.verdict == "note"
    assert "right at most on average" in found.text


def test_the_classes_are_as_before():
    before = vars(Swish)["forward"], vars(Swish)["backward"]
    found_in(lambda net, x: Swish.apply(x))
    assert (vars(Swish)["forward"], vars(Swish)["backward"]) == before
    assert "forward" not in vars(HalfSwish)


def run_by(function):
    """Returns what calls an inner layer by a function that recomputes it."""

    def between(net, x):
        if not hasattr(net, "inner"):
            torch.manual_seed(0)
            net.inner = torch.nn.Linear(8, 8)
        return function.apply(lambda x: net.drop(net.inner(x)), x, *net.inner.parameters())

    return between


def test_a_function_that_differentiates_parameters_which_it_does_not_use_as_inputs_is_checked():
    assert found_in(run_by(RecomputedByHand)) is None
    found = found_in(run_by(RedrawnByHand))
    assert (found.verdict, found.places) == ("fault", ("RedrawnByHand",))
    assert "draws other random numbers than the forward pass" in found.text
    found = found_in(run_by(HalfByHand))
    assert found.verdict == "fault"
    assert "the gradient of input 2 is 0.5 times the right one" in found.text


def twice(function, run=lambda function, *args: function(*args)):
    """Returns what multiplies by 2 and then by 3, each in a run of its own."""

    def between(net, x):
        for factor in (2.0, 3.0):
            x = run(lambda x, factor=factor: F.gelu(function.apply(F.gelu(x), torch.full((8,), factor))), x)
        return x

    return between


def test_a_second_call_must_not_overwrite_what_the_first_ones_backward_pass_needs():
    found = found_in(twice(OnClass))
    assert (found.verdict, found.places) == ("fault", ("OnClass",))
    assert "OnClass is called twice before the backward pass" in found.text
    assert "another one than alone (OnClass), of input 0 by 0.5 of its norm" in found.text
    assert found.line == f"{__file__}:{OnClass.backward.__code__.co_firstlineno}"
    assert "keep what OnClass.backward needs on ctx" in found.fix
    assert found_in(lambda net, x: OnClass.apply(x, torch.full((8,), 2.0))) is None
    assert found_in(twice(OnStack)) is None


def test_what_a_recomputed_call_writes_anew_is_not_overwritten():
    assert found_in(twice(OnClass, lambda *args: checkpoint(*args, use_reentrant=False))) is None
