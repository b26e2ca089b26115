"""Arithmetic checked by doing it twice: every `recheck_every` steps one gradient and one tensor's update are repeated.

A processor that computes wrongly now and then leaves no NaN (arXiv 2102.11245, 2605.04213). Two results that should be
equal show it:

- the gradient of the step's first micro-batch, computed again from the same weights, buffers and random numbers;
- the optimizer's update of one tensor, computed again on copies. Each time it is another tensor's turn.

Uncompiled on a CPU, and with `determinism=strict`, both must have the same bits. Elsewhere kernels may add in another
order. There the limit is learnt: `FACTOR` times the largest of the first `FIRST` differences, where a tensor's
difference is max|a - b| / max(|a|, |b|). Until then nothing is judged. Each tensor's gradient has a limit of its own:
that of an attention's key bias is 0 but for rounding, so its difference is as large as it is, and says nothing of other
tensors. The number that is judged is the largest difference over its limit.

The repetition leaves no trace: buffers, random generators, gradients and the modules' attributes are put back. Nothing
here waits for the device; the result is a number of the step's reading.

A step that is computed twice needs more memory than any other. So one is repeated at the start of every process, as a
rehearsal that is not judged: a run that does not fit fails then, and not hours later. If memory does not suffice, the
repetition is given up on all ranks, and nothing is repeated any more in this process.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.buffers import SavedBuffers
from stabletrain.errors import ConfigError
from stabletrain.machine.compiling import compiled_shape
from stabletrain.records import Reading, TrainState
from stabletrain.stability.guard.comparing import Compared
from stabletrain.stability.guard.limits import LARGEST
from stabletrain.stability.guard.repeats import (
    NOTHING,
    Judge,
    NoRepeat,
    RepeatGradient,
    RepeatUpdate,
    next_tensor,
    tensor_by_tensor,
)
from stabletrain.stability.step_tools import StepTools

FIRST = 8
"""Number of repetitions from which a limit is learnt."""

FACTOR = 8.0
"""The limit over the largest of the first differences."""

UPDATE_EPS = torch.finfo(torch.float32).eps
"""Precision of an update: the weights that are repeated have 32 bits or more, whatever the model computes in."""


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
    """The largest differences that are no fault, one for each tensor.

    Attributes:
        varies: whether two results differ without a fault, as it was found out, although the machine is deterministic.
        agreed: number of repetitions with the same bits.
        learnt: number of repetitions from which `largest` was learnt; at most `FIRST`.
        largest: fp32 `[tensors]`, on the device, the largest of those differences; None if there were none.
        common: the same as one number for all tensors, as older versions learnt it. It counts until `largest` is
            learnt; 0 if there is none.
    """

    varies: bool = False
    agreed: int = 0
    learnt: int = 0
    largest: Tensor | None = None
    common: float = 0.0

    def limit(self, exact: bool) -> float:
        """Returns the limit of `judged`: 0 if bits must be equal, 1 if it is learnt.

        While it is learnt, this is below infinity, but without any effect else.

        Args:
            exact: whether this machine gives the same bits again.
        """
        if exact and not self.varies:
            return 0.0
        return 1.0 if self.learnt >= FIRST or self.common else LARGEST

    def limits(self, ratios: Tensor, exact: bool, eps: float) -> Tensor:
        """Returns the limit of each difference of `ratios`, fp32 `[tensors]`.

        Args:
            ratios: fp32 `[tensors]`, differences of any repetition.
            exact: see `limit`.
            eps: of the dtype in which most is computed; a lower bound of the learnt limits, times `FACTOR`.
        """
        if (allowed := self.limit(exact)) != 1.0:
            return torch.full_like(ratios, allowed)
        learnt = self.largest if self.learnt >= FIRST else None
        learnt = torch.full_like(ratios, self.common) if learnt is None else learnt
        return FACTOR * learnt.clamp(eps, LARGEST / FACTOR)

    def judged(self, ratios: Tensor, limits: Tensor, exact: bool) -> Tensor:
        """Returns the number to compare with `limit`, 0-d: the largest difference, over its limit if it is learnt."""
        return (ratios / limits).amax() if self.limit(exact) == 1.0 else ratios.amax()

    def learn(self, difference: float, ratios: Tensor, exact: bool) -> None:
        """Adds the differences of an applied step.

        Args:
            difference: what `judged` returned for them.
            ratios: the largest of all ranks.
            exact: see `limit`.
        """
        if difference == 0:
            self.agreed += 1
        if (self.varies or not exact) and self.learnt < FIRST and math.isfinite(difference):
            self.largest = ratios if self.largest is None else torch.maximum(self.largest, ratios)
            self.learnt += 1

    def fit(self, ratios: Tensor) -> None:
        """Learns anew if other tensors are trained than before."""
        if self.largest is not None and self.largest.shape != ratios.shape:
            self.learnt, self.largest = 0, None

    def state_dict(self) -> dict[str, Any]:
        """Returns what was learnt, for the checkpoint."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Bound":
        """Returns what was saved; older versions saved the first differences, each the largest of all tensors."""
        common = max(state["seen"]) if len(state.get("seen", [])) >= FIRST else state.get("common", 0.0)
        learnt, largest = int(state.get("learnt", 0)), state.get("largest")
        return cls(bool(state["varies"]), int(state["agreed"]), learnt, largest, float(common))


