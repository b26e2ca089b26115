"""A set of 10^9 tokens against one of 10^6: how long opening takes, and a batch, and how much memory either holds."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from measuring import in_turns, most_memory, ratios
from quantities import quantity

from stabletrain.data.manifest import VERSION
from stabletrain.data.tokens import Tokens
from stabletrain.machine.hardware import pick

SIZES = {"10^6 tokens": 10**6, "10^9 tokens": 10**9}
BATCH, BLOCK = 16, 256
BATCHES = 50
"""Of a turn, each at another place."""


def made(folder: Path, tokens: int) -> Path:
    """A folder as `stabletrain prepare` writes it, whose training shard is a hole: 2 bytes a token, none on disk."""
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
        "vocab_size": 50257,
        "dtype": "uint16",
        "splits": splits,
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def measured(folder: Path, rounds: int, now: Callable[[], float] = time.perf_counter) -> list[dict[str, Any]]:
    """Opening, batches in turns, and the most memory that the process had meanwhile, of both sets."""
    folders = {name: made(folder / str(tokens), tokens) for name, tokens in SIZES.items()}
    opened = lambda path: Tokens(str(path), BLOCK, seed=0)  # noqa: E731

    def opening(name: str, _: int) -> float:
        start = now()
        opened(folders[name])
        return now() - start

    sets = {name: opened(path) for name, path in folders.items()}

    def batches(name: str, number: int) -> float:
        start = now()
        for step in range(BATCHES):
            sets[name].batch((number + 3) * BATCHES + step, BATCH, "train")
        return (now() - start) / BATCHES

    open_times = in_turns({name: partial(opening, name) for name in SIZES}, rounds)
    batch_times = in_turns({name: partial(batches, name) for name in SIZES}, rounds)
    small, large = SIZES
    found = [quantity(name, "opening", open_times[name], "s", "growth/opening") for name in SIZES]
    found += [
        quantity(name, f"a batch of {BATCH} x {BLOCK} tokens", [1e3 * each for each in batch_times[name]], "ms")
        for name in SIZES
    ]
    batch_ratios = ratios(batch_times[large], batch_times[small])
    found.append(quantity(f"{large} over {small}", "a batch", batch_ratios, "ratio", "growth/batch"))
    heights = {}
    for name in SIZES:
        with most_memory(pick("cpu")) as height:
            for step in range(10 * BATCHES):
                sets[name].batch(step, BATCH, "train")
        heights[name] = max(height, default=0) / 1e6
    more = heights[large] - heights[small]
    found.append(quantity(f"{large} over {small}", "most memory of the process, more", [more], "MB", "growth/memory"))
    return found
