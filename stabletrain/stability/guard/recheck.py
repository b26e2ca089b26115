"""Arithmetic checked by doing it twice: every `recheck_every` steps one gradient and one tensor's update are repeated.

A processor that computes wrongly now and then leaves no NaN (arXiv 2102.11245, 2605.04213). Two results that should be
equal show it:

- the gradient of the step's first micro-batch, computed again from the same weights, buffers and random numbers;
- the optimizer's update of one tensor, computed again on copies. Each time it is another tensor's turn.

Uncompiled on a CPU, and with `determinism=strict`, both must have the same bits. Elsewhere kernels may add in another
order. There the limit is learnt: `FACTOR` times the largest of the first `FIRST` differences, where a tensor's
difference is max|a - b| / max|a|. Until then nothing is judged.

The repetition leaves no trace: buffers, random generators, gradients and the modules' attributes are put back. Nothing
here waits for the device; the result is a number of the step's reading.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stabletrain.buffers import SavedBuffers
from stabletrain.errors import ConfigError
from stabletrain.machine.compiling import compiled_shape
from stabletrain.protocols import Tools
from stabletrain.records import Reading, TrainState
from stabletrain.stability.guard.comparing import Compared
from stabletrain.stability.guard.limits import LARGEST
from stabletrain.stability.guard.repeats import (
    NOTHING,
    NoRepeat,
    RepeatGradient,
    RepeatUpdate,
    next_tensor,
    tensor_by_tensor,
)

FIRST = 8
"""Number of repetitions from which a limit is learnt."""

FACTOR = 8.0
"""The limit over the largest of the first differences."""


@dataclass(frozen=True)
class Finding:
    """What is known of a repetition that gave another result, on the host.

    Attributes:
        part: `gradient` or `update`.
        differs: whether it differed on this rank.
        tensors: names with their differences, largest first.
        third: what a third computation equals: `first` (the step's own), `second`, `neither`, or empty if it was not
            run.
        agreed: number of earlier repetitions with the same bits.
        limit: largest difference allowed; 0 for equal bits.
        place: device, host and rank.
    """

    part: str
    differs: bool
    tensors: Sequence[tuple[str, float]]
    third: str
    agreed: int
    limit: float
    place: str


@dataclass
class Bound:
    """The largest difference that is no fault.

    Attributes:
        varies: whether two results differ without a fault, as it was found out, although the machine is deterministic.
        agreed: number of repetitions with the same bits.
        seen: the first differences where equal bits cannot be expected; at most `FIRST`.
    """

    varies: bool = False
    agreed: int = 0
    seen: list[float] = field(default_factory=list)

    def limit(self, exact: bool, eps: float) -> float:
        """Returns the limit: 0 if bits must be equal; below infinity, but without any effect else, while it is learnt.

        Args:
            exact: whether this machine gives the same bits again.
            eps: of the dtype in which most is computed; a lower bound of the learnt limit, times `FACTOR`.
        """
        if exact and not self.varies:
            return 0.0
        return LARGEST if len(self.seen) < FIRST else FACTOR * max(*self.seen, eps)

    def learn(self, difference: float, exact: bool) -> None:
        """Adds the difference of an applied step."""
        if difference == 0:
            self.agreed += 1
        if (self.varies or not exact) and len(self.seen) < FIRST and math.isfinite(difference):
            self.seen.append(difference)


class NoRecheck:
    """Never repeats anything.

    Attributes:
        every: steps between two repetitions; 0.
        found: what the newest difference was; None if there was none.
        compared: the results of the newest repetition, by part.
    """

    every = 0

    def __init__(self) -> None:
        self.found: Finding | None = None
        self.compared: dict[str, Compared] = {}

    def due(self, step: int) -> bool:
        """Returns whether step number `step`, counted from 0, is repeated: never."""
        del step
        return False

    def of_step(self, state: TrainState, buffers: SavedBuffers, tools: Tools) -> NoRepeat:
        """Returns what repeats this step's gradient: nothing."""
        del state, buffers, tools
        return NOTHING

    def of_update(self, state: TrainState, tools: Tools) -> NoRepeat:
        """Returns what repeats this step's update: nothing."""
        del state, tools
        return NOTHING

    def limit(self, part: str) -> float:
        """Returns the largest difference allowed: no difference is judged."""
        del part
        return LARGEST

    def agreed(self, part: str) -> int:
        """Returns how often a part came out with the same bits: never."""
        del part
        return 0

    def wrong(self, reading: Reading) -> str:
        """Returns which part of a step came out differently: empty."""
        del reading
        return ""

    def learn(self, reading: Reading) -> None:
        """Does nothing."""

    def vary(self, part: str) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing to save."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing."""


class Recheck(NoRecheck):
    """Repeats a gradient and an update every `every` steps.

    Attributes:
        bounds: for `gradient` and `update`.
        exact: whether the machine of the newest repetition gives the same bits again.
        stopped: whether nothing is repeated any more.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every
        self.bounds = {"gradient": Bound(), "update": Bound()}
        self.exact, self._eps, self.stopped = True, 0.0, False

    def due(self, step: int) -> bool:
        """Returns whether step number `step`, counted from 0, is repeated."""
        return not self.stopped and (step + 1) % self.every == 0

    def of_step(self, state: TrainState, buffers: SavedBuffers, tools: Tools) -> NoRepeat:
        """Returns what repeats the gradient of the step that begins; call it after the randomness was seeded.

        Args:
            state: where the step starts.
            buffers: their values from before the forward pass.
            tools: the step's.
        """
        self.compared, self.found = {}, None  # frees the copies of the last one
        if not self.due(state.step):
            return NOTHING
        device = next(state.model.parameters()).device
        self.exact = repeats_exactly(state.model, device)
        self._eps = torch.finfo(getattr(tools.precision, "dtype", torch.float32)).eps
        return RepeatGradient(self.compared, state.model, buffers, tools, device)

    def of_update(self, state: TrainState, tools: Tools) -> NoRepeat:
        """Returns what repeats the update of one tensor; call it just before the update."""
        if not self.due(state.step) or not tensor_by_tensor(state.optimizer):
            return NOTHING
        chosen = next_tensor(state.optimizer, (state.step + 1) // self.every)
        return NOTHING if chosen is None else RepeatUpdate(self.compared, state, chosen, tools)

    def limit(self, part: str) -> float:
        """Returns the largest difference allowed: 0 for equal bits; any finite one while it is being learnt."""
        return self.bounds[part].limit(self.exact, self._eps)

    def agreed(self, part: str) -> int:
        """Returns how often a part came out with the same bits so far."""
        return self.bounds[part].agreed

    def wrong(self, reading: Reading) -> str:
        """Returns which part of a step came out differently, `gradient` or `update`; empty if neither did."""
        if reading.recheck > self.limit("gradient"):
            return "gradient"
        return "update" if reading.recheck_update > self.limit("update") else ""

    def learn(self, reading: Reading) -> None:
        """Adds an applied step to what is known of differences without a fault."""
        if self.due(reading.step - 1) and not self.wrong(reading):
            for part, difference in (("gradient", reading.recheck), ("update", reading.recheck_update)):
                if part in self.compared:
                    self.bounds[part].learn(difference, self.exact)

    def vary(self, part: str) -> None:
        """Notes that a part does not give the same bits again on this machine: its limit is learnt from now on."""
        self.bounds[part].varies = True

    def stop(self) -> None:
        """Ends all repetitions: what is computed can never be computed again."""
        self.stopped = True

    def state_dict(self) -> dict[str, Any]:
        """Returns what was learnt, for the checkpoint."""
        bounds = {part: {**vars(bound), "seen": [*bound.seen]} for part, bound in self.bounds.items()}
        return {**bounds, "stopped": self.stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it; another guard stores none."""
        self.compared, self.found, self.stopped = {}, None, bool(state.get("stopped", False))
        for part in self.bounds:
            bound = state.get(part, vars(Bound()))
            self.bounds[part] = Bound(bool(bound["varies"]), int(bound["agreed"]), [*bound["seen"]])


def recheck_every(steps: int) -> NoRecheck:
    """Returns what repeats every `steps` steps; 0 for never.

    Raises:
        ConfigError: `steps` is negative.
    """
    if steps < 0:
        raise ConfigError(f"guard.recheck_every={steps} is below 0: 250 is the default; 0 repeats nothing")
    return Recheck(steps) if steps else NoRecheck()


def repeats_exactly(model: nn.Module, device: torch.device) -> bool:
    """Returns whether the same computation must give the same bits: with strict kernels, or uncompiled on a CPU."""
    strict = torch.are_deterministic_algorithms_enabled()
    return strict or (device.type == "cpu" and compiled_shape(model) is None)
