"""What happened in a recorded run: when it broke, when signals crossed their thresholds, whether it ended worse."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stabletrain.beside.forecast.series import THRESHOLDS
from stabletrain.beside.forecast.signals import SIGNALS, values_of
from tests.reliability.foresight.record import Recording

WINDOW = 20
"""Steps of the smoothed loss."""

SHARE, LONG = 0.5, 50
"""A run breaks where its smoothed loss is above `best + 0.5 (first - best)` for 50 steps."""

IN_A_ROW = 5
"""Or where this many steps in a row are skipped."""

OF_FP16 = ("headroom", "loss_scale")
"""Signals that mean trouble only if the loss is scaled."""

WORSE, LAST = 1.05, 100
"""A run ends worse if the mean loss of its last 100 steps is above 1.05 times that of a partner."""


@dataclass(frozen=True)
class Run:
    """A recorded run and its events.

    Attributes:
        recording: what was measured.
        steps: its planned length.
        broke: step of the break; None without one.
        worse: whether it ends worse than a partner: with the fix, at a third of the learning rate, or both.
        best: the lowest final loss of a partner that does not break; NaN without one.
    """

    recording: Recording
    steps: int
    broke: int | None
    worse: bool
    best: float = math.nan

    @property
    def name(self) -> str:
        """Of its case."""
        return self.recording["case"]

    @property
    def family(self) -> str:
        """Of its case."""
        return self.name.partition("/")[0]

    @property
    def number(self) -> int:
        """Of its case."""
        return int(self.name.split("/")[1])

    @property
    def partner(self) -> bool:
        """Whether it is a run with the fix."""
        return self.name.endswith("/fixed")

    @property
    def trouble(self) -> bool:
        """Whether it has an event."""
        return self.broke is not None or self.worse

    def metrics(self, look: int) -> dict[str, float]:
        """Returns what the look number `look` measured."""
        names, values = self.recording["names"], self.recording["signals"][look]
        # A signal that this look did not measure is NaN in the table; one that is NaN itself ends in an infinite loss.
        return {name: float(value) for name, value in zip(names, values, strict=True) if not math.isnan(value)}


def runs_of(recordings: Sequence[Recording], lengths: Mapping[str, int]) -> list[Run]:
    """Returns the runs with their events; `lengths` are the planned steps by case."""
    by_name = {recording["case"]: recording for recording in recordings}
    broke = {name: break_of(recording, lengths[name]) for name, recording in by_name.items()}
    found = []
    for name, recording in by_name.items():
        if name.endswith("/slower"):
            continue
        partners = [f"{name}/fixed", f"{name}/slower", f"{name}/fixed/slower"]
        ends = [final(by_name[each]) for each in partners if each in by_name and broke[each] is None]
        best = min(ends, default=math.nan)
        worse = bool(ends) and (broke[name] is not None or final(recording) > WORSE * best)
        found.append(Run(recording, lengths[name], broke[name], worse, best))
    return found


def break_of(recording: Recording, planned: int) -> int | None:
    """Returns the step at which a run breaks."""
    steps = recording["steps"]
    if not len(steps):
        return 1
    loss, norm, applied = recording["stepwise"].T
    scaled = is_scaled(recording)
    overflow = np.isfinite(loss) & ~np.isfinite(norm) & scaled  # routine in fp16
    ends = []
    bad = ~(np.isfinite(loss) & np.isfinite(norm)) & ~overflow
    if bad.any():
        ends.append(int(steps[bad.argmax()]))
    skipped = longest_from((applied == 0) & ~overflow, IN_A_ROW)
    if skipped is not None:
        ends.append(int(steps[skipped]))
    finite = np.where(np.isfinite(loss), loss, np.max(loss, where=np.isfinite(loss), initial=0.0))
    if len(finite) >= WINDOW:
        smooth = np.convolve(finite, np.full(WINDOW, 1 / WINDOW), "valid")
        best = np.minimum.accumulate(smooth)
        high = longest_from(smooth > best + SHARE * (smooth[0] - best), LONG)
        if high is not None:
            ends.append(int(steps[high + WINDOW - 1]))
    if steps[-1] < planned:
        ends.append(int(steps[-1]))
    return min(ends, default=None)


def is_scaled(recording: Recording) -> bool:
    """Whether the loss of a run is scaled, as in fp16."""
    if "precision/loss_scale" not in recording["names"]:  # a run without looks: fp16, or another precision
        return "fp16" in recording["case"] and "fixed" not in recording["case"]
    return bool((recording["signals"][:, recording["names"].index("precision/loss_scale")] != 1).any())


def longest_from(true: np.ndarray, length: int) -> int | None:
    """Returns where the first `length` true values in a row begin; None if there are none."""
    if len(true) < length:
        return None
    counts = np.convolve(true.astype(int), np.ones(length, int), "valid")
    return int(np.argmax(counts == length)) if (counts == length).any() else None


def final(recording: Recording) -> float:
    """Returns the mean loss of the last steps; infinity if one of them is not finite."""
    last = recording["stepwise"][-LAST:, 0]
    return float(last.mean()) if np.isfinite(last).all() else math.inf


def crossings(run: Run) -> dict[tuple[str, str], int]:
    """Returns the first look beyond the threshold by signal and place; not for those beyond it from the first look."""
    found: dict[tuple[str, str], int] = {}
    at_first: set[tuple[str, str]] = set()
    scaled = is_scaled(run.recording)
    for number, step in enumerate(run.recording["looks"]):
        seen = values_of(run.metrics(number))
        for signal in SIGNALS:
            if signal.name in OF_FP16 and not scaled:
                continue
            for place, value in seen[signal.name].items():
                key = signal.name, place
                if signal.height(value) >= THRESHOLDS[signal.name]:
                    if number == 0 or key in at_first:
                        at_first.add(key)
                    found.setdefault(key, int(step))
    return {key: step for key, step in found.items() if key not in at_first}
