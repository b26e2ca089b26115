"""Law 5: replay is exact, changes nothing live, and works from a folder alone. And what each variant tells."""

import json
import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import stabletrain.trainer.loop
from stabletrain.checkpoint.capture import capture, restore
from stabletrain.checkpoint.tree import flatten, to_host
from stabletrain.errors import ConfigError
from stabletrain.forensics.probes.bisect import find_culprits
from stabletrain.forensics.replay import VARIANTS, replay, replays
from stabletrain.forensics.repro import Repro
from stabletrain.forensics.repro_files import about, load_repro, save_repro
from stabletrain.records import Batch
from stabletrain.step import commit, compute
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.runs import ROOT, TINY_GPT, TINY_RESNET, composed, python

GPT = [*TINY_GPT, "model.dropout=0.1"]
RESNET = [*TINY_RESNET, "model.depth=8"]
MODELS = {"gpt": GPT, "resnet": RESNET}
QUIET = ["checkpoint=off", "monitors=none", "steps=40", "warmup=none", "schedule=constant"]
FAST_FP16 = ["precision.init_scale=1e6", "precision.growth_interval=2"]
"""So that the loss scale falls, and rises again, within some steps."""


def made(folder, *overrides):
    with composed(*QUIET, *overrides) as cfg:
        return build(cfg, folder)


def precision_of(name):
    return [f"precision={name}", *(FAST_FP16 if name == "fp16" else [])]


def micro_batches(job, batch):
    return batch.to(job.device).split(job.plan.grad_accum_steps)


def scene_of(job, batch, computed=None, reading=None, **more):
    """A step of `job` as the loop would hand it on; without `computed`, one that has not begun."""
    held = [buffer.clone() for buffer in job.state.model.buffers()] if computed is None else computed.saved_buffers
    scale = float(job.tools.precision.loss_scale()) if reading is None else reading.loss_scale
    step = job.state.step if reading is None else reading.step - 1
    return Repro(
        model=job.state.model,
        buffers=held,
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
    """Runs steps; returns of each the state it started from, its batch and its reading."""
    found = []
    for step in range(steps):
        tree, batch = to_host(capture(job.state, job.rollback.parts)), job.data.batches.get(step)
        found.append((tree, batch, one_step(job, batch)[1]))
    return found


def live(job, pythons_generator=False):
    """Every bit that a replay could reach: state, gradients, generators, modes, hooks, switches.

    Python's own generator only where asked: the checking of types in tests draws from it.
    """
    model = job.state.model
    tensors, skeleton = flatten(to_host(capture(job.state, job.rollback.parts)))
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
    }
    return tensors, rest


def everything(job):
    """What a run has made of itself, but for the time that it took."""
    parts = {name: part for name, part in job.rollback.parts.items() if name != "history"}
    tensors, skeleton = flatten(to_host(capture(job.state, parts)))
    return tensors, str(skeleton)


def assert_unchanged(before, after):
    assert after[1] == before[1]
    assert after[0].keys() == before[0].keys()
    for name, tensor in before[0].items():
        assert after[0][name].numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes(), name


# Samples that harm a step, by what is in them and in no other: the fault is part of the model, as a real one is.

MARK = {"gpt": 1, "resnet": 77.0}
"""What a marked sample is filled with; no other sample is."""


def marked(batch, rows):
    inputs = batch.inputs.clone()
    inputs[rows] = MARK["resnet"] if inputs.is_floating_point() else MARK["gpt"]
    return replace(batch, inputs=inputs)


def marks(inputs):
    flat = inputs.flatten(1)
    return (flat == (MARK["resnet"] if inputs.is_floating_point() else MARK["gpt"])).all(1)


class Backwards(torch.autograd.Function):
    """Does nothing forward, and ruins the gradient of marked samples."""

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
    """Counts in a buffer how often the model ran, and lets the logits depend on it, as BatchNorm's do in evaluation."""
    module.worn += 1
    return output * (1 + module.worn / 64)


def wearing(job):
    """The job with a model whose forward pass depends on a buffer that it writes."""
    job.state.model.register_buffer("worn", torch.zeros((), device=job.device))
    job.state.model.register_forward_hook(wear)
    return job


RUINS = {"forward": ruin_forward, "backward": ruin_backward, "two": ruin_if_two}


def ruined(job, how):
    """The job with a fault in its model that only marked samples meet: in the logits, which no BatchNorm mixes."""
    wearing(job).state.model.register_forward_hook(RUINS[how])
    return job


