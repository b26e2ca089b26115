"""The guard as a callback of Lightning:

    trainer = Trainer(callbacks=[GuardCallback()], ...)

Lightning keeps its own precision, gradient clipping, accumulation and loop. Each update is judged by the gradients from
before clipping, and is applied or not. A withheld step is explained by running `training_step` again on its
micro-batches.

A withheld step does not advance schedulers with `interval="step"`. Lightning's `global_step` counts it, so `max_steps`
is the number of judged steps. What `training_step` logged for it is logged.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from stabletrain.beside.adapters.callback import IN_A_LOOP, GuardHolder, do_nothing, replaced, unchanged
from stabletrain.errors import ConfigError
from stabletrain.guard.attached_guard import AttachedGuard


class GuardCallback(GuardHolder, pl.Callback):
    """Guards the training of a `LightningModule` with automatic optimization. `Trainer.fit` raises what `Guard` raises.

    Its state is saved and loaded with Lightning's checkpoints.

    Attributes:
        guard: the guard of the training that runs, or ran last; None before the first. See `Guard` for `guard.skipped`,
            `guard.incidents` and so on.
        first: whether the present micro-batch is the first of its step.

    Args:
        folder, rollback, slow, loss, max_incidents, max_seconds, policy: as for `Guard`. After a rollback, training
            goes on with the next batches: Lightning cannot pass over any (`guard.rolled_back`).
    """

    def __init__(
        self,
        folder: str | Path = "incidents",
        *,
        rollback: bool = False,
        slow: str = "alarm",
        loss: str = "minimized",
        max_incidents: int = 10,
        max_seconds: float = 120.0,
        policy: Any = None,
    ) -> None:
        limits = {"max_incidents": max_incidents, "max_seconds": max_seconds}
        super().__init__(folder=folder, rollback=rollback, slow=slow, loss=loss, policy=policy, **limits)
        self._state: dict[str, Any] = {}
        self.first = True
        self._clips = False

    # ---- beginning and end

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attaches a new guard."""
        self._release()
        check(trainer, pl_module)
        optimizer, scaler = trainer.optimizers[0], getattr(trainer.precision_plugin, "scaler", None)
        guard = self._attach(trainer.strategy.model, optimizer, scaler)
        if self._state:
            guard.load_state_dict(self._state)
            self._state = {}
        # Gradients of a fused optimizer are still scaled before its step; Lightning does not clip these.
        fused = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
        own = is_overridden("configure_gradient_clipping", pl_module)
        self._clips = bool(trainer.gradient_clip_val or own) and not fused
        self._undo.append(replaced(trainer.strategy, "training_step", recording(self, guard, trainer, pl_module)))
        self._undo.append(replaced(pl_module, "lr_scheduler_step", scheduling(guard, trainer, pl_module)))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Detaches the guard."""
        self._release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Detaches the guard."""
        self._release()

    # ---- a step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Notes whether the micro-batch is the first of its step."""
        self.first = batch_idx % trainer.accumulate_grad_batches == 0

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Measures the gradients before they are clipped."""
        if self._clips and self.guard is not None:
            self.guard.before_clipping()

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the guard's counts and limits, or those that the guard of the next training will have."""
        return self._state or ({} if self.guard is None else self.guard.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps them for the guard of the next training."""
        self._state = state_dict


def recording(
    callback: GuardCallback, guard: AttachedGuard, trainer: pl.Trainer, pl_module: pl.LightningModule
) -> Callable[..., Any]:
    """Returns a `training_step` for the strategy that records each micro-batch."""
    inner = trainer.strategy.training_step

    def training_step(batch: Any, *rest: Any, **keywords: Any) -> Any:
        parts = trainer.accumulate_grad_batches

        def again(*elements: Any) -> Tensor | None:
            with unchanged(trainer, *pl_module.modules()):
                silence(trainer, pl_module)
                return loss_of(inner(batch_like(batch, elements), *rest, **keywords), parts)

        vars(again)["not_replayable"] = "the step is Lightning's: training_step needs its Trainer"
        guard.before_forward(batch, first=callback.first)
        output = inner(batch, *rest, **keywords)
        loss = loss_of(output, parts)
        if loss is not None:
            guard.record(again, batch, loss)
        return output

    return training_step


def scheduling(guard: AttachedGuard, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Callable[..., Any]:
    """Returns an `lr_scheduler_step` that leaves schedulers as they are after a withheld step."""
    inner = pl_module.lr_scheduler_step

    def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
        of_steps = [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "step"]
        withheld = guard.last is not None and not guard.last.applied
        if not (withheld and any(scheduler is one for one in of_steps)):
            inner(scheduler, metric)

    return lr_scheduler_step


def check(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Raises ConfigError if the training is of a kind that cannot be guarded."""
    name = type(pl_module).__name__
    if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
        raise ConfigError(
            f"GuardCallback guards automatic optimization with one optimizer; {name} has {len(trainer.optimizers)}, "
            f"automatic_optimization={pl_module.automatic_optimization}: {IN_A_LOOP}"
        )
    if isinstance(trainer.optimizers[0], LBFGS):
        raise ConfigError(f"GuardCallback cannot guard LBFGS, which runs several passes in a step: {IN_A_LOOP}")
    if trainer.strategy.handles_gradient_accumulation:
        strategy = type(trainer.strategy).__name__
        raise ConfigError(f"GuardCallback cannot guard {strategy}, which applies updates by itself: use DDP or FSDP2")
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise ConfigError(
            f"{name}.training_step(dataloader_iter) reads its batches itself, so that they cannot be run again: take a "
            "batch instead"
        )


def silence(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Turns logging off, until `unchanged` restores it."""
    vars(pl_module).update(log=do_nothing, log_dict=do_nothing, print=do_nothing)
    trainer.loggers = [DummyLogger() for _ in trainer.loggers]


def loss_of(output: Any, parts: int) -> Tensor | None:
    """Returns the loss that Lightning differentiates; None if `training_step` skips the batch.

    Args:
        output: what `training_step` returned.
        parts: number of micro-batches that a step accumulates.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss / parts if isinstance(loss, Tensor) else None


def batch_like(batch: Any, elements: Sequence[Any]) -> Any:
    """Returns the elements that the guard calls a closure with as a batch of the same form as `batch`."""
    if not isinstance(batch, tuple | list):
        return elements[0]
    return type(batch)(*elements) if hasattr(batch, "_fields") else type(batch)(elements)
