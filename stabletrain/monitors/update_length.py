"""Length of each update and of the weights after it, measured over a fixed sample of every trained parameter.

    update  = sqrt(stride) · |w_after - w_before|       L2 norms over every `stride`-th element
    weights = sqrt(stride) · |w_after|

Measuring costs two copies of the sample and one pass over both: five kernels whatever the model's size. The sample has
at least one element of each parameter. It is the same in every step, so that the numbers of two steps can be compared.
Nothing here waits for the device.
"""

import functools
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

SAMPLED = 2**16
"""Approximate number of sampled elements; a smaller model is measured whole."""


class NoLengths:
    """Measures nothing, without a kernel. Base class of `Lengths`."""

    def before(self, model: nn.Module) -> Tensor | None:
        """Returns what `after` needs of the weights before the optimizer's step: nothing."""
        return None

    def after(self, before: Tensor | None, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Returns `update` and `weights`, fp32, 0-d on the device: nothing.

        Args:
            before: what `before` returned in this step.
            sum_over_ranks: adds up the ranks' tensors; only called for sharded parameters.
        """
        return {}


class Lengths(NoLengths):
    """Measures updates and weights of a model's trained parameters; of sharded ones, the shards of all ranks."""

    def __init__(self) -> None:
        self._model: ref[nn.Module] | None = None
        self._views: list[Tensor] = []
        self._elements, self._dtype = 0, torch.float32
        self._factor, self._sharded = 1.0, False

    def before(self, model: nn.Module) -> Tensor:
        """Returns a copy of the sample, with room for a second one."""
        if self._model is None or self._model() is not model:
            self._choose(model)
        copies = self._views[0].new_empty((2, self._elements), dtype=self._dtype)
        torch.cat(self._views, out=copies[0])
        return copies

    def after(self, before: Tensor | None, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Returns `update` and `weights`."""
        assert before is not None
        earlier, now = before.unbind()
        torch.cat(self._views, out=now)
        earlier.sub_(now)
        numbers = torch.linalg.vector_norm(before, dim=1).float()
        if self._sharded:
            numbers = sum_over_ranks(numbers.square()).sqrt()
        update, weights = (numbers * self._factor).unbind()
        return {"update": update, "weights": weights}

    def _choose(self, model: nn.Module) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._sharded = any(hasattr(parameter, "to_local") for parameter in trained)
        # An odd stride, because matrices have even widths: the sample must not lie in a few columns.
        stride = (sum(parameter.numel() for parameter in trained) // SAMPLED) | 1
        self._views = [sample(parameter, stride) for parameter in trained]
        self._elements = sum(view.numel() for view in self._views)
        dtypes = (view.dtype for view in self._views)
        self._dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        self._factor = stride**0.5
        self._model = ref(model)


def sample(parameter: Any, stride: int) -> Tensor:
    """Returns a 1-d view of every `stride`-th element, in the order of the memory; of a sharded one, of its shard."""
    own = (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()
    if own.is_complex():
        own = torch.view_as_real(own)
    span = 1 + sum((size - 1) * step for size, step in zip(own.shape, own.stride(), strict=True))
    if own.numel() and span != own.numel():  # a view with gaps, or an expanded one: one line of it is sample enough
        return own[(0,) * (own.dim() - 1)][::stride]
    return own.as_strided((own.numel(),), (1,))[::stride]
