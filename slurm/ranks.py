"""torchrun on one node of a job, ending with the exit code of the rank that failed first.

`torchrun` itself ends with 1 whatever happened; whether a job is to queue again depends on what did.
"""

import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.run import parse_args, run


def main(arguments: list[str]) -> int:
    """Runs the ranks of this node; a rank killed by signal n gives 128 + n, as does an end from outside."""
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another node's end must not change how this one ended
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as end:
        print(f"stabletrain: the ranks of this node were ended by {end.sigval.name}", file=sys.stderr)
        return 128 + end.sigval
    except RendezvousConnectionError as error:  # the first node, which keeps the ranks' register, has ended before us
        print(f"stabletrain: the first node has ended, and so do the ranks of this one ({error})", file=sys.stderr)
        return 128 + signal.SIGTERM
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: threads of the register, cut off from the other nodes, may abort a slower end
