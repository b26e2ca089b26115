"""The top eigenvalue of quadratics, and of a whole model against the full Hessian in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from stabletrain.monitors.curvature import of_loss, top_eigenvalue
from stabletrain.monitors.forward import isolated
from stabletrain.stability.objective import CrossEntropy
from tests.monitors.watched import features, images, tiny_gpt, tiny_resnet, tokens


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("eigenvalues", [[9.0, 2.0, 1.0, 0.0], [-7.0, 3.0, 1.0, 0.5]])
def test_of_a_quadratic(eigenvalues):
    turn, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator(), dtype=torch.float64))
    matrix = turn @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ turn.T
    w = torch.randn(4, generator=generator(), dtype=torch.float64).requires_grad_()
    a, b = w[:1], w[1:]  # through parts, as a model's parameters are
    x = torch.cat([a, b])
    assert top_eigenvalue(0.5 * x @ matrix @ x, [w], 60, generator()).item() == pytest.approx(eigenvalues[0], rel=1e-6)


def test_of_a_loss_in_several_parameters_and_one_that_is_linear():
    a, b, c = (torch.ones(3, requires_grad=True) for _ in range(3))
    loss = 2 * a.square().sum() + 5 * b.square().sum() + c.sum()
    assert top_eigenvalue(loss, [a, b, c], 30, generator()).item() == pytest.approx(10.0, rel=1e-4)
    assert top_eigenvalue(c.sum(), [c], 3, generator()).item() == 0.0


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 5), nn.Linear(5, 4)

    def forward(self, inputs):
        return self.head(torch.tanh(self.body(inputs)))


def full_hessian_top(model, batch):
    """Eigenvalue of largest absolute value of the whole matrix, in float64."""
    named = {name: p.detach().double() for name, p in model.named_parameters()}

    def loss(flat):
        parts = flat.split([p.numel() for p in named.values()])
        given = {name: part.view_as(p) for (name, p), part in zip(named.items(), parts, strict=True)}
        output = functional_call(model, given, (batch.inputs.double(),))
        return F.cross_entropy(output, batch.targets)

    flat = torch.cat([p.flatten() for p in named.values()])
    values = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat))
    return values[values.abs().argmax()].item()


def test_of_a_model_against_the_whole_hessian():
    model, batch = Small(), features()
    batch.targets[3] = -100
    found = of_loss(model, batch, CrossEntropy(), 200, len(batch)).item()
    assert found == pytest.approx(full_hessian_top(model, batch), rel=1e-3)
    assert all(p.grad is None for p in model.parameters())


def test_only_the_first_samples_count():
    model, batch = Small(), features()
    other = features()
    other.inputs[4:] = 100.0
    assert of_loss(model, batch, CrossEntropy(), 5, 4) == of_loss(model, other, CrossEntropy(), 5, 4)
    assert of_loss(model, batch, CrossEntropy(), 5, 5) != of_loss(model, other, CrossEntropy(), 5, 5)


def test_fused_attention_which_has_no_second_derivative_on_cards_is_off():
    model, batch, seen = tiny_gpt(), tokens(), []
    fused = torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled
    for block in model.blocks:
        block.register_forward_hook(lambda *_: seen.append([enabled() for enabled in fused]))
    of_loss(model, batch, CrossEntropy(), 1, 4)
    assert seen == [[False, False]] * 2
    assert [enabled() for enabled in fused] == [True, True]


@pytest.mark.parametrize(
    "made", [lambda: (tiny_gpt(), tokens()), lambda: (tiny_resnet(), images())], ids=["gpt", "resnet"]
)
def test_attention_and_batchnorm_have_second_derivatives(made):
    model, batch = made()
    with isolated(model):
        first = of_loss(model, batch, CrossEntropy(), 3, 4)
    with isolated(model):
        second = of_loss(model, batch, CrossEntropy(), 3, 4)
    assert torch.isfinite(first)
    assert first != 0
    assert first == second, "its own generator starts it, and dropout's draws are put back"
