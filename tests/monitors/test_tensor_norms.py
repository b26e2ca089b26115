"""Updates and gradients against closed forms and float64."""

import pytest
import torch
from torch import nn

from stabletrain.buffers import buffers_of
from stabletrain.monitors.module_groups import trained
from stabletrain.monitors.monitors import FullMonitors, Monitors
from stabletrain.monitors.tensor_norms import Adaptive, measure, measure_all, norms, zero_shares
from tests.monitors.watched import PRECISIONS, adamw, features, look_at, tiny_gpt, tokens

FP32 = PRECISIONS["fp32"]()


class Two(nn.Module):
    """Two module groups of one layer each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        return self.head(torch.tanh(self.body(inputs)))


def rms(*tensors):
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors]).square().mean().sqrt().item()


def test_the_update_of_sgd_has_a_closed_form():
    model, lr = Two(), 0.25
    before = [p.detach().clone() for p in model.body.parameters()]
    metrics, alarms = look_at(Monitors(1), model, torch.optim.SGD(model.parameters(), lr=lr), features(), FP32)
    gradients = [p.grad for p in model.body.parameters()]
    assert metrics["monitors/update_ratio/body"] == pytest.approx(lr * rms(*gradients) / rms(*before), rel=1e-4)
    assert metrics["monitors/grad_norm/body"] == pytest.approx(rms(*gradients) * 72**0.5, rel=1e-5)
    assert metrics["monitors/update_ratio_max"] == max(
        metrics["monitors/update_ratio/body"], metrics["monitors/update_ratio/head"]
    )
    assert not any("sqrt_v" in name or "eps" in name for name in metrics), "SGD has no second moment"
    assert alarms == []


def test_g_over_sqrt_v_of_adam_follows_its_definition():
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9), eps=1e-4)
    v = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for step in range(1, 6):
        metrics, _ = look_at(Monitors(1), model, optimizer, features(step), FP32, clip=0.01)
        each = {}
        for name, p in model.named_parameters():
            g = p.grad.double()
            v[name] = 0.9 * v[name] + 0.1 * g * g
            each[name] = (g * g / (v[name] / (1 - 0.9**step)).clamp(min=1e-8)).mean().sqrt().item()
        assert metrics["monitors/g_over_sqrt_v_max"] == pytest.approx(max(each.values()), rel=1e-4)
        head = (each["head.weight"] ** 2 * 32 + each["head.bias"] ** 2 * 4) / 36
        assert metrics["monitors/g_over_sqrt_v/head"] == pytest.approx(head**0.5, rel=1e-4)
        smallest = min(rms(p.grad) / 1e-4 for p in model.parameters())
        assert metrics["monitors/grad_over_eps_min"] == pytest.approx(smallest, rel=1e-4)
        assert metrics["monitors/grad_norm/head"] > 0.011, "norms are of raw gradients, g / sqrt(v) of clipped ones"


@pytest.mark.parametrize("fused", [True, False])
def test_the_first_step_of_adam_is_at_one(fused):
    model = tiny_gpt(dropout=0.0)
    metrics, _ = look_at(Monitors(1), model, adamw(model, fused=fused), tokens(), FP32)
    assert metrics["monitors/g_over_sqrt_v/blocks.0"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_an_eps_of_zero_leaves_out_the_ratio_to_eps_and_nothing_else(kind):
    model = Two()
    optimizer = kind([{"params": model.body.parameters(), "eps": 0.0}, {"params": model.head.parameters()}], eps=1e-4)
    metrics, alarms = look_at(Monitors(1), model, optimizer, features(), FP32)
    assert alarms == []
    assert metrics["monitors/g_over_sqrt_v/body"] == pytest.approx(1.0, abs=1e-3)
    smallest = min(rms(p.grad) / 1e-4 for p in model.head.parameters())
    assert metrics["monitors/grad_over_eps_min"] == pytest.approx(smallest, rel=1e-4)
    metrics, alarms = look_at(Monitors(1), model, torch.optim.Adam(model.parameters(), eps=0.0), features(), FP32)
    assert alarms == []
    assert "monitors/update_ratio/body" in metrics
    assert "monitors/grad_over_eps_min" not in metrics


def test_a_skipped_update_has_no_metrics_of_updates():
    model = Two()
    optimizer, monitors = adamw(model), Monitors(1)
    look_at(monitors, model, optimizer, features(), FP32)
    metrics, alarms = look_at(monitors, model, optimizer, features(), FP32, applied=False)
    assert alarms == []
    assert "monitors/grad_norm/head" in metrics
    assert not any(name.startswith(("monitors/update", "monitors/g_over", "monitors/grad_over")) for name in metrics)


def test_zero_gradients_are_counted_exactly():
    assert zero_shares([torch.tensor([0.0, 1e-45, -0.0, float("nan")]), torch.ones(3)]).tolist() == [0.5, 0.0]
    model, batch = tiny_gpt(dropout=0.0), tokens()
    metrics, _ = look_at(Monitors(1), model, adamw(model), batch, FP32)
    unseen = 1 - len(batch.inputs.unique()) / 32
    assert metrics["monitors/zero_grads/embedding"] == pytest.approx(unseen)
    assert metrics["monitors/zero_grads"] == pytest.approx(
        unseen * 32 * 16 / sum(p.numel() for p in model.parameters()), abs=1e-6
    )


def test_gradients_are_measured_each_by_itself_and_over_all():
    model = Two()
    assert (measure(model).total.item(), measure(model).each.tolist()) == (0.0, [0.0]), "there is none yet"
    sizes = [3.0, 4.0, 0.0, 12.0]
    for parameter, size in zip(model.parameters(), sizes, strict=True):
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.view(-1)[0] = -size
    assert (measure(model).total.item(), measure(model).each.tolist()) == (13.0, sizes)
    model.head.bias.grad[0] = float("nan")
    assert measure(model).total.isnan()
    model.head.bias.grad[0] = 1e20
    assert measure(model).total.isinf(), "its square is past the end of fp32"


def test_buffers_are_measured_together_but_for_whole_numbers():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(1))
    model[0].running_mean[:] = torch.tensor([3.0, 4.0])
    model[0].running_var[:] = torch.tensor([0.0, 12.0])
    model[1].running_var[:] = 0.0
    model[1].num_batches_tracked += 1000
    assert measure_all([], buffers_of(model).judged)[1].item() == 13.0
    model[1].running_mean[0] = float("inf")
    assert measure_all([], buffers_of(model).judged)[1].isinf()
    assert measure_all([], buffers_of(Two()).judged)[1] == 0.0


def test_norms_of_half_precision_are_fp32():
    assert norms([torch.full((10_000,), 300.0, dtype=torch.float16)]).item() == pytest.approx(30_000, rel=1e-6)


def test_full_has_both_norms_of_every_parameter():
    model = tiny_gpt()
    weights = {name: p.detach().double().norm().item() for name, p in model.named_parameters()}
    metrics, alarms = look_at(FullMonitors(1, 0, 1), model, adamw(model), tokens(), FP32)
    assert alarms == []
    for name, p in trained(model).items():
        assert metrics[f"monitors/layer_weight_norm/{name}"] == pytest.approx(weights[name], rel=1e-5)
        assert metrics[f"monitors/layer_grad_norm/{name}"] == pytest.approx(p.grad.double().norm().item(), rel=1e-5)
    assert "monitors/hessian_top" not in metrics


def test_frozen_and_unadapted_parameters_are_passed_over():
    model = Two()
    model.body.requires_grad_(False)
    metrics, alarms = look_at(Monitors(1), model, adamw(model), features(), FP32)
    assert alarms == []
    assert "monitors/grad_norm/body" not in metrics
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert Adaptive(optimizer, trained(model)).names == []


def test_a_place_of_zero_weights_has_no_ratio_yet():
    model = Two()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    metrics, alarms = look_at(Monitors(1), model, adamw(model), features(), FP32)
    assert alarms == []
    assert "monitors/update_ratio/head" not in metrics
    assert metrics["monitors/update_ratio_max"] == metrics["monitors/update_ratio/body"]
