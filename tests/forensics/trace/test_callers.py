"""Checks the module and source line of each operation, in forward, backward and recomputation."""

import inspect

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchvision.ops import FrozenBatchNorm2d

from stabletrain.forensics.trace.callers import OUTSIDE_MODEL, Callers, frame_kind, read_stack
from stabletrain.forensics.trace.recorder import Trace
from stabletrain.forensics.trace.values import tensors
from tests.forensics import faulty
from tests.forensics.faulty import Around, line


def recorded(part):
    """The records of a step of a model around `part`."""
    model = Around(part)
    with Trace(model) as trace:
        model(torch.ones(4, 3)).sum().backward()
    return trace.records


def here(offset=0):
    """`file:line` of the caller, plus `offset` lines."""
    frame = inspect.currentframe().f_back
    return f"{__file__}:{frame.f_lineno + offset}"


@pytest.mark.parametrize("name", ["LogOfZero", "LogOfNegative", "Direction", "Exp", "CheckpointedForward"])
def test_a_forward_operation_has_its_module_and_line(name):
    part = getattr(faulty, name)
    found = [record for record in recorded(part()) if record.source == line(part) and record.direction == "forward"]
    assert found
    assert {record.module for record in found} == {"part"}


def test_forward_operations_are_in_module_order_and_the_loss_is_outside():
    found = [record for record in recorded(nn.Linear(3, 3)) if record.direction == "forward"]
    assert [(record.op, record.module) for record in found if record.op in ("aten.addmm", "aten.sum")] == [
        ("aten.addmm", "stem"),
        ("aten.addmm", "part"),
        ("aten.addmm", "head"),
        ("aten.sum", OUTSIDE_MODEL),
    ]
    files = {record.op: record.source.rpartition(":")[0] for record in found}
    assert (files["aten.addmm"], files["aten.sum"]) == (faulty.__file__, __file__)


BACKWARD = ["RootBackward", "HandWrittenNormBackward", "LogInPlaceOnAView", "Checkpointed", "CheckpointedReentrant"]


@pytest.mark.parametrize("name", BACKWARD)
def test_a_backward_operation_has_the_line_of_its_forward_operation(name):
    part = getattr(faulty, name)
    found = [record for record in recorded(part()) if record.op == "aten.div" and record.direction == "backward"]
    assert {(record.module, record.source) for record in found} == {("part", line(part))}


def test_the_backward_of_a_users_function_has_its_own_line():
    found = [record for record in recorded(faulty.UsersFunction()) if record.op == "aten.div"]
    assert [(record.module, record.source) for record in found] == [("part", line(faulty.UsersFunction))]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_is_marked(reentrant):
    class Part(nn.Module):
        def forward(self, x):
            return checkpoint(self.work, x, use_reentrant=reentrant)

        def work(self, x):
            return x.exp().sin()

    found = [record for record in recorded(Part()) if record.op == "aten.exp"]
    assert [record.recomputed for record in found] == [False, True]
    assert {(record.module, record.direction) for record in found} == {("part", "forward")}


class Asking(TorchDispatchMode):
    """Collects the caller of every operation in `told`."""

    def __init__(self, model):
        super().__init__()
        self.told, self._callers = [], Callers(model)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        reads = list(tensors((args, kwargs)))
        makes = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in reads)
        self.told.append(self._callers.of(torch._C._current_autograd_node(), reads, makes))
        return out


def test_the_start_of_the_backward_pass_and_the_accumulated_gradients_are_marked():
    model = Around(nn.Linear(3, 3))
    with Asking(model) as asking:
        model(torch.ones(4, 3)).sum().backward()
    assert [(caller.place.module, caller.backward) for caller in asking.told if caller.seed] == [(OUTSIDE_MODEL, False)]
    arrived = [caller.place.module for caller in asking.told if caller.leaf]
    assert {*arrived} == {"head", "part", "stem"}, "each at the module that read the parameter"


def test_the_stack_gives_the_module_and_line_of_user_code():
    class Looks(nn.Module):
        def forward(self, x):
            self.seen, self.line = read_stack(names), here()
            return x

    looks = Looks()
    names = {id(looks): "blocks.3.looks"}
    nn.Sequential(looks)(torch.ones(1))
    assert looks.seen == ("blocks.3.looks", looks.line, "", False, False, False)
    assert read_stack(names)[:2] == (None, here())


def test_an_operation_in_a_library_also_has_the_line_of_user_code_that_called_it():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = FrozenBatchNorm2d(3)

        def forward(self, x):
            self.line = here(1)
            return self.norm(x)

    part = Normed()
    roots = [record for record in recorded(part) if record.op == "aten.rsqrt"]
    assert [record.called_from for record in roots] == [part.line]
    assert "torchvision" in roots[0].source
    assert {record.called_from for record in recorded(nn.Linear(3, 3))} == {""}, "the source is the user's own line"


def test_library_code_is_distinguished_from_user_code():
    torchs = torch.__file__.removesuffix("__init__.py")
    assert frame_kind(f"{torchs}nn/functional.py", "linear") == "library"
    assert frame_kind(f"{torchs}nn/modules/module.py", "_call_impl") == "module"
    assert frame_kind(f"{torchs}autograd/graph.py", "_engine_run_backward") == "engine"
    assert frame_kind(f"{torchs}utils/checkpoint.py", "anything") == "checkpoint"
    assert frame_kind("/site-packages/beartype/door.py", "check") == "library"
    assert frame_kind("<string>", "f") == "library"
    assert frame_kind("<ipython-input-3-abc>", "f") == "own"
    assert frame_kind(__file__, "f") == "own"
