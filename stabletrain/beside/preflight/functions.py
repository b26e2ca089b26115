"""The user's own autograd functions, each alone: its backward pass against finite differences of its forward pass.

A function is called again on the inputs that it had in training, in fp64. One that uses parameters in another way than
as its inputs, as a checkpoint written by hand does, is called with the parameters themselves, turned to fp64.
"""

import functools
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.loop import Loop, seed
from stabletrain.beside.preflight.plain import InDouble, doubled, in_double, mapped
from stabletrain.errors import is_own
from stabletrain.guard.backward_calls import within_backward

NAME = "gradient"

STEP = 1e-6
"""How far inputs of size 1 are moved: the error of central differences is of the order of its square, 1e-12, and
rounding in fp64 adds 1e-16 / 1e-6 = 1e-10."""

WRONG = 0.01
"""Relative difference from which a slope is wrong: a thousand times more than fp64 makes, and more than a backward pass
that is meant to approximate, or computes in bf16 (rounding 0.004, averaged over many numbers)."""


@dataclass
class Call:
    """A call of an autograd function.

    Attributes:
        function: the function's class.
        inputs: copies of its arguments.
        needs: numbers of those that need a gradient.
        module: name of the model's module that called it; empty if it is none.
        parameters: those of its arguments that are parameters, by their number.
        loop: that called it.
        later: copies of the arguments of the second call before the backward pass, if there was one.
        recomputed: whether it was called in the backward pass too.
    """

    function: type[Any]
    inputs: tuple[Any, ...]
    needs: tuple[int, ...]
    module: str
    parameters: dict[int, nn.Parameter]
    loop: Loop
    later: tuple[Any, ...] = ()
    recomputed: bool = False

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.__name__

    @property
    def line(self) -> str:
        """Where its backward pass begins."""
        code = getattr(self.function.backward, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


@contextmanager
def recorded_calls(loop: Loop) -> Generator[list[Call], None, None]:
    """Records the first call of each autograd function of the user's that needs a gradient, and what the second got."""
    calls: list[Call] = []
    names = {id(module): name for name, module in loop.model.named_modules()}

    def forward(function: type[Any], inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = args[1:] if args and is_context(args[0]) else args
        needs = tuple(index for index, each in enumerate(inputs) if differentiable(each) and each.requires_grad)
        first = next((each for each in calls if each.function is function), None)
        if first is not None and within_backward():
            first.recomputed = True
        elif needs and (first is None or not first.later):
            copies = tuple(each.detach().clone() if isinstance(each, Tensor) else each for each in inputs)
            own = {index: each for index, each in enumerate(inputs) if isinstance(each, nn.Parameter)}
            if first is None:
                calls.append(Call(function, copies, needs, calling_module(names), own, loop))
            elif needs == first.needs:
                first.later = copies
        return inner(*args, **kwargs)

    with ExitStack() as stack:
        functions = [(each, each.forward) for each in own_functions()]  # a class may inherit its forward pass
        for function, inner in functions:
            stack.enter_context(static_replaced(function, "forward", functools.partial(forward, function, inner)))
        yield calls


def own_functions(of: type[Any] = torch.autograd.Function) -> list[type[Any]]:
    """Returns the classes of autograd functions whose forward pass is the user's own."""
    found: list[type[Any]] = []
    for each in of.__subclasses__():
        code = getattr(each.forward, "__code__", None)
        if code is not None and is_own(code.co_filename):
            found.append(each)
        found += own_functions(each)
    return found


@contextmanager
def static_replaced(function: Any, name: str, by: Callable[..., Any]) -> Generator[None, None, None]:
    """Replaces the forward or backward pass of an autograd function, a static method."""
    kept = vars(function).get(name)
    setattr(function, name, staticmethod(functools.wraps(getattr(function, name))(by)))
    try:
        yield
    finally:
        if kept is None:
            delattr(function, name)
        else:
            setattr(function, name, kept)


def is_context(value: Any) -> bool:
    """Whether an argument is the context that `forward` gets if there is no `setup_context`."""
    return hasattr(value, "save_for_backward")


def differentiable(value: Any) -> bool:
    """Whether a value is a tensor that can have a gradient."""
    return isinstance(value, Tensor) and value.is_floating_point()


def calling_module(names: dict[int, str]) -> str:
    """Returns the name of the module whose method is running, the innermost one."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            return names[id(owner)]
        frame = frame.f_back
    return ""


def check_call(call: Call) -> Finding | None:
    """Compares a function's backward pass with finite differences of its forward pass; returns what is wrong.

    A note if it may be meant: the forward pass returns its input or rounds it, as with a straight-through gradient, or
    gradients that are reversed or scaled.
    """
    where = f"{call.name} ({call.module})" if call.module else call.name
    places = tuple(each for each in (call.name, call.module) if each)
    reason = ""
    for bound in (False, True) if call.parameters else (False,):
        try:
            with in_double(call.loop) if bound else nullcontext():
                return checked_alone(Alone(call, bound=bound), where, places)
        except Exception as error:  # of the user's function, which need not take fp64, nor work alone
            reason = str(error)
    return Finding(NAME, "not checked", f"{where} cannot be called alone in fp64: {reason}", places, call.line)


def checked_alone(alone: "Alone", where: str, places: tuple[str, ...]) -> Finding | None:
    """Calls a function alone; see `check_call`."""
    call = alone.call
    compared = {index: alone.compared(index) for index in call.needs}
    wrong = [
        index
        for index, (meant, slope, _) in compared.items()
        if abs(meant - slope) > max(WRONG * max(abs(meant), abs(slope), alone.size(index)), alone.rounding)
    ]
    if not wrong:
        return overwritten(alone, where, places)
    if not alone.repeatable or not all(compared[index][2] for index in wrong):
        text = (
            f"{where}: the forward pass is not smooth or draws numbers from a generator of its own, so that the "
            "backward pass cannot be compared with finite differences"
        )
        return Finding(NAME, "not checked", text, places, call.line)
    said = "; ".join(alone.said_of(index, *compared[index][:2]) for index in wrong)
    if alone.draws and not alone.random:
        text = f"{where}: the backward pass draws random numbers: its gradient is right at most on average"
        return Finding(NAME, "note", text, places, call.line)
    if alone.draws:
        text = f"{where}: the backward pass draws other random numbers than the forward pass"
        fix = f"save the mask or the random state in {call.name}.forward, and use it in backward"
        return Finding(NAME, "fault", text, places, call.line, fix)
    if alone.rounds or alone.returned.issuperset(wrong):
        text = f"{where} returns its input or rounds it, and changes the gradient, which may be meant: {said}"
        return Finding(NAME, "note", text, places, call.line)
    text = f"{call.name}.backward is not the gradient of its forward pass ({where}): {said}"
    fix = f"correct {call.name}.backward; torch.autograd.gradcheck({call.name}.apply, inputs in fp64) tests it"
    return Finding(NAME, "fault", text, places, call.line, fix)


def overwritten(alone: "Alone", where: str, places: tuple[str, ...]) -> Finding | None:
    """Calls a function twice before both backward passes: a call's gradient must be the one that it has alone.

    It is not where the second call overwrites what the first one's backward pass needs. A function that is called
    again in the backward pass, as by a checkpoint, may write it anew there, and is not called twice here.
    """
    call = alone.call
    if not call.later or call.recomputed or alone.own or alone.draws or not alone.repeatable:
        return None
    pairs = zip(alone.gradients, alone.differentiated(2, mapped(doubled, [*call.later])), strict=True)
    wrong = [
        f"input {index} by {float((one - two).norm() / one.norm()):.3g} of its norm"
        for index, (one, two) in zip(call.needs, pairs, strict=True)
        if bool(one.any()) and not float((one - two).norm()) <= WRONG * float(one.norm())
    ]
    if not wrong:
        return None
    text = f"{call.name} is called twice before the backward pass, and then the gradient of the first call is another "
    text += f"one than alone ({where}), of {', '.join(wrong)}: backward uses what the second call has overwritten"
    fix = f"keep what {call.name}.backward needs on ctx (ctx.save_for_backward, or an attribute), not on the class, "
    fix += "nor in a global or an object that several calls share"
    return Finding(NAME, "fault", text, places, call.line, fix)


class Alone:
    """A function called alone in fp64, with a random gradient of its outputs.

    Args:
        call: its inputs.
        bound: whether it is called with the parameters themselves, which are in fp64 by now, and not with copies.

    Attributes:
        draws: whether the backward pass draws random numbers.
        random: whether the forward pass does.
        rounding: what rounding may change of a slope.
        repeatable: whether the forward pass returns the same with the same random numbers.
        returned: numbers of the inputs that the forward pass returns as they are, or some of their numbers.
        rounds: whether the forward pass is constant in an input, but for jumps.
    """

    def __init__(self, call: Call, *, bound: bool = False) -> None:
        self.call, self.rounds = call, False
        self.returned: set[int] = set()
        self.own = call.parameters if bound else {}
        self.inputs = [self.own.get(index, each) for index, each in enumerate(mapped(doubled, [*call.inputs]))]
        seed(0)
        first = self.outputs(self.inputs)
        self.given = [torch.randn_like(each) for each in first]
        # Rounding in fp64 changes a slope by 1e-16 / STEP of the outputs; a hundred times that.
        self.rounding = 1e-8 * sum(float((each * given).norm()) for each, given in zip(first, self.given, strict=True))
        self.directions = {
            index: torch.randn_like(self.inputs[index]) * scale_of(self.inputs[index]) for index in call.needs
        }
        self.gradients, again = self.differentiated(2), self.differentiated(3)
        self.draws = not all(map(torch.equal, self.gradients, again))
        self.repeatable = all(map(torch.equal, first, self.outputs(self.inputs)))
        self.random = not all(map(torch.equal, first, self.outputs(self.inputs, 4)))

    def called(self, inputs: list[Any], number: int = 1) -> list[Tensor]:
        """Returns the outputs that can have a gradient; the seed fixes the random numbers."""
        seed(number)
        # With clones, as a function may work in place.
        values = [
            each.clone() if isinstance(each, Tensor) and index not in self.own else each
            for index, each in enumerate(inputs)
        ]
        with InDouble():
            found = self.call.function.apply(*values)
        return [each for each in (found if isinstance(found, tuple) else (found,)) if differentiable(each)]

    def outputs(self, inputs: list[Any], number: int = 1) -> list[Tensor]:
        """Returns the outputs without their history."""
        return [each.detach() for each in self.called(inputs, number)]

    def leaves(self, inputs: list[Any]) -> list[Any]:
        """Returns inputs, with copies that need a gradient in place of those that do."""
        own, needs = self.own, self.call.needs
        return [
            each.clone().requires_grad_() if at in needs and at not in own else each for at, each in enumerate(inputs)
        ]

    def differentiated(self, number: int, later: list[Any] | None = None) -> list[Tensor]:
        """Returns the gradients of the inputs.

        Args:
            number: seed of the backward pass.
            later: inputs of a second call, which is made before the backward pass of both.
        """
        leaves, others = self.leaves(self.inputs), [] if later is None else self.leaves(later)
        with torch.enable_grad():
            found = self.called(leaves)
            after = self.called(others) if others else []
        pairs = [(each, given) for each, given in zip(found, self.given, strict=True) if each.requires_grad]
        pairs += [(each, torch.ones_like(each)) for each in after if each.requires_grad]
        outputs, given = [each for each, _ in pairs], [each for _, each in pairs]
        wanted = [leaves[index] for index in self.call.needs]
        # PyTorch leaves out the backward pass of the second call if nothing that it reaches is wanted.
        also = [others[index] for index in self.call.needs] if others else []
        for each in wanted:
            each.grad = None
        seed(number)
        function = self.call.function
        inner = function.backward

        def backward(*args: Any) -> Any:
            with InDouble():  # PyTorch runs backward passes without it
                return inner(*args)

        with static_replaced(function, "backward", backward):
            torch.autograd.backward(outputs, given, inputs=[*wanted, *also])
        found = [torch.zeros_like(each) if each.grad is None else each.grad for each in wanted]
        for each in wanted:
            each.grad = None
        return found

    def size(self, index: int) -> float:
        """Returns the typical size of a slope along the direction."""
        place = self.call.needs.index(index)
        return float((self.gradients[place] * scale_of(self.inputs[index])).norm())

    def changes(self, index: int, step: float) -> list[Tensor]:
        """Returns how fast the outputs change as an input is moved, by central differences."""
        direction = self.directions[index]
        ends = []
        for sign in (1, -1):
            inputs, own = [*self.inputs], self.own.get(index)
            if own is None:
                inputs[index] = inputs[index] + sign * step * direction
                ends.append(self.outputs(inputs))
            else:  # the function may use it elsewhere, too
                kept = own.data
                own.data = kept + sign * step * direction
                ends.append(self.outputs(inputs))
                own.data = kept
        return [(after - before) / (2 * step) for after, before in zip(*ends, strict=True)]

    def compared(self, index: int) -> tuple[float, float, bool]:
        """Returns the slope along a random direction by the backward pass and by finite differences.

        Also whether the forward pass is smooth: then the differences do not depend on the step.
        """
        changes, wider = self.changes(index, STEP), self.changes(index, 10 * STEP)
        apart = sum(float((one - two).square().sum()) for one, two in zip(changes, wider, strict=True)) ** 0.5
        length = sum(float(each.square().sum()) for each in changes) ** 0.5
        direction = self.directions[index]
        for each in changes:
            same = each.shape == direction.shape and bool(
                ((each - direction).abs().le(1e-6 * direction.abs().max()) | (each == 0)).all()
            )
            if same:
                self.returned.add(index)
            if (each == 0).double().mean() > 0.9:  # rounding: few numbers pass from one step to the next
                self.rounds = True
        slope = sum(float((each * given).sum()) for each, given in zip(changes, self.given, strict=True))
        meant = float((self.gradients[self.call.needs.index(index)] * direction).sum())
        return meant, slope, apart <= 1e-3 * max(length, 1e-300) or self.rounds

    def said_of(self, index: int, meant: float, slope: float) -> str:
        """Says how the gradient of an input is wrong."""
        if not bool(self.gradients[self.call.needs.index(index)].any()):
            return f"input {index} gets no gradient, though the output depends on it"
        direction, ratio = self.directions[index], meant / slope if slope else float("nan")
        self.directions[index] = torch.randn_like(direction) * scale_of(self.inputs[index])
        other, truth, _ = self.compared(index)
        if truth and abs(other / truth - ratio) <= WRONG * abs(ratio):
            return f"the gradient of input {index} is {ratio:.4g} times the right one"
        return (
            f"the gradient of input {index} has another direction: along two random ones it gives {meant:.3g} and "
            f"{other:.3g}, finite differences {slope:.3g} and {truth:.3g}"
        )


def scale_of(tensor: Tensor) -> float:
    """Returns the size of a tensor's numbers; 1 if all are 0."""
    return float(tensor.detach().double().square().mean().sqrt()) or 1.0