def assert_recorded_steps_replay(folder, *overrides):
    """The law itself, for a run of `overrides`; on a card it is `tests/laws/test_on_a_card.py` that asks for it."""
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
        repro = scene_of(other, batch, reading=reading)
        outcome = replay(repro, "same")
        assert outcome.bitwise_equal_to_reading, (outcome, reading)
        place = folder / f"incident-{number}"
        save_repro(place, repro)
        again = replay(load_repro(place, elsewhere.state.model, elsewhere.tools), "same")
        assert again.bitwise_equal_to_reading, (again, reading)
        assert str(replace(again, seconds=None)) == str(replace(outcome, seconds=None))


@pytest.mark.slow(unless=lambda precision: precision in ("fp32", "bf16"))
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_params"])
@pytest.mark.parametrize("model", MODELS)
def test_any_recorded_step_gives_the_same_bits_again_from_its_state_and_from_its_folder_alone(
    tmp_path, model, precision
):
    assert_recorded_steps_replay(tmp_path, *MODELS[model], *precision_of(precision))


@pytest.mark.slow(unless=lambda model, how, precision: (model, how, precision) == ("gpt", "backward", "bf16"))
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("how", ["forward", "backward"])
@pytest.mark.parametrize("model", MODELS)
def test_in_the_loop_a_withheld_step_is_replayed_bit_for_bit_and_nothing_live_changes(
    tmp_path, monkeypatch, model, how, precision
):
    """When the loop looks, the step after has run forward and backward already."""
    chosen = [*MODELS[model], *precision_of(precision), "grad_accum_steps=2", "steps=12", "eval_every=5", "guard=skip"]
    bad_steps, seen, held = (3, 4, 8), [], {}

    def trained(folder, explained):
        job = ruined(made(folder, *chosen), how)
        get = job.data.batches.get
        job.data.batches.get = lambda step: marked(get(step), [2]) if step in bad_steps else get(step)
        settle, compute_ = stabletrain.trainer.loop.settle, stabletrain.trainer.loop.compute

        def remembering(state, batches, tools):
            computed = compute_(state, batches, tools)
            held[state.executed_steps] = computed
            return computed

        def explaining(job, launched, *rest):
            reading = launched.reading()
            if not reading.applied:
                computed = held[reading.step - 1]
                fresh = lambda: get(500)  # noqa: E731
                repro = scene_of(job, launched.batch, computed, reading, fresh=fresh, older=lambda: tree)
                before = live(job)
                outcomes = replays(repro)
                culprits = find_culprits(repro)
                assert_unchanged(before, live(job))
                seen.append((reading, outcomes, culprits))
            return settle(job, launched, *rest)

        tree = to_host(capture(job.state, job.rollback.parts))
        with monkeypatch.context() as patch:
            if explained:
                patch.setattr(stabletrain.trainer.loop, "compute", remembering)
                patch.setattr(stabletrain.trainer.loop, "settle", explaining)
            train(job)
        return everything(job)

    plain, explained = trained(tmp_path / "plain", False), trained(tmp_path / "explained", True)
    assert plain[1] == explained[1]
    assert plain[0].keys() == explained[0].keys()
    for name, tensor in plain[0].items():
        assert torch.equal(explained[0][name], tensor), name
    assert {reading.step - 1 for reading, _, _ in seen} >= set(bad_steps)
    for reading, outcomes, culprits in seen:
        assert outcomes["same"].bitwise_equal_to_reading, (reading, outcomes)
        bad = reading.step - 1 in bad_steps
        assert outcomes["same"].finite is False
        assert outcomes["fp32"].finite is not bad
        assert math.isfinite(outcomes["same"].loss) is not (bad and how == "forward")
        if precision != "fp16":  # whose loss scale, while it is too large, spoils other samples as well
            assert outcomes["fresh_batch"].finite
            assert (culprits.samples, culprits.alone) == ([2], True)
        elif bad:
            assert 2 in culprits.samples
    assert any(outcomes["fresh_batch"].finite for _, outcomes, _ in seen)


ALONE = """
import random, sys
from pathlib import Path
from tests.forensics.test_replay import *

for name, chosen in MODELS.items():
    job = made(Path(sys.argv[1]) / name, *chosen)
    job.state.model.register_forward_hook(lambda *_: (random.random(), np.random.rand(), None)[-1])
    wearing(job)
    batch, fresh = job.data.batches.get(0), job.data.batches.get(700)
    tree = to_host(capture(job.state, job.rollback.parts))
    for how in ("forward", "backward"):
        job.state.model.register_forward_hook(RUINS[how])
        scene = scene_of(job, marked(batch, [1]), fresh=lambda: fresh, older=lambda: tree)
        before = live(job, pythons_generator=True)
        outcomes = replays(scene)
        assert find_culprits(scene).samples == [1], name
        assert_unchanged(before, live(job, pythons_generator=True))
        assert [outcome.finite for outcome in outcomes.values()] == [False, False, True, False], outcomes
"""


