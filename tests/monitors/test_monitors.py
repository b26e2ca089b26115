"""The monitors as the loop sees them: they change nothing, never raise, and raise each alarm once."""

import contextlib
import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from stabletrain.checkpoint.capture import capture
from stabletrain.checkpoint.tree import flatten
from stabletrain.monitors.forward import isolated, isolated_forward
from stabletrain.monitors.monitors import FullMonitors, Monitors, NoMonitors
from stabletrain.records import TrainState
from stabletrain.stability.objective import CrossEntropy
from tests.monitors.watched import PRECISIONS, adamw, backward, features, images, look_at, tiny_gpt, tiny_resnet, tokens

MODELS = {"gpt": (tiny_gpt, tokens), "resnet": (tiny_resnet, images)}


def everything(model, optimizer):
    """Returns everything that the monitors must not change, as one flat list."""
    tensors, skeleton = flatten(capture(TrainState(model, optimizer), {}))
    state = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    state |= {f"grad/{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    state |= {f"buffer/{name}": b.clone() for name, b in model.named_buffers()}
    state |= {"rng": torch.get_rng_state()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
    flags = [(m.training, [(p.requires_grad, p.grad is None) for p in m.parameters()]) for m in model.modules()]
    owned = [(id(p), p.data_ptr()) for p in model.parameters()] + [(id(b), b.data_ptr()) for b in model.buffers()]
    switches = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.backends.cuda.flash_sdp_enabled())
    _, keys, position, *_ = np.random.get_state()
    return state, (skeleton, hooks, flags, owned, switches, keys.tolist(), position)


def assert_same(one, other):
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for name, value in one[0].items():
        bits = torch.int32 if value.dtype == torch.float32 else value.dtype
        assert torch.equal(value.view(bits), other[0][name].view(bits)), name


def poison(batch, model):
    """Puts a NaN into the batch, or into a weight if the inputs are integers."""
    if batch.inputs.is_floating_point():
        batch.inputs[0] = math.nan
    else:
        with torch.no_grad():
            model.blocks[0].mlp.up.weight[0, 0] = math.nan


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_an_inspection_changes_no_bit(name, precision, poisoned):
    make, data = MODELS[name]
    model, mode = make(), PRECISIONS[precision]()
    optimizer, batch = adamw(model), data(1)
    backward(model, data(0), mode)
    optimizer.step()
    if poisoned:
        poison(batch, model)
    backward(model, batch, mode)
    monitors = FullMonitors(1, 3, 4, margin_every=1)
    before = everything(model, optimizer)
    monitors.before(model, optimizer, batch, mode, CrossEntropy())
    assert_same(everything(model, optimizer), before)
    if not poisoned:
        optimizer.step()
    before = everything(model, optimizer)
    metrics, alarms = monitors.after(model, optimizer, not poisoned)
    assert_same(everything(model, optimizer), before)
    assert alarms == []
    assert metrics
    assert all(isinstance(value, float) for value in metrics.values())
    assert all(math.isfinite(value) for value in metrics.values()) is not poisoned, "NaN is shown, not hidden"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_run_watched_at_every_step_has_the_bits_of_one_that_is_not(name, precision):
    def trained(monitors):
        make, data = MODELS[name]
        model, mode = make(), PRECISIONS[precision]()
        optimizer = adamw(model)
        torch.manual_seed(3)  # and then never again: dropout draws on
        for step in range(4):
            look_at(monitors, model, optimizer, data(step), mode)
        return everything(model, optimizer)[0]

    watched, alone = trained(FullMonitors(1, 2, 4, margin_every=2)), trained(NoMonitors())
    for key, value in alone.items():
        assert torch.equal(watched[key], value), key


class Draws(nn.Module):
    """A model that draws from every generator, and raises on request."""

    def __init__(self):
        super().__init__()
        self.fails = False
        self.layer = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if self.fails:
            raise LookupError("no such\nthing")
        return self.layer(x + random.random() + float(np.random.rand()) + torch.rand(()))


def generators():
    _, keys, position, *_ = np.random.get_state()
    return torch.get_rng_state().tolist(), (keys.tolist(), position), random.getstate()


@pytest.mark.parametrize("fails", [False, True])
def test_every_generator_and_buffer_is_restored(fails):
    model = Draws()
    model.fails = fails
    before = generators()
    with contextlib.suppress(LookupError), isolated(model):
        for _ in range(3):
            isolated_forward(model, features().inputs)
    assert generators() == before
    assert model.calls == 0
    torch.rand(1), np.random.rand(), random.random()
    assert all(now != then for now, then in zip(generators(), before, strict=True))


def test_a_failing_model_raises_one_alarm_and_leaves_no_trace():
    model, monitors = Draws(), FullMonitors(1, 2, 4, margin_every=1)
    optimizer, batch, mode = adamw(model), features(), PRECISIONS["fp32"]()
    backward(model, batch, mode)
    model.fails = True
    before = everything(model, optimizer)
    monitors.before(model, optimizer, batch, mode, CrossEntropy())
    assert_same(everything(model, optimizer), before)
    optimizer.step()
    metrics, alarms = monitors.after(model, optimizer, True)
    (alarm,) = alarms
    assert alarm.kind == "monitors"
    assert "the activations (LookupError: no such thing)" in alarm.text
    assert "\n" not in alarm.text
    assert not any(missing in name for name in metrics for missing in ("activation", "hessian", "margin"))
    assert {"monitors/grad_norm/layer", "monitors/update_ratio/layer", "monitors/layer_grad_norm/layer.bias"} < {
        *metrics
    }
    monitors.before(model, optimizer, batch, mode, CrossEntropy())
    assert monitors.after(model, optimizer, True)[1] == [], "once"


def test_a_model_without_gradients_raises_an_alarm_and_is_not_fatal():
    model, monitors = Draws(), Monitors(1)
    optimizer = adamw(model)
    monitors.before(model, optimizer, features(), PRECISIONS["fp32"](), CrossEntropy())
    metrics, (alarm,) = monitors.after(model, optimizer, True)
    assert alarm.kind == "monitors"
    assert "monitors/log_z_mean" in metrics


def test_after_without_before_measures_nothing():
    model = Draws()
    assert Monitors(1).after(model, adamw(model), True) == ({}, [])


def test_the_first_step_and_multiples_are_due():
    assert [step for step in range(1, 25) if Monitors(10).due(step, 24)] == [1, 10, 20, 24]
    assert not any(NoMonitors().due(step, 24) for step in range(1, 25))


def test_raised_alarms_go_through_a_checkpoint():
    def exploding():
        model = tiny_gpt(n_layer=3)
        with torch.no_grad():
            model.blocks[1].mlp.down.weight.mul_(1e5)
        return model, adamw(model), tokens(), PRECISIONS["fp32"]()

    first, second = Monitors(1), Monitors(1)
    assert look_at(first, *exploding())[1]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert look_at(second, *exploding())[1] == []
    assert first.state_dict() == {"raised": ["explosion"], "starving": 0, "inspections": 1}
    assert second.state_dict() == first.state_dict() | {"inspections": 2}
    second.load_state_dict(NoMonitors().state_dict())
    assert second.state_dict() == Monitors(1).state_dict()


@pytest.mark.parametrize(("every", "searched"), [(0, []), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])])
def test_the_margin_is_searched_at_every_so_many_inspections_across_a_checkpoint(every, searched):
    model, found = Draws(), []
    optimizer, mode = adamw(model), PRECISIONS["fp32"]()
    monitors = Monitors(1, margin_every=every)
    for number in range(5):
        metrics, _ = look_at(monitors, model, optimizer, features(number), mode)
        found += [number] if "monitors/update_margin" in metrics else []
        state, monitors = json.loads(json.dumps(monitors.state_dict())), Monitors(1, margin_every=every)
        monitors.load_state_dict(state)
    assert found == searched


