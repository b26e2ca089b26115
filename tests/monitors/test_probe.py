"""Checks each metric of the probe against its definition, and that one failing part does not affect the others."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.monitors.probe import (
    Part,
    Probe,
    measure_forward,
    measure_gradients,
    measure_hessian,
    over_all,
    root_sum,
    spread,
)
from stabletrain.stability.objective import CrossEntropy
from tests.monitors.watched import PRECISIONS, adamw, backward, features, tiny_gpt, tokens

FP32 = PRECISIONS["fp32"]()


class Two(nn.Module):
    """Two module groups of one layer each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        return self.head(self.body(inputs))


def rms(*tensors):
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors]).square().mean().sqrt().item()


def test_activations_and_log_z_match_a_forward_pass():
    model, batch = Two(), features()
    found = measure_forward(model, batch, FP32, CrossEntropy()).metrics
    with torch.no_grad():
        body = model.body(batch.inputs)
        logits = model.head(body)
    log_z = logits.double().logsumexp(-1)
    assert found["monitors/activation_rms/body"] == pytest.approx(rms(body), rel=1e-5)
    assert found["monitors/activation_absmax/head"] == pytest.approx(logits.abs().max().item(), rel=1e-5)
    assert found["monitors/activation_rms_max"] == max(rms_ for name, rms_ in found.items() if "_rms/" in name)
    assert found["monitors/log_z_mean"] == pytest.approx(log_z.mean().item(), rel=1e-5)
    assert found["monitors/log_z_max"] == pytest.approx(log_z.max().item(), rel=1e-5)
    bits = math.log2(65504 / max(body.abs().max().item(), logits.abs().max().item()))
    assert found["monitors/headroom_min"] == pytest.approx(bits, rel=1e-5)


def test_attention_is_measured_per_block_and_as_the_largest_over_all_blocks():
    model = tiny_gpt(dropout=0.0)
    with torch.no_grad():
        model.blocks[1].attention.query.weight.mul_(50.0)
    found = measure_forward(model, tokens(), FP32, CrossEntropy()).metrics
    first, second = (found[f"monitors/attn_logit_max/blocks.{i}"] for i in range(2))
    assert second > first > 0
    assert found["monitors/attn_logit_max"] == second < found["monitors/attn_logit_bound"]
    assert found["monitors/attn_entropy/blocks.1"] < found["monitors/attn_entropy/blocks.0"]


def test_gradient_norms_weights_and_shares_of_zeros_are_measured_per_module_group():
    model = Two()
    backward(model, features(), FP32)
    model.head.weight.grad[:2] = 0.0
    measured = measure_gradients(model)
    found = measured.metrics
    body, head = ([p.grad for p in part.parameters()] for part in (model.body, model.head))
    assert found["monitors/grad_norm/body"] == pytest.approx(rms(*body) * 72**0.5, rel=1e-5)
    assert found["monitors/grad_norm/head"] == pytest.approx(rms(*head) * 36**0.5, rel=1e-5)
    assert found["monitors/weight_rms/body"] == pytest.approx(rms(*model.body.parameters()), rel=1e-5)
    assert found["monitors/weight_rms/head"] == pytest.approx(rms(*model.head.parameters()), rel=1e-5)
    assert found["monitors/zero_grads/head"] == pytest.approx(16 / 36)
    assert found["monitors/zero_grads"] == pytest.approx(16 / 108)
    layers = measured.layers().metrics
    assert layers["monitors/layer_weight_norm/body.bias"] == pytest.approx(model.body.bias.norm().item(), rel=1e-5)
    assert len(layers) == 8


def test_the_update_ratio_compares_the_weights_before_and_after():
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    backward(model, features(), FP32)
    gradients = measure_gradients(model)
    before = [p.detach().clone() for p in model.head.parameters()]
    optimizer.step()
    found = gradients.updates(model, optimizer).metrics
    moved = [after - old for after, old in zip(model.head.parameters(), before, strict=True)]
    assert found["monitors/update_ratio/head"] == pytest.approx(rms(*moved) / rms(*before), rel=1e-4)
    assert not any("sqrt_v" in name for name in found), "SGD has no second moment"


def test_there_is_no_update_ratio_for_weights_that_were_0():
    model = Two()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    optimizer = adamw(model)
    backward(model, features(), FP32)
    gradients = measure_gradients(model)
    optimizer.step()
    found = gradients.updates(model, optimizer).metrics
    assert "monitors/update_ratio/head" not in found
    assert "monitors/g_over_sqrt_v/head" in found


def test_the_hessians_top_eigenvalue_matches_the_closed_form():
    """If the logits are a bias alone, the Hessian of each sample's cross-entropy is diag(p) - p p^T."""

    class Bias(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.tensor([2.0, 0.5, -1.0, 0.0]))

        def forward(self, inputs):
            return self.bias.expand(len(inputs), 4)

    model = Bias()
    p = F.softmax(model.bias.detach().double(), -1)
    top = torch.linalg.eigvalsh(torch.diag(p) - torch.outer(p, p))[-1].item()
    assert measure_hessian(model, features(), CrossEntropy(), 30, 16).metrics["monitors/hessian_top"] == pytest.approx(
        top, rel=1e-3
    )


def test_only_the_first_failure_is_reported_and_the_other_metrics_are_kept():
    probe = Probe()
    probe.attempt("the first", lambda: Part({"a": 1.0}))
    assert probe.attempt("the second", lambda: Part({"b": [][1]})) is None
    probe.attempt("the third", lambda: Part({"c": 1 / 0}))
    assert probe.metrics == {"a": 1.0}
    assert (
        probe.failure
        == probe.signs(True)["monitors"]
        == (
            "the monitors could not measure the second (IndexError: list index out of range); training continues "
            "without these metrics"
        )
    )


def test_gradients_raise_a_sign_only_if_the_update_was_applied():
    model, probe = Two(), Probe()
    backward(model, features(), FP32)
    for parameter in model.body.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    probe.attempt("the gradients", lambda: measure_gradients(model))
    said = probe.signs(applied=True)
    assert "gradients grow" in said["explosion"]
    assert "in the backward pass from head to body" in said["explosion"]
    assert {*probe.signs(applied=False).values()} == {None}


def test_activations_and_attention_raise_separate_signs():
    model, probe = tiny_gpt(dropout=0.0), Probe()
    with torch.no_grad():
        model.blocks[1].mlp.down.weight.mul_(1e6)
        model.blocks[0].attention.query.weight.mul_(1e7)
    probe.attempt("the activations", lambda: measure_forward(model, tokens(), FP32, CrossEntropy()))
    said = probe.signs(applied=False)
    assert "from blocks.0 to blocks.1" in said["explosion"]
    assert said["attention"].startswith("attention logits of blocks.0 reach")
    assert (said["vanishing"], said["starving"], said["monitors"]) == (None, None, None)


def test_values_per_module_group_become_named_metrics():
    sizes = {"blocks.0": 3.0, "head": 4.0}
    assert spread({"grad_norm": sizes}) == {"monitors/grad_norm/blocks.0": 3.0, "monitors/grad_norm/head": 4.0}
    assert over_all("largest", np.max, sizes) == {"monitors/largest": 4.0}
    assert math.isnan(over_all("largest", np.max, sizes | {"nan": math.nan})["monitors/largest"])
    assert over_all("largest", np.max, {}) == {}
    assert root_sum(sizes.values()) == 5.0