def test_every_generator_is_left_as_it_was(tmp_path):
    """In a process of its own, where nobody else draws."""
    done = python("-c", ALONE, str(tmp_path), cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_params"])
@pytest.mark.parametrize("model", MODELS)
def test_fp32_is_what_a_run_in_fp32_makes_of_the_same_state(tmp_path, model, precision):
    job = made(tmp_path / "low", *MODELS[model], f"precision={precision}", "grad_accum_steps=2")
    tree, batch, reading = recorded(job, 3)[-1]
    restore(tree, job.state, job.rollback.parts)
    wide = made(tmp_path / "wide", *MODELS[model], "precision=fp32", "grad_accum_steps=2")
    restore(tree, wide.state, {})
    outcome = replay(scene_of(job, batch, reading=reading), "fp32")
    expected = replay(scene_of(wide, batch), "same")
    assert (outcome.loss, outcome.grad_norm) == (expected.loss, expected.grad_norm)
    assert outcome.loss != reading.loss
    assert outcome.bitwise_equal_to_reading is None


def test_fp32_leaves_islands_and_the_switches_of_tf32_as_they_are(tmp_path):
    job = made(tmp_path, *GPT, "precision=bf16", "precision.fp32_modules=[head]")
    seen = []
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    job.state.model.head.register_forward_hook(lambda *_: seen.append(torch.backends.mkldnn.matmul.fp32_precision))
    outcome = replay(scene_of(job, job.data.batches.get(0)), "fp32")
    assert outcome.finite
    assert seen == ["ieee"]
    assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"


def test_another_batch_and_an_older_state_are_what_they_say(tmp_path):
    job = made(tmp_path / "run", *GPT, "precision=fp32")
    steps = recorded(job, 5)
    fresh = job.data.batches.get(900)
    repro = scene_of(job, steps[4][1], fresh=lambda: fresh, older=lambda: steps[1][0])
    outcomes = replays(repro)
    assert outcomes["fresh_batch"].loss == replay(scene_of(job, fresh), "same").loss
    restore({**steps[1][0], "step": 5}, job.state, {})
    assert outcomes["older_state"].loss == replay(scene_of(job, steps[4][1]), "same").loss
    assert len({outcome.loss for outcome in outcomes.values()}) == 3, "fp32 and same are the same here"


def test_what_cannot_be_run_says_why(tmp_path):
    job = made(tmp_path, *GPT)
    batch = job.data.batches.get(0)
    outcomes = replays(scene_of(job, batch))
    assert outcomes["fresh_batch"].not_run == "there is no other batch"
    assert outcomes["older_state"].not_run == "there is no older state"
    late = replays(scene_of(job, batch, deadline=time.monotonic() - 1))
    assert [outcome.not_run for outcome in late.values()] == ["no time was left"] * len(VARIANTS)
    assert find_culprits(scene_of(job, batch, deadline=time.monotonic() - 1)).passes == 0

    def refuse(module, inputs):
        raise ValueError("not today")

    job.state.model.register_forward_pre_hook(refuse)
    assert replay(scene_of(job, batch), "same").not_run == "ValueError: not today"
    assert find_culprits(scene_of(job, batch)).samples == []


def test_zero_gradients_are_counted(tmp_path):
    job = made(tmp_path, *GPT, "precision=fp16", "precision.init_scale=1")
    batch = job.data.batches.get(0)
    compute(job.state, micro_batches(job, batch), job.tools)
    gradients = [p.grad for p in job.state.model.parameters()]
    share = sum(int((g == 0).sum()) for g in gradients) / sum(g.numel() for g in gradients)
    repro = scene_of(job, batch)
    assert replay(repro, "same").zero_gradients == share
    assert replay(repro, "fp32").zero_gradients < share, "some underflowed in fp16"


@pytest.mark.slow(unless=lambda rows: rows in ([13], [2, 11]))
@pytest.mark.parametrize("with_fresh", [True, False], ids=["fresh", "no_fresh"])
@pytest.mark.parametrize("rows", [[0], [13], [15], [2, 11]], ids=str)
@pytest.mark.parametrize("how", ["forward", "backward"])
@pytest.mark.parametrize("model", MODELS)
def test_the_guilty_samples_are_found_by_halving(tmp_path, model, how, rows, with_fresh):
    job = ruined(made(tmp_path, *MODELS[model], "batch_size=16", "grad_accum_steps=2"), how)
    fresh = job.data.batches.get(700)
    repro = scene_of(job, marked(job.data.batches.get(0), rows), fresh=(lambda: fresh) if with_fresh else None)
    before = live(job)
    found = find_culprits(repro)
    assert_unchanged(before, live(job))
    assert (found.samples, found.alone) == (rows, True)
    assert found.passes <= 2 + 2 * 4 * len(rows)


class Ceiling(torch.autograd.Function):
    """Does nothing forward; a gradient above 2 / 256 overflows, and so does any of a marked sample."""

    @staticmethod
    def forward(context, x, bad):
        context.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(context, *gradients):
        (bad,) = context.saved_tensors
        return torch.where((gradients[0].abs() > 2 / 256) | bad.view(-1, 1, 1), math.inf, gradients[0]), None


def test_a_sample_that_overflows_alone_but_not_in_its_batch_is_not_accused(tmp_path):
    """Alone, and divided by its own targets, its share in the loss would be 16 times as large, and so its gradient."""
    job = made(tmp_path, *GPT, "batch_size=16", "precision=fp32")
    job.state.model.register_forward_hook(lambda _, inputs, output: Ceiling.apply(output, marks(inputs[0])))
    batch = job.data.batches.get(0)
    assert replay(scene_of(job, batch), "same").finite
    found = find_culprits(scene_of(job, marked(batch, [5])))
    assert (found.samples, found.alone) == ([5], True)


def test_every_pass_starts_from_the_buffers_of_the_step(tmp_path):
    job = ruined(made(tmp_path, *GPT, "batch_size=16"), "forward")

    def wear_out(module, inputs, output):
        return output.masked_fill(module.worn > 2.5, math.nan)  # `wear` has added 1 by then

    job.state.model.register_forward_hook(wear_out)
    found = find_culprits(scene_of(job, marked(job.data.batches.get(0), [5])))
    assert (found.samples, found.alone) == ([5], True)


def test_samples_that_are_bad_only_together_are_said_to_be(tmp_path):
    job = ruined(made(tmp_path, *GPT, "batch_size=16"), "two")
    fresh = job.data.batches.get(700)
    found = find_culprits(scene_of(job, marked(job.data.batches.get(0), [4, 6]), fresh=lambda: fresh))
    assert (found.samples, found.alone) == ([4, 5, 6, 7], False)


def test_a_broken_state_accuses_no_sample_and_a_finite_step_nobody(tmp_path):
    job = made(tmp_path, *GPT, "batch_size=16")
    batch, fresh = job.data.batches.get(0), job.data.batches.get(700)
    assert find_culprits(scene_of(job, batch, fresh=lambda: fresh)).samples == []
    with torch.no_grad():
        job.state.model.norm.weight[0] = math.nan
    found = find_culprits(scene_of(job, batch, fresh=lambda: fresh))
    assert (found.others_too, found.alone, found.passes) == (True, False, 2)
    alone = find_culprits(scene_of(job, batch))
    assert alone.samples == [*range(16)]
    assert alone.passes <= 8 + 4 * 4


def test_a_model_that_refuses_a_single_sample_is_not_accused_of_more_than_is_known(tmp_path):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

        def forward(self, inputs):
            return self.net(inputs)

    job = made(tmp_path, *RESNET)
    job.state.model = Normed()
    ruined(job, "forward")
    batch, fresh = marked(job.data.batches.get(0), [5]), job.data.batches.get(700)
    found = find_culprits(scene_of(job, batch))
    assert (found.samples, found.alone) == ([4, 5], False)
    found = find_culprits(scene_of(job, batch, fresh=lambda: fresh))
    assert (found.samples, found.alone) == ([5], True), "with others beside it, it can be run"


def test_a_scene_keeps_what_is_said_about_it_and_how_the_batch_lay_in_memory(tmp_path):
    job = made(tmp_path / "run", *RESNET)
    batch = job.data.batches.get(0)
    batch = replace(batch, inputs=batch.inputs.repeat(1, 2, 1, 1).contiguous(memory_format=torch.channels_last))
    held, reading = [b.clone() for b in job.state.model.buffers()], None
    config = {"overrides": ["a=1"], "nan": math.nan, "$x": [1, None, True]}
    save_repro(tmp_path / "scene", scene_of(job, batch, metadata=config))
    assert str(about(tmp_path / "scene")) == str(config)
    repro = load_repro(tmp_path / "scene", job.state.model, job.tools)
    assert repro.batch.inputs.stride() == batch.inputs.stride()
    assert torch.equal(repro.batch.inputs, batch.inputs)
    assert torch.equal(repro.batch.ids, batch.ids)
    assert [*repro.batch.sources] == [*batch.sources]
    assert repro.reading is reading
    assert all(torch.equal(a, b) for a, b in zip(repro.buffers, held, strict=True))
    json.loads((tmp_path / "scene" / "scene.json").read_text(), parse_constant=pytest.fail)


def test_a_reading_of_nan_comes_back_and_still_compares(tmp_path):
    job = ruined(made(tmp_path / "run", *GPT, "guard=skip"), "forward")
    batch = marked(job.data.batches.get(0), [1])
    computed, reading = one_step(job, batch)
    assert math.isnan(reading.loss)
    save_repro(tmp_path / "scene", scene_of(job, batch, computed, reading))
    repro = load_repro(tmp_path / "scene", job.state.model, job.tools)
    assert replay(repro, "same").bitwise_equal_to_reading
    assert replay(replace(repro, reading=reading._replace(loss=1.0)), "same").bitwise_equal_to_reading is False


def test_another_precision_is_tried_on_a_saved_scene_with_its_own_loss_scale(tmp_path):
    job = made(tmp_path / "bf16", *GPT, "precision=bf16")
    save_repro(tmp_path / "scene", scene_of(job, job.data.batches.get(0)))
    other = made(tmp_path / "fp16", *GPT, "precision=fp16", "precision.init_scale=256")
    assert load_repro(tmp_path / "scene", other.state.model, other.tools).loss_scale == 256
    save_repro(tmp_path / "scene", replace(scene_of(other, job.data.batches.get(0)), loss_scale=32.0))
    assert load_repro(tmp_path / "scene", other.state.model, other.tools).loss_scale == 32
    assert load_repro(tmp_path / "scene", job.state.model, job.tools).loss_scale == 1


@pytest.mark.parametrize("file", ["batch.safetensors", "state.safetensors", "scene.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_scene_is_refused_by_name(tmp_path, file, how):
    job = made(tmp_path / "run", *GPT)
    save_repro(tmp_path / "scene", scene_of(job, job.data.batches.get(0)))
    path = tmp_path / "scene" / file
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:-7])
    else:
        content[0 if file == "scene.json" else -1] ^= 1
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=file):
        load_repro(tmp_path / "scene", job.state.model, job.tools)


