"""Slow spikes and divergence: faults that no single step shows, only the series of steps.

| kind | series | a change is |
|---|---|---|
| `slow_loss` | the loss | a rise |
| `slow_gradient` | log of the gradient norm | a rise |
| `update_length` | log of the update's length over the learning rate | a rise |
| `weight_growth` | growth of the weights' length over the update's length | a rise or a fall |
| `slow_validation` | the validation loss | above the best one by more than its noise (`validation_bound`) |

The first four are change-point tests (`monitors/change_point.py`), fed with applied steps only. With Adam the update's
length over the learning rate hardly varies from step to step, so a fault of the learning rate, the moments or the
gradients shows there first. Growth of the weights changes with weight decay, `eps` or momentum, or if something other
than the step changes them. A user's loop has tests of its own (`slow_loop.py`), because its loss may mean anything.

An alarm is raised once for each change, by the test that sees it first. All tests are then reset, so that the new level
becomes normal.

A run has diverged if it has lost half of what it had learnt, without any spike:

    level     mean loss of the last `window` applied steps
    learnt    the first losses minus the lowest level so far
    diverged  the level is above the lowest one by half of what was learnt, and by a fifth of the first losses

A run whose loss has only risen from the start has learnt nothing. It has diverged once its level is a fifth above the
first losses. Data of a new kind can have the same effect.
"""

import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from stabletrain.errors import ConfigError
from stabletrain.monitors.change_point import ChangePoint, median, threshold
from stabletrain.monitors.rolling import Alarm
from stabletrain.monitors.update_length import Lengths, NoLengths
from stabletrain.records import Reading

FIRST_LOSSES = 8
"""Number of losses whose median is the first level, from which the fall of the loss is measured."""

MIN_STD_SHARE = 0.02
"""Smallest standard deviation that is assumed of the loss, as a share of its fall so far."""

MIN_STDS = {"slow_gradient": 0.25, "update_length": 0.4, "weight_growth": 0.15}
"""Smallest standard deviations that are assumed of the other series: natural drifts are smaller."""

THRESHOLDS = {"slow_loss": 1.0, "slow_gradient": 2.5, "update_length": 2.0, "weight_growth": 1.0}
"""Multiples of `threshold(rate)`: these series drift more than the loss does."""

LARGEST_GROWTH = 3.0
"""Bound of the weights' growth over the update's length: rounding errors dominate it in tiny updates."""

LR_JUMP = 1.5
"""A change of the learning rate by this factor from one step to the next starts new series of lengths."""

TINY = 1e-30

RECENT_RATES = 48
"""Number of recent learning rates that are kept, to find whether the rate rose before a change."""


