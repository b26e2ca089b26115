"""Publishes why a rank died, so the others can report it instead of "connection closed by peer".

The messages are written to the store through which torchrun's ranks found each other. torchrun itself runs this store,
so it outlives every rank. In normal operation each rank writes only one entry, at the start: its host and process id.
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
from stabletrain.parallel.ranks import Ranks, connection_error, timeout

PATIENCE = 2.0
"""Seconds to wait for the report of a rank whose connections were closed."""

LENGTH = 300
"""Maximum length of a message in characters."""


def publish_location(ranks: Ranks) -> None:
    """Publishes the host and process id of this rank."""
    put(ranks, "at", f"{platform.node()} {os.getpid()}")


def publish_failure(ranks: Ranks, error: BaseException) -> None:
    """Publishes why this rank dies."""
    if ranks.distributed:
        put(ranks, "last", f"{type(error).__name__}: {error}")


def as_rank_lost(error: BaseException, ranks: Ranks) -> RankLost | None:
    """Returns a RankLost that names the lost rank, if `error` is a failed collective; None for any other error."""
    if isinstance(error, RankLost):
        return error
    if not ranks.distributed or not connection_error(error):
        return None
    with suppress(ValueError):  # only the main thread can set handlers
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all ranks: report first
    lost, waited = describe_lost_rank(ranks), ""
    if "timed out" in connection_error(error).lower():
        put(ranks, "last", f"it waited {timeout().total_seconds():g} s for another rank")
        waited = (
            f"; this rank has waited for {timeout().total_seconds():g} s: if the ranks need longer, raise "
            "parallel.timeout, or parallel.start_timeout if the first step is not done yet"
        )
    return RankLost(lost + waited)


def says_how_to_continue(ranks: Ranks) -> bool:
    """Whether this rank, which has lost another, is the one that prints how to continue.

    If rank 0 was killed, it is the first rank that asks.
    """
    if not ranks.is_main and get(ranks, "last", 0):
        return False  # rank 0 says why it ends
    with suppress(Exception):  # the store counts the ranks that have asked
        return register().add(f"stabletrain/{ranks.restarts}/continue", 1) == 1
    return ranks.local_rank == 0  # the store is gone, with the machine that ran it: once on each other machine


def describe_lost_rank(ranks: Ranks) -> str:
    """Describes which other rank has ended and why. Waits up to `PATIENCE` seconds for its report."""
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
                    f"rank {rank} of {ranks.world_size} (process {process} on {host}) has ended without an error "
                    "message: it was killed, or it crashed outside of Python"
                )
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    elsewhere = [f"{rank} on {host}" for rank, (host, _, _) in places.items() if host not in ("", here)]
    who = f"one of those on other machines ({', '.join(elsewhere)})" if elsewhere else "although all still run"
    return f"another rank no longer responds, {who}"


def lives(process: str) -> bool:
    """Returns whether a process of this machine still runs. A zombie counts as ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not Path("/proc/self").exists()  # without /proc nothing is known: assume it runs


def put(ranks: Ranks, what: str, text: str) -> None:
    """Publishes a message of this rank; ignores all errors."""
    with suppress(Exception):
        register().set(f"stabletrain/{ranks.restarts}/{what}/{ranks.rank}", " ".join(text.split())[:LENGTH])


def get(ranks: Ranks, what: str, rank: int) -> str:
    """Returns the message of a rank; empty if there is none, or if the store is gone."""
    key = f"stabletrain/{ranks.restarts}/{what}/{rank}"
    with suppress(Exception):
        return register().get(key).decode() if register().check([key]) else ""
    return ""


@cache
def register() -> Any:
    """Returns the store at the address that torchrun gives."""
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