def test_a_skipped_step_has_no_margin():
    model, monitors = Draws(), Monitors(1, margin_every=1)
    metrics, alarms = look_at(monitors, model, adamw(model), features(), PRECISIONS["fp32"](), applied=False)
    assert "monitors/update_margin" not in metrics
    assert alarms == []


def test_no_metric_is_missing_and_aggregates_agree():
    model = tiny_gpt()
    metrics, _ = look_at(Monitors(1, margin_every=1), model, adamw(model), tokens(), PRECISIONS["bf16"]())
    for what in ("activation_rms", "activation_absmax", "headroom", "attn_logit_bound", "attn_logit_max"):
        assert {f"monitors/{what}/blocks.0", f"monitors/{what}/blocks.1"} <= {*metrics}
    assert metrics["monitors/attn_logit_max"] == max(metrics[f"monitors/attn_logit_max/blocks.{i}"] for i in (0, 1))
    assert metrics["monitors/headroom_min"] == min(metrics[f"monitors/headroom/blocks.{i}"] for i in (0, 1))
    for what in ("norm_variance", "weight_rms"):
        assert {f"monitors/{what}/blocks.0", f"monitors/{what}/blocks.1"} <= {*metrics}
    variances = [metrics[f"monitors/norm_variance/blocks.{i}"] for i in (0, 1)]
    assert metrics["monitors/norm_variance_min"] == min(variances)
    assert 1 / 16 <= metrics["monitors/update_margin"] <= 128
    assert metrics["monitors/attn_entropy_min/blocks.0"] <= metrics["monitors/attn_entropy/blocks.0"]
    assert metrics["monitors/log_z_mean"] <= metrics["monitors/log_z_max"]
    assert metrics["monitors/headroom/blocks.0"] == math.log2(65504 / metrics["monitors/activation_absmax/blocks.0"])
