"""The result of `stabletrain replay`: a table of the numbers, and a sentence that says what the replay shows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stabletrain.forensics.facts import Outcome
from stabletrain.records import RankPart, Reading
from stabletrain.tracking import metrics

BAD_SAMPLES = {"input": "the input is", "label": "the label is", "ignored": "the targets are", "empty": "the batch is"}
"""Start of the clause about a bad sample, by the sample's `fault` in `diagnosis.json`."""

SPIKE_NAMES = {"loss": "loss", "grad_norm": "gradient norm"}
"""Names of the quantities that have a limit in `diagnosis.json`, for the user."""


@dataclass(frozen=True)
class ReplayReport:
    """The result of replaying a step.

    Attributes:
        then: the step's reading; None if unknown.
        fresh: parameters that the incident does not contain, which have their initial values.
        applied: whether the weights are those after the step's update, so that the replay does not repeat the step.
        diagnosis: the incident's `diagnosis.json`; empty if it cannot be read.
        changed: the user's source files that have changed since the run imported them.
        unsure: files that may have changed, because they were written while the run trained.
        part: on several ranks, the numbers of the rank whose part is replayed; None in a single process.
    """

    then: Reading | None
    now: Outcome
    overrides: Sequence[str]
    fresh: Sequence[str]
    applied: bool = False
    diagnosis: Mapping[str, Any] = field(default_factory=dict)
    changed: Sequence[str] = ()
    unsure: Sequence[str] = ()
    part: RankPart | None = None

    def as_json(self) -> dict[str, Any]:
        """The result as JSON; non-finite numbers are strings."""
        step = self.part or self.then
        then = None if step is None else {"loss": step.loss, "grad_norm": step.grad_norm}
        now = {"loss": self.now.loss, "grad_norm": self.now.grad_norm}
        return metrics.plain(
            {
                "verdict": self.conclusion()[0],
                "same_bits": None if self.overrides else self.now.bitwise_equal_to_reading,
                "finite": self.now.finite,
                "then": then,
                "now": now,
                "rank": None if self.part is None else self.part.rank,
                "zero_gradients": self.now.zero_gradients,
                "overrides": self.overrides,
                "changed_files": self.changed,
                "fresh_parameters": self.fresh,
            }
        )

    def __str__(self) -> str:
        """A table and the verdict."""
        lines = [f"{'':<6}{'loss':>14}{'gradient norm':>16}"]
        if self.part is not None:
            lines.insert(0, f"rank {self.part.rank}'s own part of the step:")
        for name, one in (("then", self.part or self.then), ("now", self.now)):
            if one is not None:
                norm = "unknown" if one.grad_norm is None else f"{one.grad_norm:.8g}"
                lines.append(f"{name:<6}{one.loss:>14.8g}{norm:>16}")
        if self.fresh:
            lines.append(f"new    {', '.join(self.fresh[:3])}: untrained, because the incident has no weights for them")
        return "\n".join([*lines, self.conclusion()[1]])

    def conclusion(self) -> tuple[str | None, str]:
        """What the replay shows.

        Returns:
            the verdict and a sentence. The verdict is `fixed` or `not_fixed` if something was changed, `reproduced` or
            `different` if nothing was, and None if one replay cannot tell.
        """
        finite = "finite" if self.now.finite else "not finite"
        if self.applied:
            if self.now.finite and self.now.zero_gradients is not None:
                finite += f", and {self.now.zero_gradients:.1%} of its gradients are 0"
            weights = f"with {self.tried}" if self.tried else "replayed with the weights after its update,"
            return None, f"{weights} the step is {finite}"
        if self.tried:
            return self.effect(finite)
        fault = f"; {self.remaining()[1]}" if self.was_finite else ""
        if self.now.bitwise_equal_to_reading is None:
            why = "its original numbers are unknown" if self.then is None else "it ran compiled or on several ranks"
            return None, f"replayed, the step is {finite}; its bits cannot be compared: {why}{fault}"
        if self.now.bitwise_equal_to_reading:
            return "reproduced", f"bitwise equal: the step is {finite}, as in the run{fault}"
        why = "This is normal on another machine or with other software; otherwise suspect"
        if self.unsure:
            why = (
                f"{listed(self.unsure)} may have changed while the run trained, which would explain it; if not, suspect"
            )
        return "different", (
            f"not bitwise equal: replayed, the step is {finite}. {why} a hardware fault, or a fault that was injected "
            "on purpose"
        )

    @property
    def tried(self) -> str:
        """What differs from the run; empty if nothing does."""
        code = [f"the changed {listed(self.changed)}"] if self.changed else []
        return " and ".join([*([" ".join(self.overrides)] if self.overrides else []), *code])

    @property
    def was_finite(self) -> bool:
        """Whether the step's own loss and gradient norm were finite."""
        return self.then is not None and math.isfinite(self.then.loss) and math.isfinite(self.then.grad_norm)

    def effect(self, finite: str) -> tuple[str | None, str]:
        """Verdict and sentence of a replay that differs from the run."""
        result = f"with {self.tried} the step is {finite}"
        if self.now.finite and self.now.grad_norm == 0.0:
            return "not_fixed", f"{result}, but its gradient norm is 0, so nothing is learnt from it"
        if self.then is None:
            return None, result
        if not self.was_finite:
            again = (self.diagnosis.get("replays") or {}).get("same") or {}
            if self.now.finite and again.get("finite"):
                return None, f"{result}, as it was when the run replayed it unchanged"
            if self.overrides:
                return "fixed" if self.now.finite else "not_fixed", result
            if self.now.finite:
                return (
                    "fixed",
                    f"fixed by the change in {listed(self.changed)}: the step is finite, and was not in the run",
                )
            return "not_fixed", f"not fixed by the change in {listed(self.changed)}: the step is still not finite"
        if not self.now.finite:
            return "not_fixed", f"{result}, but it was finite before"
        # The step was skipped although it was finite, so a finite replay does not prove a fix.
        there, clause = self.remaining()
        verdict = None if there is None else "not_fixed" if there else "fixed"
        return verdict, f"{result}, as it was before; {clause}"

    def remaining(self) -> tuple[bool | None, str]:
        """Returns whether a finite step's fault remains (None if a replay cannot tell), and a clause about it."""
        then, now, known = self.then, self.now, self.diagnosis
        assert then is not None
        if then.bad_data:
            faults = [sample["fault"] for sample in known.get("samples") or [] if "fault" in sample]
            if not faults:
                return None, "it was skipped because its batch held bad data"
            return True, f"{BAD_SAMPLES.get(faults[0], 'the batch is')} still wrong: {known.get('verdict')}"
        if not math.isfinite(then.buffers):
            return None, "it was skipped because its buffers were not finite, which a replay does not measure"
        limits = metrics.numbers(dict(known.get("limits") or {}))
        if SPIKE_NAMES.keys() - limits.keys():  # an incident of an earlier version
            return None, "it was skipped as a spike: compare the numbers above"
        if then.loss <= limits["loss"] and then.grad_norm <= limits["grad_norm"]:
            return None, f"it was skipped because its inputs are up to {then.inputs:.4g}"
        measured = {"loss": now.loss or 0.0, "grad_norm": now.grad_norm or 0.0}
        over = [
            f"its {SPIKE_NAMES[name]} is above the guard's limit, {limits[name]:.4g}"
            for name in measured
            if measured[name] > limits[name]
        ]
        if over:
            return True, f"it is still a spike: {' and '.join(over)}"
        return False, "it is no longer a spike: its loss and gradient norm are within the guard's limits"


def listed(files: Sequence[str]) -> str:
    """Names up to three files."""
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f"{', '.join(files[:3])}{more}"
