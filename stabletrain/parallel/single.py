"""One process: the model runs as it is, and nothing is communicated. Base class of the distributed options."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.buffers import SavedBuffers
from stabletrain.checkpoint.tree import Tree
from stabletrain.machine.memory import within_memory
from stabletrain.machine.signals import NoStopRequest, StopRequest
from stabletrain.parallel.owners import Owners
from stabletrain.parallel.ranks import Ranks
from stabletrain.parallel.whole import WholeState
from stabletrain.records import Batch, GradNorms, LossTerms, OwnNumbers, RankPart, StepChecks, TrainState

NO_CASTS: Mapping[str, torch.dtype] = {}
"""Of a precision that casts no weights."""


class SingleProcess:
    """Training in one process, without communication.

    Attributes:
        ranks: this process among those of the run.
        name: `alone`, `ddp`, `fsdp` or `hsdp`.
        shards: number of ranks that share one copy of the weights.
        has_whole_moments: whether every rank has the optimizer's whole moments.
        head_apart: whether the model's head may run outside its forward pass.
        owners: how the ranks divide an optimizer's work on matrices that are whole on each of them.
    """

    ranks: Ranks
    name = "alone"
    shards = 1
    has_whole_moments = True
    head_apart = True
    owners = Owners()

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()

    # ---- before the first step

    def check(self, choices: Mapping[str, str]) -> None:
        """Rejects options that cannot work with several ranks."""

    def optimizer_overrides(self, choice: str) -> Mapping[str, Any]:
        """Returns optimizer arguments that override its YAML."""
        return {}

    def shard(self, model: nn.Module, casts: Mapping[str, torch.dtype] = NO_CASTS) -> None:
        """Shards the weights across ranks. Call this before creating the optimizer.

        Args:
            model: on its device.
            casts: the dtype of each weight that the precision casts wherever the model uses it, by name.
        """

    def wrap(self, model: nn.Module) -> None:
        """Wraps the model to synchronize gradients. Call this after everything that initializes the weights."""

    def rows(self, size: int) -> slice:
        """Returns which samples of a batch of `size` samples belong to this rank: all of them."""
        return slice(0, size)

    def shard_batch(self, batch: Batch, size: int) -> Batch:
        """Returns this rank's slice of a batch that should have `size` samples: all of it."""
        return batch

    # ---- in a step

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Returns the module to call for the forward pass: the model itself."""
        return model

    def with_whole(self, forward: Callable[..., Any], model: nn.Module, part: nn.Module | None) -> Callable[..., Any]:
        """Returns a forward pass of `model` after which the weights of one of its modules are whole: `forward`.

        They are whole until the backward pass has used them.
        """
        return forward

    def gradient_sync(self, model: nn.Module, last: bool) -> AbstractContextManager:
        """Returns a context for one micro-batch, which synchronizes gradients after the last one only."""
        return nullcontext()

    def scale_for_averaging(self, loss: Tensor) -> Tensor:
        """Scales the loss so that the average of the ranks' gradients is the gradient of the whole batch."""
        return loss

    def average_buffers_(self, model: nn.Module, held: SavedBuffers) -> None:
        """Makes the buffers equal on all ranks after a forward pass. `held`: the buffers' values before that pass."""

    def max_over_ranks_(self, values: list[Tensor]) -> None:
        """Replaces each maximum over this rank's slice by the maximum over the whole batch."""

    def on_any_rank(self, flag: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns 1 if a flag (0-d, 0 or 1) is 1 on any rank, else 0, and which rank it is; no rank in one process."""
        return flag, None

    def keep_gradients(self) -> bool:
        """Keeps this rank's gradients of the next backward pass for `own_gradients`; returns whether it can."""
        return True

    def own_gradients(self, parameters: list[Tensor]) -> list[Tensor | None] | None:
        """Returns the gradients of the last backward pass as this rank computed them, before they were averaged.

        None if there was not enough memory to keep them.
        """
        return [parameter.grad for parameter in parameters]

    def own_backward(self, model: nn.Module, run: Callable[[], Tensor]) -> list[Tensor | None] | None:
        """Runs forward and backward of a micro-batch alone; returns its loss and the gradients, before any reduction.

        Before it, no parameter has a gradient. None if there was not enough memory.

        Args:
            run: runs them without `wrapped`, and returns the loss.
        """
        loss = within_memory(run)
        return None if loss is None else [loss, *(each.grad for each in model.parameters() if each.requires_grad)]

    def from_next_rank(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the next rank's tensors, of the same shapes; after the last rank comes the first. All call it."""
        return tensors

    def all_gather(self, row: Tensor) -> Tensor:
        """Returns a row of each rank, `[ranks, numbers]`."""
        return row[None]

    def reduce_stats(
        self, terms: LossTerms, norms: GradNorms, checks: StepChecks
    ) -> tuple[LossTerms, GradNorms, StepChecks]:
        """Returns the numbers of the whole step from those of this rank's slice. They are the same on every rank."""
        return terms, norms, checks

    def wait_for(self, event: Any) -> None:
        """Waits until the device has reached a CUDA event."""
        event.synchronize()

    # ---- between steps

    def set_timeout(self, *, started: bool) -> None:
        """Sets how long ranks wait for each other: until the first step is done, or from then on (`started`)."""

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Returns the elementwise sum over the ranks."""
        return values

    def find_divergence(self, state: TrainState) -> str:
        """Returns which ranks have a different state than the others; empty if all agree."""
        return ""

    def whole_state(
        self, model: nn.Module, older: Callable[[], Tree | None], model_factory: Callable[[], nn.Module]
    ) -> WholeState:
        """Returns the whole weights of the present and of an older state, for replays without the other ranks.

        Args:
            model: the model in training.
            older: returns a captured state from before the step; None if none is left.
            model_factory: creates another instance of the model, with any weights.
        """
        return WholeState(model, older)

    def rank_part(self, own: OwnNumbers | None, factor: float, loss_scale: float) -> RankPart | None:
        """Returns this rank's own numbers of a step, on the host; None in a single process. Waits for the device.

        Args:
            own: the step's, from its checks.
            factor: see `Distributed`.
            loss_scale: the step's.
        """
        return None

    def gather_samples(self, samples: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        """Returns the samples of the whole batch; `index` is their position. This rank's slice has `size` samples."""
        return samples

    def gather(self, here: Any) -> list[Any]:
        """Returns what each rank gives, by rank. It must be small and picklable."""
        return [here]

    def any_rank(self, here: bool) -> bool:
        """Returns whether `here` is true on any rank."""
        return here

    def from_main(self, here: Any) -> Any:
        """Returns rank 0's value on every rank. It must be small and picklable."""
        return here

    def request_stop(self, signals: StopRequest | NoStopRequest) -> None:
        """Records the signals that ask this rank to stop."""

    def note_stop(self, stop: bool) -> None:
        """Records that some rank was asked to stop, as a step's reading reports."""

    def stopping(self, signal: str) -> str:
        """Returns the signal for which all ranks stop now; empty for none."""
        return signal
