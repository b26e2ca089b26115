"""What a run offers to the tools beside it (`stabletrain/beside/`), and what happens without them: nothing.

| place | with `stabletrain/beside/` | without |
|---|---|---|
| `page` | `report.html` at the end of a run | no page |
| `meter` | `run.json` tells the run's GPU-hours, energy and Slurm job | not recorded |
| `forecast` | `forecast=default` foretells trouble | no forecast |
| `preflight` | `check=first_step` says before the first step what is wrong | nothing is checked |
| `check_loop` | `Guard.check` proves what is wrong with a loop | refused |
| `heal` | `guard.escalate=whatif` tries fixes after a halt | the run ends, as a line says at its start |
| `start_sweep`, `run_of_sweep` | `-m` runs a sweep | `-m` is refused |
| `commands` | `stabletrain compare`, `whatif`, `export` ... | refused; the commands of one run work |
| `check` | nothing is refused | `faults=gradient` ... are refused: their classes lie in the folder |

The rest of the package never imports that folder: `extension()` is the only way in, and everything here has a null.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stabletrain.config.arguments import INFORMATION_OPTIONS, Arguments
from stabletrain.config.moved import now
from stabletrain.errors import ConfigError

BESIDE = "stabletrain.beside"

COMMANDS = (
    *("check", "run", "export", "status", "compare", "losses"),
    *("forecast", "whatif", "lr", "sync", "wandb-report"),
)
"""The commands of `stabletrain` that `stabletrain/beside/` adds."""

HORIZON = 500
"""Steps ahead that a forecast is about by default, as in `conf/forecast/default.yaml`."""


class NoPage:
    """Writes nothing: for `report=false`, and for all ranks except the main process."""

    def write(self, sample: str | None = None) -> None:
        """Writes the run's page, with the text that its model has generated. Does nothing."""

    def write_if_missing(self) -> bool:
        """Writes the page of a run that is over if it was killed before it had written it; returns whether it did."""
        return False


class NoMeter:
    """Measures nothing: for all ranks except the main process."""

    def facts(self) -> Mapping[str, Any]:
        """Returns what `run.json` records of this start: nothing."""
        return {}

    def sample(self) -> None:
        """Notes how busy the GPUs are; called when a step is logged. Does nothing."""

    def metrics(self) -> Mapping[str, float]:
        """Returns what the GPUs have used since the start, as `gpu/...`: nothing."""
        return {}


@dataclass(frozen=True)
class Prediction:
    """What a forecast says at one step about one signal.

    Attributes:
        step: of the look.
        signal, place: which signal, where in the model; the place is "" for the whole model.
        value, threshold: of the signal.
        at, low, high: step at which the threshold is reached, and its 80 % interval; NaN if there is no trend.
        probability: that the run breaks or ends worse; NaN if it is unlike the runs that the forecast was fitted on.
        horizon: steps ahead that the probability is about.
        fix: overrides, best first.
        text: all of it, in one line.
    """

    step: int
    signal: str
    place: str
    value: float
    threshold: float
    at: float
    low: float
    high: float
    probability: float
    horizon: int
    fix: tuple[str, ...]
    text: str

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the event `forecast`, without the step; unknown times are None."""
        found = {name: value for name, value in asdict(self).items() if name != "step"}
        times = {name: None if math.isnan(found[name]) else round(found[name], 1) for name in ("at", "low", "high")}
        probability = None if math.isnan(self.probability) else round(self.probability, 4)
        return {**found, **times, "fix": list(self.fix), "probability": probability}


class NoForecast:
    """Predicts nothing. What any forecast must offer."""

    @property
    def keeps(self) -> bool:
        """Whether the state at an alarm is kept: no."""
        return False

    @property
    def kept(self) -> Sequence[int]:
        """Steps whose state is kept: none."""
        return ()

    def set_run(self, choices: Mapping[str, str], optimizer: Mapping[str, Any], usual_lr: float | None = None) -> None:
        """Sets what the fixes depend on, so that no fix names what the run already uses. Does nothing.

        Args:
            choices: the option of each config group.
            optimizer: the keys of the chosen optimizer; `lr` is the peak learning rate.
            usual_lr: the rate that this optimizer has by default; None if it is not known.
        """

    def add_loss(self, loss: float) -> None:
        """Adds the loss of an applied step, in nats. Does nothing."""

    def look(self, step: int, metrics: Mapping[str, float]) -> list[Prediction]:
        """Adds a look of the monitors, and returns what is to be said now: nothing.

        Args:
            step: of the look.
            metrics: of the look: `monitors/...`, `grad/norm`, `lr`, `precision/loss_scale`.
        """
        return []

    def keep(self, step: int) -> None:
        """Notes that the state after `step` steps is kept. Does nothing."""

    def cumulative_state(self) -> dict:
        """Returns what a rollback does not undo: nothing."""
        return {}

    def load_cumulative_state(self, state: dict) -> None:
        """Restores it. Does nothing."""

    def state_dict(self) -> dict:
        """Returns what later looks depend on, for a checkpoint: nothing."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Restores it. Does nothing."""


class NoPreflight:
    """Checks nothing. What any check before the first step must offer."""

    def look(self, run: Any) -> Sequence[Any]:
        """Returns what is wrong or unusual: nothing. All ranks call it, and it changes nothing.

        Args:
            run: a `trainer.run.TrainingRun`, ready for its first step.

        Returns:
            findings, each with `verdict`, `check`, `text`, `places` and `fix`.
        """
        return ()


