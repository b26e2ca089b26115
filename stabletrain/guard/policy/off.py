"""`NoGuard` applies every update, as a plain PyTorch loop does; only fp16's loss scaling skips some."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from stabletrain.guard.checks.recheck import NoRecheck
from stabletrain.guard.checks.state_check import NoStateCheck
from stabletrain.guard.checks.update_check import NoUpdateCheck
from stabletrain.guard.policy.limits import overflow_reason
from stabletrain.guard.policy.retained import NoRetainedStates
from stabletrain.monitors.rolling import Alarm
from stabletrain.monitors.update_length import NoLengths
from stabletrain.records import GradNorms, LossTerms, Reading, RollbackPlan, StepChecks, Verdict


@dataclass
class NoGuard:
    """Applies every update.

    Attributes:
        skips: number of skipped steps by kind; here only `overflow`, by fp16's loss scaling.
        reason: why the newest skipped step was skipped, in one line.
        kind: kind of the newest skipped step, or `slow` after a slow spike that is rolled back, or `diverged`.
        since: first step of the problem that caused the halt; None if that is the first of the skips before the halt.
        rollbacks: always 0.
        machine_faults, retried_step: always 0.
        faulty_rank: always -1.
        consecutive: always 0.
        escalate: what happens after a halt: always `halt`, the run ends.
        kept_steps, samples_left_out, left_out: always 0.
        unfinished: always None.
        states, state_check, update_check, recheck: the parts that a guard is composed of; here all do nothing.
    """

    skips: dict[str, int] = field(default_factory=lambda: {"overflow": 0})
    reason: str = ""
    kind: str = ""
    since: int | None = None
    rollbacks: int = 0
    machine_faults: int = 0
    retried_step: int = 0
    faulty_rank: int = -1
    consecutive: int = 0
    escalate: str = "halt"
    kept_steps: int = 0
    samples_left_out: int = 0
    left_out: int = field(init=False, repr=False, default=0)
    unfinished: Path | None = field(init=False, repr=False, default=None)
    states = NoRetainedStates()
    state_check: NoStateCheck = field(init=False, repr=False, compare=False, default_factory=NoStateCheck)
    update_check: NoUpdateCheck = field(init=False, repr=False, compare=False, default_factory=NoUpdateCheck)
    recheck: NoRecheck = field(init=False, repr=False, compare=False, default_factory=NoRecheck)

    lengths = NoLengths()
    """Measures each update: nothing, because this guard looks for no slow spikes."""

    rollback_before = None
    """The next rollback must restore a state from before this step; None: the newest healthy state."""

    bounds = (math.inf, math.inf)
    """Largest loss and gradient norm that open the gate."""

    keeps = may_keep = False
    """Whether the rest of a held step is kept, without its guilty samples; and that of the step that was just held."""

    note = ""
    """Text after the guard's name in the first lines of the run."""

    healthy = True
    """Whether the state is healthy: this guard does not judge it."""

    def gate(self, terms: LossTerms, norms: GradNorms, checks: StepChecks) -> Bool[Tensor, ""]:
        """Returns True, 0-d on the device of the norms: the gate is always open."""
        return torch.ones_like(norms.total, dtype=torch.bool)

    def judge(self, reading: Reading) -> Verdict:
        """Returns APPLY, or SKIP if fp16's loss scaling skipped the update."""
        if reading.applied:
            return Verdict.APPLY
        self.skips["overflow"] += 1
        self.kind, self.reason = "overflow", overflow_reason(reading)
        return Verdict.SKIP

    def judge_validation(self, step: int, loss: float) -> Verdict:
        """Returns APPLY: this guard does not judge validation losses."""
        return Verdict.APPLY

    def new_alarms(self) -> list[Alarm]:
        """Returns the slow spikes found since the last call: none."""
        return []

    def at_end(self, verdict: Verdict) -> Verdict:
        """Returns the verdict on the last step unchanged."""
        return verdict

    def on_machine_fault(self, step: int, why: str, *, damaged: bool, otherwise: Verdict | None = None) -> Verdict:
        """Returns APPLY: this guard goes on with a state that memory or arithmetic has damaged."""
        self.reason = why
        return otherwise or Verdict.APPLY

    def note_mistake(self, incident: Any) -> None:
        """Does nothing: this guard never rolls back."""

    def trouble_at_end(self) -> str | None:
        """Returns None: this guard reports no trouble at the end of the run."""
        return None

    def lr_multiplier(self, step: int) -> float:
        """Returns 1: this guard does not lower the learning rate."""
        return 1.0

    def reset_for_new_settings(self, loss: float | None) -> None:
        """Does nothing: this guard has no statistics that depend on the settings."""

    def note_retry(self, step: int, rank: int = -1) -> None:
        """Does nothing."""

    def take_without(self, step: int, left_out: int, samples: int) -> None:
        """Does nothing: this guard leaves no samples out."""

    def begin_rollback(self, step: int, target: int) -> RollbackPlan:
        """Raises NotImplementedError, because this guard never returns ROLLBACK."""
        raise NotImplementedError(f"{type(self).__name__} never rolls back, but was asked to, from {step} to {target}")

    def state_dict(self) -> dict:
        """Counts, and what is known of the newest skip, for the checkpoint."""
        # 0 for no step, because a checkpoint's values must have the same types as the live state's.
        return {"skips": dict(self.skips), "kind": self.kind, "reason": self.reason, "since": self.since or 0}

    def load_state_dict(self, state: dict) -> None:
        """Restores them; older versions saved only the counts."""
        self.skips = dict.fromkeys(self.skips, 0) | state["skips"]
        self.kind, self.reason = state.get("kind", ""), state.get("reason", "")
        self.since = state.get("since") or None
