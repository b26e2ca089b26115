"""Measures a step, judges it by the guard's rules, and clips: all numbers of a step, with one host read."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.buffers import buffers_of, note_masks
from stabletrain.guard.agreement import OneRank, RankNumbers
from stabletrain.guard.gradients import gradients, measure, multiply_
from stabletrain.guard.policy import SkipGuard
from stabletrain.guard.scaling import Scaling
from stabletrain.records import Clipped, DeviceReading, GradNorms, Number, Reading
from stabletrain.stability.clipping.fixed import NormClip
from stabletrain.step import InFlight


class Judge:
    """Judges the steps of one loop.

    Attributes:
        scaling: the loss scale.
        unproven: whether the update of the step that was judged last is to be checked; equal on all ranks.

    Args:
        model: without wrappers.
        agreement: makes the numbers equal on all ranks.
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
        scaling: Scaling,
        agreement: OneRank,
        policy: SkipGuard,
        max_norm: float | None,
    ) -> None:
        self._model, self._optimizer, self.scaling = model, optimizer, scaling
        self._agreement, self._policy = agreement, policy
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
        unproven: bool = False,
    ) -> Reading:
        """Unscales, measures, judges and clips the gradients; returns the step's numbers.

        Args:
            step: number of the step, counted from 1.
            loss: of the step, 0-d, detached.
            parameters: those that the optimizer updates; at least one has a gradient.
            changed: 1 if the state has changed since the last update, else 0.
            recheck: how far the gradients differ from a second computation.
            unproven: whether this rank would check the update afterwards.
            unclipped: returns the norms from before the loop itself clipped; None if it does not.
        """
        scaling, found = self.scaling, gradients(parameters)
        # Undo the loss scale first, so that norms and limits mean the same in every precision. Measure before clipping:
        # clipping would turn every gradient into NaN if one of them is.
        loss_scale = scaling.loss_scale()
        scaling.unscale_(self._optimizer, found)
        norms, buffer_norm = measure(found, buffers_of(self._model).judged)
        norms = norms if unclipped is None else unclipped(norms)
        # Every rank goes on with the same numbers, so that all reach the same verdict.
        sharded = [hasattr(parameter.grad, "to_local") for parameter in parameters if parameter.grad is not None]
        own = RankNumbers(loss, norms, buffer_norm, changed, sharded, unproven)
        terms, norms, checks = self._agreement.agree(own)
        checks = replace(checks, recheck=recheck)
        overflow = scaling.overflow(terms, norms)
        opened = scaling.close(self._policy.gate(terms, norms, checks), overflow)
        # Clip whether or not the gate is open: the host does not know yet.
        clipped = Clipped(1.0)
        if self._clip is not None:
            clipped = Clipped(self._clip.factor(norms))
            multiply_(found, torch.as_tensor(clipped.coef))
        numbers = DeviceReading(
            step=step,
            loss=terms.total,
            terms={},
            grad_norm=norms.total,
            clip_coef=clipped.coef,
            clip_active=clipped.active,
            inputs=0.0,
            buffers=checks.buffers,
            loss_scale=loss_scale,
            withheld=~opened,
            bad_data=False,
            overflow=overflow,
            lr=float(self._optimizer.param_groups[0].get("lr", 0.0)),
            state_changed=checks.state_changed,
            recheck=checks.recheck,
            stop=False if checks.stop is None else checks.stop,
            rank=-1 if checks.rank is None else checks.rank,
        )
        reading = InFlight(numbers).wait()
        self.unproven = bool(checks.unproven)  # the reading has just been waited for
        return reading
