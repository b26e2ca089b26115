"""Whether a resume restores everything: one step after it equals one step without it, bit for bit."""

from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.loop import Maker


def check(make: Maker) -> list[Finding]:
    """Checks a loop."""
    return [Finding("resume", "not checked", "not written yet")]
