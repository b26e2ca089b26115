"""The objective in chunks of tokens, so that the logits of a large vocabulary never exist all at once.

`ChunkedLoss` computes the head, cross-entropy and z-loss for one chunk of tokens at a time, so the full logits never
exist. With a vocabulary of 50,257, the logits of 32 x 1024 tokens take 6.6 GB in fp32, and the backward pass needs
several times that: most of the memory of a small GPT's step. Each chunk's loss is computed, differentiated and freed at
once; only the gradients of the features and of the head's weights are kept, and nothing is recomputed. The idea comes
from Liger Kernel (arXiv 2410.10989, section 3.2) and Apple's Cut Cross-Entropy (2411.09009). All chunks of a
micro-batch use one half-precision copy of the head's weight, if the model can hand it out (`head_weight`). If the model
is compiled, so are head and loss of a chunk.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from stabletrain.errors import ConfigError
from stabletrain.machine.compiling import compiled_with
from stabletrain.machine.hardware import device_memory
from stabletrain.records import LOGITS_AT_ONCE, Batch, LossTerms, Number
from stabletrain.stability.objective.base import Count, Objective
from stabletrain.stability.objective.cross_entropy import CrossEntropy, LogitsOf
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.step_tools import StepTools


@runtime_checkable
class WithHead(Protocol):
    """A model whose head can run separately: `forward(inputs) == logits(forward(inputs, head=False))`.

    `logits` may only use the parameters of `classifier()`, and must compute each token independently of the others.
    """

    def forward(self, inputs: Tensor, *, head: bool = True) -> Tensor: ...
    def logits(self, features: Tensor) -> Tensor: ...
    def classifier(self) -> nn.Module: ...


@runtime_checkable
class SharesHeadWeight(WithHead, Protocol):
    """A model whose `logits` takes the weight from `head_weight`: one copy for all chunks, padded or not.

    The weight is the only parameter of `classifier()`, and may have more rows than the parameter, which get no use.
    """

    def logits(self, features: Tensor, weight: Tensor | None = None) -> Tensor: ...
    def head_weight(self) -> Tensor: ...


@dataclass(frozen=True)
class ChunkedLogits:
    """Logits that are not computed yet.

    Attributes:
        features: `[batch, time, width]`, the head's input.
        model: computes logits from features.
        tools: hold the step's autocast and loss scale.
        shape: shape of the logits, `[batch, time, vocab]`.
    """

    features: Tensor
    model: nn.Module
    tools: StepTools
    shape: torch.Size

    @torch.no_grad()
    def shared_weight(self) -> Tensor | None:
        """Returns the weight that all chunks use, without a graph; None if the model makes it in every call."""
        if not isinstance(self.model, SharesHeadWeight):
            return None
        with self.tools.precision.autocast():
            return self.model.head_weight().detach()


def loss_of_chunk(
    objective: CrossEntropy,
    model: nn.Module,
    precision: FullPrecision,
    features: Float[Tensor, "n width"],
    weight: Float[Tensor, "rows width"] | None,
    targets: Int[Tensor, " n"],
    n_valid: Tensor,
) -> LossTerms:
    """Returns the loss terms of a chunk: the head under autocast, then the plain objective.

    Args:
        model: a `WithHead`.
        weight: from `shared_weight`.
        n_valid: valid targets of the whole step.
    """
    with precision.autocast():
        logits = model.logits(features, *(() if weight is None else (weight,)))  # ty: ignore[not-callable]
    return objective.of_rows(logits, targets, n_valid)


@dataclass(frozen=True)
class ChunkedLoss(Objective):
    """The cross-entropy, chunk by chunk; bitwise equal to `whole` for a micro-batch that fits into one chunk.

    An evaluation has whole logits, so it takes `plain`.

    Attributes:
        whole: the cross-entropy of whole logits, which is applied to each chunk.
        tokens: number of tokens in a chunk.
        vocabulary: number of classes of the model.
    """

    whole: CrossEntropy
    tokens: int
    vocabulary: int
    unit: ClassVar[str] = CrossEntropy.unit
    softmax: ClassVar[bool] = True

    @property
    def plain(self) -> CrossEntropy:
        """Returns the cross-entropy of whole logits."""
        return self.whole

    def wrap(self, forward: Callable[..., Tensor], model: nn.Module, tools: StepTools) -> Callable[[Tensor], Any]:
        """Returns a forward pass that leaves out the head if the micro-batch is larger than a chunk."""
        whole = self.whole.wrap(forward, model, tools)

        def headless(inputs: Tensor) -> Any:
            if inputs.numel() <= self.tokens:
                return whole(inputs)
            # A hook on the head's weights expects their full gradient, so do not use chunks then.
            if any(weight._backward_hooks for weight in model.classifier().parameters()):  # ty: ignore[not-callable]
                return whole(inputs)
            features = forward(inputs, head=False)
            return ChunkedLogits(features, model, tools, torch.Size((*features.shape[:-1], self.vocabulary)))

        return headless

    def __call__(
        self, outputs: Float[Tensor, "batch *time classes"] | LogitsOf | ChunkedLogits, batch: Batch, n_valid: Count
    ) -> LossTerms:
        """Returns the terms of the plain objective; of these only `total` has a graph."""
        if not isinstance(outputs, ChunkedLogits):
            return self.whole(outputs, batch, n_valid)
        weights = tuple(outputs.model.classifier().parameters())  # ty: ignore[not-callable]
        total, ce, zloss = _Loss.apply(self, outputs, batch.targets, n_valid, outputs.features, *weights)
        terms = LossTerms(total, {"ce": ce, "zloss": zloss})
        # Not per chunk: it does not depend on the tokens.
        return self.whole.with_head(terms, outputs.model, batch.targets, n_valid)

    def classes(self, outputs: Any) -> int | None:
        """See `CrossEntropy`."""
        return self.whole.classes(outputs)

    def check_targets(self, targets: Tensor) -> None:
        """See `CrossEntropy`."""
        self.whole.check_targets(targets)

    def chunks(self, later: ChunkedLogits, features: Tensor, targets: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields the rows, features and targets of each chunk; features are detached from the model's graph."""
        wanted, rows, classes = later.features.requires_grad, features.flatten(0, -2), targets.flatten()
        for start in range(0, len(rows), self.tokens):
            part = slice(start, start + self.tokens)
            yield part, rows[part].detach().requires_grad_(wanted), classes[part]


