"""Casts to fp8 are measured by module and tensor, and blamed only for harm: a replay without them is normal."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from stabletrain.forensics.diagnosis.diagnose import diagnose
from stabletrain.forensics.diagnosis.evidence import Evidence, RunSettings
from stabletrain.forensics.probes.fp8_casts import SATURATED_SHARE, Casts, NoCasts, fp8_casts
from stabletrain.forensics.probes.underflow import can_underflow, underflow
from stabletrain.forensics.trace.recorder import Trace
from stabletrain.forensics.trace.values import measure, unscaled
from stabletrain.records import Reading
from stabletrain.stability import precision
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.devices import need_torchao
from tests.forensics.given import made, repro_of
from tests.reliability.zoo.install import behind
from tests.reliability.zoo.parts import Part, ScaleTooLarge, ScaleTooSmall
from tests.runs import TINY_GPT, composed
from tests.stability.precision.given import CPU


@pytest.fixture(autouse=True)
def torchao():
    need_torchao()


def measured(model, acting, inputs):
    """The worst cast of each module and tensor, in one forward and backward pass."""
    with Casts(model) as watching:
        with acting.autocast():
            output = model(inputs)
        output.float().square().mean().backward()
    return {(one.module, one.tensor): one for one in watching.worst}


def two(recipe="tensorwise"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 16))
    acting = precision.fp8(CPU, recipe)
    acting.wrap_fp32_modules(model)
    return model, acting


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_each_tensor_of_a_layer_is_named_with_its_scale_and_nothing_is_lost_in_a_healthy_step(recipe):
    model, acting = two(recipe)
    inputs = torch.randn(16, 32)
    found = measured(model, acting, inputs)
    assert {*found} == {("0", "input"), ("0", "weight"), ("0", "grad_output")}
    assert all(one.saturated == one.nonfinite == 0 and one.flushed < 0.02 for one in found.values())
    assert {one.format for one in found.values()} == ({"e4m3", "e5m2"} if recipe == "tensorwise" else {"e4m3"})
    if recipe == "tensorwise":
        top = float(inputs.bfloat16().abs().max())
        assert found["0", "input"].scale == pytest.approx(448 / top)
        assert found["0", "input"].absmax == pytest.approx(top)
    assert found["0", "input"].source.startswith(__file__)


def test_the_share_that_an_outlier_flushes_is_counted():
    """One row of 16 is 2^22 times the others: e4m3 keeps about 2^18."""
    inputs = torch.randn(16, 32)
    inputs[0] *= 2.0**22
    flushed = measured(*two(), inputs)["0", "input"].flushed
    assert flushed == pytest.approx(15 / 16, abs=0.02)
    model, acting = two("rowwise")
    with Casts(model) as watching, torch.no_grad(), acting.autocast():
        model(inputs)  # in the backward pass, a row is a feature, and each of them has the outlier
    assert max(one.flushed for one in watching.worst) < 0.02


class Own(nn.Module):
    """A user's own cast."""

    def __init__(self, scale, clamp):
        super().__init__()
        self.scale, self.clamp = scale, clamp

    def forward(self, x):
        x = x * self.scale
        if self.clamp:
            x = x.clamp(-448, 448)
        return x.to(torch.float8_e4m3fn).float() / self.scale


@pytest.mark.parametrize("clamp", [True, False])
def test_a_saturated_cast_is_seen_whether_the_code_or_the_cast_clips(clamp):
    values = torch.linspace(0.1, 1, 100)
    with Casts(model := Own(896.0, clamp)) as watching:
        model(values)
    (one,) = watching.worst
    share = float((values * 896 > 448 * (1 + 1 / 16)).float().mean())
    assert one.saturated == pytest.approx(share, abs=0.02)
    assert one.saturated > SATURATED_SHARE
    assert (one.scale, one.tensor) == (896.0, "input")
    assert one.source.startswith(__file__)
    with Casts(model := Own(448.0, clamp)) as watching:
        model(values)
    assert watching.worst[0].saturated == 0
    with NoCasts():
        assert torch.allclose(Own(1e-6, False)(values), values)