class NoFaults:
    """Injects nothing. What each fault must offer: every object is returned with its faults."""

    def data(self, data: Any) -> Any:
        """Returns the run's data set, an object with `batch(step, size, split)`."""
        return data

    def checkpoints(self, checkpoints: Any) -> Any:
        """Returns the run's checkpoints (`checkpoint/checkpoints.py`), not opened yet."""
        return checkpoints

    def wandb(self, wandb: Any) -> Any:
        """Returns the run's W&B (`tracking/wandb.py`), not started yet."""
        return wandb

    def state(self, state: Any, precision: Any) -> None:
        """Sets up faults in steps: none.

        Args:
            state: a `records.TrainState`, on its device.
            precision: of the run, on its device.
        """


class NoSweep:
    """A command that runs one run. Base class of a sweep that has started."""

    def opening(self) -> str:
        """Returns the first line; empty for none."""
        return ""

    def listening(self) -> AbstractContextManager[Any]:
        """Returns a context for the whole command, in which a signal stops all runs."""
        return nullcontext()

    def closing(self) -> str:
        """Returns the last lines; empty for none."""
        return ""

    def exit_code(self) -> int:
        """Returns the exit code of the command whose job has returned."""
        return 0


@dataclass(frozen=True)
class Command:
    """A command of `stabletrain`.

    Attributes:
        help: a line for `--help`.
        add_arguments: adds its arguments to its parser.
        do: runs it with the parsed arguments.
        builds: whether it builds what a run's record names, so that it takes `--trust`.
        take_over: runs it with the words after its name, in place of `do`, and returns the exit code of the process;
            None if it does not run the user's own program.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    do: Callable[[argparse.Namespace], object]
    builds: bool = False
    take_over: Callable[[Sequence[str]], int] | None = None


def needs_beside(what: str, fix: str = "") -> ConfigError:
    """Returns the refusal of what the package cannot do without the tools beside a run.

    Args:
        what: what was asked for.
        fix: what to do without them; empty for nothing.
    """
    folder = BESIDE.replace(".", "/")
    return ConfigError(
        f"{what} needs the folder {folder}, which is not installed: {f'{fix}, or ' if fix else ''}"
        "install the whole of stabletrain"
    )


class NoExtension:
    """The package without the tools beside a run.

    Attributes:
        sweeps: whether `-m` runs a sweep.
    """

    sweeps = False

    def check(self, config: Mapping[str, Any], choices: Mapping[str, str]) -> None:
        """Refuses options whose classes lie in the folder.

        Args:
            config: the configuration of a run.
            choices: the option of each config group.

        Raises:
            ConfigError: there is such an option.
        """
        for group, option in config.items():
            target = option.get("_target_", "") if isinstance(option, Mapping) else ""
            if now(str(target)).startswith(f"{BESIDE}."):
                raise needs_beside(f"{group}={choices.get(group, target)}", f"use {group}=none")

    def page(self, folder: Path) -> NoPage:
        """Returns what writes the page of the run in `folder`."""
        return NoPage()

    def meter(self, device: Any, world_size: int, local_world_size: int) -> NoMeter:
        """Returns what measures the GPUs of a run from now on.

        Args:
            device: a `torch.device`, that of the main process.
            world_size, local_world_size: number of ranks, and of those on this machine.
        """
        return NoMeter()

    def forecast(self, horizon: int, action: str) -> NoForecast:
        """Returns the forecast of a run; see `conf/forecast/default.yaml`."""
        return NoForecast()

    def preflight(self) -> NoPreflight:
        """Returns what checks a run before its first step."""
        return NoPreflight()

    def check_loop(self, make: Callable[[], Any], only: Sequence[str] = ()) -> Any:
        """Runs the checks of `Guard.check` on a loop of the user's own."""
        raise needs_beside("Guard.check")

    def heal(
        self,
        cfg: Any,
        folder: Path,
        train: Callable[[Any, Callable[[Any], None]], float | None],
        tell: Callable[[str], None],
        *,
        live: bool,
        listening: bool,
    ) -> float | None:
        """Trains a run, and tries fixes where the guard halts it; returns the last validation loss, in nats.

        Args:
            cfg: its configuration, checked.
            folder: the run folder.
            train: trains the run of a configuration in that folder; gives the built run to its second argument.
            tell: shows the user a line.
            live: whether there may be a live line.
            listening: whether signals stop the arms.
        """
        tell(f"{needs_beside('guard.escalate=whatif')}; a halt ends this run")
        return train(cfg, lambda run: None)

    def start_sweep(self, typed: Arguments, config_dir: Path) -> tuple[NoSweep, Arguments]:
        """Returns the sweep that a command line asks for, and the command line that runs it.

        Raises:
            ConfigError: it asks for a sweep, and there are none.
        """
        if typed.sweeps and not INFORMATION_OPTIONS & set(typed.options):
            raise needs_beside("a sweep", "leave out -m")
        return NoSweep(), typed

    def run_of_sweep(self, cfg: Any) -> float:
        """Trains one run of a sweep inside its Hydra job; returns the loss that a search minimizes."""
        raise needs_beside("a sweep")

    def commands(self) -> Mapping[str, Command]:
        """Returns the commands that work beside runs, by name."""
        return {}


@cache
def extension() -> NoExtension:
    """Returns the tools beside a run, if they are installed."""
    found = find_spec(BESIDE)
    # A folder without `__init__.py`, such as one with bytecode that was left behind, has no origin.
    if found is None or found.origin is None:
        return NoExtension()
    return import_module(f"{BESIDE}.extension").Extension()


def forecast(horizon: int, action: str) -> NoForecast:
    """Makes the option `forecast=default`."""
    return extension().forecast(horizon, action)


def preflight() -> NoPreflight:
    """Makes the option `check=first_step`."""
    return extension().preflight()
