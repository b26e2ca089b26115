"""Checks arithmetic by repeating it: every `recheck_every` steps, one gradient and the update of one tensor.

A processor that computes wrongly now and then leaves no NaN (arXiv 2102.11245, 2605.04213). Comparing two results
that must be equal finds it:

- the gradient of the step's first micro-batch, computed again from the same weights, buffers and random numbers;
- the optimizer's update of one tensor, computed again on copies. The tensors take turns.

Uncompiled on a CPU, and with `determinism=strict`, both must have the same bits. Elsewhere kernels may add in another
order. There the limit is learnt: `LIMIT_FACTOR` times the largest of the first `LEARNING_REPEATS` differences, where a
tensor's difference is max|a - b| / max(|a|, |b|). Until then nothing is judged. Each gradient tensor has its own limit.
The gradient of an attention's key bias, for example, is 0 except for rounding errors: its relative difference is always
large, and says nothing about other tensors. The number that is judged is the largest difference over its limit.

The repetition leaves no trace: buffers, random generators, gradients and the modules' attributes are restored. Nothing
here waits for the device; the result is a number in the step's reading.

A step that is computed twice needs more memory than any other. So one step is repeated at the start of every process,
as a rehearsal that is not judged: if memory does not suffice, this shows then, and not hours later. All ranks then stop
repeating steps for the rest of the process.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.buffers import SavedBuffers
from stabletrain.errors import ConfigError
from stabletrain.guard.checks.comparing import Compared
from stabletrain.guard.checks.neighbours import MODES, NO_SHIFT, Blame, Shift, Table
from stabletrain.guard.checks.repeats import (
    NO_REPEAT,
    Judge,
    NoRepeat,
    RepeatGradient,
    RepeatUpdate,
    next_tensor,
)
from stabletrain.machine.compiling import compiled_shape
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import LARGEST, Reading, TrainState
from stabletrain.stability.step_tools import StepTools

LEARNING_REPEATS = 8
"""Number of repetitions from which a limit is learnt."""

LIMIT_FACTOR = 8.0
"""Ratio of the limit to the largest of the first differences."""

UPDATE_EPS = torch.finfo(torch.float32).eps
"""Precision of an update: the weights that are repeated have 32 bits or more, whatever the model computes in."""


@dataclass(frozen=True)
class Finding:
    """What is known about a repetition with a different result, on the host.

    Attributes:
        part: `gradient`, `update`, or `neighbour` for the gradient of the next rank's micro-batch (`neighbours.py`).
        differs: whether it differed on this rank; of a comparison of ranks, whether this one is a suspect.
        tensors: names with their differences, largest first.
        third: which result a third computation equals: `first` (the step's own), `second` or `neither`; empty without a
            third computation.
        agreed: number of earlier repetitions with the same bits.
        limit: largest difference allowed; 0 for equal bits.
        place: device, host and rank; of a comparison of ranks, those of all suspects.
        blame: of a comparison of ranks; else None.
        hosts: the suspects' hosts, in a comparison of ranks.
    """

    part: str
    differs: bool
    tensors: Sequence[tuple[str, float]]
    third: str
    agreed: int
    limit: float
    place: str
    blame: Blame | None = None
    hosts: Sequence[str] = ()


@dataclass
class Bound:
    """The largest differences that are no fault, one for each tensor.

    Attributes:
        varies: whether two results were found to differ without a fault, although the machine is deterministic.
        agreed: number of repetitions with the same bits.
        learnt: number of repetitions from which `largest` was learnt; at most `LEARNING_REPEATS`.
        largest: fp32 `[tensors]`, on the device, the largest of those differences; None if there were none.
        common: one such number for all tensors, which older versions learnt. It is used until `largest` is learnt; 0
            if there is none.
    """

    varies: bool = False
    agreed: int = 0
    learnt: int = 0
    largest: Tensor | None = None
    common: float = 0.0

    def limit(self, exact: bool) -> float:
        """Returns the limit of `judged`: 0 if bits must be equal, 1 if the limits are learnt.

        While they are being learnt, it is a bound that no finite difference exceeds.

        Args:
            exact: whether this machine gives the same bits again.
        """
        if exact and not self.varies:
            return 0.0
        return 1.0 if self.learnt >= LEARNING_REPEATS or self.common else LARGEST

    def limits(self, ratios: Tensor, exact: bool, eps: float) -> Tensor:
        """Returns the limit of each difference of `ratios`, fp32 `[tensors]`.

        Args:
            ratios: fp32 `[tensors]`, the differences.
            exact: see `limit`.
            eps: precision of the dtype in which most is computed; `LIMIT_FACTOR * eps` is the smallest learnt limit.
        """
        if (allowed := self.limit(exact)) != 1.0:
            return torch.full_like(ratios, allowed)
        learnt = self.largest if self.learnt >= LEARNING_REPEATS else None
        learnt = torch.full_like(ratios, self.common) if learnt is None else learnt
        return LIMIT_FACTOR * learnt.clamp(eps, LARGEST / LIMIT_FACTOR)

    def judged(self, ratios: Tensor, limits: Tensor, exact: bool) -> Tensor:
        """Returns the number to compare with `limit`, 0-d: the largest difference, divided by a learnt limit."""
        return (ratios / limits).amax() if self.limit(exact) == 1.0 else ratios.amax()

    def learn(self, difference: float, ratios: Tensor, exact: bool) -> None:
        """Adds the differences of an applied step.

        Args:
            difference: the result of `judged` for them.
            ratios: the largest differences on any rank.
            exact: see `limit`.
        """
        if difference == 0:
            self.agreed += 1
        if (self.varies or not exact) and self.learnt < LEARNING_REPEATS and math.isfinite(difference):
            self.largest = ratios if self.largest is None else torch.maximum(self.largest, ratios)
            self.learnt += 1

    def fit(self, ratios: Tensor) -> None:
        """Discards the learnt limits if other tensors are trained than before."""
        if self.largest is not None and self.largest.shape != ratios.shape:
            self.learnt, self.largest = 0, None

    def state_dict(self) -> dict[str, Any]:
        """Returns what was learnt, for the checkpoint."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Bound":
        """Restores a bound. Older versions saved the first differences, each the largest of all tensors."""
        common = max(state["seen"]) if len(state.get("seen", [])) >= LEARNING_REPEATS else state.get("common", 0.0)
        learnt, largest = int(state.get("learnt", 0)), state.get("largest")
        return cls(bool(state["varies"]), int(state["agreed"]), learnt, largest, float(common))


class NoRecheck:
    """Never repeats anything.

    Attributes:
        every: steps between two repetitions; 0.
        exact: whether the machine of the newest repetition gives the same bits again.
        found: the newest fault; None if there was none.
        compared: the results of the newest repetition, by part.
        table: what the ranks computed in it for each other; None if they were not compared.
        varies: whether a model's gradients were found to differ without a fault.
    """

    every = 0
    exact = True
    varies = False

    def __init__(self) -> None:
        self.found: Finding | None = None
        self.compared: dict[str, Compared] = {}
        self.table: Table | None = None

    def due(self, step: int) -> bool:
        """Returns whether step number `step`, counted from 0, is repeated: never."""
        return False

    def rehearse(self, step: int) -> None:
        """Repeats nothing."""

    def repeats(self, step: int) -> bool:
        """Returns whether step number `step` is computed twice, judged or not: never."""
        return False

    def forget(self) -> None:
        """Discards the results of the newest repetition, and so frees their memory."""
        self.compared, self.found, self.table = {}, None, None

    def of_step(self, state: TrainState, buffers: SavedBuffers, tools: StepTools) -> NoRepeat:
        """Returns what repeats this step's gradient: nothing."""
        return NO_REPEAT

    def of_update(self, state: TrainState, parallel: SingleProcess) -> NoRepeat:
        """Returns what repeats this step's update: nothing."""
        return NO_REPEAT

    def judge_of(self, step: int, part: str, eps: float) -> Judge:
        """Returns a function that judges the repetition of a part: it finds no difference."""
        return lambda compared, everywhere: torch.zeros_like(everywhere[0])

    def limit(self, part: str) -> float:
        """Returns the largest difference allowed: no difference is judged."""
        return LARGEST

    def agreed(self, part: str) -> int:
        """Returns how often a part had the same bits again: never."""
        return 0

    def has_repeated(self, part: str) -> bool:
        """Returns whether a part ever had the same result again, or nearly the same: never."""
        return False

    def differing_part(self, reading: Reading) -> str:
        """Returns the part of a step whose repetition differs: empty."""
        return ""

    def runs_out_of_memory(self, reading: Reading) -> bool:
        """Returns whether repetitions end with this step, for lack of memory: never."""
        return False

    def news(self) -> str:
        """Returns why ranks cannot be compared, once: empty."""
        return ""

    def learn(self, reading: Reading) -> None:
        """Does nothing."""

    def learn_limit(self, part: str) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing to save."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing."""


class Recheck(NoRecheck):
    """Repeats a gradient and an update every `every` steps.

    Attributes:
        bounds: for `gradient` and `update`; with `across`, also for `neighbour`.
        across: whether each rank also computes the next rank's micro-batch.
        stopped: whether repetitions have ended for the whole run, as older versions decided.
        exhausted: whether repetitions have ended in this process, for lack of memory. It is not part of the state: the
            run may be resumed on a larger machine.
    """

    def __init__(self, every: int, *, across: bool = False) -> None:
        super().__init__()
        self.every, self.across = every, across
        self.bounds = {"gradient": Bound(), "update": Bound()} | ({"neighbour": Bound()} if across else {})
        self.stopped = self.exhausted = False
        self._rehearsed: int | None = None
        self._unlike: dict[str, bool] = {}  # why ranks could not be compared, and whether the user was told
        self._allowed: dict[str, float] = {}  # the limits that the newest repetition was compared with

    @property
    def varies(self) -> bool:
        """Whether the model's gradients differ without a fault."""
        return self.bounds["gradient"].varies

    def due(self, step: int) -> bool:
        """Returns whether step number `step`, counted from 0, is repeated and judged."""
        return not (self.stopped or self.exhausted) and (step + 1) % self.every == 0

    def rehearse(self, step: int) -> None:
        """Also repeats step number `step`, without judging it, so that a lack of memory shows early."""
        self._rehearsed = step

    def repeats(self, step: int) -> bool:
        """Returns whether step number `step` is computed twice: because it is due, or for the rehearsal."""
        return self.due(step) or (step == self._rehearsed and not (self.stopped or self.exhausted))

    def forget(self) -> None:
        """Discards the results of the newest repetition, and so frees their memory."""
        super().forget()
        self._allowed = {}

    def of_step(self, state: TrainState, buffers: SavedBuffers, tools: StepTools) -> NoRepeat:
        """Returns what repeats the gradient of this step; call it after the randomness was seeded.

        Args:
            state: where the step starts.
            buffers: the buffers' values from before the forward pass.
            tools: everything that acts in the step.
        """
        self.forget()
        if not self.repeats(state.step):
            return NO_REPEAT
        device = next(state.model.parameters()).device
        self.exact = repeats_exactly(state.model, device)
        eps, shift = torch.finfo(getattr(tools.precision, "dtype", torch.float32)).eps, NO_SHIFT
        if self.across and not self.bounds["neighbour"].varies:
            shift = Shift(tools.parallel, self.exact, self.due(state.step), self._keep)
        return RepeatGradient(self.judge_of(state.step, "gradient", eps), state.model, buffers, tools, device, shift)

    def _keep(self, table: Table | str) -> None:
        """Keeps what the ranks computed for each other, or why they are not compared."""
        if isinstance(table, str):
            self._unlike.setdefault(table, False)
        else:
            self.table = table

    def news(self) -> str:
        """Returns why ranks cannot be compared, if the user was not told yet; empty otherwise."""
        why = next((each for each, told in self._unlike.items() if not told), "")
        if why:
            self._unlike[why] = True
        return why

    def of_update(self, state: TrainState, parallel: SingleProcess) -> NoRepeat:
        """Returns what repeats the update of one tensor; call it just before the update."""
        if not self.repeats(state.step):
            return NO_REPEAT
        # The rehearsal takes the largest tensor, which needs the most memory.
        turn = (state.step + 1) // self.every if self.due(state.step) else None
        chosen = next_tensor(state.optimizer, turn)
        if chosen is None:
            return NO_REPEAT
        return RepeatUpdate(self.judge_of(state.step, "update", UPDATE_EPS), state, chosen, parallel)

    def judge_of(self, step: int, part: str, eps: float) -> Judge:
        """Returns a function that judges the repetition of a part; it returns 0 in the rehearsal.

        Args:
            step: number of the step, counted from 0.
            eps: precision of the dtype in which most is computed.
        """
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
        # The newest repetition was divided by the limit of that time, so a limit learnt since then would not fit it.
        return self._allowed.get(part, self.bounds[part].limit(self.exact))

    def agreed(self, part: str) -> int:
        """Returns how often a part had the same bits again so far."""
        return self.bounds[part].agreed

    def has_repeated(self, part: str) -> bool:
        """Returns whether a part ever had the same result again, or one within the limits that are being learnt.

        Of ranks, also whether two of them agree now.
        """
        bound = self.bounds[part]
        if part == "neighbour" and self.table is not None and not self.table.unequal.any(dim=1).all():
            return True
        return bound.agreed > 0 or bound.learnt > 0 or bound.common > 0

    def differing_part(self, reading: Reading) -> str:
        """Returns the part of a step whose repetition differs: `gradient`, `update`, or empty for neither."""
        if reading.recheck > self.limit("gradient"):
            return "gradient"
        return "update" if reading.recheck_update > self.limit("update") else ""

    def learn(self, reading: Reading) -> None:
        """Learns from the differences of an applied step, which were no fault."""
        if self.due(reading.step - 1) and not self.differing_part(reading):
            for part, difference in (("gradient", reading.recheck), ("update", reading.recheck_update)):
                if part in self.compared and difference >= 0:
                    compared = self.compared[part]
                    ratios = compared.ratios if compared.everywhere is None else compared.everywhere
                    self.bounds[part].learn(difference, ratios, self.exact)
            if self.table is not None:
                self.bounds["neighbour"].agreed += 1

    def runs_out_of_memory(self, reading: Reading) -> bool:
        """Ends repetitions in this process if the step ran out of memory; returns whether it is the first to do so."""
        new = min(reading.recheck, reading.recheck_update) < 0 and not self.exhausted
        self.exhausted = self.exhausted or new
        return new

    def learn_limit(self, part: str) -> None:
        """Learns the limits of a part from now on, because its bits differ without a fault."""
        self.bounds[part].varies = True

    def state_dict(self) -> dict[str, Any]:
        """Returns what was learnt, for the checkpoint."""
        return {**{part: bound.state_dict() for part, bound in self.bounds.items()}, "stopped": self.stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it; the checkpoint of a guard without repetitions is empty."""
        self.forget()
        self.stopped = bool(state.get("stopped", False))
        self.bounds = {part: Bound.of_state(state.get(part, vars(Bound()))) for part in self.bounds}


def recheck_every(steps: int, across: str = "none") -> NoRecheck:
    """Returns the `Recheck` that repeats every `steps` steps; 0 for never.

    Args:
        across: `ranks` to compare ranks too, else `none`.

    Raises:
        ConfigError: `steps` is negative, or `across` is unknown.
    """
    if steps < 0:
        raise ConfigError(f"guard.recheck_every={steps} is below 0: 250 is the default; 0 repeats nothing")
    if across not in MODES:
        raise ConfigError(f"guard.recheck_across={across} is not one of {', '.join(MODES)}")
    return Recheck(steps, across=across == "ranks") if steps else NoRecheck()


def repeats_exactly(model: nn.Module, device: torch.device) -> bool:
    """Returns whether the same computation must give the same bits: with strict kernels, or uncompiled on a CPU."""
    strict = torch.are_deterministic_algorithms_enabled()
    return strict or (device.type == "cpu" and compiled_shape(model) is None)


def collect_finding(
    recheck: NoRecheck, part: str, place: str, gradient_again: Callable[[Compared], Tensor | None]
) -> Finding:
    """Collects what is known about the newest repetition of a part; waits for the device.

    Args:
        place: device, host and rank.
        gradient_again: see `ReadStep`.
    """
    compared, limit, agreed = recheck.compared.get(part), recheck.limit(part), recheck.agreed(part)
    if compared is None:
        return Finding(part, False, [], "", agreed, limit, place)
    ratios, limits = compared.ratios.tolist(), [0.0] * len(compared.names)
    if compared.limits is not None:
        limits = compared.limits.tolist()
    exceeding = [each for each in zip(compared.names, ratios, limits, strict=True) if each[1] > each[2]]
    exceeding.sort(key=lambda each: -each[1] / (each[2] or 1.0))
    again = compared.again or partial(gradient_again, compared)
    equal = third_equals(again, compared) if exceeding and limit == 0 else ""
    allowed = exceeding[0][2] if exceeding else limit
    return Finding(part, bool(exceeding), [each[:2] for each in exceeding], equal, agreed, allowed, place)


def third_equals(compute_again: Callable[[], Tensor | None], compared: Compared) -> str:
    """Computes a third time; returns which result that equals, as in `Finding`."""
    try:
        third = compute_again()
    except Exception:  # a user's model may raise anything, and the two results are known
        return ""
    if third is None:
        return ""
    if torch.equal(third, compared.first):
        return "first"
    return "second" if torch.equal(third, compared.second) else "neither"
