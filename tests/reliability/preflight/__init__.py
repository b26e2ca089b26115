"""The proof set of preflight: small training loops, silent faults planted in them, and clean programs.

    python -m tests.reliability.preflight

Written before the checks, which are to be measured on it: at least 90 % of the planted faults found, and no false word
on a clean program. A fault is found if a check says that something is wrong and names one of the fault's `points_at`.
A check may also state what it saw as a note (a `detach` on the way, an eps that is not the usual one): only what it
calls a fault counts.

    loop.py      what a check is given of a loop, and the training step
    loops.py     ten loops, with their options
    faults/      the kinds of faults, three variants each
    clean.py     the clean programs: the loops, their options, and the healthy programs of this project
    evidence.py  what shows that a fault is silent and real
"""
