"""torchrun on one node of a job, exiting with the code of the rank that failed first.

`torchrun` itself exits with 1 after any failure, but job.sh decides by the code whether to requeue the job.

This runs inside srun's task, where Slurm's numbers say which node hosts the rendezvous. By itself, torchrun compares
the names and addresses of the host with those of this node. On nodes with several networks, no node may find itself.
"""

import os
import signal
import sys
from collections.abc import Mapping
from typing import NamedTuple

from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.run import parse_args, run

CONNECT = 300
"""Seconds that a node tries to reach node 0, which may need minutes to import PyTorch from a busy file system."""


class Node(NamedTuple):
    """This node among those of the job.

    Attributes:
        number: from 0, as Slurm counts the nodes of the job. Node 0 hosts the rendezvous.
        addresses: of all nodes, in order of their numbers; empty outside a Slurm job.
    """

    number: int
    addresses: list[str]

    def options(self) -> list[str]:
        """Returns the options of torchrun that differ between the nodes."""
        if not self.addresses:
            return []
        conf = f"is_host=0,read_timeout={CONNECT}" if self.number else "is_host=1"
        return [f"--rdzv-conf={conf}", f"--local-addr={self.addresses[self.number]}"]


def this_node(environment: Mapping[str, str]) -> Node:
    """Returns this node, from Slurm's variables and the one that job.sh exports."""
    addresses = environment.get("STABLETRAIN_NODE_ADDRESSES", "")
    return Node(int(environment.get("SLURM_NODEID", "0")), addresses.split(",") if addresses else [])


def main(arguments: list[str]) -> int:
    """Runs the ranks of this node and returns the exit code: 128 + n if signal n ended a rank or this one."""
    node = this_node(os.environ)
    options = parse_args([*node.options(), *arguments])
    try:
        run(options)
    except ChildFailedError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end of another node must not change this node's code
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as end:
        print(f"stabletrain: {end.sigval.name} ended the ranks of this node", file=sys.stderr)
        return 128 + end.sigval
    except (RendezvousConnectionError, DistNetworkError) as error:
        return lost(node, options.rdzv_endpoint, error)
    return 0


def lost(node: Node, endpoint: str, error: BaseException) -> int:
    """Prints why there is no rendezvous at this address; returns the exit code.

    Another node's end must not hide the code with which it ended, so it counts as an end by SIGTERM. An error on the
    host itself would come again at the next start.
    """
    why = " ".join(str(error.__cause__ or error).split())[:300]
    if node.number:
        text = f"node 0 of the job has exited or cannot be reached at {endpoint}, which ends the ranks of node"
        print(f"stabletrain: {text} {node.number} too ({why})", file=sys.stderr)
        return 128 + signal.SIGTERM
    address, _, port = endpoint.rpartition(":")
    print(
        f"stabletrain: node 0 cannot host the rendezvous of the ranks at {endpoint} ({why}): check on this node that "
        f"`hostname -I` lists {address}, and with `ss -ltn` that no other program uses port {port}; the port follows "
        "from the job's number, so a new job has another one",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # rendezvous threads that lost the other nodes may abort a normal interpreter exit
