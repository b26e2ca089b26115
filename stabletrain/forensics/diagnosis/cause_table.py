"""What a diagnosis is, and the table of causes: a row for each rule of `causes.py`. See docs/reference/incidents.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Cause(NamedTuple):
    """One cause.

    Attributes:
        title: short description, used as the heading of report.md.
        sign: the evidence by which the rule recognises the cause.
        accident: if true, every incident of this cause is filed. If false, the cause is a mistake in the code or the
            configuration that lasts until it is fixed, so only its first incident in a run is filed.
    """

    title: str
    sign: str
    accident: bool = False


CAUSES = {
    "poison_input": Cause(
        "the data holds NaN, Inf or an id that is out of range",
        "the batch holds NaN, Inf or an id that is out of range",
        accident=True,
    ),
    "bad_label": Cause(
        "a label is out of range, every label is ignored, or the batch is empty",
        "a label out of range, every label ignored, or an empty batch",
        accident=True,
    ),
    "uninitialised": Cause(
        "a weight was never initialised",
        "a weight or buffer that is not finite in the first step, before any update",
    ),
    "corrupt_state": Cause(
        "weights or optimizer moments were corrupt before the step",
        "weights, buffers or moments changed between two updates, are not finite, or a few of their elements are huge",
        accident=True,
    ),
    "bad_setting": Cause(
        "a setting of the optimizer is not a usable number",
        "a rate, eps, beta, momentum or decay that is not finite or out of its range, and an update that is not finite",
    ),
    "unsafe_optimizer": Cause(
        "the optimizer made NaN or Inf of finite numbers",
        "loss, gradients and state are finite, and the optimizer's own step is not",
    ),
    "hardware_fault": Cause(
        "a replay of the step gives a different result",
        "a second computation, or a replay of the step, differs although it must be equal; or the replay is finite",
        accident=True,
    ),
    "loss_scale_collapse": Cause(
        "gradients overflow fp16 even at the smallest loss scale",
        "the loss scale has fallen to its floor",
    ),
    "zero_variance_norm": Cause(
        "a normalisation divided by a variance of 0",
        "a division by a variance or a norm that is 0",
    ),
    "fp16_underflow": Cause(
        "gradients were too small for fp16",
        "everything is finite, and gradients are 0 in fp16 but not in fp32",
    ),
    "fp16_overflow": Cause(
        "a value was too large for fp16",
        "Inf from finite values in fp16, finite in fp32",
    ),
    "fp8_overflow": Cause(
        "a value was too large for fp8",
        "a cast to fp8 gives NaN or Inf from finite values, or saturates, and the step is normal without fp8",
    ),
    "fp8_underflow": Cause(
        "fp8 flushed most of a tensor to 0",
        "a cast to fp8 turns most values into 0, and the step is normal without fp8; or gradients are 0 in fp8 only",
    ),
    "unsafe_op": Cause(
        "an operation has no finite result for its inputs",
        "no finite result in any number format: log(0), x / 0, sqrt'(0), exp overflow, inf - inf",
    ),
    "bad_init": Cause(
        "the initial weights are too large",
        "an overflow or a spike in the first steps, whatever the batch",
    ),
    "attention_logit_growth": Cause(
        "attention logits have grown too large",
        "attention logits above 1e3 that have grown since the older state",
    ),
    "output_logit_drift": Cause(
        "output logits have drifted far from 0",
        "log Z far from 0 and grown",
    ),
    "bad_batch": Cause(
        "the batch is unlike the others",
        "another batch is normal with the same weights",
        accident=True,
    ),
    "optimizer_staleness": Cause(
        "the optimizer's second moment is out of date",
        "RMS(g / sqrt(v)) far above 1, and the last update was longer than the learning rate",
    ),
    "lr_too_high": Cause(
        "the learning rate is too high",
        "other batches fail too, and the same batch is normal with older weights",
    ),
    "unknown": Cause("the cause is unknown", "no rule holds"),
}
"""Cause by the id that `diagnosis.json` holds."""


@dataclass(frozen=True)
class Diagnosis:
    """The cause of an incident and its fixes.

    Attributes:
        cause: a key of `CAUSES`.
        confidence: in [0, 1].
        verdict: one sentence with the numbers.
        fix: Hydra overrides or actions, best first.
        also: further causes that contribute; they have no `also`.
    """

    cause: str
    confidence: float
    verdict: str
    fix: list[str]
    evidence: list[str]
    also: "Sequence[Diagnosis]" = ()
