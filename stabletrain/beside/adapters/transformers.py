"""The guard as a callback of the Trainer of transformers, also of its subclasses, such as those of TRL:

    trainer = Trainer(model, args, train_dataset=...)
    trainer.add_callback(GuardCallback(trainer))

The Trainer keeps its own precision, gradient clipping, accumulation and loop. Each update is judged by the gradients
from before clipping, and is applied or not. A withheld step is explained by running the Trainer's `training_step` again
on its micro-batches, up to the loss.

A withheld step does not advance the scheduler. The Trainer's `global_step` counts it, so `max_steps` is the number of
judged steps. Logged losses leave it out if they are not finite (`logging_nan_inf_filter`).
"""

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.optim import LBFGS
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stabletrain.beside.adapters.callback import IN_A_LOOP, GuardHolder, do_nothing, replaced, unchanged
from stabletrain.errors import ConfigError
from stabletrain.guard.attached_guard import AttachedGuard

STATE_KEY = "stabletrain.guard"
"""Name of the guard's state in `trainer_state.json`."""


class GuardCallback(GuardHolder, TrainerCallback):
    """Guards a Trainer's training. `trainer.train` raises what `Guard` raises.

    Its state is saved and loaded with the Trainer's checkpoints.

    Attributes:
        guard: the guard of the training that runs, or ran last; None before the first. See `Guard` for `guard.skipped`,
            `guard.incidents` and so on.

    Args:
        trainer: the Trainer that the callback is added to.
        folder, rollback, slow, loss, max_incidents, max_seconds, policy: as for `Guard`. After a rollback, training
            goes on with the next batches: the Trainer cannot pass over any (`guard.rolled_back`).
    """

    def __init__(
        self,
        trainer: Trainer,
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
        self._trainer = trainer
        self._first = True

    # ---- beginning and end

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attaches a new guard."""
        self._release()  # an error may have ended the training before
        trainer = self._trainer
        guard = self._attach(trainer.model_wrapped, wrapped(trainer).optimizer, trainer.accelerator.scaler)
        saved = states_in(state)
        if STATE_KEY in saved:
            guard.load_state_dict(saved[STATE_KEY])
        unscale = trainer.accelerator.unscale_gradients

        def unscale_gradients(*arguments: Any, **keywords: Any) -> None:
            unscale(*arguments, **keywords)
            guard.before_clipping()

        # accelerate calls it only before it clips.
        self._undo.append(replaced(trainer.accelerator, "unscale_gradients", unscale_gradients))
        self._undo.append(replaced(trainer, "training_step", self._recording(guard)))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detaches the guard."""
        self._release()

    # ---- a step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Notes that the next micro-batch is the first of its step."""
        self._first = True

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tells accelerate whether the step was withheld: the Trainer then does not advance its scheduler."""
        if self.guard is not None and self.guard.last is not None:
            wrapped(self._trainer)._is_overflow = not self.guard.last.applied

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Puts the guard's counts and limits where the Trainer saves them."""
        if self.guard is not None:
            states_in(state)[STATE_KEY] = self.guard.state_dict()

    def _recording(self, guard: AttachedGuard) -> Callable[..., Tensor]:
        """Returns a `training_step` that records each micro-batch."""
        trainer, inner = self._trainer, self._trainer.training_step
        accelerator = trainer.accelerator

        def training_step(model: Any, inputs: Any, *rest: Any, **keywords: Any) -> Tensor:
            def again(inputs: Any) -> Tensor:
                with unchanged(trainer, *model.modules()), losses_of(accelerator, backward=False) as losses:
                    vars(trainer).update(log=do_nothing)
                    inner(model, inputs, *rest, **keywords)
                return sum(losses[1:], losses[0])

            vars(again)["not_replayable"] = "the step is the Trainer's: training_step needs it"
            guard.before_forward(inputs, first=self._first)
            self._first = False
            with losses_of(accelerator, backward=True) as losses:
                result = inner(model, inputs, *rest, **keywords)
            if not losses:
                raise ConfigError(
                    f"{type(trainer).__name__}.training_step does not call self.accelerator.backward(loss), so that "
                    "its loss cannot be computed again: use Guard.attach(model, optimizer)"
                )
            guard.record(again, inputs, sum(losses[1:], losses[0]))
            return result

        return training_step


def states_in(state: TrainerState) -> dict[str, Any]:
    """Returns the states of callbacks that the Trainer saves as JSON."""
    saved: Any = state.stateful_callbacks
    return saved


def wrapped(trainer: Trainer) -> AcceleratedOptimizer:
    """Returns the Trainer's optimizer, in accelerate's wrapper.

    Raises:
        ConfigError: the training is of a kind that cannot be guarded.
    """
    optimizer = trainer.optimizer
    if not isinstance(optimizer, AcceleratedOptimizer) or trainer.is_deepspeed_enabled:
        raise ConfigError(
            f"GuardCallback cannot guard {type(optimizer).__name__}, which applies updates by itself: use DDP or FSDP2"
        )
    if isinstance(optimizer.optimizer, LBFGS):
        raise ConfigError(f"GuardCallback cannot guard LBFGS, which runs several passes in a step: {IN_A_LOOP}")
    return optimizer


@contextlib.contextmanager
def losses_of(accelerator: Accelerator, *, backward: bool) -> Generator[list[Tensor]]:
    """A context that collects the losses that are differentiated.

    Args:
        backward: whether to differentiate them too; they are then collected without their graph.
    """
    inner, losses = accelerator.backward, []

    def collect(loss: Tensor, **keywords: Any) -> None:
        share = loss / accelerator.gradient_accumulation_steps
        losses.append(share.detach() if backward else share)
        if backward:
            inner(loss, **keywords)

    undo = replaced(accelerator, "backward", collect)
    try:
        yield losses
    finally:
        undo()