class NoSlowSpikes:
    """Looks for no slow spikes.

    Attributes:
        lengths: measures updates and weights within a step.
        suspects: whether a change is suspected: newer states must not count as healthy.
    """

    lengths = NoLengths()
    suspects = False

    def add(self, reading: Reading) -> list[Alarm]:
        """Returns no alarm."""
        return []

    def add_validation(self, step: int, loss: float) -> list[Alarm]:
        """Returns no alarm."""
        return []

    def ignore_trends(self) -> None:
        """Judges no trend of a user's loop from now on."""

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores nothing."""


class SlowSpikes(NoSlowSpikes):
    """Looks for slow spikes.

    Args:
        rate: false alarms in 100,000 clean steps for which the tests' threshold is chosen.

    Raises:
        ConfigError: `rate` is out of bounds.
    """

    min_stds = MIN_STDS
    way_back = "let guard.slow=rollback go back to before it"

    def __init__(self, rate: float) -> None:
        if not 0 < rate <= 100:
            raise ConfigError(
                f"guard.slow_rate={rate} is outside (0, 100]: it is the number of false alarms in 100,000 clean steps; "
                "0.1 is the default"
            )
        self.lengths = Lengths()
        self._tests = self._make_tests(threshold(rate))
        self._reset()

    def _make_tests(self, limit: float) -> dict[str, ChangePoint]:
        """Returns the test of each series."""
        return {kind: ChangePoint(factor * limit, down=kind == "weight_growth") for kind, factor in THRESHOLDS.items()}

    def _reset(self) -> None:
        """Starts all series from an empty history."""
        for test in self._tests.values():
            test.reset()
        self._first: list[float] = []
        self._weights: float | None = None
        self._rates: deque[float] = deque(maxlen=RECENT_RATES)
        self._validation: list[tuple[int, float]] = []
        self._risen = False

    @property
    def suspects(self) -> bool:
        """Whether a statistic is above half its threshold."""
        return any(test.statistic > 0.5 for test in self._tests.values())

    def add(self, reading: Reading) -> list[Alarm]:
        """Adds an applied step; returns an alarm if it reveals a change.

        A reading without `update` and `weights` (0) feeds only the tests of loss and gradient norm.
        """
        if self._rates and not 1 / LR_JUMP < reading.lr / max(self._rates[-1], TINY) < LR_JUMP:
            # The schedule's own step: in bf16 an update does not shrink as the learning rate does.
            for kind in self._tests.keys() & {"update_length", "weight_growth"}:
                self._tests[kind].reset()
        level = self._tests["slow_loss"].level
        values = self._values(reading)
        self._rates.append(reading.lr)
        if len(self._first) < FIRST_LOSSES:
            self._first.append(reading.loss)
        fall = max(median(self._first) - level, 0.0) if level is not None else 0.0
        floors = {"slow_loss": MIN_STD_SHARE * fall, **self.min_stds}
        passed = [
            kind for kind, value in values.items() if self._tests[kind].add(reading.step, value, floors[kind]) > 1
        ]
        if passed == ["slow_gradient"] and self._tests["slow_loss"].falling:
            passed = []  # gradients grow while training goes well, as residual branches that start at 0 wake up
        if not passed:
            return []
        alarm = self._alarm(passed[0], reading)
        for test in self._tests.values():
            test.reset()
        return [alarm]

    def _values(self, reading: Reading) -> dict[str, float]:
        """Returns the value of each series in this step."""
        before, self._weights = self._weights, reading.weights or self._weights
        values = {"slow_loss": reading.loss, "slow_gradient": math.log(max(reading.grad_norm, TINY))}
        if reading.update > 0 and reading.lr > 0:
            values["update_length"] = math.log(reading.update / reading.lr)
            if before:
                growth = (reading.weights - before) / reading.update
                values["weight_growth"] = min(max(growth, -LARGEST_GROWTH), LARGEST_GROWTH)
        return values

    def _alarm(self, kind: str, reading: Reading) -> Alarm:
        since = min(test.since for test in self._tests.values() if test.statistic > 0.5)
        steps = reading.step - since + 1
        shift = self._tests[kind].shift
        factor = math.exp(shift) if kind in ("slow_gradient", "update_length") else 0.0  # a loss may rise by thousands
        changes = {
            "slow_loss": f"the loss has been about {shift:.3g} above its trend for {steps} steps,",
            "slow_gradient": f"the gradient norm has been {factor:.3g} times its trend",
            "update_length": f"updates have been {factor:.3g} times as long as the learning rate implies",
            "weight_growth": f"the weights have {'grown' if shift > 0 else 'shrunk'} faster than before, by "
            f"{abs(shift):.2g} of an update's length in each step",
        }
        text = (
            f"slow spike: {changes[kind]} since about step {since}; {self._cause(kind, since, reading)}. "
            f"fix: look at what changed at step {since}, or {self.way_back}"
        )
        return Alarm(kind, text, since)

    def _cause(self, kind: str, since: int, reading: Reading) -> str:
        """Names the likely cause where there is evidence, or else what is possible and how to tell it apart."""
        usual = median(self._rates)
        if kind == "weight_growth" or self._suspected("weight_growth"):
            return "likely cause: weight decay, or something other than the optimizer's step that changes the weights"
        if reading.lr > 1.3 * usual > 0:
            return f"likely cause: the learning rate, which rose from {usual:.3g} to {reading.lr:.3g}"
        if kind == "update_length" or (self._suspected("update_length") and self._tests["update_length"].shift > 0):
            return (
                "possible causes: the learning rate that the optimizer uses, its moments, or, if it has none, larger "
                "gradients"
            )
        return (
            f"possible causes: other data since step {since}, or worse weights. The loss of a batch from before it "
            "tells them apart: it rises only with worse weights"
        )

    def _suspected(self, kind: str) -> bool:
        """Whether the test of a series, if there is one, suspects a change."""
        return kind in self._tests and self._tests[kind].statistic > 0.5

    def add_validation(self, step: int, loss: float) -> list[Alarm]:
        """Adds a validation loss; returns an alarm if the last ones are above the best by more than the noise.

        These are `CONFIRMATIONS`. Fewer mean nothing: a network with BatchNorm, at a high learning rate, can
        evaluate badly twice in a row.
        """
        if not math.isfinite(loss):
            return []
        self._validation = [*(each for each in self._validation if each[0] < step), (step, loss)]
        past = self._validation[:-CONFIRMATIONS]
        if len(past) < MIN_PAST:
            return []
        best_step, best = min(past, key=lambda each: each[1])
        bound = validation_bound([value for _, value in past])
        was, self._risen = self._risen, all(value > best + bound for _, value in self._validation[-CONFIRMATIONS:])
        if was or not self._risen:
            return []
        text = (
            f"slow spike: the validation loss is {loss:.4g}, for {CONFIRMATIONS} evaluations above its "
            f"best, {best:.4g} at step {best_step}, by more than its noise ({bound:.2g}); likely cause: data that "
            f"repeats or changed since step {best_step}, or overfitting. fix: take the checkpoint of the best loss, or "
            "let guard.slow=rollback go back to before it rose"
        )
        return [Alarm("slow_validation", text, best_step + 1)]

    def state_dict(self) -> dict[str, Any]:
        """All series and statistics, for the checkpoint."""
        return {
            "tests": {kind: test.state_dict() for kind, test in self._tests.items()},
            "first": list(self._first),
            # Always a number: a checkpoint whose values have other types than the live state's counts as damaged.
            "weights": self._weights or 0.0,
            "rates": list(self._rates),
            "validation": [list(each) for each in self._validation],
            "risen": self._risen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores them; resets all series if the checkpoint's run had no such tests."""
        if not state:
            self._reset()
            return
        for kind, test in self._tests.items():
            test.load_state_dict(state["tests"][kind])
        self._first, self._weights = list(state["first"]), state["weights"] or None
        self._rates = deque(state["rates"], maxlen=RECENT_RATES)
        self._validation = [(int(step), float(loss)) for step, loss in state["validation"]]
        self._risen = state["risen"]


