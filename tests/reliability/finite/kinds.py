"""The kinds of finite faults, in three classes.

| class | what happens |
|---|---|
| memory | the state changes between two updates |
| arithmetic | a computation comes out wrong inside a step, and right if it is done a second time |
| training | data, labels or settings are wrong; every computation is right |
"""

from dataclasses import dataclass

from tests.reliability.finite.arithmetic import (
    GradientFlip,
    GradientNoisy,
    GradientPart,
    GradientScaled,
    GradientStale,
    Output,
    Update,
)
from tests.reliability.finite.fault import Fault
from tests.reliability.finite.memory import (
    Exchanged,
    Flip,
    Frozen,
    Noisy,
    Overwritten,
    Permuted,
    Scaled,
    Stale,
    Stuck,
)
from tests.reliability.finite.training import (
    Dropout,
    Duplicated,
    Inputs,
    Jump,
    Labels,
    Repeated,
    Settings,
)

BOTH = ("gpt", "resnet")


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        group: `memory`, `arithmetic` or `training`.
        fault: what acts.
        steps: for how many steps.
        models: those that have what it damages.
        overrides: of the run, and of the clean run that it is compared with.
    """

    group: str
    fault: Fault
    steps: int = 1
    models: tuple[str, ...] = BOTH
    overrides: tuple[str, ...] = ()


GPT, RESNET = ("gpt",), ("resnet",)

MEMORY = {
    "weight_lowest_bit": Kind("memory", Flip("weight", (0,))),
    "weight_mantissa": Kind("memory", Flip("weight", (21,))),
    "weight_exponent": Kind("memory", Flip("weight", (25,))),
    "weight_high_exponent": Kind("memory", Flip("weight", (28,))),
    "weight_top_exponent": Kind("memory", Flip("weight", (30,))),
    "weight_sign": Kind("memory", Flip("weight", (31,))),
    "weight_bits": Kind("memory", Flip("weight", (18, 22, 25), elements=8)),
    "first_moment_exponent": Kind("memory", Flip("first", (25,))),
    "second_moment_exponent": Kind("memory", Flip("second", (25,)), models=GPT),
    "moment_bits": Kind("memory", Flip("moments", (20, 24, 26), elements=8)),
    "weight_stuck": Kind("memory", Stuck("weight"), 60),
    "moment_stuck": Kind("memory", Stuck("first"), 60),
    "rows_frozen": Kind("memory", Frozen("weight", 8), 100),
    "rows_permuted": Kind("memory", Permuted(0)),
    "columns_permuted": Kind("memory", Permuted(1)),
    "matrices_exchanged": Kind("memory", Exchanged()),
    "weights_stale": Kind("memory", Stale("weight")),
    "moments_stale": Kind("memory", Stale("moments")),
    "cache_line": Kind("memory", Overwritten(16)),
    "page": Kind("memory", Overwritten(1024)),
    "weight_noise": Kind("memory", Noisy(1.0)),
    "weights_x1.01": Kind("memory", Scaled("weights", 1.01), 120),
    "weights_x2": Kind("memory", Scaled("weights", 2.0)),
    "weight_x0": Kind("memory", Scaled("weight", 0.0)),
    "moments_x0": Kind("memory", Scaled("moments", 0.0)),
    "moments_x100": Kind("memory", Scaled("moments", 100.0)),
    "second_moments_x0": Kind("memory", Scaled("second", 0.0), models=GPT),
    "buffer_bits": Kind("memory", Flip("buffers", (25,), elements=8)),
    "buffers_x2": Kind("memory", Scaled("buffers", 2.0), 30),
}

ARITHMETIC = {
    "gradient_sign": Kind("arithmetic", GradientScaled(-1.0), 30),
    "gradient_layer_sign": Kind("arithmetic", GradientScaled(-1.0, layer=True), 30),
    "gradient_layer_zero": Kind("arithmetic", GradientScaled(0.0, layer=True), 100),
    "gradient_x0": Kind("arithmetic", GradientScaled(0.0), 30),
    "gradient_x2": Kind("arithmetic", GradientScaled(2.0), 30),
    "gradient_stale": Kind("arithmetic", GradientStale(layer=False), 30),
    "gradient_layer_stale": Kind("arithmetic", GradientStale(layer=True), 100),
    "gradient_noise": Kind("arithmetic", GradientNoisy(3.0, layer=False), 60),
    "gradient_layer_noise": Kind("arithmetic", GradientNoisy(10.0, layer=True), 60),
    "gradient_bit": Kind("arithmetic", GradientFlip(29), 60),
    "gradient_part": Kind("arithmetic", GradientPart(0.5), 60),
    "output_element": Kind("arithmetic", Output("element"), 60),
    "output_tile": Kind("arithmetic", Output("tile"), 60),
    "output_row": Kind("arithmetic", Output("row"), 60),
    "output_scaled": Kind("arithmetic", Output("scaled"), 60),
    "update_lost": Kind("arithmetic", Update(0.0), 60),
    "update_twice": Kind("arithmetic", Update(2.0, layer=False), 60),
    "update_sign": Kind("arithmetic", Update(-1.0), 30),
}

TRAINING = {
    "labels_shuffled": Kind("training", Labels("shuffled"), 30),
    "labels_shuffled_long": Kind("training", Labels("shuffled"), 130),
    "labels_constant": Kind("training", Labels("constant"), 30),
    "labels_shifted": Kind("training", Labels("shifted"), 30),
    "labels_random": Kind("training", Labels("random", 0.3), 130),
    "inputs_shifted": Kind("training", Inputs("shifted"), 60),
    "inputs_constant": Kind("training", Inputs("constant"), 60),
    "inputs_other": Kind("training", Inputs("other"), 60),
    "batch_repeated": Kind("training", Repeated(), 100),
    "rows_duplicated": Kind("training", Duplicated(), 60),
    "lr_x10": Kind("training", Settings({"lr": 10.0}), 20),
    "lr_x100": Kind("training", Settings({"lr": 100.0}), 20),
    "lr_x0": Kind("training", Settings({"lr": 0.0}), 20),
    "schedule_jump": Kind("training", Jump(10.0)),
    "weight_decay_x1000": Kind("training", Settings({"weight_decay": 1000.0}), 30),
    "beta2_0.5": Kind("training", Settings(values={"betas": (0.9, 0.5)}), 60, GPT),
    "eps_0.1": Kind("training", Settings(values={"eps": 0.1}), 60, GPT),
    "momentum_0.99": Kind("training", Settings(values={"momentum": 0.99}), 60, RESNET),
    "no_clipping_x1000": Kind("training", GradientScaled(1000.0), 10, overrides=("clipping=none",)),
    "dropout_0.9": Kind("training", Dropout(0.9), 60, GPT),
}

KINDS: dict[str, Kind] = MEMORY | ARITHMETIC | TRAINING
"""Kinds by name."""
