"""A training run of small real parts, without Hydra and without a folder; everything it reports is kept in lists."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import nn

from stabletrain.buffers import Buffers
from stabletrain.checkpoint.checkpoints import NoCheckpoints
from stabletrain.config.make import plain
from stabletrain.data.batches import Prefetch, ToDevice
from stabletrain.extension import NoForecast, NoPage
from stabletrain.forensics.handler import IncidentSummary, NoIncidentHandler
from stabletrain.forensics.investigate import IncidentRequest
from stabletrain.guard.policy import NoGuard
from stabletrain.in_flight import InFlight
from stabletrain.machine.hardware import Usage
from stabletrain.monitors.monitors import NoMonitors
from stabletrain.monitors.rolling import RollingStats
from stabletrain.parallel.single import SingleProcess
from stabletrain.parallel.whole import WholeState
from stabletrain.records import Batch, DeviceReading, Reading, TrainState
from stabletrain.stability import precision as precisions
from stabletrain.tracking.run_folder import NoRunFolder
from stabletrain.tracking.tracker import NoTracker
from stabletrain.trainer.history import History
from stabletrain.trainer.incidents import ExecutedStep
from stabletrain.trainer.options import Options, read
from stabletrain.trainer.rollback import Rollback
from stabletrain.trainer.run import Forensics, Monitoring, Output, Plan, TrainingData, TrainingRun
from stabletrain.trainer.saved_states import SavedStates
from tests.workloads import build_tools

CPU = torch.device("cpu")
FP32 = precisions.fp32(CPU)


def options_of(cfg: DictConfig) -> Options:
    """The options of a composed configuration; must be called inside its job."""
    return read(
        Options, plain(cfg), {group: str(option) for group, option in HydraConfig.get().runtime.choices.items()}
    )


def batch(step: int = 0, size: int = 4) -> Batch:
    """A batch with four numbers per sample and one of three classes."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)
    return Batch(inputs, targets, ids=torch.arange(size))


def reading(step: int = 1, **changed: Any) -> Reading:
    """The reading of a healthy step, with some values changed."""
    values = {
        "loss": 2.0,
        "terms": {"ce": 1.75, "zloss": 0.25},
        "grad_norm": 0.5,
        "clip_coef": 1.0,
        "clip_active": 0.0,
        "inputs": 0.0,
        "buffers": 0.0,
        "loss_scale": 1.0,
        "applied": True,
        "bad_data": False,
        "overflow": False,
        "lr": 0.125,
    }
    return Reading(step, **(values | changed))


def executed(numbers: Reading, read: Batch | None = None) -> ExecutedStep:
    """The executed step whose reading is `numbers`."""
    known = numbers._asdict()
    host = {name: known.pop(name) for name in ("lr", "step", "terms")} | {"withheld": float(not known.pop("applied"))}
    known = {name: torch.tensor(float(value)) for name, value in known.items()}
    return ExecutedStep(InFlight(DeviceReading(**host, **known)), read or batch(), 3, Buffers([]).save())


class Recorder(NoTracker):
    """Records everything it receives."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, Any]]] = []
        self.events: list[tuple[str, int, dict[str, Any]]] = []
        self.notes: list[str] = []
        self.alerts: list[tuple[str, str]] = []
        self.shown: list[tuple[Any, ...]] = []
        self.summed: dict[str, Any] = {}
        self.closed: list[int] = []

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.lines.append((step, dict(metrics)))

    def event(self, kind: str, step: int, /, **fields: Any) -> None:
        self.events.append((kind, step, fields))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))

    def progress(self, step: int, metrics: Mapping[str, Any], rate: float, unit: str, skipped: int) -> None:
        self.shown.append((step, rate, unit, skipped))

    def summary(self, values: Mapping[str, Any]) -> None:
        self.summed |= values

    def close(self, exit_code: int) -> None:
        self.closed.append(exit_code)


class Folder(NoRunFolder):
    """Records how the run ended."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.ended: list[tuple[str, str | None]] = []

    def finish(self, status: str, reason: str | None, final: Mapping[str, Any], remarks: Any = ()) -> None:
        self.ended.append((status, reason))


class Saves(NoCheckpoints):
    """Records at which steps it saved; saves every `every` steps."""

    keeps = True

    def __init__(self, every: int = 10**6) -> None:
        self.every = every
        self.saves: list[int] = []

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def save(self, step: int, *arguments: Any, **options: Any) -> None:
        self.saves.append(step)


class Handler(NoIncidentHandler):
    """Records the kinds it was asked to investigate; files an incident for each if `files` is set."""

    def __init__(self, files: bool = True) -> None:
        self.newest = ""
        self.files = files
        self.kinds: list[str] = []
        self.requests: list[IncidentRequest] = []
        self.states: list[WholeState] = []

    def handle(self, request: IncidentRequest, make_repro: Any, states: WholeState) -> IncidentSummary | None:
        self.kinds.append(request.kind)
        self.requests.append(request)
        self.states.append(states)
        return (
            IncidentSummary(Path("incidents/step-7-01"), "lr", "too high", ["lower it"], ["what"])
            if self.files
            else None
        )


class Batches(Prefetch):
    """Training batches by step number; records whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def get(self, step: int) -> Batch:
        return batch(step)

    def forget(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def make_run(
    *,
    steps: int = 100,
    eval_every: int = 100,
    log_every: int = 10,
    guard: Any = None,
    precision: Any = FP32,
    parallel: Any = None,
    checkpoints: Any = None,
    handler: Any = None,
) -> TrainingRun:
    """A run of a linear model; by default only the evaluation at the last step is due."""
    model = nn.Linear(4, 3)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    parallel, tracker, history, batches = parallel or SingleProcess(), Recorder(), History(), Batches()
    tools = build_tools(precision, guard=guard or NoGuard(), parallel=parallel)
    saved = SavedStates(
        state,
        {"guard": tools.guard, "history": history},
        guard=tools.guard,
        checkpoints=checkpoints or NoCheckpoints(),
        tracker=tracker,
        run_id="tinytiny",
    )
    return TrainingRun(
        plan=Plan(steps, 1, eval_every, log_every),
        state=state,
        tools=tools,
        device=CPU,
        parallel=parallel,
        data=TrainingData(batches, lambda: iter([batch(1000), batch(1001)]), batch, "sample", ToDevice(CPU)),
        monitoring=Monitoring(NoMonitors(), RollingStats(), Usage(CPU), NoForecast()),
        forensics=Forensics(handler or Handler(), lambda: nn.Linear(4, 3), {"config": {"steps": steps}}),
        output=Output(tracker, Folder(), NoPage(), str),
        rollback=Rollback(saved, history=history, guard=tools.guard, batches=batches, tracker=tracker),
        history=history,
    )
