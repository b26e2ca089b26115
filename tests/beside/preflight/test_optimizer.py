"""Tests for an optimizer's special steps: a sound optimizer survives them, and of another the line is named."""

import inspect

import pytest
import torch
from torch import nn

from stabletrain.beside.preflight import optimizer as module
from stabletrain.beside.preflight.checks import check_loop


class Own(torch.optim.Optimizer):
    """An optimizer of a user's own: `change` returns what is added to a parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.add_(self.change(each, each.grad, self.state[each]), alpha=-0.1)


class NoEps(Own):
    def change(self, weight, gradient, state):
        square = state.setdefault("square", torch.zeros_like(weight)).lerp_(gradient.square(), 0.1)
        return gradient / square.sqrt()


class Half(Own):
    def change(self, weight, gradient, state):
        square = state.setdefault("square", torch.zeros_like(weight, dtype=torch.float16))
        square.mul_(0.9).add_((0.1 * gradient.square()).half())
        return gradient / (square.float().sqrt() + 1e-3)


class ByNorm(Own):
    def change(self, weight, gradient, state):
        return gradient / weight.norm()


class OfLast(Own):
    """Only stores its first gradient; its second step divides by the change of the gradient."""

    def change(self, weight, gradient, state):
        last = state.get("last")
        state["last"] = gradient.clone()
        return gradient if last is None else gradient / (gradient - last).norm()


def loop(kind, dtype=torch.float32, sizes=(3, 4), sparse=False, **options):
    """Returns a function that makes a loop of an embedding and a linear layer."""

    def make():
        layers = [nn.Embedding(5, sizes[0], sparse=sparse)]
        layers += [] if sparse else [nn.Linear(*sizes)]
        model = nn.Sequential(*layers).to(dtype)
        optimizers = [kind(model.parameters(), **options)]
        return {"model": model, "optimizers": optimizers, "loss": lambda b: model(b).square().mean(), "batch": batch}

    def batch(step, rank=0):
        return torch.arange(4) + step % 2

    return make


def checked(make):
    return check_loop(make, ["optimizer"])


def line_in(kind, words):
    """Returns the place of the line of a class that has these words."""
    lines, first = inspect.getsourcelines(kind)
    return f"{__file__}:{first + next(number for number, line in enumerate(lines) if words in line)}"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adafactor, {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_optimizer_passes(kind, options, dtype):
    [found] = checked(loop(kind, dtype, **options))
    assert found.verdict == "passed"
    assert found.text == (
        f"{kind.__name__} (optimizers.0) stays finite with zero gradients, with gradients of 1e+10, and with weights "
        "of 0, in its first step and after a real one"
    )


def test_a_step_with_zero_gradients():
    [found] = [each for each in checked(loop(NoEps)) if each.verdict == "fault"]
    assert found.text.startswith(
        "the first step of NoEps (optimizers.0), with zero gradients, is not finite: 0 / 0 (15 of 15 values)"
    )
    assert found.text.endswith("; not finite after it: 0.weight, 1.weight, 1.bias, 3 in all")
    assert found.places == ("optimizers.0", "NoEps", "0.weight")
    assert found.line == line_in(NoEps, "square.sqrt()")
    assert found.fix == f"{found.line}: floor the denominator: (square.sqrt()).clamp(min=1e-12), or add eps to it"


def test_a_step_with_huge_gradients():
    [found] = checked(loop(Half))
    assert "the first step of Half (optimizers.0), with huge gradients (1e+10), is not finite: overflow" in found.text
    assert "'square' of 0.weight" in found.text
    assert found.line == line_in(Half, ".half()")
    assert found.verdict == "fault"


def test_a_power_above_2_is_not_called_a_square():
    class Fourth(Own):
        def change(self, weight, gradient, state):
            return gradient / (gradient.pow(4).sqrt().sqrt() + 1e-4) + gradient.pow(4)

    [found] = checked(loop(Fourth))
    assert "overflow of fp32: inputs up to 1e+10 give 1e+40" in found.text
    assert "in `gradient.pow(4)`, computed from the gradient of 0.weight" in found.text


def test_a_step_with_weights_of_0():
    [found] = checked(loop(ByNorm))
    assert found.text.startswith(
        "the first step of ByNorm (optimizers.0), with weights of 0, is not finite: division by 0"
    )
    assert found.line == line_in(ByNorm, "weight.norm()")


def test_the_second_of_two_special_steps_may_be_the_first_that_fails():
    found = checked(loop(OfLast))
    assert [each.verdict for each in found] == ["fault"] * 3
    assert all(each.line == line_in(OfLast, "(gradient - last).norm()") for each in found)


def test_an_eps_that_the_format_cannot_hold():
    found = [each for each in checked(loop(torch.optim.AdamW, torch.float16)) if each.verdict == "fault"]
    assert "eps=1e-08 is 0 in fp16" in found[0].text
    assert found[0].fix.startswith("keep fp32 master weights")


def test_huge_gradients_of_fp16_parameters_are_those_that_adam_survives():
    found = checked(loop(torch.optim.AdamW, torch.float16, eps=1e-4))
    assert [each.verdict for each in found] == ["passed"]
    assert "with gradients of 16," in found[0].text


def test_sparse_gradients_stay_sparse():
    [found] = checked(loop(torch.optim.SparseAdam, sparse=True))
    assert found.verdict == "passed"


def test_an_optimizer_that_needs_a_closure_is_not_checked():
    [found] = checked(loop(torch.optim.LBFGS))
    assert found.verdict == "not checked"
    assert found.text == "LBFGS (optimizers.0) needs a closure, which computes new gradients"


def test_an_optimizer_that_refuses_a_step_is_not_checked():
    class Refuses(Own):
        def change(self, weight, gradient, state):
            if not gradient.any():
                raise ValueError("no gradient")
            return gradient

    first, second = checked(loop(Refuses))
    assert first.verdict == second.verdict == "not checked"
    assert "with zero gradients, failed with ValueError: no gradient" in first.text


def test_each_optimizer_of_several_is_checked():
    def make():
        model = nn.Linear(3, 3)
        optimizers = [torch.optim.SGD([model.weight], lr=0.1), NoEps([model.bias])]

        def batch(step, rank=0):
            return torch.ones(2, 3)

        return {"model": model, "optimizers": optimizers, "loss": lambda b: model(b).square().mean(), "batch": batch}

    passed, found = checked(make)
    assert passed.text.startswith("SGD (optimizers.0) stays finite")
    assert found.places == ("optimizers.1", "NoEps", "bias")


def test_of_a_large_model_some_parameters_of_each_kind_are_tried(monkeypatch):
    monkeypatch.setattr(module, "LARGE", 20)
    monkeypatch.setattr(module, "LARGEST", 18)
    [found] = checked(loop(torch.optim.AdamW, sizes=(3, 7)))
    assert found.text.endswith("(tried with 2 of its parameters)")
    [found] = [each for each in checked(loop(NoEps, sizes=(3, 7))) if each.verdict == "fault"]
    assert found.text.endswith("not finite after it: 0.weight, 1.bias, 2 in all")


@pytest.mark.parametrize("kind", [torch.optim.SGD, NoEps])
def test_an_optimizer_of_copies_of_the_parameters_is_tried_too(kind):
    def make():
        model = nn.Linear(3, 2)
        copies = [each.detach().clone().requires_grad_() for each in model.parameters()]
        batch = lambda step, rank=0: torch.ones(2, 3)  # noqa: E731

        def step(batch):
            model.zero_grad()
            model(batch).square().mean().backward()
            for each, parameter in zip(copies, model.parameters(), strict=True):
                each.grad = parameter.grad
            optimizer.step()

        optimizer = kind(copies, lr=0.1) if kind is torch.optim.SGD else kind(copies)
        return {
            "model": model,
            "optimizers": [optimizer],
            "loss": lambda b: model(b).square().mean(),
            "batch": batch,
            "step": step,
        }

    [found] = checked(make)
    assert found.verdict == ("passed" if kind is torch.optim.SGD else "fault")
    assert kind is torch.optim.SGD or found.places == (
        "optimizers.0",
        "NoEps",
        "optimizers.0.param_groups[0].params[0]",
    )
