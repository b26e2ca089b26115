"""Whole runs for the benchmarks: built by Hydra from overrides, on random data, and taken round by round."""

from collections.abc import Sequence
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from stabletrain.build import build
from stabletrain.job import Job
from stabletrain.loop import settle
from stabletrain.records import Batch
from stabletrain.recovery import Recovery
from stabletrain.report import Launched, Pace
from stabletrain.step import Computed, commit, compute

HERE = Path(__file__).parent

NOTHING_ELSE = (
    *("wandb=disabled", "checkpoint=off", "monitors=none", "warmup=none"),
    *("steps=1000000", "log_every=1000000"),
)
"""What leaves of a run its steps, its guard and its forensics."""

SIZES = {
    "cpu": {
        "GPT 4 x 128, 16 x 128 tokens": ("model=gpt_nano", "data=random_tokens", "batch_size=16"),
        "ResNet-20, 32 images of 32 px": ("model=resnet20", "data=random_images", "batch_size=32"),
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
"""The sizes of `workloads.py`, as overrides."""


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


def built(folder: Path, overrides: Sequence[str]) -> Job:
    """The run that `train.py` would make of `overrides`."""
    with initialize_config_dir(str(HERE.parent / "conf"), version_base="1.3"):
        search = f"hydra.searchpath=[file://{HERE / 'conf'}]"
        cfg = compose("config", [search, *NOTHING_ELSE, *overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        return build(cfg, folder)


class Rounds:
    """The rounds of `loop.train` for one run, with a state put by at the beginning, and no evaluation."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._pace, self._recovery = Pace(job.history), Recovery(job)
        self._computed: tuple[Batch, Computed] | None = None
        self._launched: Launched | None = None
        self._recovery.put_by()

    def __call__(self) -> None:
        """One round: a step is computed, the one before it settled, its own update applied."""
        self.compute()
        self.settle()
        self.commit()

    def compute(self) -> None:
        """Launches forward and backward of the next step."""
        job = self.job
        batch = job.batches.get(job.state.step)
        self._computed = batch, compute(job.state, batch.to(job.device).split(job.plan.grad_accum_steps), job.tools)

    def settle(self) -> None:
        """Draws the consequences of the step before."""
        if self._launched is not None and not settle(self.job, self._launched, self._pace, self._recovery):
            self._computed = None
        self._launched = None

    def commit(self) -> None:
        """Applies the update of the step that was computed, unless an older state was put back meanwhile."""
        if self._computed is not None:
            batch, computed = self._computed
            in_flight = commit(self.job.state, computed, self.job.tools)
            self._launched = Launched(in_flight, batch, computed.classes, computed.held)
            self._pace.count(batch)
