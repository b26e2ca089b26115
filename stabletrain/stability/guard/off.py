"""No guard: every update reaches the weights, as in a bare PyTorch loop; only fp16's loss scaling withholds some."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from stabletrain.records import Detour, GradNorms, LossTerms, Reading, Verdict, Vitals


def overflow_reason(reading: Reading) -> str:
    """One line for people about an update that fp16's loss scaling withheld."""
    return f"fp16 overflow at loss scale {reading.loss_scale:g}: the scale is lowered"


@dataclass
class NoGuard:
    """Every update reaches the weights.

    Attributes:
        skips: steps that loss scaling withheld, by kind (`overflow`).
        reason: why the last update was withheld, for people.
        kind: the kind of the last step that was withheld.
        rollbacks: how often an older state was put back.
    """

    skips: dict[str, int] = field(default_factory=lambda: {"overflow": 0})
    reason: str = ""
    kind: str = ""
    rollbacks: int = 0
    consecutive: int = 0

    @property
    def bounds(self) -> tuple[float, float]:
        """The largest loss and gradient norm that are let through: none are kept back."""
        return math.inf, math.inf

    @property
    def healthy(self) -> bool:
        """Whether the state may be called so, as far as the guard knows: it knows nothing against it."""
        return True

    def gate(self, terms: LossTerms, norms: GradNorms, vitals: Vitals) -> Bool[Tensor, ""]:
        """Always open."""
        del terms, vitals
        return torch.ones_like(norms.total, dtype=torch.bool)

    def judge(self, reading: Reading) -> Verdict:
        """APPLY, or SKIP where loss scaling withheld the update."""
        if reading.applied:
            return Verdict.APPLY
        self.skips["overflow"] += 1
        self.kind, self.reason = "overflow", overflow_reason(reading)
        return Verdict.SKIP

    def at_end(self, verdict: Verdict) -> Verdict:
        """The verdict on the last step of the run: as on any other."""
        return verdict

    def distrust(self, why: str) -> Verdict:
        """What to do about a state that has gone wrong without a step's fault: nothing, it is trained on."""
        self.reason = why
        return Verdict.APPLY

    def trouble_at_end(self) -> str | None:
        """What a person must know of how the run ended: nothing."""
        return None

    def slowdown(self, step: int) -> float:
        """1: nobody lowers the learning rate."""
        del step
        return 1.0

    def due(self, step: int) -> bool:
        """Whether the state after `step` steps is to be kept in memory: never."""
        del step
        return False

    def take(self, step: int) -> None:
        """Nothing is kept."""

    def forget(self) -> None:
        """Nothing is kept."""

    @property
    def held(self) -> list[int]:
        """Steps of the states that may be asked for again: none."""
        return []

    @property
    def target(self) -> int | None:
        """Step of the state to go back to: there is none."""
        return None

    def go_back(self, step: int, target: int, same_data: bool = False) -> Detour:
        """Never asked for."""
        del same_data
        raise NotImplementedError(f"{type(self).__name__} gave no verdict of a rollback from {step} to {target}")

    def state_dict(self) -> dict:
        """Counts, for the checkpoint."""
        return {"skips": dict(self.skips)}

    def load_state_dict(self, state: dict) -> None:
        """Counts, from a checkpoint."""
        self.skips = self.skips | state["skips"]
