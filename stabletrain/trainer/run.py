"""One training run, built: what the loop needs, and nothing of how it was chosen."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stabletrain.machine.hardware import Usage
from stabletrain.monitors.rolling import RollingStats
from stabletrain.protocols import Tools
from stabletrain.records import Batch, TrainState
from stabletrain.trainer.history import History
from stabletrain.trainer.roles import Batches, IncidentHandler, Monitors, Page, Parallelism, RunFolder, Tracker
from stabletrain.trainer.rollback import Rollback


@dataclass(frozen=True)
class Plan:
    """When what happens, in steps; see `conf/config.yaml`."""

    steps: int
    grad_accum_steps: int
    eval_every: int
    log_every: int


@dataclass
class TrainingData:
    """The run's data, on the host.

    Attributes:
        batches: the training batch of a step, prefetched.
        validation: the batches of one evaluation.
        load: any training batch by its step number, not prefetched.
        unit: what throughput counts: `tok`, `img` or `sample`.
    """

    batches: Batches
    validation: Callable[[], Iterator[Batch]]
    load: Callable[[int], Batch]
    unit: str


@dataclass
class Monitoring:
    """What watches the run, read-only.

    Attributes:
        monitors: inspect a step now and then.
        rolling: statistics of the last steps.
        usage: how much of the machine is used.
    """

    monitors: Monitors
    rolling: RollingStats
    usage: Usage


@dataclass
class Forensics:
    """What explains an incident.

    Attributes:
        handler: investigates a step and files the incident.
        model_factory: makes another whole model, with arbitrary weights.
        metadata: the run's configuration, kept with an incident.
    """

    handler: IncidentHandler
    model_factory: Callable[[], nn.Module]
    metadata: Mapping[str, Any]


@dataclass
class Output:
    """Where the run's results go.

    Attributes:
        tracker: metrics, events, messages.
        folder: `run.json`.
        page: the run's own page, written when the run is over.
        closing: the last lines on the terminal; called when the run has finished, and writes the page.
    """

    tracker: Tracker
    folder: RunFolder
    page: Page
    closing: Callable[[], str]


@dataclass
class TrainingRun:
    """One run, built.

    Attributes:
        plan: the cadence.
        state: model, optimizer and step number.
        tools: everything that acts in a step.
        device: where the model lives.
        parallel: the ranks that train together.
        data, monitoring, forensics, output: see their classes.
        rollback: the saved states, in memory and on disk.
        history: what the run remembers of itself.
    """

    plan: Plan
    state: TrainState
    tools: Tools
    device: torch.device
    parallel: Parallelism
    data: TrainingData
    monitoring: Monitoring
    forensics: Forensics
    output: Output
    rollback: Rollback
    history: History
