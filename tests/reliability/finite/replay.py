"""Recordings judged again by the present search for slow spikes, without a new run.

An alarm changes nothing in a run, so its recorded series are what a changed detector would have seen. Everything else
that was said stays as it was recorded, and so does a recording without series. Runs with ways back cannot be replayed:
record them again.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stabletrain.guard.policy.slow import SlowSpikes
from stabletrain.records import Reading

SLOW = ("slow_loss", "slow_gradient", "update_length", "weight_growth", "slow_validation")
"""Kinds of alarm that are replayed."""

RATE = 0.1
"""`guard.slow_rate` of the runs."""


NOTHING = Reading(**dict.fromkeys(Reading._fields, 0.0))


def replayed(found: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the recordings of runs without ways back, with the alarms that the present code would raise."""
    for one in found:
        if one["mode"] == "alarm" and one["series"]:
            others = [event for event in one["events"] if event[2] not in SLOW]
            yield {**one, "events": sorted([*others, *alarms(one)], key=lambda event: event[0])}
        else:
            yield dict(one)


def alarms(one: Mapping[str, Any]) -> list[list[Any]]:
    """Returns the alarms of slow spikes in a recording, as `[tick, "alarm", kind]`."""
    test, found = SlowSpikes(RATE), []
    withheld = {tick for tick, event, _ in one["events"] if event == "skip"}
    losses = {tick: float(loss) for tick, loss in one["val"]}
    for tick, (loss, norm, lr, update, weights) in enumerate(series(one), 1):
        if tick not in withheld:
            measured = {"step": tick, "loss": loss, "grad_norm": norm, "lr": lr, "update": update, "weights": weights}
            said = test.add(NOTHING._replace(applied=True, **measured))
            found += [[tick, "alarm", alarm.kind] for alarm in said]
        if tick in losses:
            found += [[tick, "alarm", alarm.kind] for alarm in test.add_validation(tick, losses[tick])]
    return found


def series(one: Mapping[str, Any]) -> Iterator[tuple[float, ...]]:
    """Yields loss, gradient norm, learning rate, update's and weights' length of each step."""
    names = ("loss", "grad_norm", "lr", "update", "weights")
    for values in zip(*(one["series"][name] for name in names), strict=True):
        yield tuple(float(value) for value in values)