class _Loss(Function):
    """Loss terms of all chunks; computes their gradients in the forward pass, at the step's loss scale."""

    @staticmethod
    def forward(
        ctx: Any,
        objective: ChunkedLoss,
        later: ChunkedLogits,
        targets: Tensor,
        n_valid: Tensor,
        features: Tensor,
        *weights: Tensor,
    ) -> tuple[Number, ...]:
        ctx.scaled = later.tools.scale
        # Contiguous, so that `flatten` below returns a view.
        ctx.of_features = features.new_empty(features.shape) if features.requires_grad else None
        ctx.of_weights = [torch.zeros_like(weight) if weight.requires_grad else None for weight in weights]
        trained = [weight for weight in weights if weight.requires_grad]
        sums = [gradient for gradient in ctx.of_weights if gradient is not None]
        # One copy of the head's weight for all chunks. Its gradient has the copy's dtype and rows, and is added up in
        # fp32, as the gradient of a cast would be.
        if (shared := later.shared_weight()) is not None:
            trained = [shared.requires_grad_()] if trained else []
        whole_chunk = compiled_with(later.model, loss_of_chunk)
        parts = []
        for rows, part, wanted in objective.chunks(later, features, targets):
            # Compute and differentiate the chunk's loss now, so that its logits are freed before the next chunk.
            leaves = [leaf for leaf in (part, *trained) if leaf.requires_grad]
            # Compiled code has one shape, so a smaller last chunk runs as plain Python.
            run = whole_chunk if len(part) == objective.tokens else loss_of_chunk
            with torch.enable_grad():
                terms = run(objective.plain, later.model, later.tools.precision, part, shared, wanted, n_valid)
                scaled = later.tools.scale(terms.total)
            gradients = [*torch.autograd.grad(scaled, leaves)] if leaves else []
            if ctx.of_features is not None:
                ctx.of_features.flatten(0, -2)[rows] = gradients.pop(0)
            for whole, gradient in zip(sums, gradients, strict=True):
                whole += gradient[: len(whole)]  # without the rows of the padding
            parts.append(terms.detach())
        terms = sum(parts[1:], parts[0])
        parts = (terms.parts["ce"], terms.parts["zloss"])
        ctx.mark_non_differentiable(*(part for part in parts if isinstance(part, Tensor)))
        return terms.total, *parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        # The gradients already contain the loss scale; the ratio is 1 if backward runs at that scale.
        ratio = of_total / ctx.scaled(torch.ones_like(of_total))
        gradients = [None if gradient is None else gradient * ratio for gradient in (ctx.of_features, *ctx.of_weights)]
        return None, None, None, None, *gradients


CHUNK_MULTIPLE = 128
"""`auto` rounds the tokens of a chunk down to a multiple of this, which fills the tiles of a matrix product."""

SHARE_OF_MEMORY = 128
"""`auto` gives a chunk's fp32 logits this part of a card's memory, if that is more than `LOGITS_AT_ONCE` needs."""


def tokens_at_once(classes: int, device: torch.device) -> int:
    """Returns how many tokens `auto` puts into a chunk; depends only on the number of classes and the kind of card."""
    # Each chunk reads and writes the gradient of the whole head once, so larger chunks are faster. Free memory would
    # allow more, but it changes from run to run, and with the chunks the rounding.
    logits = max(LOGITS_AT_ONCE, device_memory(device) // SHARE_OF_MEMORY // 4)
    return max(CHUNK_MULTIPLE, logits // classes // CHUNK_MULTIPLE * CHUNK_MULTIPLE)


def with_loss_chunk(objective: Objective, wanted: str | int, model: nn.Module, able: bool) -> Objective | ChunkedLoss:
    """Returns the objective for the config key `loss_chunk`: in chunks only if it is the cross-entropy.

    Args:
        objective: the plain objective.
        wanted: `auto`, `none`, or the number of tokens in a chunk, at least 1.
        model: the model that computes the logits.
        able: whether the head may run outside of the model's forward pass.

    Raises:
        ConfigError: `wanted` is a number, but the model or `parallel` does not support chunks.
    """
    if wanted == "none" or not isinstance(objective, CrossEntropy):
        return objective
    number = isinstance(wanted, int)
    if able and isinstance(model, WithHead) and "head" in signature(model.forward).parameters:
        classes = model.classifier().weight.shape[0]
        device = next(model.parameters()).device
        return ChunkedLoss(objective, wanted if number else tokens_at_once(classes, device), classes)
    if number:
        why = (
            f"{type(model).__name__} has no head that can run outside of its forward pass"
            if able
            else "with parallel.find_unused_parameters=true, DDP would take the head for unused"
        )
        raise ConfigError(f"loss_chunk={wanted}: {why}; use loss_chunk=auto or none")
    return objective
