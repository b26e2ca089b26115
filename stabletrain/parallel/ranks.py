"""Which rank this process is, as torchrun numbers them; how ranks join; and collectives for Python objects.

Torch is imported only when there are several processes, so that a mistyped command is rejected at once.

By default, gloo takes the address of the machine's own name. On many clusters that is 127.0.1.1, or an address in a
network for management. The ranks have met at `MASTER_ADDR`, so the network interface towards it connects them.
"""

import atexit
import contextlib
import fcntl
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

from stabletrain.errors import ConfigError

T = TypeVar("T")

TIMEOUT = timedelta(minutes=15)
"""How long a rank waits for the others before the configuration is read, which sets the time after that."""


@dataclass(frozen=True)
class Timeouts:
    """How long a rank waits for the others, in seconds.

    Attributes:
        start: until the first step is done. Data are prepared, models compiled and ranks connected in this time.
        steady: from then on: longer than a step, an evaluation, a checkpoint or a diagnosis takes.
    """

    start: float
    steady: float


@dataclass(frozen=True)
class Ranks:
    """This process among those of one run.

    Attributes:
        rank: its number, from 0. Rank 0 writes files and prints.
        world_size: number of processes.
        local_rank: its number on its own machine, which is also the index of its GPU.
        launched: whether torchrun started it.
        restarts: how often torchrun has restarted the ranks after a failure.
        local_world_size: number of processes on its machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launched: bool = False
    restarts: int = 0
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which writes files and prints."""
        return self.rank == 0

    @property
    def distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world_size > 1

    def sharing(self, shard: int | None, replicate: int | None) -> int:
        """Returns how many ranks share one copy of the weights with `parallel=hsdp`.

        Args:
            shard: so many; None for as many as `replicate` copies leave, or else for those of one machine.
            replicate: number of copies; None for as many as there are.
        """
        return shard or (self.world_size // replicate if replicate else self.local_world_size)


def current_ranks() -> Ranks:
    """Returns this process's ranks, from torchrun's environment variables."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Ranks()
    rank, count, local, restarts = (
        int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    )
    on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    return Ranks(rank, count, local, True, restarts, on_machine)


def join_process_group(ranks: Ranks) -> None:
    """Joins the process group: gloo between CPUs, NCCL between GPUs. Does nothing if already joined.

    Does not start CUDA: the rank's device is not known yet, and determinism must be set up before.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if ranks.world_size > ranks.local_world_size:  # on several machines
        from stabletrain.parallel.ranks import choose_interface

        choose_interface()
    # With device=cpu, NCCL is never used: it connects the ranks only in the first collective between GPUs.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # A rank whose configuration is refused leaves at once. Without a barrier it could close its sockets while another
    # one still connects, which would then fail with an error about sockets.
    with default_variable("TORCH_DIST_INIT_BARRIER", "1"):
        dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world_size, timeout=TIMEOUT)


def bind_to_card(device: Any) -> None:
    """Connects the ranks' cards with NCCL, each rank's to `device`. Does nothing for a CPU, or for ranks not joined.

    This is what `device_id` of `init_process_group` does. The ranks join before the configuration is read, so their
    devices are known only later. Without it NCCL guesses a rank's card where no tensor says it, as in a barrier.
    """
    import torch.distributed as dist

    if device.type != "cuda" or not dist.is_initialized():
        return
    group: Any = dist.group.WORLD
    backend = group._get_backend(device)
    group.bound_device_id = device
    if hasattr(backend, "bound_device_id"):  # in some versions of PyTorch, a backend gets it only when it is made
        backend.bound_device_id = device
    if backend.supports_splitting:  # of NCCL
        backend.eager_connect_single_device(device)


@contextlib.contextmanager
def default_variable(name: str, value: str) -> Generator[None]:
    """A context in which an environment variable has a value, unless the user has set it."""
    added = name not in os.environ
    if added:
        os.environ[name] = value
    try:
        yield
    finally:
        if added:
            del os.environ[name]


def leave_process_group() -> None:
    """Leaves the process group, at the end of the process."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def exit_process(code: int) -> NoReturn:
    """Ends this process with `code`, without aborting in the interpreter's shutdown."""
    # A gloo thread that still holds a tensor aborts the process during the interpreter's shutdown. A run that finished
    # would count as crashed, and torchrun would end the other ranks (pytorch/pytorch#190489). So skip the shutdown, and
    # run only its necessary parts: wait for threads, call `atexit` functions, flush the output.
    if current_ranks().launched:
        threading._shutdown()  # ty: ignore[missing-attribute]  no stub knows it
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):  # the reader of the output is gone
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    drop_unread_output()
    sys.exit(code)


