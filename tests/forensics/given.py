"""Fixtures for tests of replays: runs, steps, repros, and models that fail for marked samples."""

import math
import random
from dataclasses import replace

import numpy as np
import torch

from stabletrain.buffers import buffers_of
from stabletrain.checkpoint.capture import capture, restore
from stabletrain.checkpoint.tree import flatten, to_host
from stabletrain.forensics.diagnosis.diagnose import diagnose
from stabletrain.forensics.investigate import Findings
from stabletrain.forensics.probes.samples import Bisection, find_by_bisection
from stabletrain.forensics.repro import Repro, load_repro, save_repro
from stabletrain.forensics.rerun import VARIANTS
from stabletrain.forensics.subject import StepSubject
from stabletrain.step import commit, compute
from stabletrain.trainer.build import build
from tests.forensics.diagnosis.given import FINE, NAN, SPIKE, origin
from tests.runs import TINY_GPT, TINY_RESNET, composed

GPT = [*TINY_GPT, "model.dropout=0.1"]
RESNET = [*TINY_RESNET, "model.depth=8"]
MODELS = {"gpt": GPT, "resnet": RESNET}
QUIET = ["checkpoint=off", "monitors=none", "steps=40", "warmup=none", "schedule=constant"]
FAST_FP16 = ["precision.init_scale=1e6", "precision.growth_interval=2"]
"""Makes the loss scale fall and rise again within a few steps."""

EVIDENCE = replace(SPIKE, outcomes={"same": NAN, "fp32": FINE}, origin=origin(in_fp32=7e4))


def findings(evidence=EVIDENCE, **more):
    """What an investigation found."""
    return Findings(
        evidence, diagnose(evidence), **{"seconds": 1.23456, "failures": ["largest input: no time"], **more}
    )


def made(folder, *overrides):
    with composed(*QUIET, *overrides) as cfg:
        return build(cfg, folder)


def precision_of(name):
    return [f"precision={name}", *(FAST_FP16 if name == "fp16" else [])]


def micro_batches(job, batch):
    return batch.to(job.device).split(job.plan.grad_accum_steps)


def repro_of(job, batch, computed=None, reading=None, **more):
    """A step of `job` as the loop passes it to forensics; without `computed`, a step that has not begun."""
    saved = buffers_of(job.state.model).save() if computed is None else computed.saved_buffers
    scale = float(job.tools.precision.loss_scale()) if reading is None else reading.loss_scale
    step = job.state.step if reading is None else reading.step - 1
    return Repro(
        model=job.state.model,
        buffers=saved.tensors(),
        step=step,
        batch=batch,
        micro_batches=job.plan.grad_accum_steps,
        tools=job.tools,
        loss_scale=scale,
        device=job.device,
        reading=reading,
        **more,
    )


def one_step(job, batch):
    computed = compute(job.state, micro_batches(job, batch), job.tools)
    reading = commit(job.state, computed, job.tools).wait()
    job.tools.guard.judge(reading)
    return computed, reading


def recorded(job, steps):
    """Runs steps; returns for each its initial state, its batch and its reading."""
    found = []
    for step in range(steps):
        tree, batch = to_host(capture(job.state, job.saved.parts)), job.data.batches.get(step)
        found.append((tree, batch, one_step(job, batch)[1]))
    return found


