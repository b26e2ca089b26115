"""What the callbacks of all libraries share: a guard is attached when a training begins, and detached at its end."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from stabletrain.guard.attached_guard import AttachedGuard
from stabletrain.guard.guard import Guard

IN_A_LOOP = "use guard.step in a loop of your own"


class GuardHolder:
    """Attaches a guard when a training begins, and detaches it at the end.

    Attributes:
        guard: the guard of the training that runs, or ran last; None before the first. See `Guard` for `guard.skipped`,
            `guard.incidents` and so on.

    Args:
        options: as for `Guard.attach`.
    """

    def __init__(self, **options: Any) -> None:
        self.guard: AttachedGuard | None = None
        self._options = options
        self._undo: list[Callable[[], Any]] = []

    def _attach(self, model: nn.Module | None, optimizer: Optimizer, scaler: Any) -> AttachedGuard:
        """Attaches a new guard, which `_release` detaches."""
        assert model is not None
        self.guard = guard = Guard.attach(model, optimizer, scaler=scaler, **self._options)
        self._undo.append(guard.detach)
        return guard

    def _release(self) -> None:
        """Undoes everything in `_undo`, the newest first."""
        while self._undo:
            self._undo.pop()()
