"""Determinism: where random numbers come from, and whether the same step gives the same bits.

| option | initial weights | randomness of a step | kernels |
|---|---|---|---|
| off | PyTorch's default seed, new each time | from the generator's current state | the fastest, as measured |
| seeded | from `seed` | from (`seed`, step number) | the fastest by PyTorch's rules |
| strict | from `seed` | from (`seed`, step number) | deterministic, or an error |

Seeding by step number makes a step a pure function of (state, number): a resumed or replayed step draws the same
dropout masks, and a skipped step leaves no trace in the generator. With `off`, cuDNN and PyTorch's compiler may try
kernels and choose by their speed, so two processes may run different kernels and round differently.
"""

import os
import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stabletrain.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""cuBLAS workspace configurations that are deterministic with concurrent streams; the first is larger and faster."""

_MASK = (1 << 64) - 1


def mix(seed: int, step: int) -> int:
    """Returns a well-mixed 64-bit number from both (SplitMix64's finalizer; Steele et al., OOPSLA 2014)."""
    # `step + 1`, because the rounds below map 0 to 0: seed 0 at step 0 would not be mixed.
    z = (seed * 0x9E3779B97F4A7C15 + (step + 1) * 0xD1B54A32D192ED03) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@contextmanager
def rng_restored(model: nn.Module) -> Generator[None, None, None]:
    """A context after which every random generator is as before.

    Covers PyTorch's generators of the CPU and of the model's GPUs, NumPy's and Python's.
    """
    cards = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    drawn, numpy_drawn = random.getstate(), np.random.get_state()
    # Named, because by default `fork_rng` would start and copy every GPU of the machine.
    with torch.random.fork_rng(devices=cards):
        try:
            yield
        finally:
            random.setstate(drawn)
            np.random.set_state(numpy_drawn)


@dataclass(frozen=True)
class Generators:
    """The states of all random generators: PyTorch's on the CPU and on a card, NumPy's and Python's."""

    cpu: Tensor
    card: Tensor | None
    numpy: Any
    python: Any
    device: torch.device

    @classmethod
    def now(cls, device: torch.device) -> "Generators":
        """Records them; does not wait for the device."""
        started = device.type == "cuda" and torch.cuda.is_initialized()  # asking for the state would start CUDA
        card = torch.cuda.get_rng_state(device) if started else None
        return cls(torch.get_rng_state(), card, np.random.get_state(), random.getstate(), device)

    def set(self) -> None:
        """Sets every generator to the recorded state."""
        torch.set_rng_state(self.cpu)
        if self.card is not None:
            torch.cuda.set_rng_state(self.card, self.device)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def may_measure() -> bool:
    """Returns whether kernels may be chosen by measuring their speed: with `determinism=off` only."""
    return torch.backends.cudnn.benchmark


def set_kernels(strict: bool, measured: bool = False) -> dict:
    """Sets PyTorch's determinism switches and returns them.

    Args:
        strict: forbids nondeterministic kernels.
        measured: lets kernels be chosen by measuring their speed, see `may_measure`.

    Raises:
        ConfigError: `strict`, and the cuBLAS workspace is not deterministic.
    """
    if strict:
        check_workspace()
    # cuBLAS reads this once, when CUDA starts. Set it for every option, so that a later `strict` run of a sweep in the
    # same process finds it. The switches below are set both ways for the same reason.
    os.environ.setdefault(WORKSPACE, DETERMINISTIC_WORKSPACES[0])
    if torch.are_deterministic_algorithms_enabled() != strict:  # the call imports the compiler, which takes seconds
        torch.use_deterministic_algorithms(strict)
    # Takes effect in strict mode only: uninitialized memory becomes NaN, so reading it is always detected.
    torch.utils.deterministic.fill_uninitialized_memory = True  # ty: ignore[missing-attribute]
    torch.backends.cudnn.deterministic = strict
    torch.backends.cudnn.benchmark = measured
    return {
        "use_deterministic_algorithms": strict,
        "fill_uninitialized_memory": strict,
        "cudnn.deterministic": strict,
        "cudnn.benchmark": measured,
        WORKSPACE: os.environ[WORKSPACE],
    }


def check_workspace() -> None:
    """Raises ConfigError if the cuBLAS workspace is not deterministic, or can no longer be set."""
    found = os.environ.get(WORKSPACE)
    if found is None and torch.cuda.is_initialized():
        raise ConfigError(
            f"determinism=strict: CUDA has started without {WORKSPACE}, which it reads only then; "
            f"set {WORKSPACE}={DETERMINISTIC_WORKSPACES[0]} in the environment"
        )
    if found not in (None, *DETERMINISTIC_WORKSPACES):
        raise ConfigError(
            f"determinism=strict: {WORKSPACE}={found} in the environment makes cuBLAS nondeterministic; "
            f"use {' or '.join(DETERMINISTIC_WORKSPACES)}, or unset it"
        )


class Off:
    """Seeds nothing, restricts no kernels, and lets them be chosen by their speed.

    Base class of all kinds of determinism, and what each must offer.
    """

    def prepare(self) -> dict:
        """Sets the switches and returns them for the log. Call this once, before CUDA starts."""
        return set_kernels(strict=False, measured=True)

    def seed_run(self, seed: int) -> None:
        """Seeds the initial weights. Does nothing: they come from PyTorch's default seed."""

    def seed_step(self, seed: int, step: int) -> None:
        """Seeds a step of a rank whose seed is `seed`. Does nothing: the generators continue."""


class Seeded(Off):
    """Takes the initial weights and each step's randomness from `seed`; no kernel is forbidden."""

    def prepare(self) -> dict:
        """Sets the switches and returns them for the log. Call this once, before CUDA starts."""
        return set_kernels(strict=False)

    def seed_run(self, seed: int) -> None:
        """Seeds torch (all devices), NumPy and random, for the initial weights."""
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # NumPy takes 32 bits
        random.seed(seed)

    def seed_step(self, seed: int, step: int) -> None:
        """Seeds torch (all devices), NumPy and random from (`seed`, `step`)."""
        mixed = mix(seed, step) >> 1  # torch takes 63 bits
        # Not `torch.manual_seed`: it also records a stack trace for each device type that has not started.
        torch.default_generator.manual_seed(mixed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(mixed)
        np.random.seed(mixed % 2**32)
        random.seed(mixed)


class Strict(Seeded):
    """Seeded, and deterministic kernels only: an operation without one raises an error.

    Two-dimensional max-pooling is deterministic as it is: on CUDA too, one thread adds all windows of a pixel, row by
    row, without atomics (`DilatedMaxPool2d.cu` of PyTorch 2.11 to 2.15).
    """

    def prepare(self) -> dict:
        """Sets the switches and returns them for the log. Call this once, before CUDA starts.

        Raises:
            ConfigError: the environment makes cuBLAS nondeterministic.
        """
        return set_kernels(strict=True)
