"""Checks the options of a guard of a user's loop, and builds the policy from them; `Guard` explains each option."""

import copy
from numbers import Real
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.guard.checks.recheck import recheck_every as recheck_of
from stabletrain.guard.checks.update_check import NoUpdateCheck
from stabletrain.guard.checks.written import needs_closure
from stabletrain.guard.loop_states import Loader
from stabletrain.guard.policy import RollbackGuard, SkipGuard
from stabletrain.guard.policy.high_norms import HighNorms
from stabletrain.guard.policy.kept import KEEP
from stabletrain.guard.policy.slow_loop import loop_slow_spikes
from stabletrain.stability.precision.autocast import Unscaled
from stabletrain.stability.precision.loop import GradScaled, precision_of_loop

FROM_0 = {
    "max_norm": "1.0 is usual, 0 clips nothing",
    "checksum_every": "1 checks between all updates, 0 never",
    "recheck_every": "250 is usual, 0 repeats nothing",
    "max_incidents": "10 is usual, 0 files none",
    "forecast_every": "25 is usual, 0 predicts nothing",
}
ABOVE_0 = {"max_seconds": "120 is usual"}
"""Both: arguments of `Guard` that are numbers of at least 0, or above it, and what is usual."""


def check_numbers(**given: Any) -> None:
    """Checks arguments of `Guard` by name; None is none.

    Raises:
        ConfigError: one is no number, or out of bounds.
    """
    for name, value in given.items():
        usual = (FROM_0 | ABOVE_0)[name]
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ConfigError(f"Guard({name}={value!r}) is not a number: {usual}")
        if name in ABOVE_0 and not value > 0:
            raise ConfigError(f"Guard({name}={value}) is not above 0: {usual}")
        if name in FROM_0 and not value >= 0:
            raise ConfigError(f"Guard({name}={value}) is below 0: {usual}")


def make_policy(
    policy: SkipGuard | None = None,
    *,
    rollback: bool = False,
    keep: str | None = None,
    slow: str = "alarm",
    loss: str = "minimized",
    checksum_every: int = 0,
    recheck_every: int = 0,
    check_update: bool = True,
) -> SkipGuard:
    """Returns a new policy. A policy that the user gave is copied: the user's own object never changes.

    Raises:
        ConfigError: an option is out of bounds.
    """
    check_numbers(checksum_every=checksum_every, recheck_every=recheck_every)
    if rollback and policy is not None and not isinstance(policy, RollbackGuard):
        name = type(policy).__name__
        raise ConfigError(f"Guard(rollback=True, policy={name}(...)): {name} never rolls back; give RollbackGuard(...)")
    modes = (RollbackGuard if rollback else SkipGuard).slow_modes
    if policy is None and slow not in modes:
        more = "" if rollback else "; with rollback=True also rollback"
        raise ConfigError(f"Guard(slow={slow!r}) is not one of {', '.join(modes)}{more}")
    made = copy.deepcopy(policy) if policy is not None else (RollbackGuard if rollback else SkipGuard)(slow=slow)
    if keep is not None:
        if keep not in KEEP:
            raise ConfigError(f"Guard(keep={keep!r}) is not one of {', '.join(KEEP)}")
        made.keep = keep
    made.in_own_loop = True
    made.lone_loss_is_spike = False  # nothing is known about the loop's loss
    made.slow_spikes = loop_slow_spikes(made.slow, made.slow_rate, made.slow_modes, loss)
    made.high_norms = HighNorms()
    made.check_state_every(checksum_every)
    made.recheck = recheck_of(recheck_every)
    if not check_update:
        made.update_check = NoUpdateCheck()
    return made


def make_precision(
    precision: str | None, scaler: GradScaler | None, device: torch.device, optimizer: Optimizer, *, several_ranks: bool
) -> Unscaled:
    """Returns autocast and loss scale.

    Raises:
        ConfigError: both are given, `precision` is unknown, or the device lacks it.
    """
    if scaler is None:
        return precision_of_loop(precision, device)
    if precision is not None:
        raise ConfigError(
            f"Guard(precision={precision!r}, scaler=...): with a GradScaler, the closure uses torch.autocast "
            "itself; leave precision out, or leave scaler out and let precision='fp16' scale the loss"
        )
    return GradScaled(device, optimizer, scaler, several_ranks)


def check_closure_options(
    optimizer: Optimizer, *, max_norm: float | None, precision: str | None, scaler: GradScaler | None
) -> None:
    """Checks the options of a guard whose optimizer runs a closure in its step.

    Raises:
        ConfigError: one would change the gradients of the first evaluation only.
    """
    if not needs_closure(optimizer):
        return
    name = type(optimizer).__name__
    several = f"{name} compares gradients of several evaluations in a step"
    if max_norm is not None:
        raise ConfigError(
            f"Guard(max_norm={max_norm:g}): {several}, which clipping would falsify; leave it out, and shorten "
            f"steps by {name}'s own settings, such as lr or line_search_fn='strong_wolfe'"
        )
    if precision == "fp16" or (scaler is not None and scaler.is_enabled()):
        given = "precision='fp16'" if scaler is None else "scaler=..."
        raise ConfigError(f"Guard({given}): {several}, and no loss scale fits all of them; use bf16 or fp32")


def check_loader(loader: Any) -> Loader | None:
    """Returns the loader, which a rollback puts back; None if there is none.

    Raises:
        ConfigError: it has no position to save.
    """
    if loader is not None and not isinstance(loader, Loader):
        raise ConfigError(
            f"Guard(loader={type(loader).__name__}(...)) has no state_dict and load_state_dict: leave it out, "
            "or use torchdata's StatefulDataLoader"
        )
    return loader