def test_the_trace_reads_scaled_fp8_tensors_as_their_values():
    model, acting = two()
    model[0].weight.data[0, 0] = 3e38
    inputs = torch.full((16, 32), 3e38)
    with Trace(model) as tracing, acting.autocast():
        model(inputs)
    product = next(record for record in tracing.records if record.op == "aten.mm")
    assert [values.dtype for values in product.inputs] == ["float8_e4m3fn"] * 2
    assert product.inputs[0].absmax == pytest.approx(3e38, rel=0.01)
    assert product.module == "0"
    assert product.source.startswith(__file__)
    assert measure(unscaled(torch.ones(3))).absmax == 1


QUICK = [
    *("guard.window=20", "schedule=constant", "warmup.steps=3", "checkpoint=off", "monitors=none"),
    *("forensics.keep_state=false", "eval_every=100000", "report=false", "batch_size=16", "optimizer.lr=0.01"),
]


def diagnosed(folder, part, *overrides, place="norm"):
    """The incidents of a run with a part that fails from step 45 on."""
    with composed(*TINY_GPT, *QUICK, "steps=47", "guard=skip", *overrides) as cfg:
        job = build(cfg, folder)
        partial(behind, place, part, 45)(job, False)
        train(job)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("incidents/*/diagnosis.json"))]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "cause"), [(ScaleTooLarge, "fp8_overflow"), (ScaleTooSmall, "fp8_underflow")])
def test_a_cast_that_ruins_the_step_is_blamed_with_its_line(tmp_path, part, cause):
    (found, *_) = diagnosed(tmp_path, part, "precision=bf16")
    assert found["cause"] == cause
    assert "parts.py:" in found["fix"][0]
    assert "norm.extra" in found["verdict"]


class Harmless(Part):
    """Flushes every value to 0, and uses none of them; beside it the labels are shifted, which is a spike."""

    def work(self, x, late):
        flushed = (x.detach().float() * 1e-9).to(torch.float8_e4m3fn).float()
        return 0 * flushed + (x.roll(1, 0) * 100 - 10 * x if late else 0 * x)


@pytest.mark.slow
def test_flushed_values_that_do_no_harm_are_not_blamed(tmp_path):
    (found, *_) = diagnosed(tmp_path, Harmless, "precision=bf16")
    assert not found["cause"].startswith("fp8")


def test_gradients_that_fp8_flushes_are_told_from_those_that_are_zero_anyway(tmp_path):
    """A channel of 2^30 that the model itself undoes: fp32 and bf16 lose nothing, the gradients of fp8 become 0."""
    job = made(tmp_path, *TINY_GPT, "precision=fp8", "precision.recipe=rowwise", "init=torch")
    assert can_underflow(job.tools.precision)
    repro = repro_of(job, job.data.batches.get(0))
    assert not underflow(repro).real
    factors = torch.tensor([2.0**30, *[1.0] * 15])
    for block in job.state.model.blocks:
        with torch.no_grad():
            block.mlp.down.weight *= factors[:, None]
        block.mlp.down.register_forward_hook(lambda _, inputs, output: output / factors)
    found = underflow(repro)
    assert found.real
    assert found.sufficient_scale is None, "there is no loss scale to raise"
    assert "blocks.1.mlp.up.weight" in [one.name for one in found.worst]
    reading = Reading(1, 5.0, {}, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, True, False, False, 1e-3)
    told = diagnose(Evidence("loss_scale", reading, underflow=found, setting=RunSettings({"precision": "fp8"})))
    assert (told.cause, told.fix) == ("fp8_underflow", ["precision=bf16"])


def test_a_bf16_step_has_no_casts_and_costs_no_replay(tmp_path):
    job = made(tmp_path, *TINY_GPT, "precision=bf16")
    repro = repro_of(job, job.data.batches.get(0))
    assert fp8_casts(repro) is None
    eight = made(tmp_path / "fp8", *TINY_GPT, "precision=fp8")
    found = fp8_casts(repro_of(eight, eight.data.batches.get(0)))
    assert not found.lost
    assert not found.clipped
    assert not found.tried
    assert found.without.loss is None
    assert replace(found, casts=()).lost == []
