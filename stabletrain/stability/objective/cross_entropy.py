"""Cross-entropy in fp32, plus a z-loss that is logged separately; in chunks of tokens: `chunked_loss.py`.

A kind of z-loss may depend on the weight of the head instead of the logits: `output_embeddings.py`.

    total = ce + zloss
    ce    = -sum_i log softmax(logits_i)[target_i] / n_valid
    zloss = coefficient * sum_i (log Z_i)^2 / n_valid,      log Z_i = logsumexp(logits_i)

Sums run over the targets that are not `IGNORE_INDEX`. `n_valid` counts these targets in the *whole step*, so
micro-batches with different numbers of valid targets add up to the exact mean.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.records import IGNORE_INDEX, LOGITS_AT_ONCE, Batch, LossTerms
from stabletrain.stability.after_update import AfterUpdate
from stabletrain.stability.objective.base import Count, Objective, form, mean
from stabletrain.stability.parameter_roles import classifier
from stabletrain.stability.step_tools import StepTools


def z_loss(logits: Float[Tensor, "n classes"], coefficient: float) -> Float[Tensor, " n"]:
    """Returns `coefficient * (log Z)^2` of each row, in fp32 (fp64 stays fp64).

    Softmax ignores an offset common to all logits. This loss keeps the offset near 0, where bf16 is most precise.
    Source: PaLM, arXiv 2204.02311, section 5 (coefficient 1e-4).
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return coefficient * torch.logsumexp(wide, dim=-1).square()


@dataclass(frozen=True)
class NoZLoss:
    """No z-loss. Base class of all kinds, and what each must offer.

    Attributes:
        needs_head: whether it needs the weight of the head, so that a model without one is refused.
        after_update: what it does to the weights after an update.
    """

    needs_head: ClassVar[bool] = False
    after_update: ClassVar[AfterUpdate] = AfterUpdate()

    def of_head(self, weight: Float[Tensor, "rows *columns"]) -> Float[Tensor, ""] | None:
        """Returns the whole step's term that depends on the weight of the head; None if there is none, as here."""
        return None

    def add(
        self, ce: Float[Tensor, ""], logits: Float[Tensor, "n classes"], targets: Int[Tensor, " n"], n_valid: Count
    ) -> LossTerms:
        """Returns the cross-entropy with the z-loss, and both parts: here the cross-entropy alone.

        Args:
            ce: this micro-batch's share of the step's cross-entropy.
            logits: fp32.
            targets: class ids; rows with `IGNORE_INDEX` do not count.
            n_valid: number of valid targets of the whole step.
        """
        return LossTerms(ce, {"ce": ce, "zloss": 0.0})


@dataclass(frozen=True)
class ZLoss(NoZLoss):
    """`z_loss`, averaged over the valid targets (PaLM, arXiv 2204.02311)."""

    coefficient: float

    def __post_init__(self) -> None:
        if not 0 < self.coefficient < float("inf"):
            raise ConfigError(
                f"zloss.coefficient={self.coefficient} is not a finite number above 0: 1e-4 is customary; use "
                "zloss=none for no z-loss"
            )

    def add(
        self, ce: Float[Tensor, ""], logits: Float[Tensor, "n classes"], targets: Int[Tensor, " n"], n_valid: Count
    ) -> LossTerms:
        """Returns the sum of both; only rows with a valid target get a gradient of the z-loss."""
        zloss = z_loss(logits, self.coefficient).masked_fill(targets == IGNORE_INDEX, 0.0).sum() / n_valid
        return LossTerms(ce + zloss, {"ce": ce, "zloss": zloss})


class LogitsOf(NamedTuple):
    """Logits, and the model that computed them."""

    logits: Tensor
    model: nn.Module


def head_weight(model: nn.Module) -> Tensor:
    """Returns the parameter that computes the logits of a model; a tied head's is the embedding's."""
    head = classifier(model)
    assert head is not None, "check_head"
    return head.get_parameter("weight")


