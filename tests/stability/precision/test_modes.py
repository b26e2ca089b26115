"""The modes: the dtype of each, the hardware on which each is refused, and the choices of `auto`."""

import math

import pytest
import torch

from stabletrain.errors import ConfigError, WrongCard
from stabletrain.machine import hardware
from stabletrain.stability import precision
from stabletrain.stability.precision import LossScaled
from tests.stability.precision.given import CPU, CUDA, FP16


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: precision.fp32(CPU), torch.float32),
        (lambda: precision.bf16(CPU), torch.bfloat16),
        (lambda: precision.fp16(CPU, **FP16), torch.float16),
    ],
)
def test_matmul_runs_in_the_modes_dtype_and_parameters_stay_fp32(make, expected):
    layer = torch.nn.Linear(4, 4)
    with make().autocast():
        assert layer(torch.randn(2, 4)).dtype == expected
    assert layer.weight.dtype == torch.float32


@pytest.fixture
def card(monkeypatch):
    """A CUDA device of a given name and capability, as PyTorch would report it."""

    def make(name, capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        ones, zeros = torch.ones, torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: zeros(*a, **k))
        monkeypatch.setattr(torch, "ones", lambda *a, device=None, **k: ones(*a, **k))
        tensor = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *a, device=None, **k: tensor(*a, **k))

    return make


def test_auto_chooses_bf16_on_ampere_and_fp16_on_volta_and_explains_why(card):
    card("NVIDIA A100", (8, 0))
    ampere = precision.auto(CUDA, **FP16)
    assert (ampere.name, ampere.why) == ("bf16", "auto: NVIDIA A100 (compute capability 8.0) has bf16")
    card("Tesla V100", (7, 0))
    volta = precision.auto(CUDA, **FP16)
    assert (volta.name, volta.why) == ("fp16", "auto: Tesla V100 (compute capability 7.0) has no bf16")
    assert isinstance(volta, LossScaled)


def test_a_resumed_run_keeps_what_auto_has_chosen_for_it(card):
    card("NVIDIA A100", (8, 0))
    later = precision.auto(CUDA, **FP16, kept="fp16")
    assert isinstance(later, LossScaled)
    assert later.why == "auto: kept from the start of the run, whose numbers bf16 would change"
    assert precision.auto(CUDA, **FP16, kept="bf16").why == precision.auto(CUDA, **FP16).why
    card("Tesla V100", (7, 0))
    assert precision.auto(CUDA, **FP16, kept="fp32").name == "fp32"
    with pytest.raises(WrongCard, match="auto chose bf16 when this run began, and Tesla V100 .* has no bf16: resume"):
        precision.auto(CUDA, **FP16, kept="bf16")


@pytest.mark.parametrize("kind", ["bf16", "bf16_params", "tf32"])
def test_another_card_may_have_what_this_one_has_not(card, kind):
    card("Tesla V100", (7, 0))
    with pytest.raises(WrongCard):
        getattr(precision, kind)(CUDA)


@pytest.mark.parametrize(("flags", "expected"), [({"avx512_bf16"}, "bf16"), ({"amx_bf16"}, "bf16"), ({"avx2"}, "fp32")])
def test_auto_on_a_cpu_goes_by_its_flags(monkeypatch, flags, expected):
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset(flags))
    assert precision.auto(CPU, **FP16).name == expected


def test_bf16_on_a_v100_is_refused_with_the_card_and_the_fix(card):
    card("Tesla V100-SXM2-32GB", (7, 0))
    with pytest.raises(ConfigError, match="precision=bf16 on Tesla V100-SXM2-32GB.*precision=fp16"):
        precision.bf16(CUDA)


def test_fp16_on_a_cpu_notes_that_it_is_slow():
    assert "slower" in precision.fp16(CPU, **FP16).why


@pytest.mark.parametrize(
    "keys", [(math.nan, 2000, 1.0), (65536.0, 2000, -5.0), (65536.0, 0, 1.0), (math.inf, 2000, 1.0), (1.0, 2000, 2.0)]
)
def test_auto_refuses_a_loss_scale_that_fp16_would_refuse(keys):
    for option in (precision.auto, precision.fp16):
        with pytest.raises(ConfigError, match=r"^precision\.(init_scale|growth_interval)="):
            option(CPU, *keys)
