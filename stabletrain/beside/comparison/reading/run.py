"""One run, finished or not, reduced to what a comparison needs.

Only the first, last, lowest and highest value of each metric stay in memory, so that thousands of runs fit. A curve is
read from `metrics.jsonl` when it is requested. `runs.py` reads a run from its folder.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stabletrain.beside.comparison.reading.columns import Columns, Curve, Sheet, joined, read_columns, thin
from stabletrain.beside.comparison.reading.settings import Value


class Range(NamedTuple):
    """The range of one metric without rolled-back lines; NaN if it was never logged, or never as a number.

    Attributes:
        first, last: as logged, so they may be NaN or infinite.
        lowest, highest: over all values except NaN.
    """

    first: float = math.nan
    last: float = math.nan
    lowest: float = math.nan
    highest: float = math.nan


NOTHING = Range()
"""The range of a metric that was never logged."""


class Ranges(Mapping[str, Range]):
    """Read-only mapping from metric name to `Range`. Runs with the same metrics share the tuple of names."""

    def __init__(self, names: tuple[str, ...], values: np.ndarray) -> None:
        """`values` is float64 `[names, 4]`, with columns in the order of `Range`."""
        self._names, self._values = names, values

    @classmethod
    def of(cls, sheets: list[Sheet]) -> "Ranges":
        """Computes the ranges of all metrics in a file's lines."""
        found: dict[str, list[float]] = {}
        ends: dict[str, tuple[int, int]] = {}
        for sheet in sheets:
            first, last = int(sheet.rows[0]), int(sheet.rows[-1])
            table = [sheet.values[0], sheet.values[-1], np.fmin.reduce(sheet.values), np.fmax.reduce(sheet.values)]
            for name, numbers in zip(sheet.names, np.stack(table, axis=1).tolist(), strict=True):
                if name not in found:
                    found[name], ends[name] = numbers, (first, last)
                    continue
                # A metric may occur in several sheets: the line numbers say which value was first and which last.
                so_far, (begin, end) = found[name], ends[name]
                found[name] = [
                    numbers[0] if first < begin else so_far[0],
                    numbers[1] if last > end else so_far[1],
                    float(np.fmin(so_far[2], numbers[2])),
                    float(np.fmax(so_far[3], numbers[3])),
                ]
                ends[name] = min(first, begin), max(last, end)
        return cls(tuple(found), np.array([*found.values()]).reshape(-1, 4))

    def __getitem__(self, name: str) -> Range:
        return Range(*self._values[row_by_name(self._names)[name]].tolist())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __reduce__(self) -> tuple:
        # Raw bytes: the header of a pickled array would be longer than its few numbers.
        return restored, (self._names, self._values.tobytes())


@lru_cache(maxsize=1024)
def row_by_name(names: tuple[str, ...]) -> dict[str, int]:
    """Returns the row of each name."""
    return {name: row for row, name in enumerate(names)}


