"""The objective: cross-entropy in fp32, plus a z-loss that is logged separately; for large vocabularies in chunks.

    total = ce + zloss
    ce    = -sum_i log softmax(logits_i)[target_i] / n_valid
    zloss = coefficient * sum_i (log Z_i)^2 / n_valid,      log Z_i = logsumexp(logits_i)

Sums run over the targets that are not `IGNORE_INDEX`. `n_valid` counts them over the *whole step*, so micro-batches
with different numbers of valid targets add up to the exact mean.

`ChunkedLoss` runs the head, cross-entropy and z-loss on some tokens at a time, so the full logits never exist. With a
vocabulary of 50,257, the logits of 32 x 1024 tokens take 6.6 GB in fp32, and several times that with what the backward
pass needs: most of the memory of a small GPT's step. Each chunk's loss is computed, differentiated and freed at once;
only the gradients of the features and of the head's weights are kept. Nothing is computed twice. The idea is that of
Liger Kernel (arXiv 2410.10989, section 3.2) and Apple's Cut Cross-Entropy (2411.09009). A chunk's loss is
`Objective`'s, differentiated by autograd, so there is no second formula that could be wrong.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from stabletrain.errors import ConfigError
from stabletrain.protocols import Tools
from stabletrain.records import IGNORE_INDEX, LOGITS_AT_ONCE, LossTerms


def z_loss(logits: Float[Tensor, "n classes"], coefficient: float) -> Float[Tensor, " n"]:
    """`coefficient * (log Z)^2` of each row: keeps softmax's free offset near 0, where bf16 has its precision.

    Computed in fp32 whatever the dtype of `logits` (fp64 stays fp64).
    Source: PaLM, arXiv 2204.02311, section 5 (coefficient 1e-4).
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return coefficient * torch.logsumexp(wide, dim=-1).square()


@runtime_checkable
class ZLossKind(Protocol):
    """A kind of z-loss: fp32 logits and which rows count in, one 0-d sum out."""

    def __call__(self, logits: Tensor, valid: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class NoZLoss:
    """No z-loss: the zero of the sum."""

    def __call__(self, logits: Float[Tensor, "n classes"], valid: Bool[Tensor, " n"]) -> Float[Tensor, ""]:
        """0, without a gradient."""
        del valid
        return logits.new_zeros(())


@dataclass(frozen=True)
class ZLoss:
    """`z_loss` summed over the valid targets (PaLM, arXiv 2204.02311)."""

    coefficient: float

    def __post_init__(self) -> None:
        if not 0 < self.coefficient < float("inf"):
            raise ConfigError(
                f"zloss.coefficient={self.coefficient} is not a finite number above 0: 1e-4 is customary; use "
                "zloss=none for no z-loss"
            )

    def __call__(self, logits: Float[Tensor, "n classes"], valid: Bool[Tensor, " n"]) -> Float[Tensor, ""]:
        """The sum, with its gradient to the logits of valid rows only."""
        return z_loss(logits, self.coefficient).masked_fill(~valid, 0.0).sum()


def count_valid(targets: Int[Tensor, "*shape"]) -> Int[Tensor, ""]:
    """How many targets count, on their device: no host read."""
    return (targets != IGNORE_INDEX).sum()


@dataclass(frozen=True)
class Objective:
    """Cross-entropy with label smoothing and a kind of z-loss.

    Attributes:
        zloss: `NoZLoss` or `ZLoss`.
        label_smoothing: share of the target's mass spread over all classes, in [0, 1) (arXiv 1512.00567).
    """

    zloss: ZLossKind
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing} is outside [0, 1): 0.1 is customary")

    @property
    def plain(self) -> "Objective":
        """The same, of whole logits: itself."""
        return self

    def wrap(self, forward: Callable[..., Tensor], model: nn.Module, tools: Tools) -> Callable[..., Tensor]:
        """`forward` itself: the loss reads the model's whole logits."""
        del model, tools
        return forward

    def __call__(
        self,
        logits: Float[Tensor, "batch *time classes"],
        targets: Int[Tensor, "batch *time"],
        n_valid: Int[Tensor, ""] | Float[Tensor, ""],
    ) -> LossTerms:
        """The terms of this micro-batch's share of the step's mean loss, in fp32, with their graph.

        Args:
            logits: any floating dtype; read as fp32.
            targets: class ids; `IGNORE_INDEX` is not counted.
            n_valid: valid targets of the whole step, at least 1.
        """
        if not isinstance(logits, Tensor) or logits.ndim != targets.ndim + 1:
            shape = list(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ConfigError(
                f"model: forward() gave {shape} for targets of {list(targets.shape)}: logits are [batch, classes], "
                "or [batch, time, vocab] for text"
            )
        rows = logits.flatten(0, -2).float()
        wanted = targets.flatten()
        ce = F.cross_entropy(
            rows, wanted, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=self.label_smoothing
        )
        ce = ce / n_valid
        zloss = self.zloss(rows, wanted != IGNORE_INDEX) / n_valid
        return LossTerms(total=ce + zloss, ce=ce, zloss=zloss)


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
