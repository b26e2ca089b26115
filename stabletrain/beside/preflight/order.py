"""The order of a step's parts: clipping and the loss scale, schedulers, gradients that are not zeroed."""

from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.loop import Maker


def check(make: Maker) -> list[Finding]:
    """Checks a loop."""
    return [Finding("order", "not checked", "not written yet")]
