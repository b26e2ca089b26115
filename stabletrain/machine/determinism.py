"""Determinism: from where randomness comes, and how far the same step gives the same bits.

| option | initial weights | randomness of a step | kernels |
|---|---|---|---|
| off | PyTorch's own seed, new each time | goes on from wherever it is | the fastest |
| seeded | from `seed` | from (`seed`, step number) | the fastest |
| strict | from `seed` | from (`seed`, step number) | deterministic, or an error |

Seeding by step number is what makes a step a pure function of (state, number): a resumed or replayed step draws the
same dropout masks, and a skipped one leaves no trace in the generator.
"""

import os
import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from stabletrain.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED = (":4096:8", ":16:8")
"""cuBLAS's workspaces with which concurrent streams give the same bits; the first is the larger and faster."""

_MASK = (1 << 64) - 1


def mix(seed: int, step: int) -> int:
    """A well-spread 64-bit number from the two (SplitMix64's finaliser; Steele et al., OOPSLA 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + (step + 1) * 0xD1B54A32D192ED03) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@contextmanager
def rng_restored(model: nn.Module) -> Generator[None, None, None]:
    """Within it random numbers are borrowed: afterwards every generator is as before.

    PyTorch's generators of the CPU and of the model's cards, NumPy's and Python's.
    """
    cards = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    drawn, numpy_drawn = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=cards):
        try:
            yield
        finally:
            random.setstate(drawn)
            np.random.set_state(numpy_drawn)


def set_kernels(strict: bool) -> dict:
    """Sets PyTorch's switches both ways, since a sweep runs several settings in one process; returns what was set.

    cuBLAS reads its workspace from the environment once, when CUDA starts: so every option asks for the fixed one, and
    a `strict` run later in the sweep finds it. `use_deterministic_algorithms` also keeps `torch.compile` from choosing
    kernels by their speed, and has uninitialised memory filled with NaN, so that reading it is a fault and no chance.

    Raises:
        ConfigError: `strict`, and cuBLAS may not give the same bits twice.
    """
    if strict:
        check_workspace()
    os.environ.setdefault(WORKSPACE, FIXED[0])
    if torch.are_deterministic_algorithms_enabled() != strict:  # the call loads the compiler, which takes seconds
        torch.use_deterministic_algorithms(strict)
    torch.utils.deterministic.fill_uninitialized_memory = True  # ty: ignore[missing-attribute]
    torch.backends.cudnn.deterministic = strict
    torch.backends.cudnn.benchmark = False
    return {
        "use_deterministic_algorithms": strict,
        "fill_uninitialized_memory": strict,
        "cudnn.deterministic": strict,
        "cudnn.benchmark": False,
        WORKSPACE: os.environ[WORKSPACE],
    }


def check_workspace() -> None:
    """Refuses a workspace with which cuBLAS is not deterministic, or one that comes too late."""
    found = os.environ.get(WORKSPACE)
    if found is None and torch.cuda.is_initialized():
        raise ConfigError(
            f"determinism=strict: CUDA has started without {WORKSPACE}, which it reads only then; "
            f"set {WORKSPACE}={FIXED[0]} in the environment"
        )
    if found not in (None, *FIXED):
        raise ConfigError(
            f"determinism=strict: {WORKSPACE}={found} in the environment lets cuBLAS give other bits each time; "
            f"use {' or '.join(FIXED)}, or unset it"
        )


class Off:
    """Nothing is seeded and no kernel is constrained."""

    def prepare(self) -> dict:
        """Called once, before CUDA starts; returns the switches for the log."""
        return set_kernels(strict=False)

    def seed_run(self, seed: int) -> None:
        """Nothing: the initial weights are drawn from PyTorch's own seed."""
        del seed

    def seed_step(self, seed: int, step: int) -> None:
        """Nothing: the generator goes on."""
        del seed, step


class Seeded(Off):
    """Initial weights and each step's randomness come from `seed`; kernels stay the fastest."""

    def seed_run(self, seed: int) -> None:
        """Seeds torch (all devices), numpy and random, for the initial weights."""
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    def seed_step(self, seed: int, step: int) -> None:
        """Seeds the three from (`seed`, `step`).

        `torch.manual_seed` would do the same, and for each kind of device that has not started also note from where it
        was called, which takes longer than all the rest.
        """
        mixed = mix(seed, step) >> 1  # torch takes 63 bits without a sign
        torch.default_generator.manual_seed(mixed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(mixed)
        np.random.seed(mixed % 2**32)
        random.seed(mixed)


class Strict(Seeded):
    """Seeded, and every operation deterministic: one that has no deterministic form raises an error."""

    def prepare(self) -> dict:
        """Called once, before CUDA starts; returns the switches for the log.

        Raises:
            ConfigError: the environment does not let cuBLAS be deterministic.
        """
        return set_kernels(strict=True)
