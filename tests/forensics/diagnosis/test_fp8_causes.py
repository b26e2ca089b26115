"""The rules for fp8 blame a cast only with evidence of harm, and propose what a replay showed to help."""

import math
from dataclasses import replace

import pytest

from stabletrain.forensics.diagnosis.diagnose import diagnose
from stabletrain.forensics.facts import Outcome
from stabletrain.forensics.probes.fp8_casts import Cast, Fp8Casts
from stabletrain.forensics.trace.values import Values
from tests.forensics.diagnosis.given import BAD, FINE, NAN, SETTING, SPIKE, origin
from tests.forensics.diagnosis.test_causes import nonfinite

IN_FP8 = replace(SETTING, choices={**SETTING.choices, "precision": "fp8"})
CAST = Cast("blocks.0.mlp.up", "gpt.py:9", "input", "e4m3", 1e-4, 4e6, flushed=0.94, saturated=0.0, nonfinite=0.0)
TRIED = {"precision.recipe=rowwise": BAD, "precision.bf16_modules=[blocks.0.mlp.up]": FINE}
LOST = Fp8Casts((CAST,), FINE, TRIED)
FP8_SPIKE = replace(SPIKE, fp8=LOST, setting=IN_FP8)


def test_a_tensor_flushed_to_zero_is_blamed_if_the_step_is_normal_without_fp8():
    found = diagnose(FP8_SPIKE)
    assert found.cause == "fp8_underflow"
    assert found.fix == ["precision.bf16_modules=[blocks.0.mlp.up]", "precision=bf16"]
    assert "blocks.0.mlp.up's input to e4m3 (up to 4e+06, scaled by 0.0001) flushes 94% of its values" in found.verdict
    assert any("94.0% flushed to 0" in line for line in found.evidence)


@pytest.mark.parametrize(
    "change",
    [
        {"fp8": replace(LOST, without=BAD)},
        {"fp8": replace(LOST, without=Outcome(not_run="no memory"))},
        {"fp8": replace(LOST, casts=(replace(CAST, flushed=0.3),))},
        {"fp8": None},
        {"outcomes": {**SPIKE.outcomes, "same": FINE}},
    ],
    ids=["bad without fp8 too", "not known", "little flushed", "no casts", "not reproduced"],
)
def test_otherwise_it_is_not(change):
    assert not diagnose(replace(FP8_SPIKE, **change)).cause.startswith("fp8")


def test_saturation_comes_before_flushing():
    clipped = replace(CAST, tensor="weight", saturated=0.2)
    found = diagnose(replace(FP8_SPIKE, fp8=Fp8Casts((CAST, clipped), FINE, {})))
    assert (found.cause, found.fix) == ("fp8_overflow", ["precision=bf16"])
    assert "weight to e4m3" in found.verdict
    assert "saturates 20%" in found.verdict


def test_a_users_own_cast_is_fixed_at_its_line():
    found = diagnose(replace(FP8_SPIKE, setting=SETTING))
    assert found.fix[0].startswith("gpt.py:9: before the cast to fp8, scale by")


def test_an_infinite_scale_is_blamed_at_its_division_and_only_in_its_own_module():
    infinite = Fp8Casts((replace(CAST, module="part", scale=math.inf),), BAD, {})
    division = nonfinite(origin(op="aten.div", why="division_by_zero"))
    found = diagnose(replace(division, fp8=infinite))
    assert found.cause == "fp8_overflow"
    assert found.fix == ["model.py:7: clamp the tensor's largest value to at least 1e-12 before dividing by it"]
    for other in (None, Fp8Casts((CAST,), BAD, {}), Fp8Casts((replace(CAST, scale=math.inf),), BAD, {})):
        assert diagnose(replace(division, fp8=other)).cause == "unsafe_op"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_cast_that_gives_nan_or_inf_is_fp8s_overflow(dtype):
    cast = origin(op="aten._to_copy", dtype=dtype, in_fp32=1e5)
    assert diagnose(nonfinite(cast, fp32=FINE, choices={"precision": "fp8"})).fix == ["precision=bf16"]
    own = diagnose(nonfinite(cast, fp32=NAN, choices={"precision": "bf16"}))
    assert own.cause == "fp8_overflow"
    assert own.fix[0].startswith("model.py:7: before the cast")


def test_a_product_of_fp8_values_that_gives_nan_although_its_result_is_finite_is_fp8s_overflow():
    eight = Values((16, 16), "float8_e4m3fn", 3.0)
    product = replace(origin(op="aten.mm", dtype="bfloat16", in_fp32=90.0), inputs=(eight, eight))
    assert diagnose(nonfinite(product, fp32=FINE, choices={"precision": "fp8"})).cause == "fp8_overflow"
    overflows = replace(product, in_fp32=float("inf"))
    assert diagnose(nonfinite(overflows, choices={"precision": "fp8"})).cause != "fp8_overflow"
