"""All planted faults, by group."""

from tests.reliability.preflight.faults import accumulation, data, gradient, headroom, mechanics, optimizer, resume
from tests.reliability.preflight.faults.fault import Fault, Program, planted

GROUPS = {
    module.__name__.rpartition(".")[2]: [
        each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Fault) and each.kind
    ]
    for module in (gradient, accumulation, mechanics, resume, data, headroom, optimizer)
}
"""The variants of each group."""

KINDS = {fault.kind: group for group, faults in GROUPS.items() for fault in faults}
"""The group of each kind."""

FAULTY: list[Program] = [program for faults in GROUPS.values() for fault in faults for program in planted(fault)]
"""Every fault in every loop that it is planted in."""
