"""What a fault damages: the state of a run, and the random numbers that choose the place."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stabletrain.records import TrainState

WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their size in bytes."""

FIRST, SECOND = ("exp_avg", "momentum_buffer"), ("exp_avg_sq",)
"""Names of first and second moments in the state of optimizers."""


@dataclass
class Subject:
    """The state that a fault damages.

    Attributes:
        state: of the run.
        seed: chooses tensor and element.
        kept: what the fault remembers between steps.
    """

    state: TrainState
    seed: int
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.state.model

    def random(self, number: int = 0) -> torch.Generator:
        """Returns a generator of its own, so that the run's random numbers stay as they are."""
        return torch.Generator().manual_seed(1_000_003 * self.seed + number)

    def draw(self, below: int, number: int = 0) -> int:
        """Returns a random integer in [0, below)."""
        return int(torch.randint(below, (), generator=self.random(number)))

    def matrices(self) -> list[nn.Parameter]:
        """Returns the trained matrices and kernels."""
        return [each for each in self.model.parameters() if each.requires_grad and each.ndim > 1]

    def matrix(self) -> nn.Parameter:
        """Returns the matrix that the seed chooses, always the same one."""
        found = self.matrices()
        return found[self.draw(len(found))]

    def moments(self, names: tuple[str, ...]) -> list[Tensor]:
        """Returns the moments of these names that exist, over all trained parameters."""
        kept = (self.state.optimizer.state.get(parameter, {}) for parameter in self.model.parameters())
        return [one[name] for one in kept for name in names if isinstance(one.get(name), Tensor)]

    def tensors(self, where: str) -> list[Tensor]:
        """Returns the chosen tensors: all `weights`, one `weight`, moments or `buffers`.

        Args:
            where: `weights`, `weight`, `first`, `second` (the moments of the matrix that `weight` names), `moments`
                (all of them), `buffers` (all that hold floats).
        """
        if where == "weights":
            return [each.data for each in self.model.parameters() if each.requires_grad]
        if where == "weight":
            return [self.matrix().data]
        if where == "moments":
            return self.moments(FIRST + SECOND)
        if where in ("first", "second"):
            kept = self.state.optimizer.state.get(self.matrix(), {})
            names = FIRST if where == "first" else SECOND
            return [kept[name] for name in names if isinstance(kept.get(name), Tensor)]
        if where == "buffers":
            return [each for each in self.model.buffers() if each.is_floating_point()]
        raise ValueError(f"where={where}")

    def places(self, tensor: Tensor, count: int) -> Iterator[int]:
        """Yields `count` indices into the flat tensor, of elements that are not 0 where it has any."""
        present = tensor.reshape(-1).nonzero().reshape(-1)
        for number in range(count):
            chosen = self.draw(max(len(present), 1), 17 + number)
            yield int(present[chosen]) if len(present) else chosen


class Bits:
    """A tensor as integers, of any strides; changes are written through.

    Args:
        tensor: of 1, 2, 4 or 8 bytes an element.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._whole = tensor.view(WHOLE[tensor.element_size()])
        self._bf16 = tensor.dtype == torch.bfloat16

    def mask(self, bit: int) -> int:
        """Returns the mask of a bit, counted as in fp32; bf16 is fp32's upper half, so its lowest bit is 16."""
        own, width = max(bit - 16, 0) if self._bf16 else bit, 8 * self._whole.element_size()
        return 1 << own if own < width - 1 else -(1 << own)

    def flip_(self, place: int, bit: int) -> None:
        """Flips one bit of the element with this flat index."""
        self._whole[self._index(place)] ^= self.mask(bit)

    def set_(self, place: int, bit: int) -> None:
        """Sets one bit of the element with this flat index to 1."""
        self._whole[self._index(place)] |= self.mask(bit)

    def _index(self, place: int) -> tuple[int, ...]:
        return tuple(int(each) for each in np.unravel_index(place, tuple(self._whole.shape)))
