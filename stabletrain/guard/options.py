"""The options of a guard of a user's loop, checked once, and the policy that is built from them."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.guard.checks.recheck import recheck_every
from stabletrain.guard.checks.update_check import NoUpdateCheck
from stabletrain.guard.policy import RollbackGuard, SkipGuard
from stabletrain.guard.states import Loader
from stabletrain.stability.precision.autocast import Unscaled
from stabletrain.stability.precision.loop import GradScaled, precision_of_loop


@dataclass(frozen=True)
class GuardOptions:
    """The keyword arguments of `Guard`, where they are explained.

    Raises:
        ConfigError: one is out of bounds.
    """

    folder: str | Path = "incidents"
    rollback: bool = False
    slow: str = "alarm"
    max_norm: float | None = None
    precision: str | None = None
    scaler: GradScaler | None = None
    loader: Any = None
    policy: SkipGuard | None = None
    checksum_every: int = 0
    recheck_every: int = 0
    check_update: bool = True
    max_incidents: int = 10
    max_seconds: float = 120.0
    keep_state: bool = True

    def __post_init__(self) -> None:
        if self.loader is not None and not isinstance(self.loader, Loader):
            raise ConfigError(
                f"Guard(loader={type(self.loader).__name__}(...)) has no state_dict and load_state_dict: leave it out, "
                "or use torchdata's StatefulDataLoader"
            )
        if self.scaler is not None and self.precision is not None:
            raise ConfigError(
                f"Guard(precision={self.precision!r}, scaler=...): with a GradScaler, the closure uses torch.autocast "
                "itself; leave precision out, or leave scaler out and let precision='fp16' scale the loss"
            )
        if self.checksum_every < 0:
            raise ConfigError(
                f"Guard(checksum_every={self.checksum_every}) is below 0: 1 checks between all updates, 0 never"
            )
        if self.recheck_every < 0:
            raise ConfigError(f"Guard(recheck_every={self.recheck_every}) is below 0: 250 is usual, 0 repeats nothing")

    def make_precision(self, device: torch.device, optimizer: Optimizer, *, several_ranks: bool) -> Unscaled:
        """Returns autocast and loss scale.

        Raises:
            ConfigError: `precision` is unknown, or the device lacks it.
        """
        if self.scaler is not None:
            return GradScaled(device, optimizer, self.scaler, several_ranks)
        return precision_of_loop(self.precision, device)

    def make_policy(self) -> SkipGuard:
        """Returns a new policy. A policy that the user gave is copied: the user's own object never changes."""
        if self.policy is not None:
            policy = copy.deepcopy(self.policy)
        else:
            policy = (RollbackGuard if self.rollback else SkipGuard)(slow=self.slow)
        policy.check_state_every(self.checksum_every)
        policy.recheck = recheck_every(self.recheck_every)
        if not self.check_update:
            policy.update_check = NoUpdateCheck()
        return policy
