"""Whole runs for the benchmarks: built by Hydra from overrides, on random data, and taken round by round."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from runs import composed

from stabletrain.records import Batch
from stabletrain.step import Computed, commit, compute
from stabletrain.trainer.build import build
from stabletrain.trainer.history import Throughput
from stabletrain.trainer.incidents import ExecutedStep
from stabletrain.trainer.loop import settle, watch
from stabletrain.trainer.run import TrainingRun
from stabletrain.trainer.step_log import NOTHING

HERE = Path(__file__).parent

NOTHING_ELSE = (
    *("wandb=disabled", "checkpoint=off", "monitors=none", "warmup=none"),
    *("steps=1000000", "log_every=1000000", "compile=false"),
)
"""What leaves of a run its steps, its guard and its forensics, uncompiled unless that is asked for."""

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
"""Overrides: on a CPU as a bare `train.py` and `experiment=resnet20_cifar10` train, on a card as in `workloads.py`;
`tiny` is to see that a benchmark runs."""


class RandomTokens:
    """Token ids, drawn by the batch's number."""

    def __init__(self, vocab_size: int, block_size: int) -> None:
        self.vocab_size, self.block_size = vocab_size, block_size

    def batch(self, step: int, size: int, split: str) -> Batch:
        """Inputs and targets, int64 `[size, block_size]`."""
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(self.vocab_size, (size, self.block_size + 1), generator=drawn)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class RandomImages:
    """Noise out of a pool, since drawing a batch for each step would take longer than a card's step."""

    in_channels, pool = 3, 256

    def __init__(self, size: int, num_classes: int) -> None:
        self.num_classes = num_classes
        drawn = torch.Generator().manual_seed(0)
        self._images = torch.randn(self.pool, self.in_channels, size, size, generator=drawn)
        self._labels = torch.randint(num_classes, (self.pool,), generator=drawn)

    def batch(self, step: int, size: int, split: str) -> Batch:
        """Images, fp32 `[size, channels, height, width]`, and labels, int64 `[size]`."""
        places = torch.arange(step * size, (step + 1) * size) % self.pool
        return Batch(self._images[places], self._labels[places])


def built(folder: Path, overrides: Sequence[str]) -> TrainingRun:
    """The run that `train.py` would make of `overrides`."""
    search = f"hydra.searchpath=[file://{HERE / 'conf'}]"
    with composed(search, *NOTHING_ELSE, *overrides) as cfg:
        return build(cfg, folder)


class Rounds:
    """The rounds of `loop.train` for one run, one at a time; evaluations and checkpoints are left out.

    The first state is put by at the beginning. Called, it does a whole round, with what is due in it. `compute`,
    `settle` and `commit` are a round's parts by themselves, without a monitor's look and without a snapshot.

    Attributes:
        job: the run.
        done: how often what is not in every round was done: `looks`, `snapshots`.
    """

    def __init__(self, job: TrainingRun) -> None:
        self.job, self.done = job, {"looks": 0, "snapshots": 0}
        self._throughput = Throughput(job.history)
        self._computed: tuple[Batch, list[Batch], Computed] | None = None
        self._executed: ExecutedStep | None = None
        self.job.rollback.take_snapshot()

    def __call__(self) -> None:
        """One round: a step is computed, the one before it settled, its own update applied, and what is due is done."""
        self.compute()
        self.settle()
        watching = self.look()
        self.commit()
        self._attend(watching)

    def compute(self) -> None:
        """Launches forward and backward of the next step."""
        batch, micro_batches = self.fetch()
        self._computed = batch, micro_batches, compute(self.job.state, micro_batches, self.job.tools)

    def fetch(self) -> tuple[Batch, list[Batch]]:
        """The next batch, and its micro-batches on the device."""
        batch = self.job.data.batches.get(self.job.state.step)
        return batch, batch.to(self.job.device).split(self.job.plan.grad_accum_steps)

    def settle(self, seen: Mapping[str, float] = NOTHING) -> bool:
        """Draws the consequences of the step before; returns whether the run goes on from the state as it is."""
        executed, self._executed = self._executed, None
        if executed is None or settle(self.job, executed, self._throughput, seen):
            return True
        self._computed = None
        return False

    def commit(self) -> None:
        """Applies the update of the step that was computed, unless an older state was put back meanwhile."""
        if self._computed is not None:
            batch, _, computed = self._computed
            in_flight = commit(self.job.state, computed, self.job.tools)
            self._executed = ExecutedStep(in_flight, batch, computed.classes, computed.saved_buffers)
            self._throughput.count(batch)

    def close(self) -> None:
        """Ends the run where it is."""
        self.job.data.batches.close()
        self.job.output.tracker.close(0)

    def look(self) -> bool:
        """The first half of the monitors' look, if one is due; returns whether it is."""
        job = self.job
        if self._computed is None or not job.monitoring.monitors.due(job.state.step + 1, job.plan.steps):
            return False
        _, micro_batches, computed = self._computed
        seen_batch = job.tools.sanitizer.safe(micro_batches[0], computed.classes)
        job.monitoring.monitors.before(job.state.model, job.state.optimizer, seen_batch, job.tools.precision)
        self.done["looks"] += 1
        return True

    def _attend(self, watching: bool) -> None:
        """The second half of the look, and a snapshot if one is due; both settle the step before the next begins."""
        if self._computed is None:
            return
        putting_by = self.job.rollback.snapshot_due(self.job.state.step)
        if watching or putting_by:
            seen = watch(self.job, self._executed) if watching else NOTHING
            if self.settle(seen) and putting_by:
                self.job.rollback.take_snapshot()
                self.done["snapshots"] += 1
