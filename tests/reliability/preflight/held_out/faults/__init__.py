"""The held-out faults, by group."""

from tests.reliability.preflight.held_out.faults import data, gradient, mechanics, numbers, resume  # noqa: F401
