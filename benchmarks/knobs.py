"""Figures of docs/reference/knobs/ and docs/evidence/speed.md: growth under each init, cost and effect of clipping,
rolling statistics' cost.

    OMP_NUM_THREADS=1 python benchmarks/knobs.py
    OMP_NUM_THREADS=1 python benchmarks/knobs.py --only init

- **init**: a GPT of width 64 with 8 and 16 blocks, at step 0, means over 8 models. *Added* is the variance that all
  blocks together add to the residual stream, relative to the variance of its input. *gradients* is the largest
  gradient norm of a block divided by the smallest, with 16 blocks. *Embedding* is its gradient norm with 8 blocks.
- **clipping**: the median time of the clipping in a step of gpt_nano (16 x 128 tokens), and its share of the step. In a
  GPT with 2 blocks of width 16, the mean share of clipped parts in steps 1 to 100 and 101 to 150.
- **rolling**: time to add a reading to the rolling statistics and to compute their metrics, with full windows.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from jobs import built
from measuring import head, row, silence
from torch import Tensor, nn

from stabletrain.monitors.rolling import RollingStats
from stabletrain.records import Reading
from stabletrain.step import compute, train_step
from stabletrain.trainer.run import TrainingRun

INITS = ("gpt2", "normal", "fan_in", "small", "zero_residual", "torch")
GROWING = (
    *("model=gpt_nano", "model.n_embd=64", "model.n_head=2", "batch_size=8"),
    *("data=random_tokens", "data.vocab_size=64", "data.block_size=32"),
)
MODELS = 8
CLIPPINGS = ("none", "norm", "value", "per_module", "agc", "zclip", "adagc")
NANO = ("model=gpt_nano", "batch_size=16")
TINY = ("model=gpt_nano", "model.n_layer=2", "model.n_embd=16", "model.n_head=2", "data.block_size=16", "batch_size=4")
STEPS, WARMUP = 150, 100
"""Number of steps of the tiny GPT, and length of AdaGC's warmup at their start."""


@contextlib.contextmanager
def run(*overrides: str) -> Generator[TrainingRun, None, None]:
    """Context that yields a run in fp32 on the CPU, without a guard."""
    with tempfile.TemporaryDirectory() as folder, silence():
        alone = ("guard=off", "forensics=off", "device=cpu", "precision=fp32")
        job = built(Path(folder) / "run", (*overrides, *alone))
        yield job
        job.data.batches.close()
        job.output.tracker.close(0)


def growth(init: str, depth: int, seed: int) -> tuple[float, float, float]:
    """Returns the variance that the blocks add, the ratio of their gradient norms, and the embedding's norm."""
    variances: list[float] = []

    def note(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        for each in (output,) if variances else (given[0], output):
            variances.append(each.detach().square().mean().item())

    with run(*GROWING, f"model.n_layer={depth}", f"init={init}", f"seed={seed}") as job:
        for block in job.state.model.blocks:
            block.register_forward_hook(note)
        compute(job.state, [job.data.load(0)], job.tools)
        parts = [*job.state.model.blocks, job.state.model.embedding]
        *norms, embedding = (torch.stack([p.grad.norm() for p in each.parameters()]).norm().item() for each in parts)
    return variances[-1] / variances[0] - 1, max(norms) / min(norms), embedding


def inits() -> None:
    """Prints the table of inits."""
    print(head("init", "added by 8 blocks", "by 16", "gradients", "embedding"))
    for init in INITS:
        shallow, deep = (
            [statistics.mean(each) for each in zip(*(growth(init, depth, seed) for seed in range(MODELS)), strict=True)]
            for depth in (8, 16)
        )
        numbers = (*(f"{each:.2f}" for each in (shallow[0], deep[0])), f"{deep[1]:.1f}", f"{shallow[2]:.3f}")
        print(row(init, *numbers), flush=True)


def clipped(overrides: tuple[str, ...], steps: int) -> tuple[list[float], list[float], list[float]]:
    """Returns, for each step, the seconds of clipping, the seconds of the step, and the share of clipped parts."""
    took, seconds, active = [], [], []
    with run(*overrides) as job:
        kind = type(job.tools.clipping)
        call = kind.__call__

        def timed(*given: Any) -> Any:
            start = time.perf_counter()
            found = call(*given)
            took.append(time.perf_counter() - start)
            return found

        with mock.patch.object(kind, "__call__", timed):
            for _ in range(steps):
                start = time.perf_counter()
                reading = train_step(job.state, [job.data.batches.get(job.state.step)], job.tools)
                seconds.append(time.perf_counter() - start)
                active.append(reading.clip_active)
    return took, seconds, active


def clippings() -> None:
    """Prints the table of clippings."""
    print(head("clipping", "ms", "share of a step", "clipped in steps 1-100", "101-150"))
    for name in CLIPPINGS:
        took, seconds, _ = clipped((*NANO, f"clipping={name}"), 15)
        _, _, active = clipped((*TINY, f"clipping={name}"), STEPS)
        middle, share = statistics.median(took), statistics.median(took) / statistics.median(seconds)
        early, late = (f"{100 * statistics.mean(some):.0f} %" for some in (active[:WARMUP], active[WARMUP:]))
        print(row(name, f"{1e3 * middle:.2f}", f"{100 * share:.1f} %", early, late), flush=True)


def rolling() -> None:
    """Prints the cost of the rolling statistics."""
    stats, draw = RollingStats(), torch.rand(3000, generator=torch.Generator().manual_seed(0)).tolist()
    took = []
    for step, value in enumerate(draw):
        reading = Reading(step, 2 + value, {}, 1 + value, 1.0, 0.0, 0.0, 0.0, 1.0, True, False, False, 3e-3)
        start = time.perf_counter()
        stats.add(reading)
        stats.metrics()
        took.append(time.perf_counter() - start)
    print(f"rolling statistics: {1e3 * statistics.median(took[1000:]):.3f} ms per step")


PARTS = {"init": inits, "clipping": clippings, "rolling": rolling}


def main() -> None:
    """Measures and prints the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    for name in parser.parse_args().only.split(","):
        PARTS[name]()
        print()


if __name__ == "__main__":
    main()
