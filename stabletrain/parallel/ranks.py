"""Which of several processes this is, as torchrun numbers them, and what they tell each other beside a step's numbers.

This file loads torch only when there are several processes, so that a mistyped command is refused at once.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

from stabletrain.errors import ConfigError

T = TypeVar("T")

TIMEOUT = timedelta(minutes=15)
"""How long a rank waits for the others: longer than an evaluation or a diagnosis takes, shorter than a lost night."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of one run.

    Attributes:
        rank: its number, from 0; rank 0 writes files and speaks.
        world_size: how many there are.
        local_rank: its number on its own machine, which is the number of its card.
        launched: whether torchrun started it.
        restarts: how often torchrun has started the ranks anew, after one of them failed.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launched: bool = False
    restarts: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    @property
    def distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world_size > 1


def current_ranks() -> Ranks:
    """This process, by the variables that torchrun sets."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Ranks()
    rank, count, local, restarts = (
        int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    )
    return Ranks(rank, count, local, True, restarts)


def join_process_group(ranks: Ranks) -> None:
    """Meets the other ranks: gloo between CPUs, NCCL between cards. Does nothing the second time."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(ranks.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world_size, timeout=TIMEOUT)


def leave_process_group() -> None:
    """Parts from the other ranks, at the end of the process."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def exit_process(code: int) -> NoReturn:
    """Ends this process with a code.

    One of several ranks ends without the taking apart of Python's interpreter, in which a thread of gloo's that still
    holds a tensor would abort it: a run that finished would count as crashed, and torchrun would end the other ranks
    (pytorch/pytorch#190489). Threads are waited for, and what is registered with `atexit` is done, as ever.
    """
    if current_ranks().launched:
        threading._shutdown()  # ty: ignore[missing-attribute]  no stub knows it
        atexit._run_exitfuncs()
        with suppress(OSError):  # whoever read the output is gone
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def exit_together(ranks: Ranks) -> None:
    """Waits until all ranks are about to end with a code of their own, and then lets none be ended from outside.

    torchrun ends all when one has ended: it must not do so while rank 0 still writes down how the run went.
    """
    if not ranks.distributed:
        return
    with suppress(RuntimeError):  # another is gone already
        all_gather_object(None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def broadcast_object(value: Any) -> Any:
    """What rank 0 has, on every rank: a small value that Python can pickle."""
    import torch
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def run_on_main(ranks: Ranks, work: Callable[[], T], otherwise: Callable[[], T] | None = None) -> T:
    """Has rank 0 do something that may be refused: its result, on every rank, or the same refusal.

    Args:
        ranks: this process among those of the run.
        work: done on rank 0 only.
        otherwise: makes what the others get instead, where the result is no value that can be sent.

    Raises:
        ConfigError: rank 0's.
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


GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out",
    "timeout",
    "remote process",
)
"""What gloo and NCCL say where another process no longer answers, in lower case."""


def connection_error(error: BaseException) -> str:
    """Why a rank that waits for the others no longer has them; empty for an error of any other kind."""
    text = " ".join(str(error).split())
    of_ranks = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistError") or "gloo" in text.lower()
    heard = isinstance(error, RuntimeError) and of_ranks and any(sign in text.lower() for sign in GONE)
    return text[:160] if heard else ""


def all_gather_object(value: Any) -> list[Any]:
    """What every rank has, in the order of ranks."""
    import torch.distributed as dist

    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value, group=host_group())
    return box


_BY_HOST: list[Any] = []


def host_group() -> Any:
    """The group that speaks over the hosts' network, where the default one speaks between cards."""
    import torch.distributed as dist

    if not _BY_HOST:
        _BY_HOST.append(dist.new_group(backend="gloo", timeout=TIMEOUT))
    return _BY_HOST[0]
