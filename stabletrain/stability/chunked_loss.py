"""Logits in chunks: head, cross-entropy and z-loss of some tokens at a time, so that all logits never exist.

A vocabulary of 50,257 makes of 32 x 1024 tokens 6.6 GB of fp32 logits, several times over with what the backward pass
needs: most of the memory of a small GPT's step. Here each chunk's logits are made, its loss taken and differentiated at
once, and given up again; what is kept are the gradients of the features and of the head's weights. Nothing is computed
twice. The idea is that of Liger Kernel (arXiv 2410.10989, section 3.2) and of Apple's Cut Cross-Entropy (2411.09009).

The loss of a chunk is the plain objective's, differentiated by autograd: there is no second formula to be wrong.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from stabletrain.errors import ConfigError
from stabletrain.protocols import Tools
from stabletrain.records import LOGITS_AT_ONCE, LossTerms
from stabletrain.stability.objective import Objective


@runtime_checkable
class WithHead(Protocol):
    """A model whose head can be left out and run by itself: `forward(inputs) == logits(forward(inputs, head=False))`.

    `logits` must use no parameters but those of `classifier()`, and treat every token alone.
    """

    def forward(self, inputs: Tensor, *, head: bool = True) -> Tensor: ...
    def logits(self, features: Tensor) -> Tensor: ...
    def classifier(self) -> nn.Module: ...


@dataclass(frozen=True)
class ChunkedLogits:
    """Logits that are not computed yet.

    Attributes:
        features: `[batch, time, width]`, the head's input.
        model: computes logits from features.
        tools: autocast and loss scale of the step.
        shape: of the logits, `[batch, time, vocab]`.
    """

    features: Tensor
    model: nn.Module
    tools: Tools
    shape: torch.Size

    def compute(self, features: Tensor) -> Tensor:
        """The logits of a chunk of features, under autocast."""
        with self.tools.precision.autocast():
            return self.model.logits(features)  # ty: ignore[not-callable]


@dataclass(frozen=True)
class ChunkedLoss:
    """The objective, chunk by chunk; of a micro-batch that is no larger than a chunk, the plain one to the bit.

    Attributes:
        plain: takes the loss of a chunk.
        tokens: in a chunk.
        classes: of the model.
    """

    plain: Objective
    tokens: int
    classes: int

    def wrap(
        self, forward: Callable[..., Tensor], model: nn.Module, tools: Tools
    ) -> Callable[[Tensor], Tensor | ChunkedLogits]:
        """The model without its head, for micro-batches that are larger than a chunk."""

        def headless(inputs: Tensor) -> Tensor | ChunkedLogits:
            # A hook on the head's weights expects their whole gradient, so there are no chunks then.
            hooked = any(weight._backward_hooks for weight in model.classifier().parameters())  # ty: ignore[not-callable]
            if inputs.numel() <= self.tokens or hooked:
                return forward(inputs)
            features = forward(inputs, head=False)
            return ChunkedLogits(features, model, tools, torch.Size((*features.shape[:-1], self.classes)))

        return headless

    def __call__(
        self,
        logits: Float[Tensor, "batch *time classes"] | ChunkedLogits,
        targets: Int[Tensor, "batch *time"],
        n_valid: Int[Tensor, ""] | Float[Tensor, ""],
    ) -> LossTerms:
        """The terms, as those of the plain objective; `total` has a graph."""
        if isinstance(logits, Tensor):
            return self.plain(logits, targets, n_valid)
        weights = tuple(logits.model.classifier().parameters())  # ty: ignore[not-callable]
        return LossTerms(*_Loss.apply(self, logits, targets, n_valid, logits.features, *weights))

    def chunks(self, later: ChunkedLogits, features: Tensor, targets: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, features (leaves of a graph of their own, where a gradient is wanted) and targets of each chunk."""
        wanted, rows, classes = later.features.requires_grad, features.flatten(0, -2), targets.flatten()
        for start in range(0, len(rows), self.tokens):
            part = slice(start, start + self.tokens)
            yield part, rows[part].detach().requires_grad_(wanted), classes[part]


class _Loss(Function):
    """Loss terms of all chunks; their gradients are computed on the way, at the scale the step will ask for."""

    @staticmethod
    def forward(
        ctx: Any,
        objective: ChunkedLoss,
        later: ChunkedLogits,
        targets: Tensor,
        n_valid: Tensor,
        features: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.scaled = later.tools.scale
        ctx.of_features = features.new_empty(features.shape) if features.requires_grad else None  # in one piece
        ctx.of_weights = [torch.zeros_like(weight) if weight.requires_grad else None for weight in weights]
        trained = [weight for weight in weights if weight.requires_grad]
        sums = [gradient for gradient in ctx.of_weights if gradient is not None]
        parts = []
        for rows, part, wanted in objective.chunks(later, features, targets):
            leaves = [leaf for leaf in (part, *trained) if leaf.requires_grad]
            with torch.enable_grad():
                terms = objective.plain(later.compute(part), wanted, n_valid)
                scaled = later.tools.scale(terms.total)
            gradients = [*torch.autograd.grad(scaled, leaves)] if leaves else []
            if ctx.of_features is not None:
                ctx.of_features.flatten(0, -2)[rows] = gradients.pop(0)
            for whole, gradient in zip(sums, gradients, strict=True):
                whole += gradient
            parts.append(terms.detach())
        terms = sum(parts[1:], parts[0])
        ctx.mark_non_differentiable(terms.ce, terms.zloss)
        return terms.total, terms.ce, terms.zloss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        ratio = of_total / ctx.scaled(torch.ones_like(of_total))  # 1 where the step asks for what was foreseen
        gradients = [None if gradient is None else gradient * ratio for gradient in (ctx.of_features, *ctx.of_weights)]
        return None, None, None, None, *gradients


def with_loss_chunk(objective: Objective, wanted: str | int, model: nn.Module, able: bool) -> Objective | ChunkedLoss:
    """The objective for `loss_chunk`.

    Args:
        objective: the plain one.
        wanted: `auto`, `none`, or how many tokens a chunk has, at least 1.
        model: whose logits they are.
        able: whether the head may run outside of the model's forward pass.

    Raises:
        ConfigError: it is a number, and this model or the way it is spread over ranks has no chunks.
    """
    if wanted == "none":
        return objective
    number = isinstance(wanted, int)
    if able and isinstance(model, WithHead) and "head" in signature(model.forward).parameters:
        classes = model.classifier().weight.shape[0]
        return ChunkedLoss(objective, wanted if number else max(1, LOGITS_AT_ONCE // classes), classes)
    if number:
        why = (
            f"{type(model).__name__} makes its logits in its forward pass"
            if able
            else "the ranks have the head's weights whole within the model's forward pass only"
        )
        raise ConfigError(
            f"loss_chunk={wanted}: {why}; use loss_chunk=auto or none{'' if able else ', or parallel=ddp'}"
        )
    return objective
