"""Publishes why a rank died, so the others can report it instead of "connection closed by peer".

The messages are written to the store through which torchrun's ranks found each other. torchrun itself runs this store,
so it outlives every rank. In normal operation each rank writes only one entry, at the start: its host and process id.
"""

import os
import platform
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from stabletrain.errors import RankLost
from stabletrain.parallel import collectives
from stabletrain.parallel.ranks import Ranks, connection_error, timeout

REPORT_WAIT = 2.0
"""Seconds to wait for the report of a rank whose connections were closed."""

LOOK_INTERVAL = 1.0
"""Seconds that a rank waits for its device before it looks for lost ranks, and between two such looks."""

TIMEOUT_WAIT = 10.0
"""Seconds to wait for the records that PyTorch writes on all ranks if a collective of NCCL times out."""

WAITED = "it waited"
"""How the report of a rank begins that has waited for another one in vain."""

ANY_RANK = "any"
"""Key, in place of a rank, under which any rank publishes its end, so that the others look only once."""

KILL_MARGIN = 10.0
"""Seconds before torchrun kills this rank in which it can still report why."""

LONGEST_MESSAGE = 300
"""Maximum length of a message in characters."""


def publish_location(ranks: Ranks) -> None:
    """Publishes the host and process id of this rank."""
    put(ranks, "at", f"{platform.node()} {os.getpid()}")


def publish_failure(ranks: Ranks, error: BaseException) -> None:
    """Publishes why this rank dies."""
    if ranks.distributed:
        put(ranks, "last", f"{type(error).__name__}: {error}")


def publish_end(ranks: Ranks) -> None:
    """Publishes that this rank's process ends after a failure. (In a sweep, a failed run does not end it.)"""
    if ranks.distributed:
        put(ranks, "ended", str(ranks.rank), ANY_RANK)


def wait_or_lose_rank(event: Any, ranks: Ranks, sigterm_arrived: Callable[[], bool]) -> None:
    """Waits until the device has reached a CUDA event.

    A collective of NCCL that waits for a lost rank does not fail, and `event.synchronize()` would wait with it until
    torchrun kills this rank. So after a second, this looks for lost ranks in between.

    Args:
        event: a `torch.cuda.Event`.
        ranks: this process among those of the run.
        sigterm_arrived: whether SIGTERM has arrived.

    Raises:
        RankLost: another rank has ended, or PyTorch says that a collective has timed out. Or SIGTERM has arrived and
            this rank is about to be killed: it may have lost one on another machine.
    """
    look, kill, processes = time.monotonic() + LOOK_INTERVAL, float("inf"), None
    while not event.query():
        if (now := time.monotonic()) < look:
            time.sleep(0.0005 if processes is None else 0.02)
            continue
        look = now + LOOK_INTERVAL
        if sigterm_arrived():
            kill = min(kill, now + seconds_to_end() - KILL_MARGIN)
        if processes is None:
            processes = processes_here(ranks)
        lost = get(ranks, "ended", ANY_RANK) or not all(map(is_alive, processes)) or now >= kill
        if lost and not event.query():
            raise lost_rank(ranks)
        if collectives.has_timed_out(ranks):  # PyTorch has written a record, and ends this process within a minute
            raise lost_rank(ranks, waited_in_vain(ranks), TIMEOUT_WAIT)


def processes_here(ranks: Ranks) -> list[str]:
    """Returns the process ids of the other ranks on this machine."""
    first = ranks.rank - ranks.local_rank  # torchrun numbers the ranks of a machine one after another
    others = [rank for rank in range(first, first + ranks.local_world_size) if rank != ranks.rank]
    places = [get(ranks, "at", rank).partition(" ") for rank in others]
    return [process for host, _, process in places if host == platform.node()]


def seconds_to_end() -> float:
    """Returns how long after SIGTERM torchrun kills a rank that has not ended."""
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))


