"""Signals that ask a run to stop: recorded when they arrive, handled by the loop between two steps."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
"""Signals that ask a run to stop: Ctrl-C, the end of a job, and Slurm's notice that its time is almost up."""


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Generator[None]:
    """A context in which `handler` handles `STOP_SIGNALS`. Restores the previous handlers at the end.

    Does nothing outside the main thread, where Python allows no handlers.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {each: signal.signal(each, handler) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for each, earlier in before.items():
            signal.signal(each, earlier)


class NoStopRequest(AbstractContextManager):
    """Leaves the signal handlers as they are, so that Ctrl-C raises KeyboardInterrupt, and never asks to stop."""

    name = ""
    agreed = ""

    def __exit__(self, *raised: object) -> None:
        """Does nothing."""


class StopRequest(ExitStack):
    """A context that records the last signal of `STOP_SIGNALS`. A second SIGINT raises KeyboardInterrupt at once.

    Attributes:
        name: the recorded signal, e.g. `SIGTERM`; empty if none. Other ranks do not know of it yet.
        agreed: why all ranks stop now, the same on each of them; empty, because a signal reaches a single process.
    """

    agreed = ""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __enter__(self) -> "StopRequest":
        self.enter_context(handling(self.note))
        return self

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if self.name == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
