"""What checking an update costs: its own time over a step's, and whole steps in pairs.

    OMP_NUM_THREADS=2 python -m benchmarks.update_check --rounds 30

A subclass of AdamW, which is not proven, trains `model=gpt_mini` (batch 16, block 256). In each round a step runs three
ways, in random order: unchecked, checked with a replay as the way back, and checked with copies. Own time is that of
`UpdateCheck.of_step` and of `judge`, over an unchecked step of the same round.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from stabletrain.guard.checks.update_check import Checked, NoUpdateCheck, UpdateCheck
from stabletrain.step import train_step
from stabletrain.trainer.build import build
from tests.runs import composed

WAYS = ("unchecked", "replay", "copies")


class Own(torch.optim.AdamW):
    """AdamW, of which nothing is proven, because it is another class."""


class Timer:
    """Adds up the time that calls of a method take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Any) -> Any:
        def timed(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*given)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def main(rounds: int, precision: str) -> None:
    """Prints quartiles of own time over a step, and of whole steps over unchecked ones."""
    size = ["model=gpt_mini", "data.block_size=256", "batch_size=16", f"precision={precision}", "steps=100000"]
    quiet = ["wandb=disabled", "report=false", "checkpoint=off", "monitors=none"]
    with tempfile.TemporaryDirectory() as folder, composed(*size, *quiet) as cfg:
        job = build(cfg, Path(folder))
    model = job.state.model
    job.state.optimizer = Own(model.parameters(), lr=1e-4, fused=True)
    timer, checks = Timer(), {"unchecked": NoUpdateCheck(), "replay": UpdateCheck(), "copies": UpdateCheck()}
    checks["replay"].copies = False
    Checked.judge = timer.around(Checked.judge)
    own: dict[str, list[float]] = {way: [] for way in WAYS}
    whole: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 3):
        seconds = {}
        spent = {}
        for way in random.Random(number).sample(WAYS, len(WAYS)):
            job.tools.guard.update_check = checks[way]
            of_step, timer.seconds = checks[way].of_step, 0.0
            checks[way].of_step = timer.around(of_step)
            batches = job.data.load(number).to(job.device).split(1)
            began = time.perf_counter()
            train_step(job.state, batches, job.tools)
            seconds[way], spent[way] = time.perf_counter() - began, timer.seconds
            checks[way].of_step = of_step
        if number >= 3:  # the first ones allocate memory
            for way in WAYS:
                own[way].append(spent[way] / seconds["unchecked"])
                whole[way].append(seconds[way] / seconds["unchecked"])
    job.data.batches.close()
    print("| way | own time over a step | whole step over an unchecked one |\n|---|---|---|")
    for way in WAYS[1:]:
        texts = ["{1:.4f} ({0:.4f}-{2:.4f})".format(*quantiles(each[way], n=4)) for each in (own, whole)]
        print(f"| {way} | {texts[0]} | {texts[1]} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--precision", default="bf16")
    chosen = parser.parse_args()
    main(chosen.rounds, chosen.precision)
