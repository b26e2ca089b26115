"""The tools beside a run, as a run asks for them. Each is imported when it is used."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stabletrain.config.arguments import Arguments
from stabletrain.extension import Command, NoExtension, NoForecast, NoMeter, NoPage, NoPreflight, NoSweep


class Extension(NoExtension):
    """The tools beside a run."""

    sweeps = True

    def check(self, config: Mapping[str, Any], choices: Mapping[str, str]) -> None:
        """Refuses nothing."""

    def page(self, folder: Path) -> NoPage:
        """Returns what writes `report.html`."""
        from stabletrain.beside.comparison.pages.at_end import PageAtEnd

        return PageAtEnd(folder)

    def meter(self, device: Any, world_size: int, local_world_size: int) -> NoMeter:
        """Returns what measures the GPUs of a run."""
        from stabletrain.beside.card_meter import CardMeter

        return CardMeter(device, world_size, local_world_size)

    def forecast(self, horizon: int, action: str) -> NoForecast:
        """Returns a forecast."""
        from stabletrain.beside.forecast.forecast import Forecast

        return Forecast(horizon, action)

    def preflight(self) -> NoPreflight:
        """Returns what checks a run before its first step."""
        from stabletrain.beside.preflight.first_step import FirstStep

        return FirstStep()

    def check_loop(self, make: Callable[[], Any], only: Sequence[str] = ()) -> Any:
        """Runs the checks on a loop of the user's own."""
        from stabletrain.beside.preflight.checks import check_loop

        return check_loop(make, only)

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
        """Trains a run, and heals it where the guard halts it."""
        from stabletrain.beside.whatif.healing import Healer

        return Healer(folder, train, tell, live=live, listening=listening).run(cfg)

    def start_sweep(self, typed: Arguments, config_dir: Path) -> tuple[NoSweep, Arguments]:
        """Records the sweep that a command line asks for, if any."""
        from stabletrain.beside.sweep.running import start_sweep

        return start_sweep(typed, config_dir)

    def run_of_sweep(self, cfg: Any) -> float:
        """Trains one run of a sweep, or reads its result if it is over."""
        from stabletrain.beside.sweep.running import run_of_sweep

        return run_of_sweep(cfg)

    def commands(self) -> Mapping[str, Command]:
        """Returns the commands of `commands.py`."""
        from stabletrain.beside.commands import COMMANDS

        return COMMANDS