def check_head(zloss: NoZLoss, option: str, model: nn.Module, able: bool) -> None:
    """Checks that the weight of the head is there if a z-loss needs it.

    Args:
        option: of the group `zloss`.
        able: whether the head may be used outside of the model's forward pass.

    Raises:
        ConfigError: it is not.
    """
    if not zloss.needs_head:
        return
    weight = getattr(classifier(model), "weight", None)
    # Between forward and backward the head is whole with FSDP too, but not after the update.
    if not able or (hasattr(weight, "to_local") and type(zloss.after_update) is not AfterUpdate):
        raise ConfigError(
            f"zloss={option} needs whole tensors, but parallel=fsdp shards them across the ranks: use parallel=ddp, or "
            "zloss=palm"
        )
    if not isinstance(weight, nn.Parameter):
        raise ConfigError(
            f"zloss={option} needs the weight of the head, and {type(model).__name__} has no nn.Linear and no method "
            "classifier() that returns the module which has it; fix: add one, or zloss=palm"
        )


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """Cross-entropy of logits, with label smoothing and a kind of z-loss; logs `train/ce` and `train/zloss`.

    Attributes:
        zloss: `NoZLoss` or `ZLoss`.
        label_smoothing: share of the target's mass spread over all classes, in [0, 1) (arXiv 1512.00567).
    """

    zloss: NoZLoss = NoZLoss()
    label_smoothing: float = 0.0
    unit: ClassVar[str] = "nats"
    softmax: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing} is outside [0, 1): 0.1 is customary")

    def wrap(self, forward: Callable[..., Any], model: nn.Module, tools: StepTools) -> Callable[..., Any]:
        """Returns `forward`; if the z-loss needs the weight of the head, the outputs are `with_model`."""
        return (lambda inputs: self.with_model(forward(inputs), model)) if self.zloss.needs_head else forward

    def with_model(self, outputs: Any, model: nn.Module) -> Any:
        """Returns logits, with the model if the z-loss needs the weight of its head."""
        return LogitsOf(outputs, model) if self.zloss.needs_head else outputs

    def classes(self, outputs: Any) -> int | None:
        """Returns the last dimension of the logits; 0 if the output has none, which `check` refuses."""
        logits = outputs.logits if isinstance(outputs, LogitsOf) else outputs
        return shape[-1] if (shape := getattr(logits, "shape", ())) else 0

    def check_targets(self, targets: Tensor) -> None:
        """Refuses targets that are no class ids."""
        if targets.is_floating_point():
            raise ConfigError(
                f"data: targets are {targets.dtype}, not class ids: return an integer dtype, or choose an objective "
                "that takes numbers, such as objective=mse or objective=bce"
            )

    def check(self, outputs: Any, targets: Tensor) -> None:
        """Refuses outputs that are no logits for these targets."""
        self.check_targets(targets)
        if not isinstance(outputs, Tensor) or outputs.ndim != targets.ndim + 1:
            raise ConfigError(
                f"model: forward() gave {form(outputs)} for targets of {list(targets.shape)}: logits are [batch, "
                "classes], or [batch, time, vocab] for text; return them, an object with .logits, or a tuple that "
                "begins with them; for another loss than cross-entropy choose an objective: mse, bce or your own"
            )

    def __call__(
        self, outputs: Float[Tensor, "batch *time classes"] | LogitsOf, batch: Batch, n_valid: Count
    ) -> LossTerms:
        """Returns this micro-batch's share of the step's mean loss, in fp32, with its graph.

        Args:
            outputs: logits of any floating dtype; upcast to fp32.
            batch: its targets are class ids, of which `IGNORE_INDEX` is not counted.
            n_valid: valid targets of the whole step, at least 1.

        Raises:
            ConfigError: the logits do not fit the targets.
        """
        if isinstance(outputs, LogitsOf):
            return self.with_head(self(outputs.logits, batch, n_valid), outputs.model, batch.targets, n_valid)
        self.check(outputs, batch.targets)
        return self.of_rows(outputs.flatten(0, -2), batch.targets.flatten(), n_valid)

    def with_head(self, terms: LossTerms, model: nn.Module, targets: Tensor, n_valid: Count) -> LossTerms:
        """Adds this micro-batch's share of the term that depends on the weight of the head.

        The share is that of its valid targets, so micro-batches and ranks add up to the whole term once.
        """
        if not self.zloss.needs_head or (whole := self.zloss.of_head(head_weight(model))) is None:
            return terms
        term = whole * ((targets != IGNORE_INDEX).sum() / n_valid)
        return LossTerms(terms.total + term, {**terms.parts, "zloss": terms.parts["zloss"] + term})

    def of_rows(self, logits: Float[Tensor, "n classes"], targets: Int[Tensor, " n"], n_valid: Count) -> LossTerms:
        """Returns the loss of some rows of logits, divided by `n_valid`."""
        rows = logits.float()  # in bf16, a log-sum-exp of about 11 (50,257 classes) would be rounded to steps of 1/16
        ce = F.cross_entropy(
            rows, targets, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=self.label_smoothing
        )
        return self.zloss.add(ce / n_valid, rows, targets, n_valid)

    def sums(self, outputs: Float[Tensor, "batch *time classes"], batch: Batch) -> dict[str, Tensor]:
        """Sums the cross-entropy over a validation batch, without label smoothing or z-loss; see `Objective`."""
        self.check(outputs, batch.targets)
        # fp64, because the sums of all batches and ranks are added up: the order of addition then hardly matters.
        loss, correct = torch.zeros(2, dtype=torch.float64, device=outputs.device)
        for rows, wanted in in_parts(outputs.flatten(0, -2), batch.targets.flatten()):
            logits = rows.float()
            loss = loss + F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum").double()
            correct = correct + ((logits.argmax(dim=-1) == wanted) & (wanted != IGNORE_INDEX)).sum()
        found = {"loss": loss, "count": (batch.targets != IGNORE_INDEX).sum().double()}
        return found | ({"correct": correct} if outputs.ndim == 2 else {})

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the mean cross-entropy `loss` in nats and, for `[batch, classes]` logits, `accuracy` in [0, 1]."""
        found = {"loss": mean(sums["loss"], sums["count"])}
        return found | ({"accuracy": mean(sums["correct"], sums["count"])} if "correct" in sums else {})


def in_parts(rows: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Splits rows of logits and their targets into parts of at most `LOGITS_AT_ONCE` logits, but at least one row."""
    size = max(1, LOGITS_AT_ONCE // max(rows.shape[-1], 1))
    return zip(rows.split(size), targets.split(size), strict=True)
