"""Monitors: inspect the inside of a step every `every` steps, without changing a bit of the run.

| option | inspects |
|---|---|
| none | nothing |
| default | activations, norms, attention, log Z, gradients, weights, updates: per block or top-level module |
| full | the same, plus norms of every parameter and the top Hessian eigenvalue |

An inspection has two halves, one before and one after the update. Activations are measured in a separate forward pass
(`forward.py`). A failure inside a monitor raises one alarm and drops its metrics; it never ends the run.
"""

from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.monitors.probe import (
    Forward,
    Gradients,
    Loss,
    Metrics,
    Probe,
    measure_forward,
    measure_gradients,
    measure_hessian,
)
from stabletrain.monitors.rolling import Alarm
from stabletrain.records import Batch

IN_A_ROW = 3
"""Consecutive inspections that must find gradients too small before the alarm; the first steps may look like this."""


@dataclass
class NoMonitors:
    """Inspects nothing. Base class of all monitors, and what each must offer. None changes a bit of the run."""

    def due(self, step: int, total: int) -> bool:
        """Returns whether to inspect step number `step`, counted from 1, in a run of `total` steps: never."""
        return False

    def before(self, model: nn.Module, optimizer: Optimizer, batch: Batch, precision: Forward, objective: Loss) -> None:
        """Runs the first half of an inspection, after backward and before clipping. Does nothing.

        Args:
            model: with unscaled gradients in `.grad`.
            optimizer: before its step.
            batch: one micro-batch on the model's device.
            precision: autocast settings of the forward pass.
            objective: the run's loss.
        """

    def after(self, model: nn.Module, optimizer: Optimizer, applied: bool) -> tuple[Metrics, list[Alarm]]:
        """Runs the second half of an inspection, after the update. Returns no metrics and no alarms.

        Args:
            model: with the clipped gradients in `.grad`.
            optimizer: after its step.
            applied: whether the update was applied; if not, there are no metrics of updates.

        Returns:
            metrics, and new alarms: each kind is raised once in a run.
        """
        return {}, []

    def state_dict(self) -> dict:
        """Returns what later inspections depend on, for a checkpoint: nothing."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Restores it. Does nothing."""


@dataclass
class Monitors(NoMonitors):
    """Inspects a step per block or top-level module.

    Metrics are named `monitors/<what>/<place>`, and `monitors/<what>` or `monitors/<what>_max` over all places.

    Attributes:
        every: steps between inspections; the first and the last step are always inspected.
        margin_every: inspections between two searches along the update, which cost five forward passes; 0: none.
    """

    every: int
    margin_every: int = field(default=0, kw_only=True)
    _inspections: int = field(init=False, repr=False, default=0)
    _searched: tuple[Batch, Loss] | None = field(init=False, repr=False, default=None)
    _raised: list[str] = field(init=False, repr=False, default_factory=list)
    _starving: int = field(init=False, repr=False, default=0)
    _probe: Probe = field(init=False, repr=False, default_factory=Probe)
    _gradients: Gradients | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"monitors.every={self.every} is below 1: use monitors=none for no monitors")
        if self.margin_every < 0:
            raise ConfigError(f"monitors.margin_every={self.margin_every} is below 0: use 0 for no search")

    def due(self, step: int, total: int) -> bool:
        """Whether to inspect step number `step`, counted from 1: the first, the last, and every `every` steps."""
        return step in (1, total) or step % self.every == 0

    def before(self, model: nn.Module, optimizer: Optimizer, batch: Batch, precision: Forward, objective: Loss) -> None:
        """Runs the first half of an inspection."""
        self._probe = probe = Probe()
        probe.attempt("the activations", lambda: measure_forward(model, batch, precision, objective))
        self._gradients = probe.attempt("the gradients", lambda: measure_gradients(model))
        searches = self.margin_every > 0 and self._inspections % self.margin_every == 0
        self._searched = (batch, objective) if searches else None
        self._inspections += 1

    def after(self, model: nn.Module, optimizer: Optimizer, applied: bool) -> tuple[Metrics, list[Alarm]]:
        """Runs the second half of an inspection."""
        probe, self._probe = self._probe, Probe()
        gradients, self._gradients = self._gradients, None  # frees the copy of the weights
        if applied and gradients is not None:
            probe.attempt("the updates", lambda: gradients.updates(model, optimizer))
            if self._searched is not None:
                batch, objective = self._searched
                probe.attempt("the margin of the update", lambda: gradients.update_margin(model, batch, objective))
        self._searched = None
        signs = probe.signs(applied)
        starving = signs.pop("starving", None)
        if applied:
            self._starving = self._starving + 1 if starving else 0
        if self._starving >= IN_A_ROW:
            signs["vanishing"] = signs.get("vanishing") or starving
        alarms = [Alarm(kind, text) for kind, text in signs.items() if text and kind not in self._raised]
        self._raised += [alarm.kind for alarm in alarms]
        return probe.metrics, alarms

    def state_dict(self) -> dict:
        """Raised alarms, the number of inspections, and of the last ones in a row that found gradients too small."""
        return {"raised": list(self._raised), "starving": self._starving, "inspections": self._inspections}

    def load_state_dict(self, state: dict) -> None:
        """Restores them. A checkpoint of a run without monitors has none."""
        self._raised, self._starving = list(state.get("raised", [])), state.get("starving", 0)
        self._inspections = state.get("inspections", 0)


@dataclass
class FullMonitors(Monitors):
    """Adds norms of every gradient and weight and the Hessian's top eigenvalue to `Monitors`.

    Attributes:
        hessian_iterations: power iterations; 0 disables the Hessian.
        hessian_samples: number of samples of the micro-batch to compute it on.
    """

    hessian_iterations: int
    hessian_samples: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hessian_iterations < 0:
            raise ConfigError(f"monitors.hessian_iterations={self.hessian_iterations} is below 0: use 0 for no Hessian")
        if self.hessian_samples < 1:
            raise ConfigError(
                f"monitors.hessian_samples={self.hessian_samples} is below 1: use monitors.hessian_iterations=0 for "
                "no Hessian"
            )

    def before(self, model: nn.Module, optimizer: Optimizer, batch: Batch, precision: Forward, objective: Loss) -> None:
        """Runs the first half of an inspection; see `Monitors`."""
        super().before(model, optimizer, batch, precision, objective)
        if self._gradients is not None:
            self._probe.attempt("the layers", self._gradients.layers)
        if self.hessian_iterations:
            given = objective, self.hessian_iterations, self.hessian_samples
            self._probe.attempt("the Hessian", lambda: measure_hessian(model, batch, *given))
