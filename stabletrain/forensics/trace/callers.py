"""Finds the module and source line of the running operation, forward or backward.

For a forward operation, the Python stack shows them. This needs no hooks, so it also works while activation
checkpointing recomputes a module, inside hooks, and inside the user's backward functions. A backward operation gets the
module and line of the forward operation that made its autograd node. Autograd numbers its nodes, and makes each one
just before its operation runs.
"""

import bisect
import linecache
import os
import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from stabletrain.errors import PACKAGE, is_own

TORCH = f"{Path(torch.__file__).parent}/"
THIS_FOLDER = f"{Path(__file__).parent}/"
WRAPPERS = ("/jaxtyping/", "/beartype/", "/torchao/", "/precision/fp8_linear.py", "/probes/fp8_casts.py")
"""Files whose frames lie between the user's line and the operation: decorators that check types, and fp8 layers."""

STEP_RUNNERS = (f"{PACKAGE}step.py", f"{PACKAGE}guard{os.sep}")
"""Files that run a step. Frames beyond them only start the training."""

OPTIMIZERS = f"{TORCH}optim{os.sep}"
"""PyTorch's own optimizers."""

UPDATE_RERUN = f"{PACKAGE}forensics{os.sep}probes{os.sep}update.py"
"""Runs an optimizer's step again. Frames beyond it belong to the training loop."""

LANDMARKS = {
    ("autograd/graph.py", "_engine_run_backward"): "engine",
    ("autograd/__init__.py", "_make_grads"): "seed",
    ("nn/modules/module.py", "_call_impl"): "module",
}
LEAF = "torch::autograd::AccumulateGrad"
OUTSIDE_MODEL = "objective"


class Place(NamedTuple):
    """The code that runs an operation.

    Attributes:
        module: dotted path of the module whose forward is running; empty for the model itself, `objective` outside it.
        source: `file:line` of the innermost frame outside PyTorch and this folder; empty if there is none.
        called_from: `file:line` of the innermost frame in the user's own code, if `source` is in a library.
    """

    module: str
    source: str
    called_from: str


class Frames(NamedTuple):
    """What the stack shows about an operation.

    Attributes:
        module: dotted path of the module whose forward is running; None outside the model.
        source, called_from: see `Place`.
        seed: whether the operation makes the gradient from which a backward pass starts.
        recomputing: whether activation checkpointing recomputes it.
        checkpoint: whether activation checkpointing is anywhere on the stack, also above a backward pass.
    """

    module: str | None
    source: str
    called_from: str
    seed: bool
    recomputing: bool
    checkpoint: bool


@cache
def frame_kind(file: str, function: str) -> str:
    """Classifies a stack frame: a landmark in PyTorch, `library`, `own` for the user's own code, `step`, or `other`."""
    if file.startswith(TORCH):
        inside = file.removeprefix(TORCH)
        return "checkpoint" if inside == "utils/checkpoint.py" else LANDMARKS.get((inside, function), "library")
    if file.startswith((THIS_FOLDER, "<")) and not file.startswith("<ipython"):
        return "library"
    if any(wrapper in file for wrapper in WRAPPERS):
        return "library"
    if file.startswith(STEP_RUNNERS):
        return "step"
    return "own" if is_own(file) or file.startswith("<ipython") else "other"


def read_stack(names: dict[int, str]) -> Frames:
    """Reads the stack from the inside out; `names` maps the `id` of each module to its dotted path."""
    module: str | None = None
    source, own, started = "", "", False
    seed, recomputing, checkpoint, engine = False, False, False, False
    # Stop at the autograd engine, except to look for checkpointing: beyond it is only the line that calls `backward()`.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind = frame_kind(frame.f_code.co_filename, frame.f_code.co_name)
        if kind == "checkpoint":
            checkpoint, recomputing = True, recomputing or not engine
        elif not engine:
            if kind in ("own", "other", "step"):
                source = source or f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if kind == "own" and not started:
                own = own or f"{frame.f_code.co_filename}:{frame.f_lineno}"
            elif kind == "module" and module is None:
                module = names.get(id(frame.f_locals["self"]))  # f_locals keeps only arguments alive
            started = started or kind == "step"
            engine, seed = kind == "engine", seed or kind == "seed"
        frame = frame.f_back
    return Frames(module, source, "" if own == source else own, seed, recomputing, checkpoint)


class Caller(NamedTuple):
    """The code responsible for an operation; the other fields are as in `Frames`.

    Attributes:
        place: the code; for a backward operation, that of its forward operation.
        backward: whether it is a backward operation.
        leaf: whether it accumulates a parameter's gradient.
    """

    place: Place
    backward: bool
    recomputed: bool
    seed: bool
    leaf: bool


