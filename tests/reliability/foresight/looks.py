"""The forecast's view of a recorded run: heights of all signals at each look, and the crossings that really came."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from stabletrain.beside.forecast.forecast import Forecast
from stabletrain.beside.forecast.model import Model, Outlook, features, outlook
from stabletrain.beside.forecast.series import Heights, Key
from tests.reliability.foresight.cases import all_cases
from tests.reliability.foresight.events import Run, crossings, runs_of
from tests.reliability.foresight.record import Recording

HORIZON = 500


@dataclass(frozen=True)
class Watched:
    """A run as the forecast sees it.

    Attributes:
        run: with its events.
        steps: of the looks.
        heights: at each look.
        crossed: when each signal crossed its threshold, by signal and place.
    """

    run: Run
    steps: tuple[int, ...]
    heights: tuple[Heights, ...]
    crossed: dict[Key, int]
    _levels: dict[tuple, list[tuple[Outlook, np.ndarray]]] = field(default_factory=dict, compare=False)

    def outlooks(self, model: Model) -> list[Outlook]:
        """Returns what a model foretells at each look. The levels depend on its healthy values alone: computed once."""
        healthy = tuple(model.healthy.items())
        if healthy not in self._levels:
            seen = [outlook(each, model) for each in self.heights]
            self._levels[healthy] = [(each, features(each.levels, each.ahead)) for each in seen]
        return [replace(each, probability=model.probability(values)) for each, values in self._levels[healthy]]


def watch(recordings: Iterable[Recording]) -> list[Watched]:
    """Returns every run as the forecast sees it."""
    lengths = {case.name: case.steps for case in all_cases()}
    return [watched(run) for run in runs_of([*recordings], lengths)]


def watched(run: Run, every: int = 1, crossed: dict[Key, int] | None = None) -> Watched:
    """Runs the forecast over the looks of a recording, of which only each `every`-th counts.

    Args:
        crossed: the run's crossings, if they are known.
    """
    forecast, found, seen = Forecast(HORIZON, "alarm"), [], []
    losses, before = run.recording["stepwise"], 0
    for number, step in enumerate(run.recording["looks"]):
        if number % every and number:
            continue
        index = int(np.searchsorted(run.recording["steps"], step, "right"))
        for loss, _, applied in losses[before:index]:
            if applied:
                forecast.add_loss(float(loss))
        before = index
        found.append(forecast.heights(int(step), run.metrics(number)))
        seen.append(int(step))
    return Watched(run, tuple(seen), tuple(found), crossings(run) if crossed is None else crossed)
