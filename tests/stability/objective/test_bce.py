"""Binary cross-entropy against closed forms."""

import pytest
import torch
import torch.nn.functional as F

from stabletrain.records import IGNORE_INDEX, Batch
from stabletrain.stability.objective import BCE
from stabletrain.stability.sanitize import Sanitizer


def batch(targets):
    return Batch(torch.zeros(len(targets), 1), targets)


def test_several_labels_at_once_and_their_gradient():
    logits = torch.tensor([[2.0, -1.0], [0.5, 30.0], [-200.0, 200.0]], requires_grad=True)
    targets = torch.tensor([[1.0, 0.0], [0.25, 1.0], [1.0, 0.0]])
    total = BCE()(logits, batch(targets), torch.tensor(6)).total
    p = logits.detach().double().sigmoid()
    torch.testing.assert_close(total.item(), F.binary_cross_entropy_with_logits(logits, targets).item())
    total.backward()
    torch.testing.assert_close(logits.grad, ((p - targets) / 6).float())
    assert total.item() > 60, "two labels are wrong by 200 nats each"


def test_whole_number_labels_are_counted_without_the_ignored_ones():
    logits = torch.tensor([3.0, -2.0, -50.0])
    ids = torch.tensor([1, 0, IGNORE_INDEX])
    expected = F.binary_cross_entropy_with_logits(logits[:2], ids[:2].float())
    torch.testing.assert_close(BCE()(logits, batch(ids), torch.tensor(2)).total, expected)
    sums = {name: value.numpy() for name, value in BCE().sums(logits, batch(ids)).items()}
    assert BCE().metrics(sums) == {"loss": pytest.approx(expected.item(), rel=1e-6), "accuracy": 1.0}


def test_accuracy_is_the_share_on_the_right_side():
    logits, targets = torch.tensor([[1.0, -1.0], [1.0, -1.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    sums = {name: value.numpy() for name, value in BCE().sums(logits, batch(targets)).items()}
    assert BCE().metrics(sums)["accuracy"] == 0.5
    soft = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
    sums = {name: value.numpy() for name, value in BCE().sums(logits, batch(soft)).items()}
    assert BCE().metrics(sums)["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("targets", "bad"),
    [
        (torch.tensor([0.0, 1.0]), False),
        (torch.tensor([0.5, 1.5]), True),
        (torch.tensor([-0.5, 1.0]), True),
        (torch.tensor([0.5, float("nan")]), True),
        (torch.tensor([0, 1]), False),
        (torch.tensor([0, 2]), True),
    ],
)
def test_targets_that_are_no_probability_are_bad_data(targets, bad):
    _, found = Sanitizer().targets(targets, BCE().classes(None))
    assert bool(found) is bad
