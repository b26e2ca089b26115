"""A loss of the user's own: any callable `(outputs, batch, n_valid)`.

It returns one of two things:

- a scalar tensor, which is the mean over its micro-batch. Means of micro-batches and ranks are weighted by their number
  of samples.
- `LossTerms`, whose numbers are sums over the micro-batch divided by `n_valid`, with names for the terms to log.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.records import Batch, LossTerms
from stabletrain.stability.objective.base import Objective, mean
from stabletrain.stability.precision.autocast import widen


class Custom(Objective):
    """Calls the user's loss with outputs in fp32.

    The user's object may have two attributes: `couples_samples` (see `Objective`), and `metrics(outputs, batch)`, which
    returns means over a validation batch by name. Evaluations report them beside the loss, weighted by samples.

    Args:
        function: called as `function(outputs, batch, n_valid)`.

    Raises:
        ConfigError: it cannot be called with three arguments, or has parameters of its own.
    """

    takes_tensor: ClassVar[bool] = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.written = function.func if isinstance(function, partial) else function
        self.name = getattr(self.written, "__qualname__", type(function).__qualname__)
        self.couples_samples = bool(getattr(function, "couples_samples", False))
        self._names: list[str] | None = None
        self._scalar = False
        try:
            signature(function).bind(None, None, None)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"objective: {self.name} cannot be called with (outputs, batch, n_valid): {error}"
            ) from error
        if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
            raise ConfigError(
                f"objective: {self.name} has parameters, which no optimizer would train: make them part of the model, "
                "and return them with its outputs"
            )

    def own_factor(self, batch: Batch) -> float:
        """Returns the factor to the mean over the samples if the loss is a scalar, else over the valid targets."""
        return 1 / batch.share if self._scalar else super().own_factor(batch)

    def __call__(self, outputs: Any, batch: Batch, n_valid: Tensor) -> LossTerms:
        """Returns the user's loss as this micro-batch's share of the step's.

        Raises:
            ConfigError: the user's loss returned something else than a scalar or `LossTerms`.
        """
        found = self.function(widen(outputs), batch, n_valid)
        if isinstance(found, Tensor):
            if found.ndim:
                raise ConfigError(
                    f"objective: {self.name} returned a tensor of {list(found.shape)}: return its mean, a scalar, or "
                    "LossTerms"
                )
            self._scalar = True
            return LossTerms(self._trainable(found).float() * batch.share)
        if not isinstance(found, LossTerms):
            raise ConfigError(
                f"objective: {self.name} returned a {type(found).__name__}: return a scalar tensor, or "
                "stabletrain.LossTerms(total, {'name': term})"
            )
        self._check(found)
        return LossTerms(self._trainable(found.total).float(), found.parts)

    def _trainable(self, total: Tensor) -> Tensor:
        """Returns the loss.

        Raises:
            ConfigError: no gradient reaches it.
        """
        if torch.is_grad_enabled() and not total.requires_grad:
            raise ConfigError(
                f"objective: {self.name} returned a loss without a gradient: compute it from the outputs, without "
                "item(), detach() or no_grad()"
            )
        return total

    def _check(self, terms: LossTerms) -> None:
        """Raises ConfigError for terms that cannot be logged."""
        if not isinstance(terms.total, Tensor) or not isinstance(terms.parts, Mapping):
            raise ConfigError(
                f"objective: {self.name} returned LossTerms({type(terms.total).__name__}, "
                f"{type(terms.parts).__name__}): use LossTerms(total, {{'name': term}}) with a scalar tensor `total`"
            )
        for name, part in (("total", terms.total), *terms.parts.items()):
            if isinstance(part, Tensor) and part.ndim:
                raise ConfigError(f"objective: {self.name}: {name} has the shape {list(part.shape)}: return a scalar")
        if "loss" in terms.parts:
            raise ConfigError(f"objective: {self.name} names a term `loss`, which is the total: use another name")
        self._names = self._names or [*terms.parts]
        if [*terms.parts] != self._names:
            raise ConfigError(
                f"objective: {self.name} returned the terms {[*terms.parts]}, before {self._names}: return the same "
                "terms in every step"
            )

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """Sums the loss, its terms and the user's metrics over a validation batch."""
        outputs = widen(outputs)
        count = batch.count_targets()
        terms = self(outputs, batch.of_step(1.0), torch.full((), max(count, 1), device=batch.targets.device))
        weight = len(batch) if self._scalar else count
        found = {"loss": terms.total, **terms.parts}
        sums = {f"mean/{name}": weight * double(value, terms.total) for name, value in found.items()}
        sums["count"] = double(weight, terms.total)
        for name, value in self._measured(outputs, batch, found).items():
            sums[f"metric/{name}"] = len(batch) * double(value, terms.total)
        sums["samples"] = double(len(batch), terms.total)
        return sums

    def _measured(self, outputs: Any, batch: Batch, taken: Collection[str]) -> Mapping[str, Tensor | float]:
        """Returns the user's metrics of a batch; empty if there are none.

        Raises:
            ConfigError: they are no numbers by name, or have a name that is taken.
        """
        metrics = getattr(self.written, "metrics", None)
        found = metrics(outputs, batch) if callable(metrics) else {}
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"objective: metrics() of {self.name} returned a {type(found).__name__}: return {{'name': mean}}"
            )
        for name, value in found.items():
            if isinstance(value, Tensor) and value.ndim:
                shape = list(value.shape)
                raise ConfigError(f"objective: metrics() of {self.name}: {name} has the shape {shape}: return a mean")
            if name in taken:
                raise ConfigError(f"objective: metrics() of {self.name}: {name} is a term of the loss: rename it")
        return found

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the means."""
        counts = {"mean": sums["count"], "metric": sums["samples"]}
        named = {key: key.partition("/") for key in sums if "/" in key}
        return {name: mean(sums[key], counts[kind]) for key, (kind, _, name) in named.items()}


def double(value: Tensor | float, like: Tensor) -> Tensor:
    """Returns a number as fp64, 0-d, on the device of `like`."""
    if isinstance(value, Tensor):
        return value.detach().double()
    return torch.full((), float(value), dtype=torch.float64, device=like.device)
