"""Signals that ask a run to end: noted when they come, answered by the loop between two steps."""

import math
import signal
import threading
import time
from types import FrameType, TracebackType

ECHO = 3.0
"""Seconds within which torchrun has passed on a signal that came from the terminal."""


class StopRequest:
    """A context in which SIGINT (Ctrl-C), SIGTERM and SIGUSR2 (Slurm: the time is up) only leave their name; a second
    SIGINT interrupts at once.

    Outside the main thread, where Python allows no handlers, it never asks for anything.

    Args:
        launched: whether torchrun started this process. Ctrl-C then comes twice: from the terminal, and from torchrun,
            which passes on what it was told itself. What follows within `ECHO` seconds is no second request.

    Attributes:
        name: the signal that came, such as `SIGTERM`; empty until then.
    """

    def __init__(self, launched: bool = False) -> None:
        self.name = ""
        self._echo, self._since = ECHO if launched else 0.0, -math.inf
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
                self._before[each] = signal.signal(each, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)  # ty: ignore[invalid-argument-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.name == "SIGINT" and number == signal.SIGINT and time.monotonic() - self._since >= self._echo:
            raise KeyboardInterrupt
        if number == signal.SIGINT and self.name != "SIGINT":
            self._since = time.monotonic()
        self.name = signal.Signals(number).name
