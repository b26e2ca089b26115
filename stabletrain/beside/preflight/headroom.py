"""How near the numbers are to the edge of their precision, and eps to what it is added to."""

from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.loop import Maker


def check(make: Maker) -> list[Finding]:
    """Checks a loop."""
    return [Finding("headroom", "not checked", "not written yet")]
