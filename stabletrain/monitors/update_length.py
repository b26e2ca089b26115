"""Length of each update and of the weights after it, measured over a fixed sample of every trained parameter.

    update  = |w_after - w_before|       L2 norms over every `stride`-th element
    weights = |w_after|

Times `factor`, the root of `stride`, they are about those of the whole model. Measuring costs two copies of the sample
and one pass over both: four kernels whatever the model's size. The sample has at least one element of each parameter,
and is the same in every step, so that the numbers of two steps can be compared. Nothing here waits for the device.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.model_tensors import tensors_of
from stabletrain.parallel.shards import is_sharded, sum_over_shards

SAMPLED = 2**14
"""Approximate number of sampled elements; a smaller model is measured whole."""


class NoLengths:
    """Measures nothing, without a kernel. Base class of `Lengths`.

    Attributes:
        factor: length over the whole model, divided by that over the sample.
    """

    factor = 1.0

    def before(self, model: nn.Module) -> Tensor | None:
        """Returns what `after` needs of the weights before the optimizer's step: nothing."""
        return None

    def after(self, before: Tensor | None) -> dict[str, Tensor]:
        """Returns `update` and `weights`, fp32, 0-d on the device: nothing.

        Args:
            before: what `before` returned in this step.
        """
        return {}


class Lengths(NoLengths):
    """Measures updates and weights of a model's trained parameters; of sharded ones, the shards of all ranks."""

    def __init__(self) -> None:
        self._trained: Sequence[Tensor] | None = None
        self._views: list[Tensor] = []
        self._both = self._earlier = self._now = torch.empty(0)  # room for two copies of the sample
        self._sharded: list[Any] = []  # a parameter that is sharded, if there is one: all are sharded alike

    def before(self, model: nn.Module) -> Tensor:
        """Returns a copy of the sample, which `after` overwrites.

        It is taken anew in each step: not the optimizer alone writes weights, and what others wrote is no update.
        """
        trained = tensors_of(model, look=False).trained  # the step has just looked
        if trained is not self._trained:
            self._choose(trained)
        return torch.cat(self._views, out=self._earlier)

    def after(self, before: Tensor | None) -> dict[str, Tensor]:
        """Returns `update` and `weights`."""
        assert before is self._earlier
        torch.cat(self._views, out=self._now)
        self._earlier.sub_(self._now)
        numbers = torch.linalg.vector_norm(self._both, dim=1).float()
        if self._sharded:
            numbers = sum_over_shards(numbers.square()[None], self._sharded)[0].sqrt()
        update, weights = numbers.unbind()
        return {"update": update, "weights": weights}

    def _choose(self, trained: Sequence[Tensor]) -> None:
        self._sharded = [*filter(is_sharded, trained)][:1]
        # An odd stride, because matrices have even widths: the sample must not lie in a few columns.
        stride = (sum(parameter.numel() for parameter in trained) // SAMPLED) | 1
        self._views = [sample(parameter, stride) for parameter in trained]
        dtype = functools.reduce(torch.promote_types, (view.dtype for view in self._views), torch.float32)
        shape = (2, sum(view.numel() for view in self._views))
        self._both = self._views[0].new_empty(shape, dtype=dtype)
        self._earlier, self._now = self._both.unbind()
        self.factor = stride**0.5
        self._trained = trained


def sample(parameter: Any, stride: int) -> Tensor:
    """Returns a 1-d view of every `stride`-th element, in the order of the memory; of a sharded one, of its shard."""
    own = (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()
    if own.is_complex():
        own = torch.view_as_real(own)
    span = 1 + sum((size - 1) * step for size, step in zip(own.shape, own.stride(), strict=True))
    if own.numel() and span != own.numel():  # a view with gaps, or an expanded one: one line of it is sample enough
        return own[(0,) * (own.dim() - 1)][::stride]
    return own.as_strided((own.numel(),), (1,))[::stride]
