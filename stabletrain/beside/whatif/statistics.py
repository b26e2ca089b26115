"""The statistics of a comparison: the mean of paired differences, with an interval that respects autocorrelation.

The losses of two arms on the same batches differ by d_1 ... d_n. Neighbours are alike, because the weights of step t+1
are almost those of step t, so the usual standard error is too small. The differences are therefore cut into blocks of
neighbours, and the interval is Student's t over the block means ("batch means"; Schmeiser, Operations Research 30(3),
1982: ten to thirty blocks, however many values there are). A difference that grows or shrinks widens the interval.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from stabletrain.beside.comparison.intervals import Interval, student

MAX_BLOCKS = 10
"""Number of blocks, if there are enough values."""

MIN_BLOCKS = 4
"""Smallest number of blocks, and of values in a block, with which an interval is given."""


def block_means(values: Sequence[float] | np.ndarray, blocks: int) -> np.ndarray:
    """Returns the means of `blocks` stretches of neighbours, `[blocks]`; their lengths differ by at most 1."""
    return np.array([part.mean() for part in np.array_split(np.asarray(values, np.float64), blocks)])


def interval(*seeds: Sequence[float] | np.ndarray) -> Interval:
    """Returns the mean of neighbouring values, in their order, with its 95 % interval by block means.

    With several seeds the block means of all of them are pooled. This assumes that they are independent of each other
    and have one mean. Block means of one seed are independent only as far as the blocks are long. If the difference of
    two arms depends on the seed by more than its block means vary, the interval is too narrow: then there are as many
    independent values as seeds, and not as many as blocks.

    Args:
        seeds: the values of each seed; a seed without values is left out.
    """
    found = [np.asarray(values, np.float64) for values in seeds if len(values)]
    count = sum(map(len, found))
    if not count:
        return Interval(math.nan, -math.inf, math.inf, 0)
    mean, blocks = float(np.concatenate(found).mean()), [min(MAX_BLOCKS, len(values) // MIN_BLOCKS) for values in found]
    if min(blocks) < MIN_BLOCKS:
        return Interval(mean, -math.inf, math.inf, count)
    means = np.concatenate([block_means(values, each) for values, each in zip(found, blocks, strict=True)])
    half = student(len(means) - 1) * float(means.std(ddof=1)) / math.sqrt(len(means))
    return Interval(mean, mean - half, mean + half, count)


def differences(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Returns `one - other` for the batches that both have read, in the order of the data.

    Args:
        one, other: finite losses by the position of the batch in the data.
    """
    return [one[place] - other[place] for place in sorted(one.keys() & other.keys())]


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    """Returns the mean of `differences` with its interval."""
    return interval(differences(one, other))
