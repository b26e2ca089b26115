"""Rollback: when skipping does not help, the weights themselves have gone wrong, and an older state is put back.

    skips that do not end (`patience`)   ->  back to the newest healthy state from before, past the data that was read
                                             since it, plus `skip_batches`, and slower for `lr_steps` steps
    rollbacks that do not help           ->  further back each time, with ever lower a learning rate
    `max_rollbacks` of them              ->  the run halts

A step that is skipped changes nothing. So to read the same batches again from the older state would lead to the same
weights again, bit for bit; that is why everything read since that state is passed over, as PaLM did (arXiv 2204.02311,
section 5.1: restart about 100 steps before the spike, skip 200 to 500 batches, among them those seen before it).

The guard knows states by their step number only. The loop keeps them (`checkpoint/capture.py`), and where one is lost,
because the process was killed, it is computed again from an older checkpoint: a step is a pure function.
"""

from dataclasses import dataclass, field
from typing import Any

from stabletrain.errors import ConfigError
from stabletrain.records import Detour, Reading, Verdict
from stabletrain.stability.guard.retained import RetainedStates
from stabletrain.stability.guard.skip import SkipGuard

WHOLE = {
    "patience": (1, "10 skips"),
    "snapshots": (1, "3 states"),
    "snapshot_every": (1, "50 steps"),
    "healthy_after": (0, "20 steps"),
    "skip_batches": (0, "20 batches"),
    "max_rollbacks": (0, "3 rollbacks"),
    "lr_steps": (0, "100 steps"),
}
"""Lowest and customary value of the whole numbers."""

LAST_PATIENCE = 2
"""Trouble that calls for a rollback when there are no more steps; a single skip leaves the weights as they were."""

CUMULATIVE = ("skips", "rollbacks", "in_vain", "beyond", "slow")
"""What a rollback does not undo."""


@dataclass
class RollbackGuard(SkipGuard):
    """Skips, and where skipping does not end, goes back to a healthy state.

    Attributes:
        patience: so much `trouble` calls for a rollback.
        snapshots: healthy states that are kept in memory.
        snapshot_every: steps between two of them.
        healthy_after: steps after which a state in memory is healthy, if the run is out of trouble then.
        skip_batches: batches to pass over beyond those that were read since the state that is put back.
        max_rollbacks: so many rollbacks without progress halt the run at the next trouble. Progress is a healthy state
            from beyond the trouble.
        lr_factor: the learning rate is multiplied by it after a rollback, and once more after each further one without
            progress.
        lr_steps: for so many steps.
        states: the states a rollback may restore.
        rollbacks: in the whole run.
        in_vain: rollbacks without progress, up to now.
        beyond: the step that a healthy state must lie beyond to be progress.
        slow: first and last step, and factor, of the lowered learning rate.
    """

    patience: int = 10
    snapshots: int = 3
    snapshot_every: int = 50
    healthy_after: int = 20
    skip_batches: int = 20
    max_rollbacks: int = 3
    lr_factor: float = 0.5
    lr_steps: int = 100
    rollbacks: int = 0
    in_vain: int = 0
    beyond: int = 0
    slow: tuple[int, int, float] = (0, 0, 1.0)
    states: RetainedStates = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (lowest, customary) in WHOLE.items():
            if (value := getattr(self, name)) < lowest:
                raise ConfigError(f"guard.{name}={value} is below {lowest}: {customary} is customary")
        if not 0 < self.lr_factor <= 1:
            raise ConfigError(
                f"guard.lr_factor={self.lr_factor} is outside (0, 1]: 0.5 is customary; 1 keeps the learning rate"
            )
        if self.patience >= self.max_consecutive:
            raise ConfigError(
                f"guard.patience={self.patience} is not below guard.max_consecutive={self.max_consecutive}: the run "
                "would halt before it ever went back; lower guard.patience"
            )
        self.states = RetainedStates(self.snapshots, self.snapshot_every, self.healthy_after)

    def judge(self, reading: Reading) -> Verdict:
        """What to do about a step that is over."""
        verdict = super().judge(reading)
        if verdict is Verdict.APPLY and self.healthy:
            promoted = self.states.promote(reading.step)
            if any(step > self.beyond for step in promoted):  # progress: a healthy state from beyond the trouble
                self.in_vain = 0
        if verdict is not Verdict.SKIP or self.kind not in ("spike", "nonfinite"):
            return verdict
        if self.trouble < self.patience:
            return Verdict.SKIP
        return self._give_up(f"skipping has not ended it (guard.patience={self.patience})")

    def at_end(self, verdict: Verdict) -> Verdict:
        """The verdict on the last step of the run: what `patience` was still to bear has no more steps to end in."""
        if verdict is not Verdict.SKIP or self.trouble < LAST_PATIENCE:
            return verdict
        return self._give_up("the run is at its end")

    def _give_up(self, why: str) -> Verdict:
        what = f"{self.reason}, and {why}"
        if self.in_vain < self.max_rollbacks:
            self.reason = what
            return Verdict.ROLLBACK
        self.reason = f"{what}, nor have guard.max_rollbacks={self.max_rollbacks} rollbacks helped: " + (
            "lower optimizer.lr, lengthen warmup.steps, try stability=zloss_qknorm or precision=fp32"
        )
        return Verdict.HALT

    def distrust(self, why: str) -> Verdict:
        """What to do about a state that has gone wrong without a step's fault: an older one is put back."""
        self.reason = why
        if self.in_vain < self.max_rollbacks:
            return Verdict.ROLLBACK
        self.reason = f"{why}, nor have guard.max_rollbacks={self.max_rollbacks} rollbacks helped"
        return Verdict.HALT

    def begin_rollback(self, step: int, target: int, same_data: bool = False) -> Detour:
        """Counts a rollback from `step` to `target`; slower from there on, unless the same data are read again."""
        self.rollbacks += 1
        self.in_vain += 1
        self.beyond = max(self.beyond, step)
        if same_data:
            return Detour(self.rollbacks, 0, 1.0, target)
        self.slow = (target, target + self.lr_steps, self.lr_factor**self.in_vain)
        return Detour(self.rollbacks, self.skip_batches, self.slow[2], self.slow[1])

    def lr_multiplier(self, step: int) -> float:
        """The factor of the learning rate at step number `step`: below 1 for some time after a rollback."""
        start, stop, factor = self.slow
        return factor if start <= step < stop else 1.0

    def cumulative_state(self) -> dict[str, Any]:
        """What a rollback does not undo: counts and budgets."""
        return {name: getattr(self, name) for name in CUMULATIVE} | {"skips": dict(self.skips), "slow": list(self.slow)}

    def load_cumulative_state(self, state: dict[str, Any]) -> None:
        """Puts that back over a restored state."""
        for name, value in state.items():
            setattr(self, name, tuple(value) if name == "slow" else value)

    def state_dict(self) -> dict:
        """Counts, windows, budgets and which states are held, for the checkpoint."""
        return {**super().state_dict(), **self.cumulative_state(), **self.states.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Puts them back; what another guard wrote lacks them, and they start afresh."""
        super().load_state_dict(state)
        self.states.load_state_dict(state)
        self.load_cumulative_state({name: state[name] for name in CUMULATIVE[1:] if name in state})