def as_rank_lost(error: BaseException, ranks: Ranks) -> RankLost | None:
    """Returns a RankLost that names the lost rank, if `error` is a failed collective; None for any other error."""
    if not isinstance(error, RankLost) and (not ranks.distributed or not connection_error(error)):
        return None
    with suppress(ValueError):  # only the main thread can set handlers
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all ranks: report first
    if isinstance(error, RankLost):
        return error
    timed_out = "timed out" in connection_error(error).lower()
    return lost_rank(ranks, waited_in_vain(ranks) if timed_out else "")


def waited_in_vain(ranks: Ranks) -> str:
    """Publishes that this rank has waited for as long as it may; returns what it says of it."""
    seconds = f"{timeout().total_seconds():g} s"
    put(ranks, "last", f"{WAITED} {seconds} for another rank")
    return (
        f"; this rank has waited for {seconds}: if the ranks need longer, raise parallel.timeout, or "
        "parallel.start_timeout if the first step is not done yet"
    )


def lost_rank(ranks: Ranks, waited: str = "", patience: float = REPORT_WAIT) -> RankLost:
    """Returns the error that says which rank was lost and, if this is recorded, in which collective ranks wait.

    Args:
        ranks: this process among those of the run.
        waited: what to say of the time that this rank has waited.
        patience: seconds to wait for the records of the other ranks.
    """
    collectives.write(ranks)  # first, so that the others find it
    text = describe_lost_rank(ranks) + waited
    reports = [get(ranks, "last", rank) for rank in range(ranks.world_size)]
    if any(report and not report.startswith(WAITED) for report in reports):
        return RankLost(text)  # a rank has said why it ends, and the others wait for that one
    # Rank 0 writes it into the run's record. If it cannot, the first other rank prints it.
    if ranks.is_main or is_first(ranks, "explained"):
        text = "; ".join(filter(None, [text, collectives.explanation(ranks, patience)]))
    return RankLost(text)


def is_first(ranks: Ranks, what: str) -> bool | None:
    """Whether this rank is the first that asks for `what`; None if the store is gone."""
    with suppress(Exception):  # the store counts the ranks that have asked
        return store().add(f"stabletrain/{ranks.restarts}/{what}", 1) == 1
    return None


def says_how_to_continue(ranks: Ranks) -> bool:
    """Whether this rank, which has lost another, is the one that prints how to continue.

    If rank 0 was killed, it is the first rank that asks.
    """
    if not ranks.is_main and get(ranks, "last", 0):
        return False  # rank 0 says why it ends
    first = is_first(ranks, "continue")
    # If the store is gone, with the machine that ran it, then once on each other machine.
    return ranks.local_rank == 0 if first is None else first


def describe_lost_rank(ranks: Ranks) -> str:
    """Describes which other rank has ended and why. Waits up to `REPORT_WAIT` seconds for its report."""
    others, here = [rank for rank in range(ranks.world_size) if rank != ranks.rank], platform.node()
    places = {rank: get(ranks, "at", rank).partition(" ") for rank in others}
    end = time.monotonic() + REPORT_WAIT
    while True:
        for rank in others:
            if why := get(ranks, "last", rank):
                return f"rank {rank} of {ranks.world_size} has ended: {why}"
        for rank, (host, _, process) in places.items():
            if host == here and not is_alive(process):
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


def is_alive(process: str) -> bool:
    """Returns whether a process of this machine still runs. A zombie counts as ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not Path("/proc/self").exists()  # without /proc nothing is known: assume it runs


def put(ranks: Ranks, what: str, text: str, of: int | str | None = None) -> None:
    """Publishes a message of this rank, or under the key `of`; ignores all errors."""
    with suppress(Exception):
        store().set(key(ranks, what, ranks.rank if of is None else of), " ".join(text.split())[:LONGEST_MESSAGE])


def get(ranks: Ranks, what: str, of: int | str) -> str:
    """Returns the message of a rank; empty if there is none, or if the store is gone."""
    with suppress(Exception):
        name = key(ranks, what, of)
        return store().get(name).decode() if store().check([name]) else ""
    return ""


def key(ranks: Ranks, what: str, of: int | str) -> str:
    """Returns where a message is published; another place after each restart of all ranks."""
    return f"stabletrain/{ranks.restarts}/{what}/{of}"


@cache
def store() -> Any:
    """Returns the store at the address that torchrun gives."""
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
