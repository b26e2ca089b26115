"""What a rank leaves behind when it ends, and the sentence that the others make of it, where gloo has a closed socket.

The words lie in the store in which torchrun's ranks have found each other; it is torchrun's own, and outlives each of
them. Nothing is read or written while all is well, but one word when a rank starts: where it runs.
"""

import os
import platform
import signal
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from stabletrain.errors import RankLost
from stabletrain.parallel.ranks import Ranks, connection_error

PATIENCE = 2.0
"""Seconds within which a rank whose connections are closed is over."""

LENGTH = 300
"""Letters of a last word."""


def publish_location(ranks: Ranks) -> None:
    """Notes where this rank runs."""
    put(ranks, "at", f"{platform.node()} {os.getpid()}")


def publish_failure(ranks: Ranks, error: BaseException) -> None:
    """Notes why this rank ends."""
    if ranks.distributed:
        put(ranks, "last", f"{type(error).__name__}: {error}")


def as_rank_lost(error: BaseException, ranks: Ranks) -> RankLost | None:
    """What an error means where it says that another rank no longer answers; None for an error of any other kind."""
    if isinstance(error, RankLost):
        return error
    if not ranks.distributed or not connection_error(error):
        return None
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, who ends all: not before it is written why
    return RankLost(describe_lost_rank(ranks))


def describe_lost_rank(ranks: Ranks) -> str:
    """Which of the other ranks has ended and why, in words, as far as that can be known within `PATIENCE`."""
    others, here = [rank for rank in range(ranks.world_size) if rank != ranks.rank], platform.node()
    places = {rank: get(ranks, "at", rank).partition(" ") for rank in others}
    end = time.monotonic() + PATIENCE
    while True:
        for rank in others:
            if why := get(ranks, "last", rank):
                return f"rank {rank} of {ranks.world_size} has ended: {why}"
        for rank, (host, _, process) in places.items():
            if host == here and not lives(process):
                return (
                    f"rank {rank} of {ranks.world_size} (process {process} on {host}) has ended without a word: it was "
                    "killed, or it crashed outside of Python"
                )
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    elsewhere = [f"{rank} on {host}" for rank, (host, _, _) in places.items() if host not in ("", here)]
    who = f"one of those on other machines ({', '.join(elsewhere)})" if elsewhere else "though all still run"
    return f"another rank no longer answers, {who}"


def lives(process: str) -> bool:
    """Whether a process of this machine still runs; one that is over and waits to be collected does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not Path("/proc/self").exists()  # a system without /proc: nothing is known


def put(ranks: Ranks, what: str, text: str) -> None:
    """Leaves a word; one that cannot be left is none."""
    with suppress(Exception):
        register().set(f"stabletrain/{ranks.restarts}/{what}/{ranks.rank}", " ".join(text.split())[:LENGTH])


def get(ranks: Ranks, what: str, rank: int) -> str:
    """The word of a rank; empty where it has left none, or the store is gone too."""
    key = f"stabletrain/{ranks.restarts}/{what}/{rank}"
    with suppress(Exception):
        return register().get(key).decode() if register().check([key]) else ""
    return ""


@cache
def register() -> Any:
    """The store, by the address that torchrun gives."""
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
