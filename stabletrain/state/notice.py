"""Notice of what happens to checkpoints: an event for the record, a line for people."""

import sys
from collections.abc import Callable
from contextlib import suppress

Report = Callable[[str, int, dict], None]
"""Takes an event's kind, its step and its fields; called from the writing thread too."""

Tell = Callable[[str], None]
"""Shows a person a line."""


def silent(kind: str, step: int, fields: dict) -> None:
    """A `Report` where there is no record."""
    del kind, step, fields


def say(message: str) -> None:
    """One line for people, if there is still anybody to read it."""
    with suppress(OSError):
        print(f"stabletrain: {message}", file=sys.stderr)


def reason_of(error: OSError) -> str:
    """What the system says, and about which file: `No space left on device: /runs/a/checkpoints`."""
    return ": ".join(str(part) for part in (error.strerror or error, error.filename) if part)
