"""Bad samples are described by index, id, source, value, place and bound."""

import math

import pytest
import torch
from torch import nn

from stabletrain.forensics.probes.samples import bad_samples, describe
from stabletrain.records import IGNORE_INDEX, Batch
from tests.forensics.given import (
    GPT,
    MODELS,
    RESNET,
    assert_unchanged,
    find_culprits,
    live,
    made,
    marked,
    marks,
    replay,
    repro_of,
    ruined,
)


def images(n=3):
    return Batch(torch.zeros(n, 1, 2, 2), torch.arange(n), torch.arange(n) + 40, [f"file:{i}" for i in range(n)])


def test_a_pixel_is_named_by_sample_id_source_and_place():
    batch = images()
    batch.inputs[1, 0, 1, 0] = math.nan
    batch.inputs[1, 0, 1, 1] = math.inf
    (found,) = bad_samples(batch, None, 10)
    assert found == {
        "index": 1,
        "id": 41,
        "source": "file:1",
        "fault": "input",
        "what": "input holds 2 of 4 values that are NaN or Inf, the first at [0, 1, 0]",
    }
    assert describe([found]) == f"sample 1 of the batch: {found['what']} (file:1)"


def test_a_label_and_a_token_are_named_with_their_bound():
    batch = images()
    batch.targets[2] = 77
    assert [each["what"] for each in bad_samples(batch, None, 10)] == ["target 77 is outside [0, 10)"]
    text = Batch(torch.tensor([[1, 300], [2, 3]]), torch.tensor([[0, 1], [-5, 1]]))
    first, second = bad_samples(text, 256, 256)
    assert first == {"index": 0, "fault": "input", "what": "token 300 at [1] is outside [0, 256)"}
    assert second == {"index": 1, "fault": "label", "what": "target -5 at [0] is outside [0, 256)"}


def test_faults_of_the_whole_batch():
    assert bad_samples(images(0), None, None) == [{"index": None, "fault": "empty", "what": "the batch is empty"}]
    batch = images()
    batch.targets[:] = IGNORE_INDEX
    (found,) = bad_samples(batch, None, 10)
    assert (found["index"], found["what"]) == (None, "every target is -100, so all are ignored")


def test_a_good_batch_has_none_and_a_long_list_is_cut():
    assert bad_samples(images(), None, 10) == []
    assert "valid on the host" in describe([])
    many = images(20)
    many.inputs[:] = math.nan
    found = bad_samples(many, None, None)
    assert len(found) == 8
    assert describe(found).endswith("(file:0), and 7 more")


@pytest.mark.parametrize("vocab_size", [None, 256])
def test_data_without_ids_or_sources_is_named_by_its_place(vocab_size):
    batch = Batch(torch.full((1, 4), math.nan), torch.zeros(1, dtype=torch.int64))
    assert bad_samples(batch, vocab_size, 10)[0].keys() == {"index", "fault", "what"}


CASES = [
    ("gpt", "forward", [13], True),
    ("resnet", "backward", [2, 11], False),
    ("gpt", "backward", [0], True),
    ("resnet", "forward", [15], True),
    ("gpt", "backward", [15], False),
    ("resnet", "forward", [0], False),
    ("gpt", "forward", [2, 11], True),
    ("resnet", "backward", [13], False),
]
"""All pairs of a model, a direction, samples, and whether there is another batch; the first two are fast."""


@pytest.mark.slow(unless=lambda model, how, rows: (model, how, rows) in [case[:3] for case in CASES[:2]])
@pytest.mark.parametrize(("model", "how", "rows", "with_fresh"), CASES)
def test_culprit_samples_are_found_by_bisection(tmp_path, model, how, rows, with_fresh):
    job = ruined(made(tmp_path, *MODELS[model], "batch_size=16", "grad_accum_steps=2"), how)
    fresh = job.data.batches.get(700)
    repro = repro_of(job, marked(job.data.batches.get(0), rows), fresh=(lambda: fresh) if with_fresh else None)
    before = live(job)
    found = find_culprits(repro)
    assert_unchanged(before, live(job))
    assert (found.samples, found.alone) == (rows, True)
    assert found.passes <= 2 + 2 * 4 * len(rows)


class Ceiling(torch.autograd.Function):
    """The identity in forward; gradients above 2 / 256 and those of marked samples overflow."""

    @staticmethod
    def forward(context, x, bad):
        context.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(context, *gradients):
        (bad,) = context.saved_tensors
        return torch.where((gradients[0].abs() > 2 / 256) | bad.view(-1, 1, 1), math.inf, gradients[0]), None


def test_a_sample_that_overflows_alone_but_not_in_its_batch_is_not_accused(tmp_path):
    """Divided by its own targets, a single sample's loss, and so its gradient, would be 16 times as large."""
    job = made(tmp_path, *GPT, "batch_size=16", "precision=fp32")
    job.state.model.register_forward_hook(lambda _, inputs, output: Ceiling.apply(output, marks(inputs[0])))
    batch = job.data.batches.get(0)
    assert replay(repro_of(job, batch), "same").finite
    found = find_culprits(repro_of(job, marked(batch, [5])))
    assert (found.samples, found.alone) == ([5], True)


def test_every_pass_starts_from_the_buffers_of_the_step(tmp_path):
    job = ruined(made(tmp_path, *GPT, "batch_size=16"), "forward")

    def wear_out(module, inputs, output):
        return output.masked_fill(module.worn > 2.5, math.nan)  # `wear` has added 1 by then

    job.state.model.register_forward_hook(wear_out)
    found = find_culprits(repro_of(job, marked(job.data.batches.get(0), [5])))
    assert (found.samples, found.alone) == ([5], True)


def test_samples_that_are_bad_only_together_are_reported_as_such(tmp_path):
    job = ruined(made(tmp_path, *GPT, "batch_size=16"), "two")
    fresh = job.data.batches.get(700)
    found = find_culprits(repro_of(job, marked(job.data.batches.get(0), [4, 6]), fresh=lambda: fresh))
    assert (found.samples, found.alone) == ([4, 5, 6, 7], False)


def test_no_sample_is_blamed_for_a_corrupt_state_or_a_finite_step(tmp_path):
    job = made(tmp_path, *GPT, "batch_size=16")
    batch, fresh = job.data.batches.get(0), job.data.batches.get(700)
    assert find_culprits(repro_of(job, batch, fresh=lambda: fresh)).samples == []
    with torch.no_grad():
        job.state.model.norm.weight[0] = math.nan
    found = find_culprits(repro_of(job, batch, fresh=lambda: fresh))
    assert (found.others_too, found.alone, found.passes) == (True, False, 2)
    alone = find_culprits(repro_of(job, batch))
    assert alone.samples == [*range(16)]
    assert alone.passes <= 8 + 4 * 4


def test_culprits_are_narrowed_down_as_far_as_the_model_accepts_few_samples(tmp_path):
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
    found = find_culprits(repro_of(job, batch))
    assert (found.samples, found.alone) == ([4, 5], False)
    found = find_culprits(repro_of(job, batch, fresh=lambda: fresh))
    assert (found.samples, found.alone) == ([5], True), "with others beside it, it can be run"
