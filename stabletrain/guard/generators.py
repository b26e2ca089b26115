"""The states of the random generators before a step of a user's loop, from which a rerun draws the same numbers.

NumPy copies the state of its global generator word by word, which takes longer than all other generators together. Most
loops never draw from it. So it is asked for its state only after the memory that holds the words has changed.
"""

import ctypes
import random
from typing import Any

import numpy as np
import torch

from stabletrain.machine.determinism import Generators

STATE_BYTES = 4 * (624 + 1)
"""Bytes of the Mersenne Twister's state: its words, and the position in them."""


class GeneratorStates:
    """Records the generators' states."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._source: Any = None  # NumPy's bit generator, and where it keeps its state
        self._address = 0
        self._words = b""
        self._numpy: Any = np.random.get_state()

    def now(self) -> Generators:
        """Returns what `Generators.now` returns."""
        device = self._device
        started = device.type == "cuda" and torch.cuda.is_initialized()  # asking for the state would start CUDA
        card = torch.cuda.get_rng_state(device) if started else None
        return Generators(torch.get_rng_state(), card, self._of_numpy(), random.getstate(), device)

    def _of_numpy(self) -> Any:
        source = np.random.get_bit_generator()  # ty: ignore[missing-attribute]
        if type(source) is not np.random.MT19937:
            return np.random.get_state()
        if source is not self._source:
            self._source, self._address, self._words = source, source.ctypes.state_address, b""
        words = ctypes.string_at(self._address, STATE_BYTES)
        # Of two normal draws, the second comes from a cache and leaves the words as they are: with a cached draw, ask.
        if words != self._words or self._numpy[3]:
            self._words, self._numpy = words, np.random.get_state()
        return self._numpy
