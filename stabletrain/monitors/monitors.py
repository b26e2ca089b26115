"""Monitors: what a step looks like from inside, every so many steps, without changing a bit of it.

| option | looks at |
|---|---|
| none | nothing |
| default | activations, attention, log Z, gradients, updates: by block, or top-level module |
| full | that, norms of every parameter, and the top Hessian eigenvalue |

A look has two halves, before and after the update, around which the step stays as it is. What needs activations is a
pass of its own (`forward.py`). Whatever fails inside is told once, as an alarm, and its metrics are left out: watching
never ends a run.
"""

from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.monitors.probe import Forward, Metrics, Probe
from stabletrain.monitors.rolling import Alarm
from stabletrain.records import Batch

IN_A_ROW = 3
"""Looks at which a sign that the first steps may show as well must hold before it is an alarm."""


@dataclass
class NoMonitors:
    """Looks at nothing."""

    def due(self, step: int, total: int) -> bool:
        """Never."""
        del step, total
        return False

    def before(self, model: nn.Module, optimizer: Optimizer, batch: Batch, precision: Forward) -> None:
        """Nothing."""
        del model, optimizer, batch, precision

    def after(self, model: nn.Module, optimizer: Optimizer, applied: bool) -> tuple[Metrics, list[Alarm]]:
        """No metrics, no alarms."""
        del model, optimizer, applied
        return {}, []

    def state_dict(self) -> dict:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Nothing."""
        del state


@dataclass
class Monitors(NoMonitors):
    """The look at a step by block and top-level module.

    Names of metrics are `monitors/<what>/<place>`, and `monitors/<what>` or `monitors/<what>_max` over all places.

    Attributes:
        every: steps between looks; the first step and the last are always looked at.
    """

    every: int
    _raised: list[str] = field(init=False, repr=False, default_factory=list)
    _starving: int = field(init=False, repr=False, default=0)
    _look: Probe = field(init=False, repr=False, default_factory=Probe)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"monitors.every={self.every} is below 1: use monitors=none for no monitors")

    def due(self, step: int, total: int) -> bool:
        """Whether the step of that number, counted from 1, is looked at: the first, the last, and every so many."""
        return step in (1, total) or step % self.every == 0

    def before(self, model: nn.Module, optimizer: Optimizer, batch: Batch, precision: Forward) -> None:
        """The first half: call it when the raw gradients are there and the weights are still the step's own.

        Args:
            model: with unscaled gradients in `.grad`.
            optimizer: before its step.
            batch: one micro-batch on the model's device.
            precision: what the forward pass runs in.
        """
        del optimizer
        self._look = look = Probe()
        look.attempt("the activations", lambda: look.forward(model, batch, precision))
        look.attempt("the gradients", lambda: look.gradients(model))

    def after(self, model: nn.Module, optimizer: Optimizer, applied: bool) -> tuple[Metrics, list[Alarm]]:
        """The second half: call it after the update.

        Args:
            model: with the gradients in `.grad` as the optimizer saw them.
            optimizer: after its step.
            applied: whether the update reached the weights; if not, nothing is said of updates.

        Returns:
            the metrics, and the alarms that are new: each kind is raised once in a run.
        """
        look, self._look = self._look, Probe()  # the held weights are let go
        if applied:
            look.attempt("the updates", lambda: look.updates(model, optimizer))
        signs = look.signs(applied)
        starving = signs.pop("starving", None)
        if applied:
            self._starving = self._starving + 1 if starving else 0
        if self._starving >= IN_A_ROW:
            signs["vanishing"] = signs.get("vanishing") or starving
        alarms = [Alarm(kind, text) for kind, text in signs.items() if text and kind not in self._raised]
        self._raised += [alarm.kind for alarm in alarms]
        return look.metrics, alarms

    def state_dict(self) -> dict:
        """Which alarms were raised, and how many looks in a row gradients have been starving."""
        return {"raised": list(self._raised), "starving": self._starving}

    def load_state_dict(self, state: dict) -> None:
        """Puts them back; a checkpoint of a run without monitors has none."""
        self._raised, self._starving = list(state.get("raised", [])), state.get("starving", 0)


@dataclass
class FullMonitors(Monitors):
    """`Monitors`, and what costs more: two norms for every parameter, and the Hessian's top eigenvalue.

    Attributes:
        hessian_iterations: steps of the power iteration; 0 leaves the Hessian out.
        hessian_samples: samples of the micro-batch it is computed on.
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

    def before(self, model: nn.Module, optimizer: Optimizer, batch: Batch, precision: Forward) -> None:
        """As in `Monitors`."""
        super().before(model, optimizer, batch, precision)
        look = self._look
        look.attempt("the layers", look.layers)
        if self.hessian_iterations:
            iterations, samples = self.hessian_iterations, self.hessian_samples
            look.attempt("the Hessian", lambda: look.hessian(model, batch, iterations, samples))