def live(job, pythons_generator=False):
    """Every bit that a replay could reach: state, gradients, generators, modes, hooks, switches.

    Python's own generator only where asked: the checking of types in tests draws from it.
    """
    model = job.state.model
    tensors, skeleton = flatten(to_host(capture(job.state, job.saved.parts)))
    tensors |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    tensors |= {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    tensors["rng"] = torch.get_rng_state()
    kernels = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul]
    rest = {
        "skeleton": str(skeleton),
        "memory": [(p.data_ptr(), None if p.grad is None else p.grad.data_ptr()) for p in model.parameters()],
        "random": random.getstate() if pythons_generator else None,
        "numpy": str(np.random.get_state()),
        "modes": [module.training for module in model.modules()],
        "classes": [type(module) for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "kernels": [kind.fp32_precision for kind in kernels],
        "switches": (torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
        "reduced": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "older": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
    }
    return tensors, rest


def replay(repro, variant):
    """The outcome of one variant of a step."""
    return StepSubject(repro).replay(variant)


def find_culprits(repro):
    """The samples that make a step non-finite."""
    return find_by_bisection(Bisection(repro))


def replays(repro):
    """The outcome of each variant of a step, in order."""
    return {variant: replay(repro, variant) for variant in VARIANTS}


def assert_unchanged(before, after):
    assert after[1] == before[1]
    assert after[0].keys() == before[0].keys()
    for name, tensor in before[0].items():
        assert after[0][name].numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes(), name


# Samples that harm a step, by what is in them and in no other: the fault is part of the model, as a real one is.
MARK = {"gpt": 1, "resnet": 77.0}
"""Value that fills marked samples only."""


def marked(batch, rows):
    inputs = batch.inputs.clone()
    inputs[rows] = MARK["resnet"] if inputs.is_floating_point() else MARK["gpt"]
    return replace(batch, inputs=inputs)


def marks(inputs):
    flat = inputs.flatten(1)
    return (flat == (MARK["resnet"] if inputs.is_floating_point() else MARK["gpt"])).all(1)


class Backwards(torch.autograd.Function):
    """The identity in forward; makes the gradient of marked samples non-finite."""

    @staticmethod
    def forward(context, x, bad):
        context.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(context, *gradients):
        (bad,) = context.saved_tensors
        bad = bad.view(-1, *[1] * (gradients[0].ndim - 1))
        return torch.where(bad, math.inf, gradients[0]), None


def ruin_forward(module, inputs, output):
    bad = marks(inputs[0])
    return output.masked_fill(bad.view(-1, *[1] * (output.ndim - 1)), math.nan)


def ruin_backward(module, inputs, output):
    return Backwards.apply(output, marks(inputs[0]))


def ruin_if_two(module, inputs, output):
    return output * (math.nan if int(marks(inputs[0]).sum()) > 1 else 1.0)


def wear(module, inputs, output):
    """Counts forward passes in a buffer and makes the logits depend on it, as BatchNorm does in evaluation."""
    module.worn += 1
    return output * (1 + module.worn / 64)


def wearing(job):
    """The job with a model whose forward pass depends on a buffer that it writes."""
    job.state.model.register_buffer("worn", torch.zeros((), device=job.device))
    job.state.model.register_forward_hook(wear)
    return job


RUINS = {"forward": ruin_forward, "backward": ruin_backward, "two": ruin_if_two}


def ruined(job, how):
    """The job with a fault that only marked samples trigger; it is in the logits, after every BatchNorm."""
    wearing(job).state.model.register_forward_hook(RUINS[how])
    return job


def assert_recorded_steps_replay(folder, *overrides):
    """Checks law 5 for a run with `overrides`; `tests/laws/test_on_a_card.py` does so on a GPU."""
    chosen = [*overrides, "grad_accum_steps=2", "clipping.max_norm=0.01"]
    job = wearing(made(folder / "run", *chosen))
    steps = recorded(job, 7)
    job.data.batches.close()
    if "precision=fp16" in overrides:
        assert len({reading.loss_scale for _, _, reading in steps}) > 2, "the scale is to move"
        assert {steps[number][2].applied for number in (0, 3, 6)} == {True, False}
    other = wearing(made(folder / "other", *chosen))
    elsewhere = wearing(made(folder / "elsewhere", *chosen, "seed=3"))
    elsewhere = replace(elsewhere, tools=replace(elsewhere.tools, seed=0))
    for number in (0, 3, 6):
        tree, batch, reading = steps[number]
        restore(tree, other.state, {})  # the loss scale stays another one
        repro = repro_of(other, batch, reading=reading)
        outcome = replay(repro, "same")
        assert outcome.bitwise_equal_to_reading, (outcome, reading)
        place = folder / f"incident-{number}"
        save_repro(place, repro)
        again = replay(load_repro(place, elsewhere.state.model, elsewhere.tools), "same")
        assert again.bitwise_equal_to_reading, (again, reading)
        assert str(replace(again, seconds=None)) == str(replace(outcome, seconds=None))