def drop_unread_output() -> None:
    """Flushes standard output, and discards the rest if the reader has closed the pipe, as `head` does."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # otherwise the interpreter's shutdown reports it, and exits with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_together(ranks: Ranks) -> None:
    """Waits until all ranks are about to exit, then ignores SIGTERM, so that each exits with its own code."""
    if not ranks.distributed:
        return
    with contextlib.suppress(RuntimeError):  # another rank is gone already
        all_gather_object(None)
    # torchrun ends all ranks when one exits, but rank 0 may still be writing the run's record.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def broadcast_object(value: Any) -> Any:
    """Returns rank 0's value on every rank. The value must be small and picklable."""
    import torch
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def run_on_main(ranks: Ranks, work: Callable[[], T], otherwise: Callable[[], T] | None = None) -> T:
    """Runs `work` on rank 0, and returns its result or raises its ConfigError on every rank.

    Args:
        ranks: this process among those of the run.
        work: runs on rank 0 only.
        otherwise: creates the return value of the other ranks, if the result cannot be sent.

    Raises:
        ConfigError: raised by `work` on rank 0.
    """
    if not ranks.distributed:
        return work()
    value, refusal = None, ""
    if ranks.is_main:
        try:
            value = work()
        except ConfigError as error:
            refusal = str(error)
    refusal = broadcast_object(refusal)
    if refusal:
        raise ConfigError(refusal)
    if otherwise is None:
        return broadcast_object(value)
    return cast("T", value) if ranks.is_main else otherwise()


CONNECTION_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out",
    "timeout",
    "remote process",
)
"""Phrases, in lower case, by which gloo and NCCL report a process that no longer responds."""


def connection_error(error: BaseException) -> str:
    """Returns the message of an error that means a lost connection to another rank; empty for any other error."""
    text = " ".join(str(error).split())
    of_ranks = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistError") or "gloo" in text.lower()
    heard = isinstance(error, RuntimeError) and of_ranks and any(sign in text.lower() for sign in CONNECTION_LOST)
    return text[:160] if heard else ""


def all_gather_object(value: Any) -> list[Any]:
    """Returns the values of all ranks, in order of rank."""
    import torch.distributed as dist

    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value, group=host_group())
    return box


def all_gather_tensor(gathered: Any, values: Any, group: Any = None) -> None:
    """Writes the tensors `values` of all ranks into the tensor `gathered`, one after the other, in order of rank."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name in older versions
    gather(gathered, values, group=group)


_HOST_GROUPS: dict[int, Any] = {}


def host_group(size: int | None = None) -> Any:
    """Returns a gloo group over the hosts' network, for Python objects when the default group may be NCCL.

    Args:
        size: the ranks are cut into groups of so many in a row, and this rank's is returned; None for all ranks. All
            ranks must ask together the first time.
    """
    import torch.distributed as dist

    size = size or dist.get_world_size()
    if size not in _HOST_GROUPS:
        _HOST_GROUPS[size] = dist.new_subgroups(size, timeout=timeout(), backend="gloo")[0]
    return _HOST_GROUPS[size]


_TIMEOUT = [TIMEOUT]


def timeout() -> timedelta:
    """Returns how long this rank waits for the others at present."""
    return _TIMEOUT[0]


def set_timeout(seconds: float) -> None:
    """Sets how long this rank waits for the others, in all process groups."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    _TIMEOUT[0] = timedelta(seconds=seconds)
    set_of_group = getattr(dist, "set_timeout", None) or vars(c10d)["_set_pg_timeout"]  # its name in older versions
    for group in list(c10d._world.pg_map):
        set_of_group(timeout(), group)
    c10d._get_default_store().set_timeout(timeout())  # NCCL's communicators, made when first used, meet at the store


INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Names the interface that gloo uses."""

GET_ADDRESS = 0x8915
"""`SIOCGIFADDR` of Linux: asks for an interface's IPv4 address."""


def choose_interface() -> None:
    """Sets the interface that gloo uses in this process, unless the user has set it or it is not known."""
    if INTERFACE_VARIABLE not in os.environ and (found := interface(os.environ)):
        os.environ[INTERFACE_VARIABLE] = found


def interface(environment: Mapping[str, str]) -> str:
    """Returns the name of the interface towards `MASTER_ADDR`; empty if it is not known.

    On the machine that has this address, its name may mean 127.0.1.1. Then another node of the Slurm job decides.
    """
    nodes = environment.get("STABLETRAIN_NODE_ADDRESSES", "").split(",")
    own = map(own_address, filter(None, [environment.get("MASTER_ADDR", ""), *nodes]))
    outside = next((address for address in own if address and not address.startswith("127.")), "")
    return addresses().get(outside, "")


def own_address(host: str) -> str:
    """Returns the IPv4 address from which this machine sends to a host; empty if there is none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # of a datagram socket, this only chooses the route
        except OSError:
            return ""
        return probe.getsockname()[0]


def addresses() -> dict[str, str]:
    """Returns the name of each interface that has an IPv4 address, by that address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, GET_ADDRESS, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            found[socket.inet_ntoa(answer[20:24])] = name
    return found
