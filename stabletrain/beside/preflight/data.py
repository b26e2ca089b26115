"""The data: repeated batches, ranks with the same ones, constant, ignored or impossible targets, unscaled inputs."""

from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.loop import Maker


def check(make: Maker) -> list[Finding]:
    """Checks a loop."""
    return [Finding("data", "not checked", "not written yet")]
