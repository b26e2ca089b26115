"""The roles that the training loop calls. Each has an implementation that does nothing, so "off" needs no branch."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from stabletrain.checkpoint.folder import OnEvent
from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.checkpoint.tree import Tree
from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.handler import IncidentSummary
from stabletrain.forensics.repro import Repro
from stabletrain.monitors.probe import Forward, Loss, Metrics
from stabletrain.monitors.rolling import Alarm
from stabletrain.parallel.ranks import Ranks
from stabletrain.parallel.whole import WholeState
from stabletrain.protocols import Parallel
from stabletrain.records import Batch, OwnNumbers, RankPart, TrainState


@runtime_checkable
class Batches(Protocol):
    """Training batches by step number; see `data/prefetch.py`."""

    def get(self, step: int) -> Batch: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class Tracker(Protocol):
    """Receives metrics, events and messages; see `tracking/tracker.py`."""

    def start(self, total: int, first: int) -> None: ...
    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...
    def event(self, kind: str, step: int, /, **fields: Any) -> None: ...
    def note(self, text: str) -> None: ...
    def alert(self, title: str, text: str) -> None: ...
    def progress(self, step: int, metrics: Mapping[str, Any], rate: float, unit: str, skipped: int) -> None: ...
    def evaluating(self, done: int, total: int) -> None: ...
    def summary(self, values: Mapping[str, Any]) -> None: ...
    def started(self) -> bool: ...
    def rewind(self, tick: int) -> None: ...
    def mark(self, step: int, tick: int) -> None: ...
    def close(self, exit_code: int) -> None: ...


@runtime_checkable
class RunFolder(Protocol):
    """Writes `run.json`; see `tracking/run_folder.py`."""

    id: str
    init_from: Mapping[str, Any]

    def learn(self, hardware: Mapping[str, Any]) -> None: ...
    def change(self, step: int, keys: Mapping[str, Any]) -> None: ...
    def abandon(self, reason: str) -> None: ...
    def finish(self, status: str, reason: str | None, final: Mapping[str, Any]) -> None: ...


@runtime_checkable
class WandbRun(Protocol):
    """The run in Weights & Biases; see `tracking/wandb.py`."""

    def start(
        self,
        folder: Path,
        run_id: str | None,
        config: Mapping[str, Any],
        typed: Sequence[str] = (),
        sweeping: bool = False,
    ) -> str: ...


@runtime_checkable
class Page(Protocol):
    """Writes the run's `report.html`; see `comparison/pages/one_run.py`."""

    def write(self, sample: str | None = None) -> None: ...


@runtime_checkable
class Monitors(Protocol):
    """Inspect a step before and after its update without changing it; see `monitors/`."""

    def due(self, step: int, total: int) -> bool: ...
    def before(
        self, model: nn.Module, optimizer: Optimizer, batch: Batch, precision: Forward, objective: Loss
    ) -> None: ...
    def after(self, model: nn.Module, optimizer: Optimizer, applied: bool) -> tuple[Metrics, list[Alarm]]: ...


@runtime_checkable
class IncidentHandler(Protocol):
    """Investigates a step and writes the incident; see `forensics/handler.py`."""

    newest: str

    def open(self, folder: Path, setting: RunSettings) -> None: ...
    def handle(
        self,
        make: Callable[[], Repro],
        kind: str,
        *,
        states: WholeState,
        classes: int | None,
        optimizer: Optimizer | None,
        limits: tuple[float, float] = (math.inf, math.inf),
    ) -> IncidentSummary | None: ...


@runtime_checkable
class Checkpoints(Protocol):
    """Writes checkpoints, and finds the one to restore; see `checkpoint/`."""

    @property
    def keeps(self) -> bool: ...
    def open(self, folder: Path, on_event: OnEvent, run: str | None = None) -> None: ...
    def due(self, step: int) -> bool: ...
    def save(
        self,
        step: int,
        tree: Tree,
        *,
        info: Mapping[str, Any],
        healthy: bool,
        val_loss: float | None,
        anchor: int | None = None,
        here: bool = True,
    ) -> None: ...
    def wait(self) -> None: ...
    def finish_quietly(self) -> None: ...
    def unsaved(self) -> str | None: ...
    def newest(self, *, healthy_only: bool = False, at_most: int | None = None) -> Checkpoint | None: ...
    def oldest(self) -> Checkpoint | None: ...
    def reaches(self, step: int) -> bool: ...
    def preferred(self) -> Checkpoint | None: ...
    def find(self, path: Path) -> Checkpoint: ...
    def rewind(self, step: int) -> None: ...


@runtime_checkable
class Parallelism(Parallel, Protocol):
    """The ranks that train together, or one process; see `parallel/`."""

    ranks: Ranks
    has_whole_moments: bool

    def set_timeout(self, *, started: bool) -> None: ...
    def find_divergence(self, state: TrainState) -> str: ...
    def whole_state(
        self, model: nn.Module, older: Callable[[], Tree | None], model_factory: Callable[[], nn.Module]
    ) -> WholeState: ...
    def rank_part(self, own: OwnNumbers | None, factor: float, loss_scale: float) -> RankPart | None: ...
    def gather_samples(self, samples: list[dict[str, Any]], size: int) -> list[dict[str, Any]]: ...
    def any_rank(self, here: bool) -> bool: ...
    def request_stop(self, signal: str) -> None: ...
    def note_stop(self, stop: bool) -> None: ...
    def stopping(self, signal: str) -> str: ...
