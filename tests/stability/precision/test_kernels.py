"""Process-wide settings: every mode sets all of them, and PyTorch's older and newer calls agree."""

import pytest
import torch
import torch.nn.functional as F
from torch.backends import cuda, cudnn, mkldnn

from stabletrain.machine import hardware
from stabletrain.stability import precision
from stabletrain.stability.precision.kernels import ieee_kernels, set_fp32_precision
from tests.devices import CARD, skip_unless_it_has
from tests.stability.precision.given import CPU, FP16

SWITCHES = [
    *((library, operation) for library in (cudnn, mkldnn) for operation in ("conv", "rnn")),
    (cuda, "matmul"),
    (mkldnn, "matmul"),
]
"""Where PyTorch's newer calls keep the precision of fp32 operations."""

OLDER = {
    "cuda.matmul.allow_tf32": lambda: cuda.matmul.allow_tf32,
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "cudnn.allow_tf32": lambda: cudnn.allow_tf32,
}
"""PyTorch's older calls, which raise if they disagree with the newer ones."""

REDUCED = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
"""Whether cuBLAS may add partial sums in fp16 or bf16."""

TF32 = {"cuda.matmul.allow_tf32": True, "get_float32_matmul_precision": "high", "cudnn.allow_tf32": True}
IEEE = {"cuda.matmul.allow_tf32": False, "get_float32_matmul_precision": "highest", "cudnn.allow_tf32": False}


def older():
    return {name: read() for name, read in OLDER.items()}


class Switches:
    """Reads PyTorch's settings, or sets them to the lowest precision."""

    def read(self):
        return {f"{key[0].__name__.split('.')[-1]}.{key[1]}": getattr(*key).fp32_precision for key in SWITCHES}

    def loosen(self):
        for key in SWITCHES:
            getattr(*key).fp32_precision = "bf16" if key[0] is mkldnn else "tf32"
        for name in REDUCED:
            setattr(cuda.matmul, name, True)


@pytest.fixture
def switches(monkeypatch):
    """The settings, on a machine that claims to have TF32; restored at the end."""
    monkeypatch.setattr(hardware, "has_tf32", lambda device: True)
    found = {key: getattr(*key).fp32_precision for key in SWITCHES}
    reduced = {name: getattr(cuda.matmul, name) for name in REDUCED}
    yield Switches()
    set_fp32_precision(["ieee"] * 6)
    for key, value in found.items():
        getattr(*key).fp32_precision = value
    for name, value in reduced.items():
        setattr(cuda.matmul, name, value)


def made(mode, device=CPU):
    return precision.fp16(device, **FP16) if mode == "fp16" else getattr(precision, mode)(device)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "bf16_params"])
def test_every_mode_sets_every_fp32_operation_to_ieee(switches, mode):
    switches.loosen()
    made(mode).prepare()
    assert set(switches.read().values()) == {"ieee"}


def test_tf32_mode_sets_the_cards_operations_and_no_other(switches):
    switches.loosen()
    made("tf32").prepare()
    assert {name: value for name, value in switches.read().items() if value == "tf32"}.keys() == {
        "cudnn.conv",
        "cudnn.rnn",
        "cuda.matmul",
    }
    made("fp32").prepare()
    assert set(switches.read().values()) == {"ieee"}


def test_the_older_calls_answer_in_each_mode_of_a_sweep(switches):
    for mode in ["fp32", "tf32", "bf16", "tf32", "fp16", "tf32", "bf16_params"]:
        made(mode).prepare()
        assert older() == (TF32 if mode == "tf32" else IEEE), mode
        with cudnn.flags(enabled=True, allow_tf32=True):  # reads the older call on entry, and restores it
            pass


def test_the_older_calls_of_a_library_that_sets_them_leave_nothing_for_the_next_run(switches):
    for mode in ["tf32", "fp32"]:
        torch.set_float32_matmul_precision("medium")
        cudnn.allow_tf32 = True
        made(mode).prepare()
        assert older() == (TF32 if mode == "tf32" else IEEE), mode
        assert {switches.read()[name] for name in ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")} == {"ieee"}


@pytest.mark.parametrize("mode", ["highest", "high", "medium"])
def test_an_ieee_context_restores_the_older_and_the_newer_calls(switches, mode):
    made("tf32").prepare()
    torch.set_float32_matmul_precision(mode)
    before = older(), switches.read()
    with ieee_kernels():
        assert (older(), set(switches.read().values())) == (IEEE, {"ieee"})
    assert (older(), switches.read()) == before


@pytest.mark.parametrize("mode", ["fp32", "tf32", "bf16", "fp16", "bf16_params"])
def test_every_mode_adds_partial_sums_in_fp32_and_may_still_split_them(switches, mode):
    switches.loosen()
    made(mode).prepare()
    assert [getattr(cuda.matmul, name) for name in REDUCED] == [False, False]
    assert [getattr(cuda.matmul, f"{name}_split_k") for name in REDUCED] == [True, True]


def errors(acting):
    """Relative error, against float64, of a matmul, an attention, a convolution and its two gradients."""
    torch.manual_seed(0)
    a, b = torch.randn(64, 256), torch.randn(256, 64)
    image, kernel, heads = torch.randn(2, 16, 12, 12), torch.randn(32, 16, 3, 3), torch.randn(1, 2, 48, 32)

    def results(acting, a, b, image, kernel, heads):
        image, kernel = image.clone().requires_grad_(), kernel.clone().requires_grad_()
        with acting.autocast():
            convolved = F.conv2d(image, kernel, padding=1)
            products = a @ b, F.scaled_dot_product_attention(heads, heads, heads)
        gradients = torch.autograd.grad(convolved.double().square().sum(), (image, kernel))
        return [*products, convolved.detach(), *gradients]

    inputs = a, b, image, kernel, heads
    found, wanted = results(acting, *inputs), results(precision.fp32(CPU), *[x.double() for x in inputs])
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("before", ["bf16", "tf32", "fp16"])
def test_fp32_is_true_fp32_whatever_was_prepared_before(switches, before):
    switches.loosen()
    made(before).prepare()
    acting = precision.fp32(CPU)
    acting.prepare()
    assert max(errors(acting)) < 1e-6


def test_bf16_is_not(switches):
    acting = precision.bf16(CPU)
    acting.prepare()
    assert min(errors(acting)) > 1e-4


OPERATIONS = {
    "matmul": (torch.matmul, [(256, 256), (256, 256)]),
    "convolution": (F.conv2d, [(8, 64, 32, 32), (64, 64, 3, 3)]),
}


@pytest.mark.parametrize("device", [CARD])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_fp32_on_a_card_is_true_fp32_and_tf32_is_not(switches, monkeypatch, device, operation):
    monkeypatch.undo()  # this card's own answer about TF32
    run, shapes = OPERATIONS[operation]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device=device) for shape in shapes]
    wanted = run(*[x.double() for x in inputs])

    def error(mode):
        made(mode, torch.device(device)).prepare()
        assert older() == (TF32 if mode == "tf32" else IEEE)
        return float((run(*inputs).double() - wanted).norm() / wanted.norm())

    switches.loosen()
    assert error("fp32") < 1e-5  # not 1e-6: cuDNN may choose Winograd's algorithm
    skip_unless_it_has(device, "tf32")
    assert 1e-4 < error("tf32") < 1e-2  # a mantissa of 10 bits: each factor is rounded to within 5e-4
    assert error("fp32") < 1e-5
