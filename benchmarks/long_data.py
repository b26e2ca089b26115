"""A data set of 10^9 tokens against one of 10^6: the time to open it, to make a batch, and to take a training step.

Batches are made on a thread beside the steps. The data files are sparse, so disk time is not included; as long as
making a batch is faster than a step, disk time would not slow the steps either.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jobs import Rounds, built
from measuring import Clock, in_turns, ratios, silence
from quantities import quantity

from stabletrain.data.files import VERSION
from stabletrain.data.tokens import Tokens

SIZES = {"10^6 tokens": 10**6, "10^9 tokens": 10**9}
BATCH, BLOCK = 16, 256
BATCHES = 50
"""Batches per turn, each from another place in the data."""

RUN = ("model=gpt_nano", "data=tokens", "precision=fp32", "guard=skip")
OF_OPENING = {"10^9 tokens": "growth/opening"}


def made(folder: Path, tokens: int) -> Path:
    """Writes a folder as `stabletrain prepare` does, with a sparse training shard: 2 bytes per token, none of them on
    disk.
    """
    folder.mkdir()
    held_out = 10**5
    for name, count in (("train-00000.bin", tokens), ("val-00000.bin", held_out)):
        with open(folder / name, "wb") as file:
            file.truncate(2 * count)
    splits = {
        "train": [{"file": "train-00000.bin", "tokens": tokens}],
        "val": [{"file": "val-00000.bin", "tokens": held_out}],
    }
    meta = {
        "version": VERSION,
        "tokenizer": "gpt2",
        "vocab_size": 256,
        "dtype": "uint16",
        "splits": splits,
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def measured(folder: Path, rounds: int, clock: Clock, device: torch.device) -> list[dict[str, Any]]:
    """Measures opening, batches, and steps of gpt_nano, alternating between the two data sets."""
    folders = {name: made(folder / str(tokens), tokens) for name, tokens in SIZES.items()}
    sets, runs = {}, {}

    def opening(name: str, _: int) -> float:
        return clock.seconds(lambda: sets.update({name: Tokens(str(folders[name]), BLOCK, seed=0)}))

    def batches(name: str, number: int) -> float:
        steps = range((number + 3) * BATCHES, (number + 4) * BATCHES)
        return 1e3 / BATCHES * clock.seconds(lambda: [sets[name].batch(step, BATCH, "train") for step in steps])

    def in_both(work: Callable[[str, int], float]) -> dict[str, list[float]]:
        return in_turns({name: partial(work, name) for name in SIZES}, rounds)

    open_times, batch_times = in_both(opening), in_both(batches)
    for name, path in folders.items():
        chosen = (*RUN, f"data.path={path}", f"data.block_size={BLOCK}", f"batch_size={BATCH}", f"device={device}")
        with silence():
            runs[name] = Rounds(built(folder / f"run on {name}", chosen))
    step_times = in_both(lambda name, _: clock.seconds(runs[name]))
    for run in runs.values():
        run.close()
    small, large = SIZES
    where = f"{large} over {small}"
    return [
        *(quantity(name, "opening", open_times[name], "s", OF_OPENING.get(name, "")) for name in SIZES),
        *(quantity(name, f"a batch of {BATCH} x {BLOCK} tokens", batch_times[name], "ms") for name in SIZES),
        quantity(where, "a batch", ratios(batch_times[large], batch_times[small]), "ratio"),
        quantity(where, "a step of gpt_nano", ratios(step_times[large], step_times[small]), "ratio", "growth/step"),
    ]
