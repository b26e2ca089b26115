"""Traces the steps of a loop that cannot be edited while they run, after a fault that no rerun could name.

The loop's own loss and its backward pass cannot be run again. So the next steps run under the trace (`forensics/trace`)
with which others are run again: from the first module that the loop calls, up to `optimizer.step()`. The trace only
reads, so these steps have the same bits; but they are slow.

The trace is a mode that begins and ends in the loop's code, which may raise an error in between. Therefore it also ends
when the function that runs the loop does: of the functions that were running in an earlier `optimizer.step()`, the
innermost that is running again.
"""

import sys
from functools import partial
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from stabletrain.forensics.trace.recorder import Trace
from stabletrain.guard.loop_hooks import WeakHook

TRACED_STEPS = 100
"""Number of steps that are traced after a fault that could not be named, unless it comes again before."""


class LiveTrace:
    """Traces the next steps of a loop, when it is armed.

    Attributes:
        steps_left: number of steps that are still traced.
    """

    def __init__(self, model: nn.Module) -> None:
        self.steps_left = 0
        self._model = model
        self._running: Trace | None = None
        self._hooks: list[Any] = []
        self._codes: set[CodeType] = set()

    def arm(self) -> None:
        """Traces the next steps. Is called in `optimizer.step()`."""
        self.disarm()
        frames = [frame for frame, _ in walk_stack(None)]
        # PyTorch runs some functions in others of its own, as `optimizer.step` and `checkpoint`: these are no loop.
        codes = {each.f_code for each in frames if not each.f_globals.get("__name__", "").startswith("torch.")}
        self.steps_left, self._codes = TRACED_STEPS, codes
        self._hooks = [each.register_forward_pre_hook(WeakHook(self._begin)) for each in self._model.modules()]

    def disarm(self) -> None:
        """Traces no more steps."""
        self.end()
        self.steps_left = 0
        while self._hooks:
            self._hooks.pop().remove()

    def end_step(self) -> Trace | None:
        """Ends the trace of a step and returns it; None if there is none."""
        trace = self.end()
        self.steps_left -= trace is not None
        if self._hooks and self.steps_left <= 0:
            self.disarm()
        return trace

    def end(self) -> Trace | None:
        """Ends the trace that is running and returns it; None if there is none."""
        trace, self._running = self._running, None
        if trace is not None:
            sys.setprofile(None)
            leave(trace)
        return trace

    def _begin(self, module: nn.Module, *args: Any) -> None:
        """Begins the trace of a step, unless it runs or others use what it needs."""
        if self._running is not None or not (module.training and torch.is_grad_enabled()):
            return
        loop = next((frame for frame, _ in walk_stack(None) if frame.f_code in self._codes), None)
        # A mode that the loop has entered, it may also leave before this one; and a profiler needs its own function.
        if loop is None or _get_current_dispatch_mode_stack() or sys.getprofile() is not None:
            return
        self._running = Trace(self._model)
        self._running.__enter__()
        sys.setprofile(partial(self._end_with, loop))

    def _end_with(self, loop: FrameType, frame: FrameType, event: str, argument: Any) -> None:
        """Ends the trace when the loop's function returns or raises an error: both are the event `return`."""
        if frame is loop and event == "return":
            self.end()


def leave(trace: Trace) -> None:
    """Ends a trace, also if the loop has entered other modes since."""
    modes = _get_current_dispatch_mode_stack()
    above = modes[modes.index(trace) + 1 :]
    for _ in above:
        _pop_mode()
    trace.__exit__(None, None, None)
    for mode in above:
        _push_mode(mode)
