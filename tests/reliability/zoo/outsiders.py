"""Faults that were written after the diagnosis rules, to test them."""

from functools import partial

from stabletrain.trainer.run import TrainingRun
from tests.reliability.zoo import outsiders_parts as parts
from tests.reliability.zoo.faults import BF16, FLOOR, FP16, Fault, part
from tests.reliability.zoo.install import behind, every_step, grow, spoil_once


def age_moments(job: TrainingRun) -> None:
    """Shrinks Adam's second moment by 1e-8, as if gradients had been ten thousand times smaller."""
    for state in job.state.optimizer.state.values():
        state["exp_avg_sq"].mul_(1e-8)


STALE = ["optimizer.betas=[0.9,0.999]", "optimizer.lr=0.02"]

OUTSIDERS: list[Fault] = [
    part("softplus by hand, bf16", "gpt", "unsafe_op", parts.SoftplusByHand, "aten.exp", overrides=BF16),
    part("a divergence by hand", "resnet", "unsafe_op", parts.DivergenceByHand, "aten.log"),
    part("a mask times infinity", "gpt", "unsafe_op", parts.MaskTimesInfinity, "aten.mul", overrides=BF16, place=1),
    part("a backward of its own", "resnet", "unsafe_op", parts.OwnBackward, "aten.div", "backward"),
    part("a backward of its own, fp16", "gpt", "unsafe_op", parts.OwnBackward, "aten.div", "backward", overrides=FLOOR),
    part("equal eigenvalues, backward", "gpt", "unsafe_op", parts.TwinEigenvalues, None, "backward"),
    part("nothing attended", "gpt", "unsafe_op", parts.NothingAttended, "aten.div"),
    part("the remainder of a division by 0", "resnet", "unsafe_op", parts.RemainderOfZero, "aten.remainder"),
    part("the mean of an empty selection", "gpt", "unsafe_op", parts.MeanOfTheChosen, "aten.mean", overrides=BF16),
    part("a vector of length 0", "gpt", "unsafe_op", parts.LengthOfZero, "aten.div"),
    part("a centred vector of length 0", "resnet", "zero_variance_norm", parts.CentredLength, "aten.div"),
    part("a small temperature", "resnet", "unsafe_op", parts.Contrast, "aten.exp"),
    part("a maximum over nothing", "gpt", "unsafe_op", parts.RunningMaximum, "aten.sub"),
    part("a weight of length 0", "gpt", "unsafe_op", parts.WeightOfLengthZero, "aten._weight_norm_interface"),
    part(
        "attention scores by hand",
        "gpt",
        "fp16_overflow",
        parts.ScoresInHalf,
        "aten.mm",
        overrides=FP16,
        fix="override",
    ),
    part(
        "a cast of the code's own, bf16", "resnet", "fp16_overflow", parts.CastOfLarge, "aten._to_copy", overrides=BF16
    ),
    part(
        "gradients through half, bf16",
        "gpt",
        "fp16_overflow",
        parts.CompressedGradient,
        "aten._to_copy",
        "backward",
        overrides=BF16,
    ),
    Fault(
        "a kernel that fails once, bf16",
        "gpt",
        "hardware_fault",
        BF16,
        partial(behind, "blocks.0.mlp", parts.FailsOnce, 9),
        fix="run",
    ),
    Fault("a pixel of 1e30", "resnet", "bad_batch", ["faults=input", "faults.at=[18]", "faults.value=1e30"], fix="run"),
    Fault("a weight decay of 1e5", "gpt", "lr_too_high", ["optimizer.weight_decay=1e5"], fix="override", steps=40),
    Fault(
        "second moments too small, bf16",
        "gpt",
        "optimizer_staleness",
        [*STALE, *BF16],
        partial(every_step, partial(spoil_once, 60, age_moments)),
        fix="run",
        steps=110,
    ),
    Fault(
        "queries and keys grow, late, bf16",
        "gpt",
        "attention_logit_growth",
        BF16,
        partial(every_step, partial(grow, ("query.weight", "key.weight"), 1.25, 60, 140)),
        fix="override",
        steps=140,
    ),
]
