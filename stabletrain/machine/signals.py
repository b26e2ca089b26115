"""Signals that ask a run to end: noted when they come, answered by the loop between two steps."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
"""Signals that ask a run to stop: Ctrl-C, the end of a job, and Slurm's notice that its time is up."""


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Generator[None]:
    """A context in which `STOPS` go to `handler`; afterwards the handlers are those of before.

    Outside the main thread, where Python allows no handlers, nothing changes.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {each: signal.signal(each, handler) for each in STOPS}
    try:
        yield
    finally:
        for each, earlier in before.items():
            signal.signal(each, earlier)


class StopRequest:
    """A context in which a signal of `STOPS` only leaves its name; a second SIGINT interrupts at once.

    Attributes:
        name: the signal that came, such as `SIGTERM`; empty until then.
    """

    def __init__(self) -> None:
        self.name = ""
        self._handling: AbstractContextManager[None] = handling(self.note)

    def __enter__(self) -> "StopRequest":
        self._handling.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handling.__exit__(kind, value, trace)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Takes a signal."""
        del frame
        if self.name == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
