"""A training run, ready for the loop."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stabletrain.data.batches import Prefetch
from stabletrain.extension import NoForecast, NoMeter, NoPage, NoPreflight
from stabletrain.forensics.handler import NoIncidentHandler
from stabletrain.machine.hardware import Usage
from stabletrain.monitors.monitors import NoMonitors
from stabletrain.monitors.rolling import RollingStats
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Batch, TrainState
from stabletrain.tools import Tools
from stabletrain.tracking.run_folder import NoRunFolder
from stabletrain.tracking.tracker import NoTracker
from stabletrain.trainer.history import History
from stabletrain.trainer.rollback import Rollback
from stabletrain.trainer.saved_states import SavedStates
from stabletrain.trainer.step_graph import LaunchedSteps

NO_TRACKER = NoTracker()


@dataclass(frozen=True)
class Plan:
    """The cadence of the run, in steps; see `conf/config.yaml`."""

    steps: int
    grad_accum_steps: int
    eval_every: int
    log_every: int


@dataclass
class TrainingData:
    """The run's data, on the host.

    Attributes:
        batches: training batches by step number, prefetched.
        validation: returns the batches of one evaluation.
        load: returns the training batch of a step number, not prefetched.
        unit: unit of throughput: `tok`, `img` or `sample`.
        to_device: moves a batch to the training device; see `data/batches.py`.
        kept: the rest of the batch of a step that is taken again without its guilty samples; None for any other step.
    """

    batches: Prefetch
    validation: Callable[[], Iterator[Batch]]
    load: Callable[[int], Batch]
    unit: str
    to_device: Callable[[Batch], Batch]
    kept: Batch | None = None

    def batch(self, step: int) -> Batch:
        """Returns the batch of the next step, number `step`."""
        kept, self.kept = self.kept, None
        return self.batches.get(step) if kept is None else kept


@dataclass
class Monitoring:
    """Everything that watches the run without changing it.

    Attributes:
        monitors: inspect a step every so often.
        rolling: statistics of the last steps.
        usage: model FLOPs utilisation and peak memory.
        forecast: foretells trouble from what the monitors saw.
        meter: what the GPUs use.
        preflight: looks at the run before its first step.
    """

    monitors: NoMonitors
    rolling: RollingStats
    usage: Usage
    forecast: NoForecast
    meter: NoMeter = field(default_factory=NoMeter)
    preflight: NoPreflight = field(default_factory=NoPreflight)


@dataclass
class Forensics:
    """Everything that explains an incident.

    Attributes:
        handler: investigates a step and writes the incident.
        model_factory: builds another unsharded model, with arbitrary weights.
        metadata: the run's configuration and the time it started, stored with each incident.
    """

    handler: NoIncidentHandler
    model_factory: Callable[[], nn.Module]
    metadata: Mapping[str, Any]


@dataclass
class Output:
    """Where the run's results go.

    Attributes:
        tracker: receives metrics, events and messages.
        folder: writes `run.json`.
        page: writes the run's `report.html`.
        closing: writes `report.html` of a finished run, and returns the last lines for the terminal.
        halted: returns the lines that follow the message of a halt.
    """

    tracker: NoTracker
    folder: NoRunFolder
    page: NoPage
    closing: Callable[[], str]
    halted: Callable[[], str] = str


@dataclass
class TrainingRun:
    """A training run.

    Attributes:
        plan: the cadence.
        state: model, optimizer and step number.
        tools: everything that acts in a step.
        device: where the model lives.
        parallel: the ranks that train together.
        data, monitoring, forensics, output: see their classes.
        rollback: goes back to one of the saved states.
        history: what the run records about itself.
        compute: runs forward and backward of a step; see `step_graph.py`.
    """

    plan: Plan
    state: TrainState
    tools: Tools
    device: torch.device
    parallel: SingleProcess
    data: TrainingData
    monitoring: Monitoring
    forensics: Forensics
    output: Output
    rollback: Rollback
    history: History
    compute: LaunchedSteps = field(default_factory=LaunchedSteps)

    @property
    def saved(self) -> SavedStates:
        """The saved states, in memory and on disk."""
        return self.rollback.saved

    @property
    def tracker(self) -> NoTracker:
        """Where steps are logged; a null tracker during a replay, because those steps are in the log already."""
        return NO_TRACKER if self.rollback.replaying else self.output.tracker
