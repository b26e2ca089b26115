"""Gradients that are added up over all steps, in buffers of the loop's own; and what only looks like it."""

import pytest
import torch

from stabletrain.beside.preflight.loop import Maker
from stabletrain.beside.preflight.summed import summed
from tests.beside.preflight.plain import Plain, source


class Buffers(Plain):
    """The optimizer gets gradients from buffers of the loop's own, and clips them."""

    max_norm = 1e-2

    def clip(self):
        for parameter in self.model.parameters():
            old = getattr(parameter, "main_grad", None)
            parameter.main_grad = parameter.grad.clone() if old is None else self.joined(old, parameter.grad)
            parameter.grad.copy_(parameter.main_grad)
        super().clip()

    def joined(self, old, new):
        return old + new


class InHooks(Buffers):
    """Hooks add gradients to the buffers."""

    def make_optimizers(self):
        for parameter in self.model.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.register_post_accumulate_grad_hook(self.take)
        return super().make_optimizers()

    def take(self, parameter):
        parameter.main_grad += parameter.grad
        parameter.grad = None

    def clip(self):
        for parameter in self.model.parameters():
            parameter.grad = parameter.main_grad.clone()


class ZeroedInHooks(InHooks):
    """The same, zeroed."""

    def zero_grad(self):
        super().zero_grad()
        for parameter in self.model.parameters():
            parameter.main_grad.zero_()


class Averages(Buffers):
    """The mean over steps, of which clipping leaves the norm alone."""

    def joined(self, old, new):
        return 0.9 * old + 0.1 * new


class Momentum(Buffers):
    """Heavy-ball momentum before the optimizer."""

    def joined(self, old, new):
        return 0.99 * old + new


class Late(Plain):
    """The optimizer gets the gradients of the step before."""

    def clip(self):
        for parameter in self.model.parameters():
            old, parameter.late = getattr(parameter, "late", parameter.grad), parameter.grad
            parameter.grad = old.clone()


class Reused(Plain):
    """Gradients are computed in every third step only."""

    every = 3

    def clip(self):
        for parameter in self.model.parameters():
            if self.position % self.every == 1:
                parameter.reused = parameter.grad.clone()
            parameter.grad.copy_(parameter.reused)


class ReusedLong(Reused):
    """In every fifth."""

    every = 5


class Normalized(Buffers):
    """The mean of all steps, brought to length 1: it cannot be told from the sum."""

    def joined(self, old, new):
        return old + new

    def clip(self):
        super().clip()
        norm = torch.stack([each.grad.norm() for each in self.model.parameters()]).norm()
        for parameter in self.model.parameters():
            parameter.grad /= norm


class Noise(Plain):
    """Noise is added to gradients."""

    def clip(self):
        for parameter in self.model.parameters():
            parameter.grad += torch.randn_like(parameter)


class StopsAtZero(Buffers):
    """Fails if there is no gradient."""

    def backward(self, batch):
        loss = super().backward(batch)
        assert any(bool(each.grad.any()) for each in self.model.parameters())
        return loss


@pytest.mark.parametrize("loop", [Buffers, InHooks])
def test_buffers_that_are_never_zeroed_are_found(loop):
    [found] = summed(Maker(loop))
    assert (found.check, found.verdict, found.places) == ("order", "fault", ("optimizers.0", "zero_grad"))
    assert found.text.startswith("optimizers.0 gets the sum of the gradients of all steps: ")
    assert source(found) == "optimizer.step() if self.scaler is None else self.scaler.step(optimizer)"
    assert found.fix.startswith("zero the buffers that gradients are added up in")


CLEAN = [Plain, ZeroedInHooks, Averages, Momentum, Late, Reused, ReusedLong, Normalized, Noise, StopsAtZero]


@pytest.mark.parametrize("loop", CLEAN, ids=lambda loop: loop.__name__)
def test_nothing_is_said_of_what_may_be_meant(loop):
    assert summed(Maker(loop)) == []


def test_an_optimizer_that_calls_backward_itself_is_left_out():
    class LBFGS(Plain):
        def make_optimizers(self):
            return [torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=2)]

        def step(self, batch):
            def closure():
                self.zero_grad()
                return self.backward(batch)

            return self.optimizers[0].step(closure)

    assert summed(Maker(LBFGS)) == []
