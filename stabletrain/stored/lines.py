"""Which lines of `metrics.jsonl` and `events.jsonl` can be used."""

from typing import Any, TypedDict

from stabletrain.stored.json_files import Number, difference, is_int

LAST_STEP = 2**53
"""Bound of step numbers: columns of metrics hold them as float64."""


def is_line(value: Any) -> bool:
    """Returns whether a parsed line is an object with a step, and a tick if it has one."""
    return isinstance(value, dict) and is_step(value.get("step")) and ("tick" not in value or is_step(value["tick"]))


def is_step(value: Any) -> bool:
    """Returns whether a value is a number of steps."""
    return is_int(value) and 0 <= value < LAST_STEP


class Event(TypedDict, total=False):
    """The keys of events that are read again. Every event has `event` and `step`; the others depend on its kind."""

    event: str
    kind: str | None
    loss: Number | None
    path: str | None
    cause: str | None
    verdict: str | None
    fix: list[str] | None
    signal: str | None
    text: str | None
    low: Number | None
    high: Number | None


def is_event(value: Any) -> bool:
    """Returns whether a parsed line is an event, whose keys have the types of `Event`."""
    return is_line(value) and "event" in value and difference(value, Event) is None
