"""Guards that record what the run's own guard sees, with its actions or without them."""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stabletrain.records import GradNorms, LossTerms, Reading, StepChecks, TrainState, Verdict

SERIES = ("loss", "grad_norm", "update", "weights", "lr", "clip_coef", "buffers")
"""What is recorded of each step."""


class Lengths:
    """Measures the L2 length of each update, and of the weights after it, over all trained parameters.

    Attributes:
        update, weights: of the newest step; 0 for a withheld update.
    """

    def __init__(self, state: TrainState) -> None:
        self._trained = [each for each in state.model.parameters() if each.requires_grad]
        self._before = self._flat()
        self.update, self.weights = 0.0, self._before.norm().item()
        state.optimizer.register_step_pre_hook(self._begin)
        state.optimizer.register_step_post_hook(self._end)

    def _flat(self) -> Tensor:
        return torch.cat([each.detach().float().reshape(-1) for each in self._trained])

    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        self._before = self._flat()

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        now = self._flat()
        self.update, self.weights = (now - self._before).norm().item(), now.norm().item()


class Watched:
    """The run's guard, with every step's numbers recorded; everything else is the guard's own.

    Attributes:
        series: a list for each of `SERIES`.
    """

    def __init__(self, guard: Any, lengths: Lengths) -> None:
        self._guard, self._lengths = guard, lengths
        self.series: dict[str, list[float]] = {name: [] for name in SERIES}
        self.events: list[list[Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._guard, name)

    def judge(self, reading: Reading) -> Verdict:
        """Records the reading, and returns the guard's verdict."""
        self._record(reading)
        return self._guard.judge(reading)

    def _record(self, reading: Reading) -> None:
        for name in ("loss", "grad_norm", "lr", "clip_coef", "buffers"):
            self.series[name].append(getattr(reading, name))
        self.series["update"].append(self._lengths.update)
        self.series["weights"].append(self._lengths.weights)
        self._lengths.update = 0.0  # an optimizer that is not fused is not even called if the update is withheld


class Unconfirmed:
    """The guard's recheck, of which the loop does not ask for a third computation."""

    def __init__(self, recheck: Any) -> None:
        self._recheck = recheck

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recheck, name)

    def differing_part(self, reading: Reading) -> str:
        """Returns that the step is right."""
        return ""


class Alarmed(Watched):
    """The run's guard as an alarm: what it would withhold is recorded and applied.

    Non-finite steps and bad data are withheld as by every guard.

    Attributes:
        events: `[tick, "skip", kind]` for each update that the guard would have withheld.
    """

    def __init__(self, guard: Any, lengths: Lengths) -> None:
        super().__init__(guard, lengths)
        self._gates: list[Tensor] = []
        self.recheck = Unconfirmed(guard.recheck)

    def gate(self, terms: LossTerms, norms: GradNorms, checks: StepChecks) -> Tensor:
        """Returns whether the step is finite and its data can be trained on."""
        gate = self._guard.gate(terms, norms, checks)
        self._gates.append(gate.clone())
        parts = [terms.total, norms.total, torch.as_tensor(checks.buffers, device=gate.device)]
        finite = torch.stack([part.isfinite() for part in parts]).all()
        return finite & (torch.as_tensor(checks.bad_data, device=gate.device) == 0)

    def judge(self, reading: Reading) -> Verdict:
        """Records what the guard says, and lets the run go on."""
        self._record(reading)
        open_ = bool(self._gates.pop(0)) and reading.applied
        verdict = self._guard.judge(reading._replace(applied=open_))
        tick = len(self.series["loss"])
        if not open_:
            self.events.append([tick, "skip", self._guard.kind])
        if verdict in (Verdict.ROLLBACK, Verdict.HALT):
            self.events.append([tick, verdict.value, self._guard.kind])
            self._guard.consecutive = self._guard.trouble = 0  # as after a rollback
        return Verdict.APPLY if reading.applied else Verdict.SKIP

    def at_end(self, verdict: Verdict) -> Verdict:
        """Returns the verdict on the last step unchanged."""
        return verdict


def digest(state: TrainState) -> str:
    """Returns a hash of the weights and buffers, 16 hexadecimal digits."""
    found = hashlib.sha256()
    for name, tensor in state.model.state_dict().items():
        found.update(name.encode())
        flat = tensor.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
