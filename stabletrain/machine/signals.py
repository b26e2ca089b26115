"""Signals that ask a run to end: noted when they come, answered by the loop between two steps."""

import signal
import threading
from types import FrameType, TracebackType


class StopRequest:
    """A context in which SIGINT (Ctrl-C), SIGTERM and SIGUSR2 (Slurm: the time is up) only leave their name; a second
    SIGINT interrupts at once.

    Outside the main thread, where Python allows no handlers, it never asks for anything.

    Attributes:
        name: the signal that came, such as `SIGTERM`; empty until then.
    """

    def __init__(self) -> None:
        self.name = ""
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
        if self.name == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
