"""Checks at the start that all ranks read the same data: fingerprints, and the inputs and targets of three batches.

Each rank trains on its own rows of a batch, so ranks that read different files would train on a mixture without a word.
For the comparison every rank looks up the same samples. It sends hashes only, in one all-gather.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.parallel.ranks import Ranks, all_gather_object
from stabletrain.trainer.contract import first_rows

BATCHES = 3
"""Number of batches that are compared."""

ROWS = 8
"""Samples of a batch that are compared, if the data set can read some of them alone."""

FIX = (
    "all ranks must read equal batches: put the same files at the data's path on every machine, and use no setting "
    "that differs between ranks; a data set of your own must return the same batch on every rank"
)


class Reads(NamedTuple):
    """What a rank reads; it is sent to the others.

    Attributes:
        fingerprint: the data set's, as text, without its name: data may lie elsewhere. Empty if it has none.
        batches: for each batch the name and hash of its inputs and its targets, or why it cannot be read.
        error: why the data cannot be opened; empty if they can.
    """

    fingerprint: Mapping[str, str] = {}
    batches: Sequence[Mapping[str, str]] = ()
    error: str = ""


def on_all_ranks(ranks: Ranks, load: Callable[[], Any], size: int) -> tuple[Any, Mapping[str, Any] | None]:
    """Opens the data, and checks that all ranks read the same; in one process only opens them. All ranks must call it.

    Args:
        ranks: this process among those of the run.
        load: opens the data set, without injected faults.
        size: samples in a batch.

    Returns:
        the data set, and its fingerprint; None if it has none, or in one process.

    Raises:
        ConfigError: the ranks read different data, or another rank cannot open them; on every rank.
    """
    if not ranks.distributed:
        return load(), None
    data = fingerprint = failed = None
    mine = Reads()
    try:
        data = load()
        fingerprint = dict(data.fingerprint()) if hasattr(data, "fingerprint") else None
        compared = {key: str(value)[:64] for key, value in (fingerprint or {}).items() if key != "name"}
        mine = Reads(compared, [batch_of(data, step, size) for step in range(BATCHES)])
    except Exception as error:  # the other ranks wait
        failed, mine = error, Reads(error=in_one_line(error))
    everyones = all_gather_object(mine)
    if failed is not None:
        raise failed
    if message := difference(everyones):
        raise ConfigError(f"data: {message}; {FIX}")
    return data, fingerprint


def batch_of(data: Any, step: int, size: int) -> dict[str, str]:
    """Returns hashes of the inputs and the targets of a training batch, or why it cannot be read."""
    try:
        batch = first_rows(data, step, size, "train", min(ROWS, size))
        augmented = () if batch.transform is None else (batch.transform.each,)  # how, by the number of the step
        return {"inputs": hash_of(batch.inputs, *augmented), "targets": hash_of(batch.targets)}
    except Exception as error:  # if all ranks fail alike, training reports it when it reads the batch
        return {"error": in_one_line(error)}


def hash_of(*tensors: Tensor) -> str:
    """Returns the first 16 digits of the SHA-256 of tensors: dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.detach().cpu().contiguous()
        digest.update(f"{whole.dtype} {[*whole.shape]}".encode())
        digest.update(whole.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def difference(everyones: Sequence[Reads]) -> str:
    """Returns what the first rank that differs from rank 0 reads otherwise; empty if all read the same."""
    first = everyones[0]
    for rank, reads in enumerate(everyones):
        if reads.error:
            return f"rank {rank} cannot open it: {reads.error}"
        if reads.fingerprint.keys() != first.fingerprint.keys():
            return f"rank {rank} reads other data than rank 0: its fingerprint has other keys"
        for key, value in reads.fingerprint.items():
            if value != first.fingerprint[key]:
                there = first.fingerprint[key]
                return f"rank {rank} reads other data than rank 0: fingerprint {key}={value}, on rank 0 {there}"
        for number, (here, there) in enumerate(zip(reads.batches, first.batches, strict=True)):
            if "error" in here and "error" in there:
                continue
            for one, other in ((rank, here), (0, there)):
                if "error" in other:
                    return f"rank {one} cannot read batch {number}, which another rank can: {other['error']}"
            for part, value in here.items():
                if value != there[part]:
                    return (
                        f"rank {rank} reads other data than rank 0: {part} of batch {number} differ "
                        f"(sha256 {value}, on rank 0 {there[part]})"
                    )
    return ""


def in_one_line(error: Exception) -> str:
    """Returns an error as one short line."""
    text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]
