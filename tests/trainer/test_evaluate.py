"""Evaluation: the mean over all valid targets as computed in float64, whatever the batches; and no trace is left."""

import math

import pytest
import torch
from torch import nn

from stabletrain.parallel.single import SingleProcess
from stabletrain.records import IGNORE_INDEX, Batch
from stabletrain.stability import precision as precisions
from stabletrain.stability.objective import MSE, CrossEntropy
from stabletrain.stability.objective import cross_entropy as module
from stabletrain.stability.objective.cross_entropy import in_parts
from stabletrain.stability.sanitize import Sanitizer
from stabletrain.trainer.evaluate import evaluate
from tests.trainer.given import CPU, FP32


class Words(nn.Module):
    """Logits [batch, time, 11] of tokens, through dropout and with a buffer that training changes."""

    def __init__(self):
        super().__init__()
        self.embedding, self.drop, self.norm = nn.Embedding(11, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        hidden = self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(self.drop(hidden))


class Points(nn.Module):
    """Logits [batch, 3] of points."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, points):
        return self.head(points)


def words(seed, rows, ignored=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (rows, 6), generator=generator)
    targets = torch.randint(11, (rows, 6), generator=generator)
    targets.view(-1)[:ignored] = IGNORE_INDEX
    return Batch(tokens, targets)


def points(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator))


@torch.no_grad()
def in_float64(model, batches):
    """Mean loss and accuracy, each target by itself."""
    losses, hits = [], []
    double = type(model)().double().eval()
    double.load_state_dict(model.state_dict())
    for batch in batches:
        inputs = batch.inputs.double() if batch.inputs.is_floating_point() else batch.inputs
        log_p = double(inputs).flatten(0, -2).log_softmax(-1)
        for row, target in zip(log_p, batch.targets.flatten().tolist(), strict=True):
            if target != IGNORE_INDEX:
                losses.append(-row[target].item())
                hits.append(row.argmax().item() == target)
    return math.fsum(losses) / len(losses), sum(hits) / len(hits)


def evaluated(model, batches, **options):
    chosen = {
        "objective": CrossEntropy(),
        "precision": FP32,
        "sanitizer": Sanitizer(11),
        "parallel": SingleProcess(),
    } | options
    return evaluate(model, iter(batches), **chosen)


def test_the_loss_is_the_mean_over_targets_and_not_over_batches():
    batches = [words(1, 4), words(2, 1, ignored=5), words(3, 3, ignored=2)]
    loss, _ = in_float64(model := Words(), batches)
    assert evaluated(model, batches) == {"val/loss": pytest.approx(loss, rel=1e-5)}


def test_the_accuracy_is_the_share_of_correct_classes():
    batches = [points(1, 64), points(2, 5)]
    loss, accuracy = in_float64(model := Points(), batches)
    assert 0 < accuracy < 1
    assert evaluated(model, batches) == {"val/loss": pytest.approx(loss, rel=1e-5), "val/accuracy": accuracy}


@pytest.mark.parametrize("at_once", [1, 11, 25, 10**6])
def test_the_number_of_parts_in_which_logits_are_upcast_changes_nothing(monkeypatch, at_once):
    batches = [words(1, 4, ignored=3)]
    loss, _ = in_float64(model := Words(), batches)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", at_once)
    parts = [len(rows) for rows, _ in in_parts(torch.zeros(24, 11), torch.zeros(24))]
    assert sum(parts) == 24
    assert max(parts) == min(24, max(1, at_once // 11))
    assert evaluated(model, batches)["val/loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_no_trace_is_left_in_the_model(training):
    model = Words().train(training)
    before, drawn = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    evaluated(model, [words(1, 4)])
    assert all(module.training == training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_module_that_was_in_evaluation_mode_stays_in_it():
    """A frozen BatchNorm, say, in a model that is trained."""
    model = Words().train()
    model.norm.eval()
    evaluated(model, [words(1, 4)])
    assert [model.training, model.drop.training, model.norm.training] == [True, True, False]


def test_the_mode_is_restored_after_an_error_too():
    def broken():
        yield words(1, 4)
        raise OSError("the disk is gone")

    model = Words().train()
    with pytest.raises(OSError, match="the disk is gone"):
        evaluated(model, broken())
    assert model.training


def test_bad_data_is_not_counted_but_reported():
    good, bad_input, bad_label = points(1, 8), points(2, 8), points(3, 8)
    bad_input.inputs[3, 1] = math.nan  # the whole batch is left out
    bad_label.targets[5] = 3  # this label only
    counted = Batch(bad_label.inputs, bad_label.targets.clone())
    counted.targets[5] = IGNORE_INDEX
    loss, accuracy = in_float64(model := Points(), [good, counted])
    assert evaluated(model, [good, bad_input, bad_label]) == {
        "val/loss": pytest.approx(loss, rel=1e-5),
        "val/accuracy": accuracy,
        "val/bad_batches": 2,
    }


def test_without_a_valid_target_the_numbers_are_nan():
    nothing = points(1, 4)
    nothing.targets.fill_(IGNORE_INDEX)
    metrics = evaluated(Points(), [nothing])
    assert set(metrics) == {"val/loss", "val/accuracy"}
    assert all(math.isnan(value) for value in metrics.values())


def test_the_ranks_sums_are_added_before_they_are_divided():
    class Another(SingleProcess):
        """A second rank that has seen 6 targets with a loss of 30 in sum, 5 of them right, in one bad batch."""

        def all_reduce_sum(self, values):
            return values + torch.tensor([1.0, 30.0, 6.0, 5.0], dtype=torch.float64)

    batches = [points(1, 10)]
    loss, accuracy = in_float64(model := Points(), batches)
    assert evaluated(model, batches, parallel=Another()) == {
        "val/loss": pytest.approx((10 * loss + 30) / 16, rel=1e-5),
        "val/accuracy": pytest.approx((10 * accuracy + 5) / 16),
        "val/bad_batches": 1,
    }


def test_the_forward_pass_runs_in_the_runs_precision_and_the_loss_in_fp32():
    seen = []
    model = Points()
    model.register_forward_hook(lambda module, inputs, logits: seen.append(logits))
    batches = [points(1, 64)]
    low = evaluated(model, batches, precision=precisions.bf16(CPU))["val/loss"]
    (logits,) = seen
    assert logits.dtype == torch.bfloat16
    expected = nn.functional.cross_entropy(logits.double(), batches[0].targets).item()
    assert low == pytest.approx(expected, rel=1e-6)


def numbers(seed, rows, bad=False):
    """Float targets, of which one may be NaN."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)
    if bad:
        targets[0, 0] = math.nan
    return Batch(inputs, targets)


def test_a_batch_with_a_bad_float_label_is_not_counted_and_one_marked_as_repeated_neither():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    good = [numbers(1, 4), numbers(2, 8)]
    expected = evaluated(model, good, objective=MSE())
    assert set(expected) == {"val/loss", "val/r2"}
    given = [*good, numbers(3, 4, bad=True), numbers(4, 4).counting(0)]
    assert evaluated(model, given, objective=MSE()) == expected | {"val/bad_batches": 1}
