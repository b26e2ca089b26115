"""Optimizers that make NaN or Inf of finite gradients, each in a way of its own, as public ones have."""

import math
from collections import deque
from functools import partial

import torch
from torch.optim import Optimizer


class Fragile(Optimizer):
    """An optimizer with one moment, whose update is `direction`."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in (each for each in group["params"] if each.grad is not None):
                state = self.state[weight]
                if not state:
                    state["m"], state["v"], state["t"] = torch.zeros_like(weight), torch.zeros_like(weight), 0
                state["t"] += 1
                state["m"].lerp_(weight.grad, 0.1)
                state["v"].mul_(0.9).addcmul_(weight.grad, weight.grad, value=0.1)
                weight.add_(self.direction(weight, weight.grad, state), alpha=-group["lr"])


class Restored(Fragile):
    def direction(self, weight, gradient, state):
        update = torch.sign(state["m"]) * state["v"].sqrt()
        return update * (state["m"].norm() / update.norm())


class RootFirst(Fragile):
    def direction(self, weight, gradient, state):
        return gradient * (state["v"].rsqrt() + 1e-8)


class Logarithm(Fragile):
    def direction(self, weight, gradient, state):
        return torch.sign(gradient) * gradient.abs().log()


class Factored(Fragile):
    def direction(self, weight, gradient, state):
        if gradient.ndim < 2:
            return gradient
        square = gradient.flatten(1).square()
        rows, columns = square.mean(1, keepdim=True), square.mean(0, keepdim=True)
        return (gradient.flatten(1) / (rows * columns / rows.mean()).sqrt()).view_as(gradient)


class InPlace(Fragile):
    def direction(self, weight, gradient, state):
        return gradient.div_(gradient.norm())


class Poisoned(Fragile):
    """Only a moment goes wrong; the weights would follow in the next step."""

    def direction(self, weight, gradient, state):
        state["m"] = state["m"] / state["m"].norm() * state["m"].norm()
        return gradient


class Grown(Fragile):
    """Squares that overflow: finite gradients, an infinite second moment."""

    def direction(self, weight, gradient, state):
        state["v"] = (gradient + 1e20).square()
        return gradient


class OwnList(Fragile):
    """Keeps its moments in a list of its own."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        self.history = []

    def direction(self, weight, gradient, state):
        self.history = [*self.history[-3:], gradient / gradient.norm()]
        return self.history[-1]


class OwnDeque(Fragile):
    """Keeps its moments in a deque of its own."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        self.history = deque(maxlen=64)

    def direction(self, weight, gradient, state):
        self.history.append(gradient / gradient.norm())
        return gradient


class Held:
    """What `InObject` keeps."""

    def __init__(self, moment):
        self.moment = moment


class InObject(Fragile):
    """Keeps a moment in an object of its own, in its state, as Shampoo does."""

    def direction(self, weight, gradient, state):
        held = state.setdefault("held", Held(torch.zeros_like(weight)))
        held.moment = gradient / gradient.norm()
        return gradient


class OwnModule(Fragile):
    """Keeps an average in a module of its own."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        self.average = torch.nn.BatchNorm1d(1)

    def direction(self, weight, gradient, state):
        self.average.running_var.mul_(gradient.norm() / gradient.norm())
        return gradient


class OwnNumber(Fragile):
    """Counts a number in Python that goes wrong; the weights would follow in the next step."""

    def direction(self, weight, gradient, state):
        scale, norm = state.get("scale", 1.0), float(gradient.norm())
        state["scale"] = norm / norm if norm else math.nan
        return gradient * scale


class Eight(Fragile):
    """A moment in 8 bits, whose largest value is 57,344."""

    def direction(self, weight, gradient, state):
        state["eight"] = (1e6 * (gradient == 0)).to(torch.float8_e5m2)
        return gradient


class Swapped(Fragile):
    """Gives weights the memory of a moment and divides by 0, from the second step on."""

    def direction(self, weight, gradient, state):
        if state["t"] < 2:
            return gradient
        weight.data = state["m"]
        return gradient / 0


class Expanded(Fragile):
    """One number for all values of a tensor, expanded to its shape; divides by 0 from the second step on."""

    def direction(self, weight, gradient, state):
        state.setdefault("rate", torch.ones(()).expand_as(weight))
        return gradient / (state["t"] < 2)


class Wrapped(Optimizer):
    """Holds another optimizer, as Lookahead does."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})
        self.inner = RootFirst(self.param_groups, lr)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        self.inner.step()


class InHalf(torch.optim.Adam):
    """Adam over weights in fp16, where its eps is 0."""

    def __init__(self, params):
        params = [*params]
        for each in params:
            each.data = each.data.half()
        super().__init__(params)


FRAGILE = {
    "norm restored": Restored,
    "rsqrt before eps": RootFirst,
    "log of the gradient": Logarithm,
    "factored": Factored,
    "gradient normalised in place": InPlace,
    "moment only": Poisoned,
    "squares overflow": Grown,
    "a list of its own": OwnList,
    "a deque of its own": OwnDeque,
    "a moment in an object": InObject,
    "a module of its own": OwnModule,
    "a number of its own": OwnNumber,
    "a moment in 8 bits": Eight,
    "weights in a moment's memory": Swapped,
    "an expanded moment": Expanded,
    "inside another": Wrapped,
    "adam without eps": partial(torch.optim.Adam, eps=0.0),
    "fused adamw without eps": partial(torch.optim.AdamW, eps=0.0, fused=True),
    "rate is nan": partial(torch.optim.SGD, lr=math.nan, momentum=0.9),
    "fp16 weights": InHalf,
    "decay is inf": partial(torch.optim.AdamW, weight_decay=math.inf, fused=True),
}
