"""One piece of work at a time on a thread of its own; what goes wrong in it is raised where it is waited for."""

import threading
from collections.abc import Callable


class Background:
    """A thread, or none.

    Args:
        asynchronous: False does all work at once.

    Attributes:
        ending: set when nobody will ask for the work any more.
    """

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous, self.ending = asynchronous, threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None], name: str) -> None:
        """Does `work`; the work before has been waited for."""

        def attempt() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        if self.asynchronous:
            self._thread = threading.Thread(target=attempt, name=name)
            self._thread.start()
        else:
            attempt()
            self.wait()

    def wait(self) -> None:
        """Returns when the work has ended; raises what it raised."""
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """Returns when the work has ended, soon; for a run that is ending with an error of its own already."""
        self.ending.set()
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
