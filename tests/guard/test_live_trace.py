"""A fault in the loop's own loss or backward pass is named when it comes again: the steps are traced while they run."""

import copy
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stabletrain.guard import live_trace
from stabletrain.guard.guard import Guard
from tests.guard.given import batches, bits, network, same


def clean():
    """Whether no mode and no profiler is left."""
    return torch._C._len_torch_dispatch_stack() == 0 and sys.getprofile() is None


class Loop:
    """A loop with a loss of its own; `bad` says what is wrong in a step."""

    def __init__(self, folder=None, forward=None, **options):
        self.model = network()
        self.forward = forward or (lambda model, x: model(x))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.guard = folder and Guard.attach(self.model, self.optimizer, folder=folder, **options)
        self.traced = 0

    def loss(self, x, y, bad):
        chosen = self.forward(self.model, x).softmax(-1)[range(len(y)), y]
        if bad == "error":
            raise ValueError("an error of the loop")
        if bad == "backward":
            return -chosen.log().mean() + (x.mean() - x.mean() + 0 * chosen.mean()).sqrt()  # its derivative is Inf
        return -(chosen * (0.0 if bad == "forward" else 1.0)).log().mean()

    def step(self, batch, bad=""):
        self.optimizer.zero_grad()
        loss = self.loss(*batch, bad)
        loss.backward()
        self.traced += torch._C._len_torch_dispatch_stack()
        self.optimizer.step()

    def train(self, *bads):
        for batch, bad in zip(batches(len(bads)), bads, strict=True):
            self.step(batch, bad)

    @property
    def left(self):
        """Number of steps that are still traced."""
        return self.guard._recorder.live.steps_left

    def record(self):
        return json.loads((self.guard.incidents[-1].path / "diagnosis.json").read_text())


FORWARDS = {
    "whole": None,
    "in parts": lambda model, x: model[1:](model[0](x)),
    "autocast": lambda model, x: torch.autocast("cpu", torch.bfloat16)(model)(x).float(),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize(
    ("bad", "op", "node"), [("forward", "aten.log", ""), ("backward", "aten.div", "SqrtBackward0")]
)
def test_a_fault_of_the_loops_own_is_named_when_it_comes_again(tmp_path, name, bad, op, node):
    loop = Loop(tmp_path, FORWARDS[name])
    loop.train("", bad)
    assert (loop.record()["cause"], loop.left) == ("unknown", live_trace.TRACED_STEPS)
    loop.train("", "", bad)
    record = loop.record()
    origin = record["origin"]
    assert (record["cause"], origin["op"], origin["node"], origin["direction"]) == ("unsafe_op", op, node, bad)
    assert (origin["module"], origin["source"].split(":")[0]) == ("objective", __file__)
    assert (loop.left, loop.traced) == (0, 3)
    loop.train("")
    assert loop.traced == 3, "no more after the fault was named"
    assert clean()


def test_a_fault_that_comes_in_the_very_next_step_is_named(tmp_path):
    loop = Loop(tmp_path)
    loop.train("", "forward", "forward")
    assert loop.record()["origin"]["op"] == "aten.log"


def test_traced_steps_have_the_same_bits(tmp_path):
    loop, plain = Loop(tmp_path), Loop()
    bads = ["", "forward", *[""] * 6]
    torch.manual_seed(1)
    loop.train(*bads)
    torch.manual_seed(1)
    for batch, bad in zip(batches(len(bads)), bads, strict=True):
        if not bad:
            plain.step(batch)
            continue
        held = copy.deepcopy(plain.model[1].state_dict())
        plain.loss(*batch, "")  # it draws the same random numbers
        plain.model[1].load_state_dict(held)
    assert loop.traced == 6
    assert same(bits(loop.model), bits(plain.model))


def test_an_error_of_the_loop_leaves_nothing_behind(tmp_path):
    loop = Loop(tmp_path)
    loop.train("", "forward")
    with pytest.raises(ValueError, match="an error of the loop"):
        loop.train("", "error")
    assert clean()
    loop.train("", "forward")
    assert loop.record()["origin"]["op"] == "aten.log"


def test_an_error_that_the_loop_catches_ends_no_later_trace(tmp_path):
    loop = Loop(tmp_path)
    loop.train("", "forward")

    def careful():
        for batch, bad in zip(batches(3), ("", "error", "forward"), strict=True):
            try:
                loop.step(batch, bad)
            except ValueError:
                continue

    careful()
    assert clean()
    assert loop.record()["origin"]["op"] == "aten.log"


def test_the_number_of_traced_steps_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(live_trace, "TRACED_STEPS", 3)
    loop = Loop(tmp_path)
    loop.train("", "forward", *[""] * 5)
    assert (loop.traced, loop.left) == (3, 0)
    assert not any(each._forward_pre_hooks for each in loop.model)


class Mode(TorchDispatchMode):
    """A mode of the loop's own."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_modes_of_the_loop_are_left_to_it(tmp_path):
    loop = Loop(tmp_path)
    loop.train("", "forward")
    with Mode():  # around the step: not traced
        loop.train("")
        assert torch._C._len_torch_dispatch_stack() == 1
    assert clean()
    (x, y), mode = batches(1)[0], Mode()
    loop.optimizer.zero_grad()
    with Mode():  # around the forward pass
        loss = loop.loss(x, y, "")
    assert clean()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loss = loop.loss(x, y, "")
    with mode:  # begins after the trace, and ends after it
        loss.backward()
        loop.optimizer.step()
        assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == [mode]
    assert clean()
    loop.train("forward")
    assert loop.record()["origin"]["op"] == "aten.log"


def test_a_profiler_is_left_alone(tmp_path):
    loop = Loop(tmp_path)
    loop.train("", "forward")
    profile = lambda *_: None  # noqa: E731
    sys.setprofile(profile)
    try:
        loop.train("")
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert loop.traced == 0


def test_where_a_rerun_shows_the_fault_or_none_is_explained_nothing_is_traced(tmp_path):
    loop = Loop(tmp_path)
    (x, y), *_ = batches(1)
    loop.step((x * torch.nan, y))
    assert (loop.record()["cause"], loop.left) == ("poison_input", 0)
    loop = Loop(tmp_path, max_incidents=0)
    loop.train("", "forward")
    assert loop.left == 0


def test_a_compiled_loop_is_not_traced(tmp_path):
    loop = Loop(tmp_path)
    loop.guard._loop.frames = -1  # as if something had been compiled since
    loop.train("", "forward")
    assert (loop.record()["cause"], loop.left) == ("unknown", 0)


def test_a_fault_that_the_trace_does_not_show_is_traced_once(tmp_path):
    loop = Loop(tmp_path)

    def spoilt(batch):
        loop.optimizer.zero_grad()
        F.cross_entropy(loop.model(batch[0]), batch[1]).backward()
        loop.model[0].weight.grad = loop.model[0].weight.grad.clone().fill_(torch.nan)
        loop.optimizer.step()

    for number, batch in enumerate(batches(6)):
        loop.step(batch) if number % 2 else spoilt(batch)
    assert loop.left == 0
    assert clean()


def test_detaching_ends_the_trace(tmp_path):
    loop = Loop(tmp_path)
    loop.train("", "forward")
    x, y = batches(1)[0]
    loss = loop.loss(x, y, "")
    loop.guard.detach()
    assert clean()
    loss.backward()
    loop.optimizer.step()
