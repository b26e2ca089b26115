"""What the objects of config groups must offer, beyond their role in a step, while a run is built.

`config.make.Choice.build` refuses an object of the wrong kind (`guard._target_=builtins.dict`) by these roles, before
anything calls it.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.checkpoint.capture import Stateful
from stabletrain.protocols import Clipping, GuardPolicy, Precision, Seeding
from stabletrain.records import Batch, TrainState
from stabletrain.trainer.roles import Forecast, IncidentHandler, Monitors, Parallelism, WandbRun


@runtime_checkable
class GuardOption(GuardPolicy, Stateful, Protocol):
    """An option of `guard`; see `stability/guard/`."""


@runtime_checkable
class ClippingOption(Clipping, Protocol):
    """An option of `clipping`; see `stability/clipping/`."""


@runtime_checkable
class PrecisionOption(Precision, Stateful, Protocol):
    """An option of `precision`; see `stability/precision/`."""

    name: str
    why: str

    def prepare(self) -> None: ...
    def wrap_fp32_modules(self, model: nn.Module) -> list[str]: ...
    def attach(self, model: nn.Module, optimizer: Optimizer) -> None: ...


@runtime_checkable
class DeterminismOption(Seeding, Protocol):
    """An option of `determinism`; see `machine/determinism.py`."""

    def prepare(self) -> Mapping[str, Any]: ...
    def seed_run(self, seed: int) -> None: ...


@runtime_checkable
class ParallelOption(Parallelism, Protocol):
    """An option of `parallel`; see `parallel/options.py`."""

    head_apart: bool

    def check(self, choices: Mapping[str, str]) -> None: ...
    def optimizer_overrides(self, choice: str) -> Mapping[str, Any]: ...
    def shard(self, model: nn.Module) -> None: ...
    def wrap(self, model: nn.Module) -> None: ...
    def rows(self, size: int) -> slice: ...
    def shard_batch(self, batch: Batch, size: int) -> Batch: ...


@runtime_checkable
class MonitorsOption(Monitors, Stateful, Protocol):
    """An option of `monitors`; see `monitors/`."""


@runtime_checkable
class ForecastOption(Forecast, Stateful, Protocol):
    """An option of `forecast`; see `forecast/forecast.py`."""


@runtime_checkable
class FaultsOption(Protocol):
    """An option of `faults`; see `faults/planned.py`."""

    def data(self, data: Any) -> Any: ...
    def state(self, state: TrainState, precision: Any) -> None: ...
    def checkpoints(self, checkpoints: Any) -> Any: ...
    def wandb(self, wandb: Any) -> Any: ...


@runtime_checkable
class WandbOption(WandbRun, Protocol):
    """An option of `wandb`; see `tracking/wandb.py`."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...
    def event(self, kind: str, step: int, /, **fields: Any) -> None: ...
    def summary(self, values: Mapping[str, Any]) -> None: ...
    def alert(self, title: str, text: str) -> None: ...
    def finish(self, exit_code: int) -> None: ...


@runtime_checkable
class InitOption(Protocol):
    """An option of `init`; see `stability/init.py`."""

    def __call__(self, model: nn.Module) -> None: ...


@runtime_checkable
class OptimizerOption(Protocol):
    """A factory of `optimizer`; see `stability/optimizers/`. The target may also be a `torch.optim.Optimizer`."""

    def __call__(self, model: nn.Module) -> Optimizer: ...


@runtime_checkable
class DataOption(Protocol):
    """An option of `data`; see `data/`."""

    def batch(self, step: int, size: int, split: str) -> Batch: ...


@runtime_checkable
class ForensicsOption(IncidentHandler, Protocol):
    """An option of `forensics`; see `forensics/handler.py`."""


@runtime_checkable
class QKClipOption(Protocol):
    """An option of `qkclip`; see `stability/qkclip.py`."""

    def meter(self, n_head: int) -> nn.Module: ...
    def maxima(self, model: nn.Module) -> list[Tensor]: ...
    def __call__(self, model: nn.Module, gate: Tensor) -> None: ...
