"""One run, built: what the loop needs, and nothing of how it was chosen."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from stabletrain.checkpoint.capture import Snapshots, Stateful
from stabletrain.checkpoint.checkpoints import NoCheckpoints
from stabletrain.compare.pages.one_run import NoPage
from stabletrain.forensics.handler import NoIncidentHandler
from stabletrain.machine.usage import Usage
from stabletrain.monitors.monitors import NoMonitors
from stabletrain.monitors.rolling import RollingStats
from stabletrain.parallel.single import SingleProcess
from stabletrain.protocols import Tools
from stabletrain.records import Batch, TrainState
from stabletrain.tracking.run_folder import NoRunFolder
from stabletrain.tracking.tracker import NoTracker

UNITS = {"tok": "tokens", "img": "images", "sample": "samples"}
"""What the pace counts, in short and in the metrics."""


@dataclass(frozen=True)
class Plan:
    """When what happens, in steps; see `conf/config.yaml`."""

    steps: int
    grad_accum_steps: int
    eval_every: int
    log_every: int


@dataclass
class History:
    """What a run remembers of itself across interruptions.

    Attributes:
        best_loss: lowest validation loss so far, nats; at `best_step`.
        val: the newest evaluation's metrics, after `val_step` steps.
        updates: optimizer steps that are in the weights.
        seconds: training time, without evaluations and checkpoints.
        units: tokens or images consumed.
        lost_steps, lost_seconds: how much of it was rolled back.
    """

    best_loss: float = math.inf
    best_step: int = 0
    val: dict[str, float] = field(default_factory=dict)
    val_step: int = 0
    updates: int = 0
    seconds: float = 0.0
    units: int = 0
    lost_steps: int = 0
    lost_seconds: float = 0.0

    def cumulative_state(self) -> dict:
        """What a rollback does not undo: time and data spent."""
        names = ("seconds", "units", "lost_steps", "lost_seconds")
        return {name: getattr(self, name) for name in names}

    def load_cumulative_state(self, lasting: dict) -> None:
        """Puts that back over a restored state, whose own time is not lost."""
        lost = lasting["seconds"] - self.seconds
        self.load_state_dict({**lasting, "lost_seconds": lasting["lost_seconds"] + lost})

    def state_dict(self) -> dict:
        """For the checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict) -> None:
        """From a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)


@runtime_checkable
class Batches(Protocol):
    """Training batches by step number; see `data/prefetch.py`."""

    def get(self, step: int) -> Batch: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class TrainingRun:
    """One run, built.

    Attributes:
        plan: the cadence.
        state: model, optimizer and step number.
        tools: what acts in a step.
        parallel: the ranks that train together.
        batches: the training batch of a step number, on the host.
        validation: the batches of one evaluation, on the host.
        device: where the model lives.
        monitors: what looks into a step now and then.
        rolling: what the last steps were like.
        snapshots: where states are held in memory.
        checkpoints: where states are saved.
        tracker: where numbers and events go.
        folder: `run.json`.
        parts: everything stateful beside model and optimizer, by name.
        history: what the run remembers of itself.
        unit: what the pace counts: `tok`, `img` or `sample`.
        usage: how much of the machine is used.
        forensics: what explains an incident.
        model_factory: makes the model once more, whole and with weights that are anything.
        load: any training batch by its step number, on the host.
        metadata: the run's configuration, to be kept with an incident.
        page: the run's own page, written when it is over.
        closing: what a person reads last; asked for when the run has finished, and writes the page.
    """

    plan: Plan
    state: TrainState
    tools: Tools
    parallel: SingleProcess
    batches: Batches
    validation: Callable[[], Iterator[Batch]]
    device: torch.device
    monitors: NoMonitors
    rolling: RollingStats
    snapshots: Snapshots
    checkpoints: NoCheckpoints
    tracker: NoTracker
    folder: NoRunFolder
    parts: Mapping[str, Stateful]
    history: History
    unit: str
    hardware_usage: Usage
    forensics: NoIncidentHandler
    model_factory: Callable[[], nn.Module]
    load: Callable[[int], Batch]
    metadata: Mapping[str, Any]
    page: NoPage
    closing: Callable[[], str]
