"""The zoo's table: faults with a known cause, their expected origin, and how the proposed fix is tested.

`fix` says how the proposed fix must prove itself:

    mended      the fix names the line to change, and the correctly written part runs without an incident
    override    the same run with the first fix that is an override has no incident of this cause
    samples     the fix names exactly the spoilt samples
    run         the guard alone brings the run to a good end, and the diagnosis proposes some fix
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from stabletrain.trainer.run import TrainingRun
from tests.reliability.zoo import parts
from tests.reliability.zoo.install import (
    behind,
    behind_frozen,
    behind_in_fp8,
    every_step,
    grow,
    learnt_behind,
    poison_moment,
    spoil_once,
)
from tests.runs import TINY_GPT

GPT = [*TINY_GPT]
RESNET = [
    *("model=resnet20", "model.depth=8", "data=digits", "optimizer=sgd", "optimizer.lr=0.02"),
    *("batch_size=8", "device=cpu", "wandb=disabled", "eval_batches=1"),
]
PLACES = {"gpt": ("blocks.0.mlp", "blocks.1.attention", "head"), "resnet": ("stages.0.0.conv2", "stages.2.0.bn1", "fc")}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: of the table's row.
        model: `gpt` or `resnet`.
        cause: the cause that the diagnosis must name.
        overrides: of the command line, in addition to the tiny model's.
        install: puts the fault into a built job; its last argument asks for the fixed part instead.
        module, op, direction: the origin that the diagnosis must name; None if it is not checked.
        fix: how the proposed fix is tested; see the module docstring.
        steps: length of the run.
    """

    name: str
    model: str
    cause: str
    overrides: Sequence[str] = ()
    install: Callable[[TrainingRun, bool], None] | None = None
    module: str | None = None
    op: str | None = None
    direction: str | None = None
    fix: str = "mended"
    steps: int = 30
    spoilt: Sequence[int] = field(default=())


def part(
    name: str, model: str, cause: str, kind: type[parts.Part], op: str, direction: str = "forward", **more
) -> Fault:
    """Returns a fault in a part that a user wrote."""
    at, place = more.pop("at", 6), PLACES[model][more.pop("place", 0)]
    install = partial(behind, place, kind, at)
    return Fault(name, model, cause, more.pop("overrides", ()), install, f"{place}.extra", op, direction, **more)


FP32, BF16, FP16 = ["precision=fp32"], ["precision=bf16"], ["precision=fp16", "precision.init_scale=8"]
FLOOR = ["precision=fp16", "precision.init_scale=1"]
FP8, LEARNT = ["precision=fp8"], ["batch_size=16", "optimizer.lr=0.01"]
LOOKED_AT = ["monitors=default", "monitors.every=3"]
BATCH_OF_32 = ["batch_size=32", "optimizer.lr=0.02"]

