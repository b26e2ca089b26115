"""`stabletrain forecast`: what the forecast says of a run, from its `metrics.jsonl`; the run may still be training.

The live forecast sees the loss of every step, the file has those of the logged ones (`log_every`). Lines that a
rollback discarded are left out.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stabletrain.beside.comparison.reading.columns import Columns, read_columns
from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.runs import is_run, read_run
from stabletrain.beside.forecast.forecast import Forecast
from stabletrain.beside.forecast.model import fitted, outlook
from stabletrain.config.arguments import recorded_arguments, usual_lr
from stabletrain.errors import ConfigError
from stabletrain.extension import HORIZON, Prediction
from stabletrain.printable import one_line
from stabletrain.tracking.metrics import plain


@dataclass(frozen=True)
class ReplayedForecast:
    """The forecast of a run.

    Attributes:
        steps: of the looks.
        said: the predictions, in order.
        now: what is known at the last look: for each signal, the place with the highest level ahead.
        probability: at the last look.
        far: why there is no percentage; empty if there is one.
        horizon: steps ahead that the probability is about.
    """

    steps: Sequence[int]
    said: Sequence[Prediction]
    now: Sequence[Prediction]
    probability: float
    horizon: int
    far: str

    def as_json(self) -> dict[str, Any]:
        """The result as JSON; non-finite numbers are words."""
        last = [{name: each.fields()[name] for name in SIGNAL_FIELDS} for each in self.now]
        about = {
            "step": self.steps[-1],
            "looks": len(self.steps),
            "probability": None if self.far else round(self.probability, 4),
        }
        said = [{"step": each.step, **each.fields()} for each in self.said]
        return plain({**about, "horizon": self.horizon, "forecasts": said, "signals": last})

    def __str__(self) -> str:
        said = [one_line(f"step {each.step:,}: {each.text}") for each in self.said] or ["no forecasts"]
        cells = [("signal", "place", "value", "threshold", "near step"), *map(row, self.now)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        table = ["  ".join(map(aligned, each, widths, range(5))).rstrip() for each in cells]
        end = self.far or f"{min(99, round(100 * self.probability))} of 100 runs like this break or end worse"
        return "\n".join([*said, "", f"step {self.steps[-1]:,}, look {len(self.steps):,}:", *table, "", end])


def row(each: Prediction) -> tuple[str, ...]:
    """Returns the cells of a signal."""
    when = f"{each.at:,.0f} ({each.low:,.0f}-{each.high:,.0f})" if math.isfinite(each.at) else "-"
    return each.signal, one_line(each.place), f"{each.value:.3g}", f"{each.threshold:g}", when


def aligned(cell: str, width: int, column: int) -> str:
    """Pads a cell: names to the right, numbers to the left."""
    return cell.ljust(width) if column < 2 else cell.rjust(width)


SIGNAL_FIELDS = ("signal", "place", "value", "threshold", "at", "low", "high")
"""The fields of a signal at the last look."""


def replay_forecast(folder: Path) -> ReplayedForecast:
    """Replays the forecast over a run's looks.

    Raises:
        ConfigError: `folder` is no run folder, its metrics cannot be read, or no look of the monitors is in them.
    """
    if not is_run(folder):
        what = "is not a run folder" if folder.is_dir() else "is not a folder"
        raise ConfigError(f"{folder} {what}; fix: name a folder that train.py made, such as outputs/<date>/<time>")
    run = read_run(folder)
    try:
        seen = [*lines(read_columns(folder / "metrics.jsonl"))]
    except OSError as error:
        raise ConfigError(f"{folder / 'metrics.jsonl'} cannot be read: {error.strerror or error}") from error
    looks = [line for line in seen if is_look(line)]
    if not looks:
        raise ConfigError(why_no_inspections(folder, run, len(seen)))
    forecast = Forecast(horizon_of(run), "alarm")
    choices = {**run.record["choices"], "precision": run.precision or "auto"}
    usual = usual_lr(recorded_arguments(folder).options, str(choices.get("optimizer")))
    forecast.set_run({group: str(option) for group, option in choices.items() if option}, optimizer_of(run), usual)
    said: list[Prediction] = []
    before: dict[str, Any] = {}
    for line in seen:
        if line.get("guard/applied", 1) and "train/loss" in line:
            forecast.add_loss(line["train/loss"])
        if is_look(line):
            before = forecast.state_dict()
            said += forecast.look(int(line["step"]), line)
    forecast.load_state_dict(before)  # the last look once more, for all signals
    steps = [int(line["step"]) for line in looks]
    return ReplayedForecast(steps, said, *last_predictions(forecast, looks[-1]), forecast.horizon, forecast.distance)


def last_predictions(forecast: Forecast, line: Mapping[str, float]) -> tuple[list[Prediction], float]:
    """Adds the last look; returns a prediction for each signal, about its worst place, and the probability."""
    model, step = fitted(), int(line["step"])
    heights = forecast.heights(step, line)
    ranks: dict[str, list[tuple[float, float, str]]] = {}
    for (name, place), height in heights.now.items():
        ranks.setdefault(name, []).append((max(height, heights.later.get((name, place), height)), height, place))
    probability = outlook(heights, model).probability
    worst = [(name, max(each)[-1]) for name, each in ranks.items()]
    return [forecast.predict(step, key, heights, probability, model) for key in worst], probability


def lines(columns: Columns) -> Iterator[dict[str, float]]:
    """Yields the lines that no rollback discarded, in the order of the file."""
    rows = [(int(row), sheet, number) for sheet in columns.kept for number, row in enumerate(sheet.rows)]
    for _, sheet, number in sorted(rows, key=lambda row: row[0]):
        yield dict(zip(sheet.names, sheet.values[number].tolist(), strict=True))


def is_look(line: Mapping[str, float]) -> bool:
    """Whether the monitors inspected the step of a line."""
    return any(name.startswith("monitors/") for name in line)


def why_no_inspections(folder: Path, run: Run, count: int) -> str:
    """Returns why there is nothing to foretell from."""
    if not count:
        return f"{folder} has no metrics yet; fix: wait for the first step, or name another run"
    if run.record["choices"].get("monitors") == "none":
        return f"{folder} was trained with monitors=none, so nothing was measured; fix: train with monitors=default"
    return f"{folder}: none of {count:,} lines of metrics.jsonl is a look of the monitors; fix: monitors=default"


def horizon_of(run: Run) -> int:
    """Returns the run's `forecast.horizon`, or the default."""
    found = run.settings.get("forecast.horizon")
    return found if isinstance(found, int) and found >= 1 else HORIZON


def optimizer_of(run: Run) -> dict[str, Any]:
    """Returns the keys of the run's optimizer."""
    found: dict[str, Any] = {}
    for key, value in run.settings.items():
        group, _, name = key.partition(".")
        if group == "optimizer" and name and (name != "lr" or isinstance(value, int | float)):
            found[name] = value
            with suppress(ValueError):  # lists are kept as text
                found[name] = json.loads(value) if isinstance(value, str) else value
    return found
