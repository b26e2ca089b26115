"""The causes that an incident can have. Add a row here for a new rule in `causes.py`, and one to docs/forensics.md."""

from typing import NamedTuple


class Cause(NamedTuple):
    """One cause.

    Attributes:
        title: in words, for a heading.
        sign: what the rule recognises it by.
        accident: whether each incident is a new accident. Otherwise all incidents of this cause in a run are one
            mistake, which lasts until it is fixed, and only the first is filed.
    """

    title: str
    sign: str
    accident: bool = False


CAUSES = {
    "poison_input": Cause(
        "the data holds NaN or Inf, or an id out of range",
        "the batch holds NaN, Inf or an id out of range",
        accident=True,
    ),
    "bad_label": Cause(
        "a label that is no class, or no label that counts",
        "a label out of range, or none that counts",
        accident=True,
    ),
    "corrupt_state": Cause(
        "weights or moments were bad before the step",
        "weights, buffers or moments bad before the step, or a few of their elements huge",
        accident=True,
    ),
    "hardware_fault": Cause(
        "the machine computed something else the second time",
        "the same step again is finite, or gives other bits where it must not",
        accident=True,
    ),
    "loss_scale_collapse": Cause(
        "no loss scale is small enough any more",
        "the loss scale has fallen to its floor",
    ),
    "zero_variance_norm": Cause(
        "a normalisation divided by no spread at all",
        "a division by a variance or a norm that is 0",
    ),
    "fp16_underflow": Cause(
        "gradients were too small for fp16",
        "everything is finite, and gradients are 0 in fp16 but not in fp32",
    ),
    "fp16_overflow": Cause(
        "a number was too large for fp16",
        "Inf from finite values in fp16, finite in fp32",
    ),
    "unsafe_op": Cause(
        "an operation with no finite result",
        "no finite result in any format: log(0), x / 0, sqrt'(0), exp overflow, inf - inf",
    ),
    "bad_init": Cause(
        "the initial weights are too large",
        "values too large for the format, or a spike, in the first steps",
    ),
    "attention_logit_growth": Cause(
        "attention logits have grown too large",
        "attention logits above 1e3 that have grown since the older state",
    ),
    "output_logit_drift": Cause(
        "output logits have drifted away",
        "log Z far from 0 and grown",
    ),
    "bad_batch": Cause(
        "a batch unlike the others",
        "another batch on the same state is normal",
        accident=True,
    ),
    "optimizer_staleness": Cause(
        "the optimizer's second moment is out of date",
        "RMS(g / sqrt(v)) far above 1",
    ),
    "lr_too_high": Cause(
        "the learning rate is too high",
        "every batch fails on this state, and the same batch on an older one does not",
    ),
    "unknown": Cause("no rule explains it", "none of these"),
}
"""By the id that `diagnosis.json` holds."""
