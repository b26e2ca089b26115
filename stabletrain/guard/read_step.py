"""`ReadStep`: a step whose numbers are on the host, as the engine sees it in either kind of loop."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stabletrain.forensics.handler import IncidentSummary, NoIncidentHandler
from stabletrain.forensics.probes.samples import MAX_LISTED
from stabletrain.guard.checks.comparing import Compared
from stabletrain.guard.guilty import Counts, Sample
from stabletrain.guard.policy import NoGuard
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Reading, TrainState
from stabletrain.tracking.tracker import NoTracker


@dataclass
class ReadStep(ABC):
    """A step whose numbers are on the host, and the ways to run it again.

    Attributes:
        reading: its numbers; `reading.step` is its number as the guard counts.
        number: its number in events and messages: the user's.
        tick: number of steps executed so far, with this one.
        state: weights and moments: those from before the step if it was held, else those that it led to.
        device: of the model.
        guard: the policy.
        parallel: the ranks that train together.
        tracker: receives events and lines.
        handler: investigates.
        traced: whether the step itself was traced while it ran.
        left_out: samples without which the step is to be taken again, if the verdict is KEEP.
    """

    reading: Reading
    number: int
    tick: int
    state: TrainState
    device: torch.device
    guard: NoGuard
    parallel: SingleProcess
    tracker: NoTracker
    handler: NoIncidentHandler
    traced: bool = field(default=False, init=False)
    left_out: Sequence[Sample] = field(default=(), init=False)

    @abstractmethod
    def investigate(self, kind: str, reading: Reading) -> IncidentSummary | None:
        """Has the handler explain the step, as a step with these numbers; None if it did not. All ranks call it.

        Raises:
            NotInvestigated: an error prevents it.
        """

    @abstractmethod
    def can_be_repeated(self) -> bool:
        """Returns whether a repetition of the step must give the same bits."""

    @abstractmethod
    def differs_when_repeated(self, cause: str | None) -> bool:
        """Returns whether a repetition gives another loss or gradient norm. All ranks call it.

        Args:
            cause: the result of the investigation; None if there was none.
        """

    @abstractmethod
    def update_again(self) -> None:
        """Runs the optimizer's step once more on the present gradients."""

    @abstractmethod
    def gradient_again(self, compared: Compared) -> Tensor | None:
        """Computes the gradients that were compared once more; returns the sums of their bits, int64 `[tensors]`.

        Returns None if other bits are to be expected.
        """

    @abstractmethod
    def sample_counts(self) -> Counts:
        """Returns how many samples the step has; nothing if it cannot be run with some of them. All ranks call it."""

    @abstractmethod
    def is_sound_without(self, left_out: Collection[Sample]) -> bool:
        """Runs the step without some samples; returns whether it is within all limits. All ranks call it."""

    def bad_samples(self, most: int | None = MAX_LISTED) -> tuple[list[dict[str, Any]], int]:
        """Returns this rank's samples with values that no model can learn from, and how many samples it has.

        Args:
            most: how many to return at most; None for all.
        """
        return [], 0

    def names_of(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Returns what events and messages say of some samples. All ranks call it."""
        return [each._asdict() for each in samples]
