"""The switches of fp32 arithmetic that a mode sets, and the loss scale's rule."""

import pytest
import torch
import torch.nn.functional as F
from torch.backends import cuda, cudnn, mkldnn

from stabletrain.errors import ConfigError
from stabletrain.machine import hardware
from stabletrain.records import GradNorms, LossTerms
from stabletrain.stability import precision
from stabletrain.stability.precision import LossScaled
from tests.stability.precision.given import CPU, CUDA, FP16


def terms(loss):
    value = torch.tensor(loss)
    return LossTerms(value, value, torch.zeros(()))


def norms(norm):
    return GradNorms(torch.tensor(norm), torch.tensor([norm]))


SWITCHES = [
    *((library, operation) for library in (cudnn, mkldnn) for operation in ("conv", "rnn")),
    (cuda, "matmul"),
    (mkldnn, "matmul"),
]
"""Where PyTorch keeps the format of fp32 arithmetic."""


@pytest.fixture
def switches():
    """Reads all of them as `{"cudnn.conv": "ieee"}`, sets all to the coarsest there is, and puts them back."""
    found = {key: getattr(*key).fp32_precision for key in SWITCHES}
    reduced = cuda.matmul.allow_fp16_reduced_precision_reduction

    class Switches:
        def read(self):
            return {f"{key[0].__name__.split('.')[-1]}.{key[1]}": getattr(*key).fp32_precision for key in SWITCHES}

        def loosen(self):
            for key in SWITCHES:
                getattr(*key).fp32_precision = "bf16" if key[0] is mkldnn else "tf32"

    yield Switches()
    for key, value in found.items():
        getattr(*key).fp32_precision = value
    cuda.matmul.allow_fp16_reduced_precision_reduction = reduced


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_every_mode_sets_every_fp32_operation_to_ieee(switches, mode):
    switches.loosen()
    cuda.matmul.allow_fp16_reduced_precision_reduction = True
    made = precision.fp16(CPU, **FP16) if mode == "fp16" else getattr(precision, mode)(CPU)
    made.prepare()
    assert set(switches.read().values()) == {"ieee"}
    assert not cuda.matmul.allow_fp16_reduced_precision_reduction


def test_tf32_mode_sets_the_cards_operations_and_no_other(switches, monkeypatch):
    monkeypatch.setattr(hardware, "has_tf32", lambda device: True)
    precision.tf32(CPU).prepare()
    assert {name: value for name, value in switches.read().items() if value == "tf32"}.keys() == {
        "cudnn.conv",
        "cudnn.rnn",
        "cuda.matmul",
    }
    precision.fp32(CPU).prepare()
    assert set(switches.read().values()) == {"ieee"}


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
def test_fp32_is_true_fp32_whatever_was_prepared_before(switches, monkeypatch, before):
    monkeypatch.setattr(hardware, "has_tf32", lambda device: True)
    switches.loosen()
    made = precision.fp16(CPU, **FP16) if before == "fp16" else getattr(precision, before)(CPU)
    made.prepare()
    acting = precision.fp32(CPU)
    acting.prepare()
    assert max(errors(acting)) < 1e-6


def test_bf16_is_not(switches):
    acting = precision.bf16(CPU)
    acting.prepare()
    assert min(errors(acting)) > 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fp32_on_a_card_is_true_fp32_in_convolutions_too(switches):
    switches.loosen()
    precision.fp32(CUDA).prepare()
    torch.manual_seed(0)
    for operation, shapes in ((torch.matmul, ((256, 256), (256, 256))), (F.conv2d, ((8, 64, 32, 32), (64, 64, 3, 3)))):
        inputs = [torch.randn(shape, device=CUDA) for shape in shapes]
        wanted = operation(*[x.double() for x in inputs])
        assert (operation(*inputs).double() - wanted).norm() / wanted.norm() < 1e-6


def scaled(**values):
    return LossScaled("fp16", CPU, torch.float16, **values)


def step(scaler, loss, norm):
    overflow = scaler.overflow(terms(loss), norms(norm))
    applied = torch.isfinite(torch.tensor(loss)) & torch.isfinite(torch.tensor(norm)) & ~overflow
    scaler.update(overflow, applied)
    return bool(overflow)


def test_scaling_and_unscaling_gives_the_gradient_back_exactly():
    scaler = scaled()
    weight = torch.randn(5, requires_grad=True)
    scaler.scale((weight * torch.arange(5.0)).sum()).backward()
    assert weight.grad[1] == 65536
    scaler.unscale_([weight.grad])
    assert torch.equal(weight.grad, torch.arange(5.0))


def test_the_scale_halves_on_overflow_and_doubles_after_clean_steps_in_a_row():
    scaler = scaled(init_scale=1024.0, growth_interval=3)
    assert step(scaler, 1.0, float("inf"))
    assert scaler.loss_scale() == 512
    assert [step(scaler, 1.0, 1.0) for _ in range(2)] == [False, False]
    assert step(scaler, 1.0, float("nan")), "the third clean step did not come: an overflow starts the count afresh"
    assert scaler.loss_scale() == 256
    for _ in range(3):
        step(scaler, 1.0, 1.0)
    assert scaler.loss_scale() == 512


def test_a_non_finite_loss_is_no_overflow_and_leaves_the_scale_alone():
    scaler = scaled(init_scale=1024.0, growth_interval=2)
    step(scaler, 1.0, 1.0)
    before = {key: value.clone() for key, value in scaler.state_dict().items()}
    assert not step(scaler, float("nan"), float("nan"))
    assert all(torch.equal(before[key], value) for key, value in scaler.state_dict().items())


def test_an_overflow_at_the_floor_is_a_fault():
    scaler = scaled(init_scale=2.0, min_scale=1.0)
    assert step(scaler, 1.0, float("inf"))
    assert not step(scaler, 1.0, float("inf")), "at the floor the scale cannot help any more"
    assert scaler.loss_scale() == 1


def test_the_state_goes_through_a_checkpoint():
    scaler = scaled(init_scale=1024.0, growth_interval=5)
    step(scaler, 1.0, float("inf"))
    step(scaler, 1.0, 1.0)
    other = scaled()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    other.load_state_dict({})
    assert other.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_scale": 0.0}, r"precision\.init_scale"),
        ({"init_scale": 0.5}, r"precision\.init_scale"),
        ({"growth_interval": 0}, r"precision\.growth_interval"),
    ],
)
def test_bounds_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        scaled(**values)


def test_the_scale_stops_to_grow_before_it_could_become_infinite():
    acting = LossScaled("fp16", CPU, torch.float16, init_scale=2.0**100, growth_interval=1)
    no, yes = torch.tensor(False), torch.tensor(True)
    for _ in range(100):
        acting.update(overflow=no, applied=yes)
    assert acting.loss_scale() == 2.0**100
    acting.update(overflow=yes, applied=no)
    assert acting.loss_scale() == 2.0**99
