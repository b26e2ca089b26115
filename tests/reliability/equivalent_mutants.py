"""Mutants that survive because they change nothing that a test can see, with the reason.

`mutation.py` leaves them out of the score. The keys are the file, and the line without and with the mutation, without
indentation.
"""

NEVER_SET = "nothing assigns to its fields or hashes it: `frozen` guards against mistakes in code yet to be written"

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "stabletrain/in_flight.py",
        "numbers = self._known | dict(zip(self._names, self._values.tolist(), strict=True))",
        "numbers = self._known | dict(zip(self._names, self._values.tolist(), strict=False))",
    ): "names and values come from one dict, so they are equally many",
    (
        "stabletrain/step.py",
        "n_valid = torch.full((), max(known, 1), device=batches[0].targets.device)",
        "n_valid = torch.full((), max(known, 1), device=batches[ -1].targets.device)",
    ): "all micro-batches are on one device",
    (
        "stabletrain/step.py",
        "if len(tensors) > 1:",
        "if len(tensors) >= 1:",
    ): "the maximum of one tensor is that tensor",
    (
        "stabletrain/guard/policy/off.py",
        "faulty_rank: int = -1",
        "faulty_rank: int = 1",
    ): "read only after `machine_faults` has risen, which stays 0 without a guard",
    (
        "stabletrain/guard/checks/comparing.py",
        "@dataclass(frozen=True)",
        "@dataclass(frozen=False)",
    ): NEVER_SET,
}
