"""The inputs of `checkouts.py`'s cases: a text, images, and a user's plug-ins with a script."""

from pathlib import Path

import numpy as np
from PIL import Image

WORDS = ["a", "model", "that", "reads", "the", "bytes", "of", "text", "learns", "which", "of", "them", "follow"]

PLUGIN = {
    "mine.py": '''
import os
import pathlib
import signal

import torch
from torch import nn

from stabletrain.records import Batch, Clipped
from stabletrain.stability.clipping import NoClip


class Model(nn.Module):
    """Two layers; stops its own process once, or raises, at a training pass."""

    def __init__(self, width, stops_at=None, raises_at=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))
        self.stops_at, self.raises_at, self.passes = stops_at, raises_at, 0

    def forward(self, inputs):
        self.passes += self.training
        stopped = pathlib.Path("stopped")
        if self.training and self.passes == self.stops_at and not stopped.exists():
            stopped.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        if self.training and self.raises_at and self.passes >= self.raises_at:  # monitors pass over an error
            raise ValueError("the batch is too sad")
        return self.net(inputs)


class Data:
    """Three clouds of points, with a poisoned or a broken batch if asked for."""

    def __init__(self, noise, poisoned_step=None, broken=False):
        self.noise, self.poisoned_step, self.broken = noise, poisoned_step, broken

    def batch(self, step, size, split):
        generator = torch.Generator().manual_seed(step + (10**6 if split == "val" else 0))
        targets = torch.randint(3, (size,), generator=generator)
        inputs = torch.eye(8)[targets] + self.noise * torch.randn(size, 8, generator=generator)
        if split == "train" and step == self.poisoned_step:
            inputs[0, 0] = float("nan")
        return (inputs, targets) if self.broken else Batch(inputs, targets)


class HalfClip(NoClip):
    """Halves every gradient."""

    def __call__(self, model, norms, gate):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        return Clipped(coef=torch.full_like(norms.total, 0.5), active=torch.ones_like(norms.total))
''',
    "script.py": """
import sys

import torch

from stabletrain import __version__
try:  # its place until 2026-11
    from stabletrain.comparison import by_seed, frame, read_runs
except ImportError:
    from stabletrain.beside.comparison import by_seed, frame, read_runs
from stabletrain.records import Batch, GradNorms
from stabletrain.stability.clipping.fixed import NormClip

runs = frame(sys.argv[1])
print("columns", *runs.columns)
print(by_seed(runs)[["val_loss", "best_val_loss", "diverged", "steps"]].to_csv())
print(read_runs([sys.argv[1]])[0].curve("train/loss"), __version__)
print("clipped by hand", NormClip(1.0).max_norm, len(Batch(torch.ones(2, 3), torch.ones(2))), GradNorms.__name__)
""",
    "conf/model/mine.yaml": "_target_: mine.Model\nwidth: 16\nstops_at: null\nraises_at: null\n",
    "conf/data/mine.yaml": "_target_: mine.Data\nnoise: 0.1\npoisoned_step: null\nbroken: false\n",
    "conf/clipping/mine.yaml": "_target_: mine.HalfClip\n",
}


def write_inputs(folder: Path) -> None:
    """Writes `text.txt`, `pictures/` and `plugin/` into `folder`; the bytes are the same every time."""
    lines = [f"{number} {' '.join(WORDS[number % 7 : 7 + number * 5 % 12])}." for number in range(400)]
    (folder / "text.txt").write_text("\n".join(lines))
    random = np.random.default_rng(0)
    for label in range(3):
        (folder / "pictures" / f"class{label}").mkdir(parents=True)
        for number in range(12):
            pixels = random.integers(0, 80, (16, 16, 3), dtype=np.uint8) + 60 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "pictures" / f"class{label}" / f"{number}.png")
    for name, content in PLUGIN.items():
        file = folder / "plugin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content.lstrip())
