"""Law 3: a skipped step changes nothing, for every fault, precision, model and kind of optimizer.

Parameters, buffers, moments, step counters, and the state of clipping, guard and loss scale stay bit-identical.
"""

import math
from dataclasses import replace

import pytest
import torch

from stabletrain.checkpoint.capture import capture
from stabletrain.checkpoint.tree import flatten, to_host
from stabletrain.step import train_step
from stabletrain.trainer.build import build
from tests.devices import need_torchao
from tests.runs import TINY_GPT, TINY_RESNET, composed

PRECISIONS = [(model, precision) for model in ("gpt", "resnet") for precision in ("fp32", "bf16", "fp16")]
PRECISIONS.append(("gpt", "fp8"))  # a ResNet has no linear layer for it
MODELS = {"gpt": [*TINY_GPT, "clipping=zclip"], "resnet": [*TINY_RESNET, "model.depth=8", "batch_size=4"]}


def some_module(model):
    """Returns a module in the middle of the model whose output is a tensor."""
    leaves = [module for module in model.modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)]
    return leaves[len(leaves) // 2]


def spoil_inputs(job, batch, value):
    """Writes `value` into the inputs; for text an invalid token id, because integers cannot be NaN."""
    inputs = batch.inputs.clone()
    inputs[(-1,) * inputs.ndim] = value if inputs.is_floating_point() else 2**31 - 1
    return replace(batch, inputs=inputs)


def spoil_labels(job, batch, value):
    targets = batch.targets.clone()
    targets[(1,) * targets.ndim] = 10**6 if math.isnan(value) else -1
    return replace(batch, targets=targets)


def spoil_all_labels(job, batch, value):
    return replace(batch, targets=torch.full_like(batch.targets, -100), counted=None)


def spoil_activation(job, batch, value):
    def hook(module, inputs, output):
        output = output.clone()
        output[(0,) * output.ndim] = value
        return output

    some_module(job.state.model).register_forward_hook(hook)
    return batch


def spoil_loss(job, batch, value):
    objective = job.tools.objective

    class Spoilt:
        def __getattr__(self, name):
            return getattr(objective, name)

        def __call__(self, outputs, batch, n_valid):
            terms = objective(outputs, batch, n_valid)
            return replace(terms, total=terms.total * value)

    object.__setattr__(job.tools, "objective", Spoilt())
    return batch


def spoil_one_gradient(job, batch, value):
    def hook(gradient):
        gradient = gradient.clone()
        gradient[(0,) * gradient.ndim] = value
        return gradient

    some_module(job.state.model).weight.register_hook(hook)
    return batch


def spike(job, batch, value):
    """Makes the loss finite but beyond every limit."""
    return spoil_loss(job, batch, 1e4)


SPOILT = {
    "input": spoil_inputs,
    "label": spoil_labels,
    "ignored": spoil_all_labels,
    "activation": spoil_activation,
    "loss": spoil_loss,
    "gradient": spoil_one_gradient,
    "spike": spike,
}


def everything(job):
    """Returns the whole state, except the step's number and the counts of skips."""
    tensors, skeleton = flatten(to_host(capture(job.state, {k: job.saved.parts[k] for k in ("clipping", "precision")})))
    guard = job.tools.guard.limits.state_dict()
    skeleton = {key: value for key, value in skeleton.items() if key not in ("step", "tick")}
    return tensors, str(skeleton), str(guard)


def assert_nothing_changes(folder, what, value, *overrides):
    """Checks the law for one fault in a run of `overrides`; `test_on_a_card.py` calls it too."""
    if "precision=fp16" in overrides:  # at its floor, a non-finite gradient is no routine overflow
        overrides += ("precision.init_scale=1", "precision.min_scale=1")
    with composed(*overrides, "guard=skip", "steps=9", "warmup=none", "schedule=constant", "checkpoint=off") as cfg:
        job = build(cfg, folder)
    batches = [job.data.batches.get(step).to(job.device) for step in range(5)]
    job.data.batches.close()
    for batch in batches[:3]:
        assert job.tools.guard.judge(train_step(job.state, [batch], job.tools)).value == "apply"
    before = everything(job)
    reading = train_step(job.state, [SPOILT[what](job, batches[3], value)], job.tools)
    assert not reading.applied
    assert job.tools.guard.judge(reading).value == "skip"
    kind = {"input": "bad_data", "label": "bad_data", "ignored": "bad_data", "spike": "spike"}.get(what, "nonfinite")
    assert job.tools.guard.skips[kind] == 1
    after = everything(job)
    assert after[1:] == before[1:]
    assert after[0].keys() == before[0].keys()
    for name, tensor in before[0].items():
        assert torch.equal(after[0][name], tensor), name
    assert (job.state.step, job.state.executed_steps) == (4, 4), "the step happened"


CASES = [
    (what, (math.nan, math.inf)[(i + j) % 2], model, precision, (i + j // 2) % 2 == 0)
    for i, what in enumerate(SPOILT)
    for j, (model, precision) in enumerate(PRECISIONS)
]
"""Every fault with every model and precision; of the rest, all pairs."""

FAST = [CASES[i * len(PRECISIONS) + i] for i in range(len(SPOILT))]


@pytest.mark.slow(unless=lambda what, value, model, precision, fused: (what, value, model, precision, fused) in FAST)
@pytest.mark.parametrize(("what", "value", "model", "precision", "fused"), CASES)
def test_a_skipped_step_changes_nothing(tmp_path, what, value, model, precision, fused):
    need_torchao(precision)
    chosen = [*MODELS[model], f"precision={precision}", f"optimizer.fused={str(fused).lower()}"]
    assert_nothing_changes(tmp_path, what, value, *chosen)


def test_a_skipped_step_changes_nothing_of_what_scales_and_masks_an_update(tmp_path):
    chosen = [*TINY_GPT, "clipping=update_norm", "optimizer.cautious_decay=true", "precision=fp32"]
    assert_nothing_changes(tmp_path, "activation", math.nan, *chosen)


@pytest.mark.parametrize("model", MODELS)
def test_the_comparison_sees_a_step_that_is_applied(tmp_path, model):
    with composed(*MODELS[model], "guard=skip", "steps=9", "checkpoint=off") as cfg:
        job = build(cfg, tmp_path)
    before = everything(job)
    job.tools.guard.judge(train_step(job.state, [job.data.batches.get(0)], job.tools))
    job.data.batches.close()
    after = everything(job)
    assert after[2] != before[2], "the guard's windows"
    changed = {name for name, tensor in before[0].items() if not torch.equal(after[0][name], tensor)}
    parts = ["model/", "optimizer/"] if model == "gpt" else ["model/", "optimizer/", "running_mean"]
    assert all(any(part in name for name in changed | (after[0].keys() - before[0].keys())) for part in parts)


@pytest.mark.parametrize("model", MODELS)
def test_an_empty_batch_is_a_skip(tmp_path, model):
    chosen = ["guard=skip", "steps=9", "checkpoint=off", "grad_accum_steps=2", "warmup=none", "schedule=constant"]
    with composed(*MODELS[model], *chosen) as cfg:
        job = build(cfg, tmp_path)
    batch = job.data.batches.get(0)
    job.data.batches.close()
    train_step(job.state, batch.split(2), job.tools)
    before = everything(job)
    empty = replace(batch, inputs=batch.inputs[:0], targets=batch.targets[:0], ids=None, sources=None)
    reading = train_step(job.state, empty.split(2), job.tools)
    assert (reading.applied, reading.bad_data, reading.loss, reading.grad_norm) == (False, True, 0.0, 0.0)
    after = everything(job)
    assert after[1:] == before[1:]
    assert all(torch.equal(after[0][name], tensor) for name, tensor in before[0].items())
