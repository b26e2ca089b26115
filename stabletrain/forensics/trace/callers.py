"""Whose code runs: module and source line of the operation under way, forward or backward.

In forward they are read off the Python stack. Nothing is hooked, so this also holds within checkpointing's second
forward, hooks and backward functions of the user's. In backward they are those of the forward operation that made the
autograd node: autograd numbers its nodes, and makes one just before the operation runs.
"""

import bisect
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

TORCH = f"{Path(torch.__file__).parent}/"
HERE = f"{Path(__file__).parent}/"
WRAPPERS = ("/jaxtyping/", "/beartype/")
"""Decorators that check types: they stand between caller and called, and compute nothing."""

LANDMARKS = {
    ("autograd/graph.py", "_engine_run_backward"): "engine",
    ("autograd/__init__.py", "_make_grads"): "seed",
    ("nn/modules/module.py", "_call_impl"): "module",
}
LEAF = "torch::autograd::AccumulateGrad"
OUTSIDE = "objective"


class Frames(NamedTuple):
    """What the stack says of an operation.

    Attributes:
        module: dotted path of the module whose forward is running; None outside of the model.
        source: `file:line` of the innermost code that is neither PyTorch's nor this folder's; empty if there is none.
        seed: whether the operation makes the gradient that a backward pass starts from.
        recomputing: whether it belongs to checkpointing's second forward.
        checkpoint: whether checkpointing is anywhere in the stack, so also in a backward that it started itself.
    """

    module: str | None
    source: str
    seed: bool
    recomputing: bool
    checkpoint: bool


@cache
def role(file: str, function: str) -> str:
    """What a stack frame is: a landmark of PyTorch's, `library`, or `user`."""
    if file.startswith(TORCH):
        inside = file.removeprefix(TORCH)
        return "checkpoint" if inside == "utils/checkpoint.py" else LANDMARKS.get((inside, function), "library")
    if file.startswith((HERE, "<")) and not file.startswith("<ipython"):
        return "library"
    return "library" if any(wrapper in file for wrapper in WRAPPERS) else "user"


def frames(names: dict[int, str]) -> Frames:
    """The stack, seen from here.

    The stack is read from the inside out. At the autograd engine it stops, but for checkpointing: what lies further out
    is the line that says `backward()`, which is nobody's fault.

    Args:
        names: the model's modules: `id` to dotted path.
    """
    module: str | None = None
    source, seed, recomputing, checkpoint, engine = "", False, False, False, False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind = role(frame.f_code.co_filename, frame.f_code.co_name)
        if kind == "checkpoint":
            checkpoint, recomputing = True, recomputing or not engine
        elif not engine:
            if kind == "user":
                source = source or f"{frame.f_code.co_filename}:{frame.f_lineno}"
            elif kind == "module" and module is None:
                module = names.get(id(frame.f_locals["self"]))  # its other locals are arguments: nothing lives longer
            engine, seed = kind == "engine", seed or kind == "seed"
        frame = frame.f_back
    return Frames(module, source, seed, recomputing, checkpoint)


class Caller(NamedTuple):
    """Who is to answer for an operation.

    Attributes:
        module: dotted path in the model, empty for the model itself, `objective` outside of it.
        source: `file:line`; empty if nobody knows.
        backward: whether it is a backward operation.
        recomputed: whether it belongs to checkpointing's second forward.
        seed: whether it makes the gradient that a backward pass starts from.
        leaf: whether it brings a parameter its gradient.
    """

    module: str
    source: str
    backward: bool
    recomputed: bool
    seed: bool
    leaf: bool


class Callers:
    """Remembers who called in forward, for the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._nodes = {False: Nodes(), True: Nodes()}  # by whether checkpointing made them, which may count apart
        self._owners: dict[int, tuple[str, str]] = {}  # parameter -> module and line that first read it

    def of(self, node: Any, reads: list[Tensor], makes: bool) -> Caller:
        """Who is to answer for the operation under way.

        Args:
            node: the autograd node that runs it; None in forward.
            reads: the tensors it reads.
            makes: whether it is one that autograd makes a node for.
        """
        seen = frames(self._names)
        again = node is not None and seen.checkpoint
        if node is None or seen.recomputing:
            module = self._module(node, seen)
            self._nodes[again].add(module, seen.source, makes)
            for tensor in reads:
                if tensor.requires_grad and tensor.is_leaf:
                    self._owners.setdefault(id(tensor), (module, seen.source))
            return Caller(module, seen.source, False, node is not None, seen.seed, False)
        leaf = node.name() == LEAF
        found = self._owners.get(id(node.variable)) if leaf else None
        module, source = found or self._nodes[again].find(node) or self._nodes[False].find(node) or (OUTSIDE, "")
        return Caller(module, seen.source or source, True, False, False, leaf)

    def _module(self, node: Any, seen: Frames) -> str:
        """The module of a forward operation; where checkpointing calls a mere method again, its first forward's."""
        if seen.module is not None or node is None:
            return OUTSIDE if seen.module is None else seen.module
        made = self._nodes[False].find(node)
        return OUTSIDE if made is None else made[0]


class Nodes:
    """Which forward operation made which autograd node."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._made: list[tuple[str, str, bool]] = []

    def add(self, module: str, source: str, makes: bool) -> None:
        """Notes the operation under way; if it `makes` a node, that is the newest one: it is made just before."""
        self._numbers.append(torch.autograd._get_sequence_nr() - 1)
        self._made.append((module, source, makes))

    def find(self, node: Any) -> tuple[str, str] | None:
        """Module and source line.

        A node that no operation made just before it ran belongs to a function of the user's, whose first operation is
        the next one; or it was made behind an operation, by writing into a view, which is then the one before.
        """
        number = node._sequence_nr()
        at = bisect.bisect_left(self._numbers, number)
        exact = at < len(self._numbers) and self._numbers[at] == number and self._made[at][2]
        if not exact and not isinstance(node, BackwardCFunction):
            at -= 1
        return self._made[at][:2] if 0 <= at < len(self._made) else None
