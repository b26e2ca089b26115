"""Whether the optimizer's step stays finite with zero gradients, huge ones, and weights of 0."""

from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.loop import Maker


def check(make: Maker) -> list[Finding]:
    """Checks a loop."""
    return [Finding("optimizer", "not checked", "not written yet")]