class NoRecheck:
    """Never repeats anything.

    Attributes:
        every: steps between two repetitions; 0.
        found: what the newest difference was; None if there was none.
        compared: the results of the newest repetition, by part.
        varies: whether a model's gradients differ without a fault, as it was found out.
    """

    every = 0
    varies = False

    def __init__(self) -> None:
        self.found: Finding | None = None
        self.compared: dict[str, Compared] = {}

    def due(self, step: int) -> bool:
        """Returns whether step number `step`, counted from 0, is repeated: never."""
        del step
        return False

    def rehearse(self, step: int) -> None:
        """Also repeats step number `step`, once, without judging it: nothing."""
        del step

    def repeats(self, step: int) -> bool:
        """Returns whether step number `step` is computed twice, judged or not: never."""
        del step
        return False

    def of_step(self, state: TrainState, buffers: SavedBuffers, tools: StepTools) -> NoRepeat:
        """Returns what repeats this step's gradient: nothing."""
        del state, buffers, tools
        return NOTHING

    def of_update(self, state: TrainState, tools: StepTools) -> NoRepeat:
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

    def knows(self, part: str) -> bool:
        """Returns whether a part came out equal before, or within what is usual: never."""
        del part
        return False

    def wrong(self, reading: Reading) -> str:
        """Returns which part of a step came out differently: empty."""
        del reading
        return ""

    def gives_up(self, reading: Reading) -> bool:
        """Returns whether nothing is repeated from this step on, for lack of memory: never."""
        del reading
        return False

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
        exhausted: whether nothing is repeated in this process, for lack of memory. It is not part of the state: the
            run may go on elsewhere.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every
        self.bounds = {"gradient": Bound(), "update": Bound()}
        self.exact, self.stopped, self.exhausted = True, False, False
        self._rehearsed: int | None = None
        self._allowed: dict[str, float] = {}  # the limits by which the newest repetition was judged

    @property
    def varies(self) -> bool:
        """Whether the model's gradients differ without a fault."""
        return self.bounds["gradient"].varies

    def due(self, step: int) -> bool:
        """Returns whether step number `step`, counted from 0, is repeated and judged."""
        return not (self.stopped or self.exhausted) and (step + 1) % self.every == 0

    def rehearse(self, step: int) -> None:
        """Also repeats step number `step`, without judging it, so that memory is needed now and not much later."""
        self._rehearsed = step

    def repeats(self, step: int) -> bool:
        """Returns whether step number `step` is computed twice: because it is due, or as the rehearsal."""
        return self.due(step) or (step == self._rehearsed and not (self.stopped or self.exhausted))

    def of_step(self, state: TrainState, buffers: SavedBuffers, tools: StepTools) -> NoRepeat:
        """Returns what repeats the gradient of the step that begins; call it after the randomness was seeded.

        Args:
            state: where the step starts.
            buffers: their values from before the forward pass.
            tools: the step's.
        """
        self.compared, self.found, self._allowed = {}, None, {}  # frees the copies of the last one
        if not self.repeats(state.step):
            return NOTHING
        device = next(state.model.parameters()).device
        self.exact = repeats_exactly(state.model, device)
        eps = torch.finfo(getattr(tools.precision, "dtype", torch.float32)).eps
        return RepeatGradient(self._judge(state.step, "gradient", eps), state.model, buffers, tools, device)

    def of_update(self, state: TrainState, tools: StepTools) -> NoRepeat:
        """Returns what repeats the update of one tensor; call it just before the update."""
        if not self.repeats(state.step) or not tensor_by_tensor(state.optimizer):
            return NOTHING
        # The rehearsal takes the largest tensor, which needs the most memory.
        turn = (state.step + 1) // self.every if self.due(state.step) else None
        chosen = next_tensor(state.optimizer, turn)
        if chosen is None:
            return NOTHING
        return RepeatUpdate(self._judge(state.step, "update", UPDATE_EPS), state, chosen, tools)

    def _judge(self, step: int, part: str, eps: float) -> Judge:
        """Returns what judges the repetition of a part of a step: nothing, if that is only the rehearsal."""
        bound, exact, due = self.bounds[part], self.exact, self.due(step)

        def judge(compared: Compared | None, everywhere: Tensor) -> Tensor:
            if not due:
                return torch.zeros_like(everywhere[0])
            bound.fit(everywhere)
            self._allowed[part], limits = bound.limit(exact), bound.limits(everywhere, exact, eps)
            if compared is not None:
                self.compared[part] = replace(compared, limits=limits.expand_as(compared.ratios), everywhere=everywhere)
            return bound.judged(everywhere, limits, exact)

        return judge

    def limit(self, part: str) -> float:
        """Returns the largest number allowed: 0 for equal bits; any finite one while it is being learnt; then 1."""
        # Not what has been learnt since: the number of the newest repetition has the scale of its own limit.
        return self._allowed.get(part, self.bounds[part].limit(self.exact))

    def agreed(self, part: str) -> int:
        """Returns how often a part came out with the same bits so far."""
        return self.bounds[part].agreed

    def knows(self, part: str) -> bool:
        """Returns whether a part came out equal before, or within what is usual: it does repeat, without a fault."""
        bound = self.bounds[part]
        return bound.agreed > 0 or bound.learnt > 0 or bound.common > 0

    def wrong(self, reading: Reading) -> str:
        """Returns which part of a step came out differently, `gradient` or `update`; empty if neither did."""
        if reading.recheck > self.limit("gradient"):
            return "gradient"
        return "update" if reading.recheck_update > self.limit("update") else ""

    def learn(self, reading: Reading) -> None:
        """Adds an applied step to what is known of differences without a fault."""
        if self.due(reading.step - 1) and not self.wrong(reading):
            for part, difference in (("gradient", reading.recheck), ("update", reading.recheck_update)):
                if part in self.compared and difference >= 0:
                    compared = self.compared[part]
                    ratios = compared.ratios if compared.everywhere is None else compared.everywhere
                    self.bounds[part].learn(difference, ratios, self.exact)

    def gives_up(self, reading: Reading) -> bool:
        """Repeats nothing any more in this process if the step ran out of memory; returns whether that is new."""
        new = min(reading.recheck, reading.recheck_update) < 0 and not self.exhausted
        self.exhausted = self.exhausted or new
        return new

    def vary(self, part: str) -> None:
        """Notes that a part does not give the same bits again on this machine: its limit is learnt from now on."""
        self.bounds[part].varies = True

    def stop(self) -> None:
        """Ends all repetitions: what is computed can never be computed again."""
        self.stopped = True

    def state_dict(self) -> dict[str, Any]:
        """Returns what was learnt, for the checkpoint."""
        return {**{part: bound.state_dict() for part, bound in self.bounds.items()}, "stopped": self.stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it; another guard stores none."""
        self.compared, self.found, self._allowed = {}, None, {}
        self.stopped = bool(state.get("stopped", False))
        self.bounds = {part: Bound.of_state(state.get(part, vars(Bound()))) for part in self.bounds}


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
