"""Runs for the benchmarks: built from Hydra overrides, on random data, executed one loop round at a time."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from stabletrain.records import Batch
from stabletrain.step import Computed, commit
from stabletrain.trainer.build import build
from stabletrain.trainer.history import Throughput
from stabletrain.trainer.incidents import ExecutedStep
from stabletrain.trainer.loop import judge_step, run_monitors
from stabletrain.trainer.reports import NOTHING
from stabletrain.trainer.run import TrainingRun

sys.path.insert(0, str(Path(__file__).parent.parent))  # `tests` is not installed
from tests.runs import composed

sys.path.insert(0, str(Path(__file__).parent.parent))  # `tests` is not installed

HERE = Path(__file__).parent

NOTHING_ELSE = (
    *("wandb=disabled", "checkpoint=off", "monitors=none", "warmup=none"),
    *("steps=1000000", "log_every=1000000", "compile=false"),
)
"""Overrides that leave only the steps, the guard and the forensics, and disable compilation."""

SIZES = {
    "cpu": {
        "GPT 4 x 128, 16 x 128 tokens": ("model=gpt_nano", "data=random_tokens", "batch_size=16"),
        "ResNet-20, 128 images of 32 px": ("model=resnet20", "data=random_images", "batch_size=128"),
    },
    "tiny": {
        "GPT 2 x 16, 4 x 16 tokens": (
            *("model=gpt_nano", "model.n_layer=2", "model.n_head=2", "model.n_embd=16"),
            *("data=random_tokens", "data.block_size=16", "batch_size=4"),
        ),
        "ResNet-8, 4 images of 8 px": (
            *("model=resnet20", "model.depth=8", "data=random_images", "data.size=8", "batch_size=4"),
        ),
    },
    "cuda": {
        "GPT 12 x 768, 8 x 1024 tokens": (
            *("model=gpt2", "data=random_tokens", "data.vocab_size=50257", "data.block_size=1024", "batch_size=8"),
        ),
        "ResNet-50, 64 images of 224 px": (
            *("model=resnet50", "data=random_images", "data.size=224", "data.num_classes=1000", "batch_size=64"),
        ),
    },
}
"""Overrides by device: on a CPU those of a bare `train.py` and `experiment=resnet20_cifar10`, on a GPU those of
`workloads.py`; `tiny` only checks that a benchmark runs.
"""


class RandomTokens:
    """Random token ids, seeded by the batch's number."""

    def __init__(self, vocab_size: int, block_size: int) -> None:
        self.vocab_size, self.block_size = vocab_size, block_size

    def batch(self, step: int, size: int, split: str) -> Batch:
        """Returns inputs and targets, int64 `[size, block_size]`."""
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(self.vocab_size, (size, self.block_size + 1), generator=drawn)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class RandomImages:
    """Random images from a fixed pool: generating a batch per step would take longer than a GPU's step."""

    in_channels, pool = 3, 256

    def __init__(self, size: int, num_classes: int) -> None:
        self.num_classes = num_classes
        drawn = torch.Generator().manual_seed(0)
        self._images = torch.randn(self.pool, self.in_channels, size, size, generator=drawn)
        self._labels = torch.randint(num_classes, (self.pool,), generator=drawn)

    def batch(self, step: int, size: int, split: str) -> Batch:
        """Returns images, fp32 `[size, channels, height, width]`, and labels, int64 `[size]`."""
        places = torch.arange(step * size, (step + 1) * size) % self.pool
        return Batch(self._images[places], self._labels[places])


def built(folder: Path, overrides: Sequence[str]) -> TrainingRun:
    """Builds the run that `train.py` would build from `overrides`."""
    search = f"hydra.searchpath=[file://{HERE / 'conf'}]"
    with composed(search, *NOTHING_ELSE, *overrides) as cfg:
        return build(cfg, folder)


class Rounds:
    """The rounds of `loop.train`, one at a time, without evaluations and checkpoints.

    Takes a snapshot when constructed. Calling it executes a whole round with everything that is due. `compute`,
    `judge` and `commit` execute a round's stages alone, without monitors and snapshots.

    Attributes:
        job: the run.
        done: how many monitor inspections (`looks`) and `snapshots` were made.
    """

    def __init__(self, job: TrainingRun) -> None:
        self.job, self.done = job, {"looks": 0, "snapshots": 0}
        self._throughput = Throughput(job.history)
        self._computed: tuple[Batch, list[Batch], Computed] | None = None
        self._executed: ExecutedStep | None = None
        self.job.saved.take_snapshot()

    def __call__(self) -> None:
        """Executes one round: computes a step, judges the previous one, applies the update, and does what is due."""
        self.compute()
        self.judge()
        watching = self.look()
        self.commit()
        self._attend(watching)

    def compute(self) -> None:
        """Launches the next step's forward and backward passes."""
        batch, micro_batches = self.fetch()
        self._computed = batch, micro_batches, self.job.compute(self.job.state, micro_batches, self.job.tools)

    def fetch(self) -> tuple[Batch, list[Batch]]:
        """Returns the next batch, and its micro-batches on the device."""
        batch = self.job.data.batches.get(self.job.state.step)
        return batch, batch.to(self.job.device).split(self.job.plan.grad_accum_steps)

    def judge(self, seen: Mapping[str, float] = NOTHING) -> bool:
        """Acts on the previous step's verdict; returns False if the state was rolled back."""
        executed, self._executed = self._executed, None
        if executed is None:
            return True
        if judge_step(self.job, executed, self._throughput, seen):
            if executed.in_flight.recomputed:  # the gradients at hand are that step's
                self.compute()
            return True
        self._computed = None
        return False

    def commit(self) -> None:
        """Applies the update of the computed step, unless a rollback has discarded it."""
        if self._computed is not None:
            batch, _, computed = self._computed
            in_flight = commit(self.job.state, computed, self.job.tools)
            self._executed = ExecutedStep(in_flight, batch, computed.classes, computed.saved_buffers)
            self._throughput.count(batch)

    def close(self) -> None:
        """Ends the run."""
        self.job.data.batches.close()
        self.job.output.tracker.close(0)

    def look(self) -> bool:
        """Runs the monitors' first half if they are due; returns whether they are."""
        job = self.job
        if self._computed is None or not job.monitoring.monitors.due(job.state.step + 1, job.plan.steps):
            return False
        _, micro_batches, computed = self._computed
        seen_batch = job.tools.sanitizer.safe(micro_batches[0], computed.classes)
        job.monitoring.monitors.before(
            job.state.model, job.state.optimizer, seen_batch, job.tools.precision, job.tools.objective
        )
        self.done["looks"] += 1
        return True

    def _attend(self, watching: bool) -> None:
        """Runs the monitors' second half, and takes a snapshot if due; both require that the step is judged first."""
        if self._computed is None:
            return
        putting_by = self.job.saved.snapshot_due(self.job.state.step)
        if watching or putting_by:
            seen = run_monitors(self.job, self._executed) if watching else NOTHING
            if self.judge(seen) and putting_by:
                self.job.saved.take_snapshot()
                self.done["snapshots"] += 1
