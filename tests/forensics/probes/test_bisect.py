"""Which samples harm a step is found by halving, and no other is accused."""

import math

import pytest
import torch
from torch import nn

from stabletrain.forensics.probes.bisect import find_culprits
from stabletrain.forensics.replay import replay
from tests.forensics.given import GPT, MODELS, RESNET, assert_unchanged, live, made, marked, marks, ruined, scene_of


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
