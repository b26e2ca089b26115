"""Steps that take a while, so that a test finds a run in the middle of its steps however busy the machine is."""

import time
from typing import Any

from hydra.experimental.callback import Callback

from stabletrain.trainer import loop


def paced(seconds: float) -> list[str]:
    """Returns the words that let each step of a command take this much longer; nothing that it computes changes."""
    return [f"+hydra.callbacks.paced._target_={__name__}.{Paced.__name__}", f"+hydra.callbacks.paced.seconds={seconds}"]


class Paced(Callback):
    """Sleeps after each step of this process, the steps of a what-if's arms included."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_job_start(self, config: Any, **given: Any) -> None:
        """Lets the loop sleep where it asks what is due after a step."""
        ask = loop.due_after_step

        def asking(*asked: Any) -> loop.Due:
            time.sleep(self._seconds)
            return ask(*asked)

        loop.due_after_step = asking
