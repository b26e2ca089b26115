"""Whether the gradient that training uses is that of the loss."""

from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.loop import Maker


def check(make: Maker) -> list[Finding]:
    """Checks a loop."""
    return [Finding("gradient", "not checked", "not written yet")]
