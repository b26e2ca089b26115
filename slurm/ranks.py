"""torchrun on one node of a job, exiting with the code of the rank that failed first.

`torchrun` itself exits with 1 after any failure, but job.sh decides by the code whether to requeue the job.
"""

import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.run import parse_args, run


def main(arguments: list[str]) -> int:
    """Runs the ranks of this node and returns the exit code: 128 + n if signal n ended a rank or this one."""
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end of another node must not change this node's code
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as end:
        print(f"stabletrain: {end.sigval.name} ended the ranks of this node", file=sys.stderr)
        return 128 + end.sigval
    except RendezvousConnectionError as error:  # the first node hosts the rendezvous and has exited
        print(
            f"stabletrain: the first node has exited, which ends the ranks of this node too ({error})", file=sys.stderr
        )
        return 128 + signal.SIGTERM
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # rendezvous threads that lost the other nodes may abort a normal interpreter exit
