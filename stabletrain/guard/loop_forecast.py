"""The forecast of a user's own loop, fed with what can be measured without running the model again.

| signal | measured from |
|---|---|
| `grad_norm`, `loss`, `loss_scale` | the step's own numbers; the loss is 0 in an attached loop if it is not known |
| `weights`, `update_ratio` | the weights before and after the update, for each place in the model |
| `g_over_sqrt_v` | the gradients and Adam's second moments after the update |

Activations, attention, normalisation layers, log Z, fp16's headroom and the margin of the update need a forward pass:
an own loop lacks these signals, and a signal that is not measured adds nothing to the probability.
"""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from stabletrain.extension import HORIZON, NoForecast, Prediction, extension
from stabletrain.guard.in_code import in_code
from stabletrain.guard.incidents import plain_number
from stabletrain.guard.judge import Judge
from stabletrain.monitors.probe import Probe, measure_gradients
from stabletrain.records import Reading, TrainState
from stabletrain.tracking.tracker import NoTracker

KEYS = ("lr", "initial_lr", "betas", "weight_decay")
"""Keys of a parameter group that the fixes depend on."""


class NoLoopForecast(NoForecast):
    """Measures and predicts nothing. Base class of `LoopForecast`."""

    def measuring(self) -> AbstractContextManager[None]:
        """Returns a context in which the optimizer's step runs, and which measures it: nothing."""
        return nullcontext()

    def after_step(self, reading: Reading) -> list[Prediction]:
        """Adds an applied step; returns what is to be said now: nothing.

        Args:
            reading: its numbers; `reading.step` is its number as the guard counts.
        """
        return []


class LoopForecast(NoLoopForecast):
    """Looks at every `every`-th applied step.

    A look copies the weights until the update is done, and reads two vectors from the device.

    Args:
        every: applied steps between two looks, at least 1.
        state: model and optimizer.
        judge: knows what the fixes depend on: the precision, and whether gradients are clipped.
        tracker: receives one line if something cannot be measured.
    """

    def __init__(self, every: int, state: TrainState, judge: Judge, tracker: NoTracker) -> None:
        self._forecast = extension().forecast(HORIZON, "alarm")
        self._every, self._state, self._judge, self._tracker = every, state, judge, tracker
        self._applied, self._failed = 0, False
        self._measured: Mapping[str, float] = {}

    @contextmanager
    def measuring(self) -> Generator[None]:
        """A context in which the optimizer's step runs. If a look is due, measures weights and update as monitors do.

        A step that is taken again is measured again. All ranks must enter it: norms of sharded tensors communicate.
        """
        if (self._applied + 1) % self._every:
            yield
            return
        model, optimizer, probe = self._state.model, self._state.optimizer, Probe()
        before = probe.attempt("the weights", lambda: measure_gradients(model))
        yield
        if before is not None:
            probe.attempt("the update", lambda: before.updates(model, optimizer))
        self._measured = probe.metrics
        if probe.failure and not self._failed:
            self._failed = True
            self._tracker.note(f"forecast_every={self._every}: {probe.failure}")

    def after_step(self, reading: Reading) -> list[Prediction]:
        """Adds an applied step; if a look is due, returns the predictions to print now, with fixes for any loop."""
        self._forecast.add_loss(reading.loss)
        self._applied += 1
        if self._applied % self._every:
            return []
        # The rate that the fixes lower is the peak rate, which a scheduler keeps as `initial_lr`.
        group = self._state.optimizer.param_groups[0]
        known: dict[str, Any] = {key: plain_number(group[key]) for key in KEYS if key in group}
        if "lr" in known:
            known["lr"] = max(known["lr"], known.get("initial_lr", 0.0))
        clipping = "norm" if self._judge.clips else "none"
        self._forecast.set_run({"precision": self._judge.precision.name, "clipping": clipping}, known)
        numbers = {"grad/norm": reading.grad_norm, "lr": reading.lr, "precision/loss_scale": reading.loss_scale}
        found = self._forecast.look(reading.step, {**self._measured, **numbers})
        self._measured = {}
        return [for_any_loop(each) for each in found]

    def cumulative_state(self) -> dict:
        """What a rollback does not undo: what was said."""
        return self._forecast.cumulative_state()

    def load_cumulative_state(self, state: dict) -> None:
        """Restores it."""
        self._forecast.load_cumulative_state(state)

    def state_dict(self) -> dict:
        """The series of the last looks, what was said, and the number of applied steps."""
        return {**self._forecast.state_dict(), "applied": self._applied}

    def load_state_dict(self, state: dict) -> None:
        """Restores them. A state that was saved without a forecast has none."""
        self._forecast.load_state_dict(state)
        self._applied = state.get("applied", 0)


def for_any_loop(found: Prediction) -> Prediction:
    """Returns a prediction whose fixes hold in any training loop."""
    if not found.fix:
        return found
    fix = tuple(map(in_code, found.fix))
    return replace(found, fix=fix, text=found.text.removesuffix(found.fix[0]) + fix[0])


def forecast_of_loop(every: int, state: TrainState, judge: Judge, tracker: NoTracker) -> NoLoopForecast:
    """Returns the forecast that looks at every `every`-th applied step; for 0 none."""
    return LoopForecast(every, state, judge, tracker) if every else NoLoopForecast()
