"""`train.py` as it meets a lost rank on cards: rank 1 is killed in a step, and rank 0's device never ends that step.

With NCCL no collective fails then. The CPU's gloo would raise an error, so the device is one that is never asked.
"""

import os
import signal
import sys
import time

from stabletrain import step
from stabletrain.cli.train import train_command
from stabletrain.parallel.ranks import current_ranks, exit_process

STEP = 10


class Never:
    """A CUDA event that the device does not reach."""

    def query(self):
        """Returns False."""
        return False

    def synchronize(self):
        """Waits until the process is killed."""
        time.sleep(3600)


class Stuck(step.InFlight):
    """A reading that never arrives from step `STEP` on."""

    def __init__(self, numbers, *arguments, **options):
        super().__init__(numbers, *arguments, **options)
        if numbers.step >= STEP:
            self._arrived = Never()
            if current_ranks().rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    step.InFlight = Stuck
    exit_process(train_command(sys.argv[1:]))