CONFIRMATIONS, MIN_PAST = 3, 5
"""Evaluations that must be above the bound, and earlier evaluations that are needed to compute it."""

NOISE_FACTOR, FALL_SHARE, BEST_SHARE = 4.0, 0.05, 0.02
"""The bound above the best loss: the largest of this multiple of the usual rise, and these shares of the fall so far
and of the best loss."""


def validation_bound(losses: Sequence[float]) -> float:
    """Returns the bound within which a validation loss above the best of `losses` means nothing.

    The noise is the median of the rises between successive evaluations.

    Args:
        losses: earlier validation losses, oldest first, at least one.
    """
    best = min(losses)
    rises = [later - earlier for earlier, later in itertools.pairwise(losses) if later > earlier]
    noise = median(rises) if rises else 0.0
    return max(NOISE_FACTOR * noise, FALL_SHARE * (losses[0] - best), BEST_SHARE * abs(best))


def slow_spikes(mode: str | bool, rate: float, modes: Sequence[str]) -> NoSlowSpikes:
    """Returns what looks for slow spikes.

    Args:
        mode: the key `guard.slow`.
        rate: the key `guard.slow_rate`.
        modes: those that the guard has.

    Raises:
        ConfigError: the guard has no such mode, or the rate is out of bounds.
    """
    if mode is False:  # YAML reads `off` as false
        mode = "off"
    if mode == "rollback" and mode not in modes:
        raise ConfigError("guard.slow=rollback: this guard retains no state to go back to; use guard=rollback with it")
    if mode not in modes:
        raise ConfigError(f"guard.slow={mode} is not one of {', '.join(modes)}")
    return NoSlowSpikes() if mode == "off" else SlowSpikes(rate)


LOST_SHARE = 0.5
"""A run has diverged if it has lost this share of what it had learnt."""

MIN_RISE_SHARE = 0.2
"""The level must also rise by this share of the first level, more than the noise of a run that has learnt little."""


class Diverged(NamedTuple):
    """How a run has diverged.

    Attributes:
        text: one line about it.
        since: the step in the middle of the losses whose level was lowest: the rise begins about there.
    """

    text: str
    since: int


class NoDivergence:
    """Looks for no divergence."""

    def add(self, step: int, loss: float) -> Diverged | None:
        """Returns None."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores nothing."""


class Divergence(NoDivergence):
    """Looks for divergence.

    Args:
        window: number of losses in a level.
    """

    def __init__(self, window: int) -> None:
        self._first: list[float] = []
        self._losses: deque[float] = deque(maxlen=window)
        self._lowest: tuple[float, int] | None = None

    def add(self, step: int, loss: float) -> Diverged | None:
        """Adds the loss of an applied step, which is finite; returns whether the run has diverged, and how."""
        if len(self._first) < FIRST_LOSSES:
            self._first.append(loss)
        self._losses.append(loss)
        if len(self._losses) < (self._losses.maxlen or 0):
            return None
        level, first = sum(self._losses) / len(self._losses), median(self._first)
        lowest, lowest_step = self._lowest = self._lowest or (first, 1)
        if level <= lowest:
            self._lowest = (level, step)
        if level - lowest <= max(LOST_SHARE * (first - lowest), MIN_RISE_SHARE * abs(first)):
            return None
        since = max(lowest_step - len(self._losses) // 2, 1)
        text = (
            f"mean loss {level:.4g} in the last {len(self._losses)} updates, after {lowest:.4g} at step {lowest_step}"
        )
        return Diverged(f"the run has diverged: {text}", since)

    def state_dict(self) -> dict[str, Any]:
        """Losses and levels, for the checkpoint."""
        lowest, step = self._lowest or (0.0, 0)
        return {"first": list(self._first), "losses": list(self._losses), "lowest": lowest, "lowest_at": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores them; a checkpoint of a run that did not look for divergence has none."""
        self._first = list(state.get("first", []))
        self._losses = deque(state.get("losses", []), maxlen=self._losses.maxlen)
        self._lowest = (state["lowest"], int(state["lowest_at"])) if state.get("lowest_at") else None