@lru_cache(maxsize=1024)
def shared_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the cached tuple that equals this one, so that equal tuples are stored once."""
    return names


def restored(names: tuple[str, ...], values: bytes) -> Ranges:
    """Restores `Ranges` from a pickle."""
    return Ranges(shared_names(names), np.frombuffer(values).reshape(-1, 4))


RECENT = 20
"""Number of the last lines from which the pace of a run is taken."""

ENDED = ("finished", "halted", "preempted", "failed")
"""The statuses of a run that has stopped."""


@dataclass(frozen=True, kw_only=True)
class Events:
    """What happened in a run.

    Attributes:
        incidents: mappings with step, kind, cause, verdict, fix (a list) and path (relative to the run folder; None if
            nothing could be written), in order.
        skips: the skipped steps in order, without fp16's routine overflows.
        skip_losses: their losses; NaN for a loss that is not a number or was not recorded.
        forecasts: mappings with step, signal, text and the interval of the crossing, low to high, in order.
        whatifs: what was tried after each halt, in order; see `runs.WHATIF`. `Run.healings` are those that went on.
    """

    incidents: list[dict[str, Any]] = field(default_factory=list)
    skips: list[int] = field(default_factory=list)
    skip_losses: list[float] = field(default_factory=list)
    rollbacks: int = 0
    forecasts: list[dict[str, Any]] = field(default_factory=list)
    whatifs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Run(Events):
    """One run. Holds the `Range` of each metric but no curves, and can be pickled.

    Attributes:
        status: finished, halted, preempted, failed or running, as recorded; `empty` if the run never took a step,
            `broken` if its record or metrics cannot be read.
        problem: one sentence on what the reader should know about the run, or None.
        record: the content of `run.json`; empty if it cannot be read.
        settings: key to plain value; see `settings.py`.
        composed: whether `settings` is the whole configuration, and not only the overrides.
        overrides: the command-line overrides, key to value; the last one of a key wins.
        steps: the last step: the last one logged, or the one at which the run ended; 0 if there is none.
        best: the lowest validation loss and its step; NaN and 0 if there is none.
        seconds: time between the first and the last line.
        label: the run's name, if another run that is compared has the same folder name.
        copies: other folders that hold the same run, with the same id; they are not counted.
    """

    folder: Path
    status: str
    problem: str | None
    record: dict[str, Any]
    settings: dict[str, Value]
    composed: bool
    overrides: dict[str, str]
    steps: int = 0
    best: tuple[float, int] = (math.nan, 0)
    seconds: float = math.nan
    ranges: Mapping[str, Range] = field(default_factory=dict)
    label: str = ""
    copies: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """The name of the run folder (in a sweep, the number of the run); with the folders above it, if names clash."""
        return self.label or self.folder.absolute().name

    @property
    def sweep(self) -> str:
        """The name of the folder that contains the run folder."""
        return self.folder.parent.name

    @property
    def card(self) -> str | None:
        """The product name of the GPU, or `cpu`; None if not recorded."""
        return self.record.get("hardware", {}).get("name")

    @property
    def precision(self) -> str | None:
        """The precision the run used; the configured one, such as auto, if that is not recorded."""
        return self.record.get("hardware", {}).get("precision") or self.record.get("choices", {}).get("precision")

    @property
    def loss_unit(self) -> str:
        """The unit of the loss with a space before it: ` nats` for cross-entropies, empty if the loss has none."""
        objective = self.record.get("choices", {}).get("objective", "cross_entropy")
        return " nats" if objective in ("cross_entropy", "bce") else ""

    @property
    def initial_loss(self) -> float:
        """The first step's cross-entropy; its whole loss if the objective is another one."""
        first = self.first("train/ce")
        return self.first("train/loss") if math.isnan(first) else first

    @property
    def parameters(self) -> int | None:
        """The number of model parameters; None if not recorded."""
        count = self.record.get("model", {}).get("parameters")
        return count if isinstance(count, int) else None

    def times_between_lines(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of steps and the seconds between the last `RECENT` lines of different steps."""
        steps, times = self.curve("time", -1)
        steps, firsts = np.unique(steps, return_index=True)
        return np.diff(steps)[-RECENT:], np.diff(times[firsts])[-RECENT:]

    @property
    def seconds_per_step(self) -> float:
        """The median time of a step between the last lines, without evaluations and pauses; NaN if unknown.

        It reads the file again.
        """
        steps, seconds = self.times_between_lines()
        return float(np.median(seconds / steps)) if len(steps) else math.nan

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The processes that have trained the run, as `run.json` records them; see `stored/run_files.py`."""
        return self.record.get("starts", [])

    @property
    def gpu_hours(self) -> float:
        """The GPU-hours of all starts that have ended; NaN without GPUs."""
        return self.record.get("gpu_hours", math.nan)

    @property
    def energy_kwh(self) -> float:
        """The energy of the GPUs; NaN if it is not known of every start, as of one that was killed."""
        return sum(start.get("energy_kwh", math.nan) for start in self.starts) if self.starts else math.nan

    @property
    def utilization(self) -> float:
        """The fraction of the time in which the GPUs computed, over the starts that have measured it; NaN if none."""
        known = [start for start in self.starts if "utilization" in start]
        hours = [start.get("gpus", 0) * start.get("hours", 0) for start in known]
        busy = sum(each * start["utilization"] for each, start in zip(hours, known, strict=True))
        return busy / sum(hours) if sum(hours) else math.nan

    @property
    def host(self) -> str | None:
        """The machine of the main process at the last start; None if not recorded."""
        return self.record.get("host")

    @property
    def job(self) -> str | None:
        """The number of the last start's Slurm job, such as 17 or 17_3 for a task of an array; None outside Slurm."""
        slurm = self.starts[-1].get("slurm", {}) if self.starts else {}
        return f"{slurm['array']}_{slurm['task']}" if {"array", "task"} <= slurm.keys() else slurm.get("job")

    @property
    def spike_score(self) -> float:
        """The recorded fraction of steps whose loss was a spike, or that were skipped as a spike."""
        final = self.record.get("final", {}).get("spike/score")  # the last logged line may be older than the run's end
        return final if isinstance(final, int | float) else self.last("spike/score")

    @property
    def diverged(self) -> bool:
        """Whether the run was halted, or finished with a validation loss that is not finite."""
        return self.status == "halted" or (self.status == "finished" and not math.isfinite(self.last("val/loss")))

    def first(self, name: str) -> float:
        """Returns the first value of a metric; NaN if there is none."""
        return self.ranges.get(name, NOTHING).first

    def last(self, name: str) -> float:
        """Returns the last value of a metric; NaN if there is none."""
        return self.ranges.get(name, NOTHING).last

    def lowest(self, name: str) -> float:
        """Returns the lowest value of `name` and of all metrics that begin with `name/`; NaN if there is none."""
        return float(np.fmin.reduce([each.lowest for each in self._below(name)], initial=math.nan))

    def highest(self, name: str) -> float:
        """Returns the highest value of `name` and of all metrics that begin with `name/`; NaN if there is none."""
        return float(np.fmax.reduce([each.highest for each in self._below(name)], initial=math.nan))

    def curve(self, name: str, points: int | None = None) -> Curve:
        """Returns the steps and values of a metric without rolled-back lines; empty if it was never logged.

        Reads the file on first use, so the curve of a running run may be newer than its other attributes.

        Args:
            points: maximum number of points (see `thin`), -1 for all of them. Any number reads the file again; the
                default of 500 does so only once.
        """
        if points is not None:
            curve = self._columns().curve(name)
            return curve if points < 0 else thin(curve, points)
        return self._curves[0].get(name) or joined([], name)

    def curves(self, names: Sequence[str]) -> dict[str, Curve]:
        """Returns all points of those metrics that were logged, without rolled-back lines; reads the file once."""
        columns = self._columns()
        found = {name: columns.curve(name) for name in names}
        return {name: curve for name, curve in found.items() if len(curve[0])}

    @property
    def healings(self) -> list[dict[str, Any]]:
        """Those of `whatifs` after which the run went on."""
        return [each for each in self.whatifs if each["arm"]]

    def abandoned(self, name: str) -> list[Curve]:
        """Returns the rolled-back values of a metric, a curve per rollback or healing, in the order of execution."""
        return self._curves[1].get(name, [])

    def applied_and_skipped_losses(self) -> tuple[Curve, Curve]:
        """Returns two curves of all logged training losses: one of the applied steps, and one of the skipped steps."""
        return split_losses(self.curves(("train/loss", "guard/applied")))

    def _below(self, name: str) -> list[Range]:
        return [each for key, each in self.ranges.items() if key == name or key.startswith(f"{name}/")]

    def _columns(self) -> Columns:
        try:
            return read_columns(self.folder / "metrics.jsonl")
        except OSError:
            return Columns()

    @cached_property
    def _curves(self) -> tuple[dict[str, Curve], dict[str, list[Curve]]]:
        columns = self._columns()
        kept, gone = (
            {name for sheet in sheets for name in sheet.names} for sheets in (columns.kept, columns.rolled_back)
        )
        return (
            {name: thin(columns.curve(name)) for name in kept},
            {name: [thin(stretch) for stretch in columns.abandoned(name)] for name in gone},
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_curves"}


def split_losses(curves: Mapping[str, Curve]) -> tuple[Curve, Curve]:
    """Splits the curve `train/loss` by the curve `guard/applied`: the applied steps, and the skipped steps."""
    (steps, losses), (gates, applied) = (curves.get(name, joined([], name)) for name in ("train/loss", "guard/applied"))
    skipped = np.isin(steps, gates[applied == 0])
    return (steps[~skipped], losses[~skipped]), (steps[skipped], losses[skipped])
