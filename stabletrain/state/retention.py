"""Retention: which checkpoints stay when another one has been written.

| stays | since |
|---|---|
| the `keep` newest | the run continues from one of them |
| the two newest healthy ones; the newest alone, where `keep` is 1 | a rollback and a resume fall back to them |
| the newest at or before the anchor | from it the state that a rollback asks for can be computed again |
| the best, if it is asked for | it is the result |

Why two: that a healthy checkpoint is still what was written shows only when all of it is read, which at each save would
take as long as the write. So one stands in for the other, and nothing is read. One that was found damaged counts for
nothing here (`folder.py` leaves it out). `keep: 1` asks for a single copy, and then there is no second.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from stabletrain.state.trust import Checkpoint


def kept(known: Sequence[Checkpoint], keep: int, keep_best: bool, anchor: int | None = None) -> set[Path]:
    """The folders of those that stay.

    Args:
        known: all that look whole, oldest first.
        keep: so many of the newest stay.
        keep_best: the best stays too.
        anchor: so does the newest of a step up to this one; None for no such wish.
    """
    healthy = [checkpoint for checkpoint in known if checkpoint.healthy]
    best = by_val_loss(known)[:1] if keep_best else []
    early = [checkpoint for checkpoint in known if anchor is not None and checkpoint.step <= anchor][-1:]
    return {checkpoint.path for checkpoint in (*known[-keep:], *healthy[-min(keep, 2) :], *early, *best)}


def left_behind(known: Sequence[Checkpoint], step: int, healthy: bool) -> set[Path]:
    """The folders of those after `step`, which a run that is at `step` again has left behind.

    Args:
        known: all that look whole, oldest first.
        step: where the run is.
        healthy: whether it has a healthy checkpoint at or before `step`; otherwise the newest healthy one stays, for
            it is the last.
    """
    after = [checkpoint for checkpoint in known if checkpoint.step > step]
    spared = [] if healthy else [checkpoint for checkpoint in after if checkpoint.healthy][-1:]
    return {checkpoint.path for checkpoint in after} - {checkpoint.path for checkpoint in spared}


def by_val_loss(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The healthy ones with a finite validation loss, best first, of equals the newest."""
    ranked = [c for c in checkpoints if c.healthy and c.val_loss is not None and math.isfinite(c.val_loss)]
    return sorted(ranked, key=lambda c: (c.val_loss, -c.step))
