"""Sample order: computes which samples a step reads from the step's number, so a checkpoint needs no data cursor.

Each epoch has its own permutation, evaluated point by point in O(1) memory: a Feistel network permutes a grid `a x b`
of at least `n` points, and a value outside `[0, n)` is permuted again ("cycle walking"). Both are in Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 3 and 5. The grid has at most about sqrt(n) spare points,
so permuting twice is rare. Random numbers are counter-based. All functions here are pure and thread-safe.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import overload

import numpy as np

ROUNDS = 8  # four suffice for a good round function (Luby and Rackoff 1988)
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def key(*parts: int | str) -> int:
    """Hashes numbers and strings to a 64-bit key with BLAKE2b, such as `key(seed, epoch, "phase")`."""
    # Not Python's `hash`: it differs from process to process for strings.
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def split_hash(name: str) -> float:
    """Hashes a name to [0, 1); samples below `val_fraction` are held out for validation.

    Depends neither on the seed nor on other names: runs with different seeds validate on the same samples, and adding a
    sample moves no other sample between the splits.
    """
    return key("stabletrain validation", name) / 2**64


def mix(values: np.ndarray) -> np.ndarray:
    """Applies a bijective hash to uint64 values: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniform(index: np.ndarray, key: int, count: int) -> np.ndarray:
    """Returns random numbers, float64 `[len(index), count]` in [0, 1); row i depends only on `index[i]` and `key`."""
    row = mix(index.astype(np.uint64) * np.uint64(GOLDEN) ^ np.uint64(key))
    column = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    # The upper 53 bits, as many as a float64 holds: every result is exact, so it is the same on every machine.
    return (mix(row[:, None] + column) >> np.uint64(11)) * 2.0**-53


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Applies the permutation of [0, n) that belongs to `key`.

    Args:
        index: integers in [0, n), any shape.
        n: size of the domain, 1 to 2^62.
        key: 64 bits; selects the permutation.

    Returns:
        int64, of the shape of `index`.

    Raises:
        ValueError: an index is outside [0, n).
    """
    if index.size and not (index.min() >= 0 and index.max() < n):
        raise ValueError(f"an index in [{index.min()}, {index.max()}] lies outside [0, {n})")
    side = math.isqrt(n - 1) + 1  # ceil(sqrt(n))
    a, b = np.uint64(side), np.uint64(-(-n // side))
    keys = mix(np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(key & MASK))
    value = index.astype(np.uint64).ravel()
    outside = np.arange(value.size)
    while outside.size:  # cycle walking: permute again what falls outside [0, n)
        right, left = np.divmod(value[outside], a)  # point (left, right) of the grid a x b
        # Each round shifts one coordinate by a hash of the other, which can be undone: so no two indices collide.
        for r in range(0, ROUNDS, 2):
            left = (left + mix(right ^ keys[r]) % a) % a
            right = (right + mix(left ^ keys[r + 1]) % b) % b
        moved = right * a + left
        value[outside] = moved
        outside = outside[moved >= n]
    return value.astype(np.int64).reshape(index.shape)


def sample_ids(start: int, count: int, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the samples at positions `start ... start + count - 1` of an endless training run over `n` samples.

    Args:
        start: number of samples read before; position p is in epoch p // n.
        count: number of samples to return.
        n: samples in one epoch.
        seed: selects the permutation, together with the epoch.

    Returns:
        ids and epochs, both int64 `[count]`.
    """
    positions = np.arange(start, start + count, dtype=np.int64)
    epochs, index = np.divmod(positions, n)
    ids = np.empty_like(index)
    # A batch may cross the end of an epoch, or several if it is larger than the data.
    for epoch in range(start // n, (start + count - 1) // n + 1):
        here = epochs == epoch
        ids[here] = permute(index[here], n, key(seed, epoch, "order"))
    return ids, epochs


def pass_ids(step: int, size: int, n: int) -> np.ndarray:
    """Returns the samples of batch `step` of one pass in fixed order: int64 `[size]`, fewer in the last batch.

    Raises:
        IndexError: the pass has no such batch.
    """
    if not 0 <= step < -(-n // size):
        raise IndexError(f"batch {step} of a pass of {-(-n // size)} batches ({n} samples, {size} per batch)")
    return np.arange(step * size, min((step + 1) * size, n), dtype=np.int64)


def position(step: int, skipped: Iterable[Sequence[int]]) -> int:
    """Returns the data position that step number `step` reads if the ranges `[start, stop)` in `skipped` are not read.

    The other positions keep their order, so adding a range at or after the current position does not change earlier
    steps. Without ranges the position is the step.
    """
    end = 0
    for start, stop in sorted((start, stop) for start, stop in skipped):
        start = max(start, end)  # ranges may overlap or contain each other
        if stop <= start:
            continue
        if step < start:
            break
        step += stop - start
        end = stop
    return step


class Sources(Sequence[str]):
    """The source of each sample of a batch, formatted on access.

    Args:
        locate: describes the source of one sample id.
        ids: int64 `[batch]`.
    """

    def __init__(self, locate: Callable[[int], str], ids: np.ndarray) -> None:
        self._locate, self._ids = locate, ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, item: int) -> str: ...
    @overload
    def __getitem__(self, item: slice) -> "Sources": ...
    def __getitem__(self, item: int | slice) -> "str | Sources":
        if isinstance(item, slice):
            return Sources(self._locate, self._ids[item])
        return self._locate(int(self._ids[item]))

    def __repr__(self) -> str:
        return repr(list(self))
