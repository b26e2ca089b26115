"""Mutants that survive because they change nothing that a test can see, with the reason.

`mutation.py` leaves them out of the score. The keys are the file, and the line without and with the mutation, without
indentation.
"""

EQUIVALENT: dict[tuple[str, str, str], str] = {}