def test_a_scene_of_another_model_is_refused_unless_it_only_lacks_a_part(tmp_path):
    job = made(tmp_path / "run", *GPT)
    save_repro(tmp_path / "scene", scene_of(job, job.data.batches.get(0)))
    wider = made(tmp_path / "wider", *GPT, "model.n_embd=32")
    with pytest.raises(ConfigError, match="'embedding.weight' is .* in the incident and .* in the model: replay it"):
        load_repro(tmp_path / "scene", wider.state.model, wider.tools)
    normed = made(tmp_path / "normed", *GPT, "qknorm=layernorm")
    with pytest.raises(ConfigError, match="is absent in the incident"):
        load_repro(tmp_path / "scene", normed.state.model, normed.tools)
    repro = load_repro(tmp_path / "scene", normed.state.model, normed.tools, strict=False)
    assert torch.equal(normed.state.model.head.weight, job.state.model.head.weight)
    assert replay(repro, "same").finite


def test_a_compiled_step_is_not_compared_bit_for_bit(tmp_path):
    job = made(tmp_path, *GPT)
    batch = job.data.batches.get(0)
    computed, reading = one_step(job, batch)
    job.state.model.blocks[0].compile(backend="eager")
    repro = scene_of(job, batch, computed, reading)
    assert replay(repro, "same").bitwise_equal_to_reading is None
    save_repro(tmp_path / "scene", repro)
    job.state.model.blocks[0]._compiled_call_impl = None
    assert not load_repro(tmp_path / "scene", job.state.model, job.tools).comparable


def test_an_empty_batch_is_replayed_too(tmp_path):
    job = made(tmp_path / "run", *GPT, "guard=skip")
    empty = Batch(torch.zeros(0, 16, dtype=torch.int64), torch.zeros(0, 16, dtype=torch.int64))
    computed, reading = one_step(job, empty)
    repro = scene_of(job, empty, computed, reading)
    assert replay(repro, "same").bitwise_equal_to_reading
    assert find_culprits(repro).samples == []
    save_repro(tmp_path / "scene", repro)
    assert replay(load_repro(tmp_path / "scene", job.state.model, job.tools), "same").bitwise_equal_to_reading
