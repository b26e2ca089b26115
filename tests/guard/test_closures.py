"""What a user's closure takes and where it is defined; which tensors of a batch hold samples; the loss in an output."""

import math
from functools import partial
from types import FunctionType
from unittest.mock import Mock

import pytest
import torch

from stabletrain.forensics.diagnosis.evidence import Evidence
from stabletrain.guard.in_code import unknown_beyond_forward
from stabletrain.guard.loss_graph import total
from stabletrain.guard.micro_batch import MicroBatch, argument_count, takes, takes_nothing
from stabletrain.guard.rerun import Rerun
from stabletrain.guard.samples import BatchTrials, bad_samples, has_rows, sizes_by_name
from stabletrain.guard.saved_step import why_not_importable
from tests.guard.policy.given import reading


def loss(x, y):
    return x, y


def inner(x):
    """Makes a closure that is nested and uses a variable around it: its code has other flags."""
    return lambda: x


@pytest.mark.parametrize(
    ("closure", "count"),
    [
        (loss, 2),
        (inner(1), 0),
        (lambda x: x, 1),
        (lambda *x: x, None),
        (lambda x=1: x, None),
        (lambda *, x: x, None),
        (partial(loss, 1), None),
    ],
)
def test_the_arguments_of_a_plain_function_are_counted_without_a_signature(closure, count):
    assert argument_count(closure) == count


def test_a_closure_without_arguments_is_called_without_the_batch():
    assert [takes_nothing(each) for each in (inner(1), loss, lambda *, x=1: x)] == [True, False, True]
    assert [takes(each, 2) for each in (loss, inner(1), lambda *x: x, lambda x: x)] == [True, False, True, False]


def test_only_a_function_at_the_top_of_a_module_can_be_imported():
    assert why_not_importable(loss) == ""
    assert "a lambda or a function inside a function" in why_not_importable(inner(1))
    script = FunctionType(loss.__code__, {"__name__": "__main__"}, "loss")
    assert "in the script itself (__main__)" in why_not_importable(script)
    assert "is not the closure" in why_not_importable(FunctionType(inner.__code__, globals(), "loss"))


@pytest.mark.parametrize(("mine", "usual"), [([(2, 4)], [(3, 4)]), ([(3, 4)], [(2, 4)]), ([(2, 4)], [(2, 4)] * 2)])
def test_batches_of_another_form_are_no_other_batches_of_a_step(mine, usual):
    step, other = ([MicroBatch(torch.sum, torch.ones(shape)) for shape in each] for each in (mine, usual))
    rerun = Mock(spec=Rerun, begun=Mock(micro_batches=step))
    assert BatchTrials(rerun, other, math.inf).other() is None
    alike = [MicroBatch(torch.sum, torch.zeros(shape)) for shape in mine]
    assert [each.batch for each in BatchTrials(rerun, alike, math.inf).other()] == [each.batch for each in alike]


def test_a_bad_sample_has_its_number_in_the_step_and_in_its_micro_batch():
    batches = [torch.ones(3, 2), torch.ones(3, 2)]
    batches[1][1, 0] = math.nan
    [found] = bad_samples([MicroBatch(torch.sum, batch) for batch in batches], [])
    assert (found["index"], found["fault"]) == (4, "input")


def test_sizes_are_compared_of_the_inputs_that_every_micro_batch_has():
    both, one = {"x": torch.tensor([[1.0], [-3.0]]), "y": torch.ones(2, 1)}, {"x": torch.tensor([[2.0]])}
    for batches in ([both, one], [one, both]):
        found = sizes_by_name([MicroBatch(torch.sum, batch) for batch in batches])
        assert found.get("y", []) in ([], [1.0, 1.0])
        assert sorted(found["x"]) == [1.0, 2.0, 3.0]
    assert sizes_by_name([MicroBatch(torch.sum, batch) for batch in (one, both)]).keys() == {"x"}
    labels = {"x": one["x"], "labels": torch.tensor([1])}
    assert sizes_by_name([MicroBatch(torch.sum, labels)]).keys() == {"x"}, "whole numbers have no size"


def test_a_tensor_of_another_length_holds_no_samples():
    assert [has_rows(torch.zeros(rows, 2), 4) for rows in (3, 4, 5)] == [False, True, False]
    assert not has_rows(torch.tensor(4.0), 4)


def test_the_values_of_an_output_are_summed_in_fp32_or_wider():
    assert total([torch.tensor([1.0, 1e-12], dtype=torch.float64)]).item() == 1.0 + 1e-12
    many = torch.full((4096,), 0.1, dtype=torch.bfloat16)
    assert float(total([many, many.double()])) == pytest.approx(float(many.double().sum()) * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "buffers", "said"), [("nonfinite", 1.0, True), ("spike", 1.0, False), ("nonfinite", math.inf, False)]
)
def test_what_the_forward_pass_does_not_explain_lies_in_the_loss_or_behind_it(kind, buffers, said):
    found = unknown_beyond_forward(Evidence(kind, reading(math.nan, buffers=buffers)))
    assert ("not in the forward pass" in found.verdict) == said
