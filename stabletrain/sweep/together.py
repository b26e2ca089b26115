"""Several runs of a sweep at once, in processes of their own: asked to stop, all of them save and no other begins.

The processes know each other by the sweep's folder only, so the wish to stop is a file in it.
"""

import os
import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)

LOOK = 0.5
"""Seconds between two looks for the wish to stop."""


class Asked:
    """A context around a whole sweep, in the process that started it: a signal leaves the wish to stop.

    A second SIGINT interrupts at once, and ends the runs where they are.

    Attributes:
        name: the signal that came, such as `SIGTERM`; empty until then.
    """

    def __init__(self, folder: Path) -> None:
        self.name = ""
        self._wish = wish_in(folder)
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Asked":
        self._wish.unlink(missing_ok=True)
        for each in SIGNALS:
            self._before[each] = signal.signal(each, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)  # ty: ignore[invalid-argument-type]
        self._wish.unlink(missing_ok=True)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        self._wish.touch()


class Listening:
    """A context around one run, in its own process: the wish to stop becomes the signal that a run answers.

    Signals from outside are left to the process that started the sweep, until the run listens to them itself.
    """

    def __init__(self, folder: Path) -> None:
        self._wish = wish_in(folder)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Listening":
        for each in SIGNALS:
            self._before[each] = signal.signal(each, signal.SIG_IGN)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for each, handler in self._before.items():
            signal.signal(each, handler)  # ty: ignore[invalid-argument-type]

    def _listen(self) -> None:
        while not self._over.wait(LOOK):
            if self._wish.exists():  # again and again, for the run may not yet have begun to listen
                os.kill(os.getpid(), signal.SIGTERM)


def wish_in(folder: Path) -> Path:
    """The file that says that a sweep is to stop."""
    return folder / ".stop"
