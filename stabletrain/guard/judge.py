"""Measures a step of a loop, judges it as `step.py` does, and clips: all numbers of a step, with one host read."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.buffers import buffers_of, note_masks
from stabletrain.guard.gradients import given, gradients, measure, multiply_, summed_gradients
from stabletrain.guard.policy import SkipGuard
from stabletrain.in_flight import InFlight
from stabletrain.parallel.shards import is_sharded, shards_of
from stabletrain.parallel.single import SingleProcess
from stabletrain.records import Clipped, GradNorms, LossTerms, Number, Reading, StepChecks
from stabletrain.stability.clipping.fixed import NormClip
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.step import close_gate


class Judge:
    """Judges the steps of one loop.

    Attributes:
        precision: holds the loss scale.
        unproven: whether the update of the step that was judged last is to be checked; equal on all ranks.

    Args:
        model: without wrappers.
        parallel: the ranks that judge together.
        policy: holds the limits.
        max_norm: largest gradient norm; None for no clipping.

    Raises:
        ConfigError: `max_norm` is not above 0.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        precision: FullPrecision,
        parallel: SingleProcess,
        policy: SkipGuard,
        max_norm: float | None,
    ) -> None:
        self._model, self._optimizer, self.precision = model, optimizer, precision
        self._parallel, self._policy = parallel, policy
        self.unproven = False
        self._clip = None if max_norm is None else NormClip(max_norm)
        note_masks(model)

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self._clip is not None

    def __call__(
        self,
        step: int,
        loss: Tensor,
        parameters: list[Tensor],
        unclipped: Callable[[GradNorms], GradNorms] | None = None,
        changed: Number = 0.0,
        recheck: Number = 0.0,
        lengths: Sequence[Tensor] = (),
    ) -> Reading:
        """Unscales, measures, judges and clips the gradients; returns the step's numbers.

        Args:
            step: number of the step, counted from 1.
            loss: of the step, 0-d, detached.
            parameters: those that the optimizer updates; at least one has a gradient.
            changed: 1 if the state has changed since the last update, else 0.
            recheck: how far the gradients differ from a second computation.
            lengths: of the update before, and of the weights after it, for the reading; empty if not measured.
            unclipped: returns the norms from before the loop itself clipped; None if it does not.
        """
        found, loss_scale = gradients(parameters), self.precision.loss_scale()
        # Undo the loss scale first, so that norms and limits mean the same in every precision. Measure before clipping:
        # clipping would turn every gradient into NaN if one of them is.
        self.precision.unscale_(found)
        norms, buffer_norm = measure(summed_gradients(parameters, found), buffers_of(self._model).judged)
        norms = norms if unclipped is None else unclipped(norms)
        if (world := self._parallel.ranks.world_size) > 1:
            shards = [shards_of(each) if is_sharded(each) else 0 for each in given(parameters)]
            norms = replace(norms, sharded=[count / world for count in shards])
        # Judge with the numbers of all ranks, as the trainer does.
        terms = LossTerms(loss.float())
        unproven = float(bool(self._policy.update_check.why(self._optimizer)))
        checks = StepChecks(0.0, 0.0, buffer_norm, changed, recheck, unproven=unproven)
        gated = close_gate(terms, norms, checks, self._parallel, self.precision, self._policy.gate)
        factor = None if self._clip is None else self._clip.factor(gated.norms)
        # The learning rate of this step's update: lower for some steps after a rollback.
        lr = float(self._optimizer.param_groups[0].get("lr", 0.0)) * self._policy.lr_multiplier(step - 1)
        # Wait for the numbers.
        clipped = Clipped(1.0 if factor is None else factor)
        lengths = [each.to(gated.gate.device) for each in lengths]
        update, weights = lengths or (0.0, 0.0)
        numbers = gated.numbers(
            step, clipped, loss_scale=loss_scale, lr=lr, withheld=~gated.gate, update=update, weights=weights
        )
        reading = InFlight(numbers).wait()
        self.unproven = bool(gated.checks.unproven)
        # Clip. A factor of 1, as of most steps, would change no bit.
        if factor is not None and reading.clip_coef != 1:
            multiply_(found, factor)
        return reading
