"""Parameters and groups: stale, in no group, in two, without gradient; tied weights split by a copy; eval mode."""

from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.loop import Maker


def check(make: Maker) -> list[Finding]:
    """Checks a loop."""
    return [Finding("structure", "not checked", "not written yet")]
