"""One process: the model is run as it is, every number is the step's own, and nobody else need agree."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from stabletrain.checkpoint.tree import Tree
from stabletrain.parallel.ranks import Ranks
from stabletrain.records import Batch, GradNorms, LossTerms, StepChecks, TrainState


class SingleProcess:
    """Shares nothing.

    Attributes:
        ranks: this process among those of the run.
        name: of the kind.
        has_whole_moments: whether the optimizer's moments are whole on every rank.
        head_apart: whether the model's head may run outside of its forward pass.
    """

    name = "alone"
    has_whole_moments = True
    head_apart = True

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()

    # ---- before the first step

    def check(self, choices: Mapping[str, str]) -> None:
        """Refuses options that cannot work on several ranks."""

    def optimizer_overrides(self, choice: str) -> Mapping[str, Any]:
        """Arguments that the ranks ask of an optimizer, whatever its YAML says."""
        del choice
        return {}

    def shard(self, model: nn.Module) -> None:
        """Parts the weights between the ranks, before there is an optimizer."""

    def wrap(self, model: nn.Module) -> None:
        """Lets gradients meet, once all that writes the weights before the first step has done so."""

    def shard_batch(self, batch: Batch, size: int) -> Batch:
        """This rank's part of a batch that should have `size` samples: all of it."""
        del size
        return batch

    # ---- in a step

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The module to call for the model's forward pass: the model itself."""
        return model

    def gradient_sync(self, model: nn.Module, last: bool) -> AbstractContextManager:
        """Around forward and backward of a micro-batch: gradients meet after the last one only."""
        del model, last
        return nullcontext()

    def scale_for_averaging(self, loss: Tensor) -> Tensor:
        """What is differentiated, so that gradients that are averaged over the ranks are those of the whole batch."""
        return loss

    def average_buffers_(self, model: nn.Module, held: list[Tensor]) -> None:
        """Makes buffers that a forward pass has written the same on every rank."""

    def max_over_ranks_(self, values: list[Tensor]) -> None:
        """Makes maxima over this rank's part of the step those over the whole step."""

    def reduce_stats(
        self, terms: LossTerms, norms: GradNorms, checks: StepChecks
    ) -> tuple[LossTerms, GradNorms, StepChecks]:
        """The numbers of the whole step, from those of this rank's part of it: the same on every rank."""
        return terms, norms, checks

    # ---- between steps

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, elementwise."""
        return values

    def find_divergence(self, state: TrainState) -> str:
        """Which ranks no longer have the state that the others have, in words; empty where all agree."""
        del state
        return ""

    def full_model(self, model: nn.Module, model_factory: Callable[[], nn.Module]) -> nn.Module | None:
        """A model with all weights, to be run without the other ranks; None where it would not fit.

        Args:
            model: that is trained.
            model_factory: makes another one, whose weights are anything.
        """
        del model_factory
        return model

    def full_state(self, tree: Tree | None) -> Tree | None:
        """A captured state with every tensor whole, for that model."""
        return tree

    def gather_samples(self, samples: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        """Samples of the whole batch, from those of this rank's part of it, which has `size`; `index` is the place."""
        del size
        return samples

    def any_rank(self, here: bool) -> bool:
        """Whether something is so on any rank."""
        return here

    def request_stop(self, signal: str) -> None:
        """Notes that this rank has been asked to stop, by a signal's name; empty for no."""

    def note_stop(self, stop: bool) -> None:
        """Notes that some rank had been asked to stop, as a reading says."""

    def stopping(self, signal: str) -> str:
        """The signal that all ranks stop for now; empty for none."""
        return signal
