"""The roles in a step, each played by the object that a config group chooses; the step does not know its kind.

A role is the class named here: the kind that does nothing, or the plainest one. Its docstrings say what every kind must
offer. Kinds of this package derive from it; those of a user need only offer the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from stabletrain.guard.policy import NoGuard
from stabletrain.machine.determinism import Off
from stabletrain.parallel.single import SingleProcess
from stabletrain.stability.after_update import AfterUpdate
from stabletrain.stability.averaging import NoAveraging
from stabletrain.stability.clipping import NoClip
from stabletrain.stability.objective import Objective
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.sanitize import Sanitizer
from stabletrain.stability.schedule import LearningRate


@dataclass(frozen=True)
class Tools:
    """Everything that acts in a step.

    Attributes:
        sanitizer: replaces values in a batch that no model can learn from, and reports them.
        precision: number format of forward and backward, and the loss scale.
        objective: the loss, and what an evaluation reports beside it.
        clipping: clips gradients.
        after_update: changes the weights after an update.
        guard: decides which updates reach the weights, and what happens after a skip.
        learning_rate: the learning rate by step number, and what else depends on it.
        determinism: seeds the randomness of a step.
        seed: of this rank.
        parallel: the ranks that train together, or one process.
        averaging: averages the weights over time.
    """

    sanitizer: Sanitizer
    precision: FullPrecision
    objective: Objective
    clipping: NoClip
    after_update: AfterUpdate
    guard: NoGuard
    learning_rate: LearningRate
    determinism: Off
    seed: int
    parallel: SingleProcess
    averaging: NoAveraging = field(default_factory=NoAveraging)

    def wrap(self, model: nn.Module) -> Callable[[Tensor], Any]:
        """Returns the model as a step calls it: `outputs = wrapped(inputs)`.

        With DDP this is its wrapper, which averages the gradients. With `loss_chunk` the head is left to the loss.
        """
        return self.objective.wrap(self.parallel.wrapped(model), model, self)

    def wrap_alone(self, model: nn.Module) -> Callable[[Tensor], Any]:
        """Returns the model as `wrap` does, but without communication between ranks."""
        return self.objective.wrap(model, model, self)

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss to differentiate: times the loss scale, and times the world size, since DDP averages."""
        return self.precision.scale(self.parallel.scale_for_averaging(loss))