class Callers:
    """Maps operations to the code responsible for them; remembers forward callers for the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._nodes = {False: Nodes(), True: Nodes()}  # True: made under checkpointing, may be numbered apart
        self._owners: dict[int, Place] = {}  # parameter -> the code that first read it

    def of(self, node: Any, reads: list[Tensor], makes: bool) -> Caller:
        """Returns the code responsible for the running operation.

        Args:
            node: the autograd node that runs it; None in forward.
            reads: the tensors it reads.
            makes: whether autograd makes a node for it.
        """
        seen = read_stack(self._names)
        again = node is not None and seen.checkpoint
        if node is None or seen.recomputing:
            place = Place(self._module(node, seen), seen.source, seen.called_from)
            self._nodes[again].add(place, makes)
            for tensor in reads:
                if tensor.requires_grad and tensor.is_leaf:
                    self._owners.setdefault(id(tensor), place)
            return Caller(place, False, node is not None, seen.seed, False)
        leaf = node.name() == LEAF
        found = self._owners.get(id(node.variable)) if leaf else None
        place = found or self._nodes[again].find(node) or self._nodes[False].find(node) or Place(OUTSIDE_MODEL, "", "")
        if seen.source:  # a backward function of the user's
            place = Place(place.module, seen.source, seen.called_from)
        return Caller(place, True, False, False, leaf)

    def _module(self, node: Any, seen: Frames) -> str:
        """Returns the module of a forward operation; outside a module's recomputed forward, that of its first run."""
        if seen.module is not None or node is None:
            return OUTSIDE_MODEL if seen.module is None else seen.module
        made = self._nodes[False].find(node)
        return OUTSIDE_MODEL if made is None else made.module


class Nodes:
    """Maps autograd nodes to the forward operations that made them."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._made: list[tuple[Place, bool]] = []

    def add(self, place: Place, makes: bool) -> None:
        """Records the running operation. If it `makes` a node, that is the newest one."""
        self._numbers.append(torch.autograd._get_sequence_nr() - 1)
        self._made.append((place, makes))

    def find(self, node: Any) -> Place | None:
        """Returns the code of a node's forward operation; None if unknown."""
        number = node._sequence_nr()
        at = bisect.bisect_left(self._numbers, number)
        # Without an exact match there are two cases. If the node belongs to a user's autograd.Function, the function's
        # first operation comes next. Otherwise the node was made after an operation that wrote into a view: use that.
        exact = at < len(self._numbers) and self._numbers[at] == number and self._made[at][1]
        if not exact and not isinstance(node, BackwardCFunction):
            at -= 1
        return self._made[at][0] if 0 <= at < len(self._made) else None


MAX_LENGTH = 120
"""Maximum length of an expression, in characters."""


class StepCallers:
    """Finds the code of an optimizer that runs an operation, in place of `Callers`: there are no modules.

    Attributes:
        text: the expression in the source code that ran the newest operation; empty if unknown.
    """

    def __init__(self) -> None:
        self.text = ""

    def of(self, node: Any, reads: list[Tensor], makes: bool) -> Caller:
        """Returns the line of the innermost frame in an optimizer, and the line in the user's code that called it."""
        source, own, self.text = "", "", ""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != UPDATE_RERUN:
            file = frame.f_code.co_filename
            kind = frame_kind(file, frame.f_code.co_name)
            torchs = file.startswith(OPTIMIZERS) and not file.endswith(f"{os.sep}optimizer.py")
            if not source and (torchs or kind in ("own", "other", "step")):
                source, self.text = f"{file}:{frame.f_lineno}", expression(frame.f_code, frame.f_lasti)
            if kind == "own" and not own:
                own = f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        return Caller(Place(OUTSIDE_MODEL, source, "" if own == source else own), False, False, False, False)


@cache
def expression(code: CodeType, instruction: int) -> str:
    """Returns the source code of the expression that an instruction evaluates, in one line; empty if unknown.

    Args:
        instruction: offset in bytes, such as `f_lasti` of a frame.
    """
    if sys.version_info < (3, 11):  # an older Python knows the line only
        return ""
    first, last, begin, end = [*code.co_positions()][instruction // 2]
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][:end]  # the positions are in bytes
    lines[0] = lines[0][begin:]
    lines = [line.partition(b"  #")[0] for line in lines]
    words = " ".join(b" ".join(lines).decode(errors="replace").split())
    words = words.replace("( ", "(").replace(", )", ")").replace(" )", ")")
    return words if len(words) <= MAX_LENGTH else f"{words[: MAX_LENGTH - 4]} ..."
