"""Held-out programs of preflight: loops, faults and clean programs by another author, who knew no check.

    python -m tests.reliability.preflight.held_out

    program.py   a program, and how a fault or a clean program is registered
    loops.py     seven loops, each written as another person would
    faults/      the kinds of the proof set, each planted in another way than there
    clean.py     programs that look wrong and are right
    second/      a smaller set by a second author, in four other loops
    evidence.py  what shows that a fault is silent and real, and that a clean program resumes bit for bit

No base class is shared with the proof set. Many faults follow public bug reports.
"""

from tests.reliability.preflight.held_out import clean, faults, second  # noqa: F401  (registers the programs)
from tests.reliability.preflight.held_out.program import CLEAN, FAULTY

__all__ = ["CLEAN", "FAULTY"]