ALL: list[Fault] = [
    # poison_input
    Fault("a NaN pixel", "resnet", "poison_input", ["faults=input", "faults.at=[9]"], fix="samples"),
    Fault(
        "an Inf pixel, bf16",
        "resnet",
        "poison_input",
        ["faults=input", "faults.at=[20]", "faults.value=inf", *BF16],
        fix="samples",
    ),
    Fault("a token out of range", "gpt", "poison_input", ["faults=input", "faults.at=[9]"], fix="samples"),
    Fault("a token out of range, fp16", "gpt", "poison_input", ["faults=input", "faults.at=[5]", *FP16], fix="samples"),
    # bad_label
    Fault("a label too large", "resnet", "bad_label", ["faults=label", "faults.at=[9]"], fix="samples"),
    Fault("a label of -1", "gpt", "bad_label", ["faults=label", "faults.at=[9]", "faults.value=-1"], fix="samples"),
    Fault("all targets ignored", "gpt", "bad_label", ["faults=ignored", "faults.at=[12]", *BF16], fix="samples"),
    Fault("no samples", "resnet", "bad_label", ["faults=empty", "faults.at=[9]"], fix="samples"),
    # corrupt_state
    Fault(
        "a flipped bit of a weight", "gpt", "corrupt_state", ["faults=bitflip", "faults.at=[15]"], fix="run", steps=45
    ),
    Fault(
        "a flipped bit of a kernel, bf16",
        "resnet",
        "corrupt_state",
        ["faults=bitflip", "faults.at=[15]", *BF16],
        fix="run",
        steps=45,
    ),
    # Two that the update reveals: an older state is put back first, and what is seen then is that all is well.
    Fault(
        "a negative second moment",
        "gpt",
        "hardware_fault",
        (),
        partial(every_step, partial(spoil_once, 15, partial(poison_moment, -1.0))),
        fix="run",
        steps=45,
    ),
    Fault(
        "a NaN momentum",
        "resnet",
        "hardware_fault",
        (),
        partial(every_step, partial(spoil_once, 15, partial(poison_moment, float("nan")))),
        fix="run",
        steps=45,
    ),
    # hardware_fault
    Fault("a NaN activation", "gpt", "hardware_fault", ["faults=activation", "faults.at=[9]"], fix="run"),
    Fault(
        "an Inf gradient, bf16",
        "gpt",
        "hardware_fault",
        ["faults=gradient", "faults.at=[9]", "faults.value=inf", *BF16],
        fix="run",
    ),
    Fault(
        "a huge gradient",
        "resnet",
        "hardware_fault",
        ["faults=gradient", "faults.at=[20]", "faults.value=1e6"],
        fix="run",
    ),
    # bad_batch
    Fault(
        "wrong labels, bright images", "resnet", "bad_batch", ["faults=poison", "faults.at=[20]"], fix="run", steps=40
    ),
    Fault(
        "wrong labels, bf16",
        "gpt",
        "bad_batch",
        ["faults=poison", "faults.at=[300]", "optimizer.lr=0.01", *BF16],
        fix="run",
        steps=310,
    ),
    # lr_too_high
    Fault(
        "one update 10000 times too long",
        "gpt",
        "lr_too_high",
        ["faults=learning_rate", "faults.at=[20]", "faults.factor=1e4"],
        fix="run",
        steps=50,
    ),
    Fault(
        "one update 1000 times too long, bf16",
        "gpt",
        "lr_too_high",
        ["faults=learning_rate", "faults.at=[22]", "faults.factor=1e3", *BF16],
        fix="run",
        steps=50,
    ),
    Fault(
        "one update 300 times too long, long after the older state, bf16",
        "gpt",
        "lr_too_high",
        [
            *("faults=learning_rate", "faults.at=[108]", "faults.factor=300"),
            *("guard.snapshot_every=60", "optimizer.lr=0.005", *BF16),
        ],
        fix="run",
        steps=120,
    ),
    Fault("a learning rate of 1e6", "resnet", "lr_too_high", ["optimizer.lr=1e6", "warmup=none"], fix="override"),
    Fault(
        "a learning rate of 1e4, bf16", "gpt", "lr_too_high", ["optimizer.lr=1e4", "warmup=none", *BF16], fix="override"
    ),
    Fault(
        "one update 1e5 times too long, SGD",
        "resnet",
        "lr_too_high",
        ["faults=learning_rate", "faults.at=[22]", "faults.factor=1e5"],
        fix="run",
        steps=50,
    ),
    Fault(
        "a learning rate of 1e3, fp16", "gpt", "lr_too_high", ["optimizer.lr=1e3", "warmup=none", *FP16], fix="override"
    ),
    # bad_init
    Fault("weights of 1e12", "gpt", "bad_init", ["init=normal", "init.std=1e12", *FP32], fix="override"),
    Fault("weights of 1e20, bf16", "gpt", "bad_init", ["init=normal", "init.std=1e20", *BF16], fix="override"),
    Fault("kernels of 1e30", "resnet", "bad_init", ["init=normal", "init.std=1e30", *FP32], fix="override"),
    # unsafe_op
    part("log of a closed gate", "gpt", "unsafe_op", parts.LogOfGate, "aten.log"),
    part(
        "log of a closed gate, bf16, late",
        "resnet",
        "unsafe_op",
        parts.LogOfGate,
        "aten.log",
        overrides=BF16,
        at=60,
        steps=70,
    ),
    part("root of 0, backward", "gpt", "unsafe_op", parts.LengthBackward, "aten.div", "backward"),
    part(
        "root of 0, backward, fp16", "gpt", "unsafe_op", parts.LengthBackward, "aten.div", "backward", overrides=FLOOR
    ),
    part("power at 0, backward, bf16", "gpt", "unsafe_op", parts.PowerBackward, "aten.pow", "backward", overrides=BF16),
    part("log behind where, backward", "resnet", "unsafe_op", parts.WhereBackward, "aten.div", "backward"),
    part("a mean over nothing", "gpt", "unsafe_op", parts.MaskedMean, "aten.div", overrides=BF16),
    part("softmax by hand", "resnet", "unsafe_op", parts.SoftmaxByHand, "aten.exp"),
    part("softmax by hand, fp16", "gpt", "unsafe_op", parts.SoftmaxByHand, "aten.exp", overrides=FP16),
    part("a row masked whole beside harmless masks", "gpt", "unsafe_op", parts.MaskedRow, "aten._softmax", place=1),
    part("the angle of 1, backward", "resnet", "unsafe_op", parts.Angle, None, "backward"),
    # zero_variance_norm
    part("x / std(x)", "gpt", "zero_variance_norm", parts.StandardizeByHand, "aten.div"),
    part("x / std(x), bf16", "resnet", "zero_variance_norm", parts.StandardizeByHand, "aten.div", overrides=BF16),
    part("RMSNorm by hand", "gpt", "zero_variance_norm", parts.RMSByHand, "aten.rsqrt", at=80, steps=90),
    part(
        "root of the variance, backward",
        "gpt",
        "zero_variance_norm",
        parts.RootOfVarianceBackward,
        "aten.div",
        "backward",
    ),
    part("eps that fp16 loses", "gpt", "zero_variance_norm", parts.NormEpsInFP16, "aten.div", overrides=FP16),
    part("LayerNorm with eps=0", "resnet", "zero_variance_norm", parts.LayerNormNoEps, "aten.native_layer_norm"),
    part(
        "root of the variance, backward, fp16",
        "resnet",
        "zero_variance_norm",
        parts.RootOfVarianceBackward,
        "aten.div",
        "backward",
        overrides=FLOOR,
    ),
    part(
        "x / std(x) in the second micro-batch",
        "gpt",
        "zero_variance_norm",
        parts.StandardizeByHand,
        "aten.div",
        at=11,
        overrides=["grad_accum_steps=2"],
    ),
    part(
        "power at 0, backward, late",
        "resnet",
        "unsafe_op",
        parts.PowerBackward,
        "aten.pow",
        "backward",
        at=60,
        steps=70,
    ),
    # fp16_overflow
    part("a square past 65504", "gpt", "fp16_overflow", parts.SquareInHalf, "aten.pow", overrides=FP16),
    part("an exp past 65504", "resnet", "fp16_overflow", parts.ExpInHalf, "aten.exp", overrides=FP16),
    part(
        "a linear layer past 65504",
        "gpt",
        "fp16_overflow",
        parts.LinearOverflow,
        "aten.mm",
        overrides=FP16,
        fix="override",
    ),
    Fault(
        "logits past 65504",
        "gpt",
        "fp16_overflow",
        FP16,
        partial(every_step, partial(grow, ("head",), 5e5, 15, 16)),
        "head",
        "aten.mm",
        "forward",
        fix="override",
    ),
    # fp8_overflow, fp8_underflow
    Fault(
        "a cast to e4m3 whose scale is too large",
        "gpt",
        "fp8_overflow",
        [*BF16, *LEARNT],
        partial(behind, "norm", parts.ScaleTooLarge, 60),
        steps=70,
    ),
    part("a cast to e5m2 past 57344", "gpt", "fp8_overflow", parts.WideCast, "aten._to_copy", overrides=FP8),
    part("a cast to e4m3 whose scale is 448 / 0", "gpt", "fp8_overflow", parts.ScaleOfNothing, None, overrides=FP8),
    Fault(
        "a cast to e4m3 whose scale is too small",
        "gpt",
        "fp8_underflow",
        [*BF16, *LEARNT],
        partial(behind, "norm", parts.ScaleTooSmall, 60),
        steps=70,
    ),
    Fault(
        "an outlier token",
        "gpt",
        "fp8_underflow",
        [*FP8, *LEARNT],
        partial(behind_in_fp8, "norm", parts.OutlierToken, 60),
        fix="override",
        steps=70,
    ),
    # loss_scale_collapse
    part(
        "gradients past 65504 at every scale",
        "gpt",
        "loss_scale_collapse",
        parts.SteepBackward,
        None,
        "backward",
        overrides=FP16,
        place=2,
        fix="override",
    ),
    part(
        "gradients past 65504 at every scale, convolutions",
        "resnet",
        "loss_scale_collapse",
        parts.SteepBackward,
        None,
        "backward",
        overrides=FLOOR,
        place=2,
        fix="override",
    ),
    Fault(
        "gradients past 65504 at every scale, to the halt",
        "gpt",
        "loss_scale_collapse",
        ["guard.max_rollbacks=0", "precision=fp16", "precision.init_scale=256"],
        partial(behind, "head", parts.SteepBackward, 12),
        "head.extra",
        None,
        "backward",
        fix="override",
    ),
    Fault(
        "gradients past 65504 in the second micro-batch, late, frozen layers beside",
        "resnet",
        "loss_scale_collapse",
        ["grad_accum_steps=2", *FP16],
        partial(behind_frozen, "fc", parts.SteepBackward, 81),
        "fc.extra",
        None,
        "backward",
        fix="override",
        steps=60,
    ),
    # attention_logit_growth
    Fault(
        "queries and keys grow",
        "gpt",
        "attention_logit_growth",
        FP32,
        partial(every_step, partial(grow, ("query.weight", "key.weight"), 1.15, 5, 120)),
        fix="override",
        steps=120,
    ),
    Fault(
        "queries and keys grow, bf16",
        "gpt",
        "attention_logit_growth",
        BF16,
        partial(every_step, partial(grow, ("query.weight", "key.weight"), 1.2, 20, 120)),
        fix="override",
        steps=120,
    ),
    # fp16_underflow
    Fault(
        "the head's gradient shrunk a million times, loss scale 1",
        "gpt",
        "fp16_underflow",
        [*LOOKED_AT, *FLOOR],
        partial(behind, "head", parts.FaintGradient, 0),
        fix="override",
    ),
    Fault(
        "the head's gradient shrunk a million times, late, loss scale 8",
        "resnet",
        "fp16_underflow",
        [*LOOKED_AT, *FP16],
        partial(behind, "fc", parts.FaintGradient, 30),
        fix="override",
        steps=50,
    ),
    Fault(
        "a loss scale far too small beside a mask of -inf",
        "gpt",
        "fp16_underflow",
        [*LOOKED_AT, "precision=fp16", "precision.init_scale=1e-7", "precision.min_scale=1e-7"],
        partial(behind, "blocks.1.attention", parts.MaskedRow, 10**6),
        fix="override",
    ),
    Fault(
        "a loss scale far too small",
        "resnet",
        "fp16_underflow",
        [*LOOKED_AT, "precision=fp16", "precision.init_scale=1e-6", "precision.min_scale=1e-6"],
        fix="override",
    ),
    # output_logit_drift
    Fault(
        "log Z drifts, bf16",
        "gpt",
        "output_logit_drift",
        [*BF16, "optimizer.lr=0.01"],
        partial(learnt_behind, "head", parts.WanderingOffset, 100, 0.4),
        fix="override",
        steps=160,
    ),
    Fault(
        "log Z drifts, bf16, images",
        "resnet",
        "output_logit_drift",
        [*BF16, "batch_size=32", "optimizer=adamw", "optimizer.lr=0.003"],
        partial(learnt_behind, "fc", parts.WanderingOffset, 60, 0.3),
        fix="override",
        steps=110,
    ),
    # optimizer_staleness
    Fault(
        "layers unfrozen",
        "gpt",
        "optimizer_staleness",
        [*FP32, *BATCH_OF_32, "optimizer.betas=[0.5,0.999]"],
        partial(behind, "norm", parts.QuietGradient, 300),
        fix="override",
        steps=320,
    ),
    Fault(
        "layers unfrozen, bf16, dropout",
        "gpt",
        "optimizer_staleness",
        [*BF16, *BATCH_OF_32, "optimizer.betas=[0.3,0.999]", "model.dropout=0.1"],
        partial(behind, "norm", parts.QuietGradient, 300),
        fix="override",
        steps=320,
    ),
]

CLEAN: list[tuple[str, str, Sequence[str]]] = [
    ("gpt", "gpt", FP32),
    ("gpt, bf16", "gpt", BF16),
    ("gpt, fp16", "gpt", FP16),
    ("gpt, fp8", "gpt", FP8),
    ("resnet", "resnet", FP32),
    ("resnet, bf16", "resnet", BF16),
]
