"""Whether a run that keeps the rest of its bad steps ends like one without bad samples.

    python -m tests.reliability.keep --seeds 5

Each case trains the same run three times for each seed: without a fault; with one bad sample in each of `--bad` steps,
which are skipped (`guard.keep=none`); and with the same bad samples and `guard.keep=all_but_guilty`. A difference is
that of the final validation loss from the clean run's of the same seed; the noise is the standard deviation of the
clean runs' losses over the seeds.
"""

import argparse
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.runs import composed

ALWAYS = ["device=cpu", "wandb=disabled", "checkpoint=off", "monitors=none", "forensics=off", "precision=fp32"]
ALWAYS += ["guard=skip", "warmup.steps=20", "eval_every=1000000", "log_every=1000000", "report=false"]
GPT = ["model.n_layer=2", "model.n_head=2", "model.n_embd=32", "data.block_size=32", "batch_size=8", "eval_batches=20"]
RESNET = ["model=resnet20", "model.depth=8", "data=digits", "batch_size=16"]

CASES = {
    "GPT, a label out of range": [*GPT, "faults=label"],
    "ResNet, a NaN pixel": [*RESNET, "faults=input"],
    "ResNet, a pixel of 1e6": [*RESNET, "faults=input", "faults.value=1e6"],
}
"""Runs with a fault; the last one is a spike, whose sample is found by running the step without parts of it."""

POLICIES = ("clean", "none", "all_but_guilty")


class Result(NamedTuple):
    """The end of a run: its validation loss, and its numbers of updates, kept steps and samples left out."""

    loss: float
    updates: int
    kept_steps: int
    left_out: int


def trained(case: str, policy: str, seed: int, steps: int, bad: int) -> Result:
    """Trains one run; the bad steps depend on the seed."""
    torch.set_num_threads(1)
    at = sorted(random.Random(seed).sample(range(steps // 10, steps - 1), bad))
    chosen = [*ALWAYS, *CASES[case], f"seed={seed}", f"steps={steps}"]
    if policy == "clean":
        chosen = [each for each in chosen if not each.startswith("faults")]
    else:
        chosen += [f"guard.keep={policy}", f"faults.at={at}".replace(" ", "")]
    with tempfile.TemporaryDirectory() as folder, composed(*chosen) as cfg:
        job = build(cfg, Path(folder))
        history, guard = train(job), job.tools.guard
    return Result(history.val["val/loss"], history.updates, guard.kept_steps, guard.samples_left_out)


def row(case: str, found: dict[str, Sequence[Result]]) -> str:
    """Returns a row of the table.

    Args:
        found: for each policy the result of each seed.
    """
    clean = [each.loss for each in found["clean"]]
    noise = statistics.stdev(clean) if len(clean) > 1 else math.nan
    cells = [case, f"{statistics.mean(clean):.4f}", f"{noise:.4f}"]
    for policy in POLICIES[1:]:
        losses = [each.loss - wanted for each, wanted in zip(found[policy], clean, strict=True)]
        updates = sum(each.updates for each in found[policy])
        cells += [f"{statistics.mean(losses):+.4f} ({min(losses):+.4f} to {max(losses):+.4f})", f"{updates:,}"]
    cells.append(f"{sum(each.left_out for each in found['all_but_guilty']):,}")
    return f"| {' | '.join(cells)} |"


HEAD = """\
| case | clean loss | noise | skipped: difference | updates | kept: difference | updates | samples left out |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    """Runs all cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=800, help="of each run")
    parser.add_argument("--bad", type=int, default=200, help="steps of each run with a bad sample")
    parser.add_argument("--processes", type=int, default=1)
    chosen = parser.parse_args()
    seeds = range(chosen.seeds)
    print(HEAD, flush=True)
    with ProcessPoolExecutor(chosen.processes) as pool:
        for case in CASES:
            waiting = {
                policy: [pool.submit(trained, case, policy, seed, chosen.steps, chosen.bad) for seed in seeds]
                for policy in POLICIES
            }
            print(row(case, {policy: [each.result() for each in runs] for policy, runs in waiting.items()}), flush=True)


if __name__ == "__main__":
    main()
