"""Whether the micro-batches' losses and gradients add up to those of the whole batch."""

from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.loop import Maker


def check(make: Maker) -> list[Finding]:
    """Checks a loop."""
    return [Finding("accumulation", "not checked", "not written yet")]
