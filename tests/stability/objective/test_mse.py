"""Mean squared error against closed forms, and r2 against its definition."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stabletrain.errors import ConfigError
from stabletrain.records import Batch
from stabletrain.stability.objective import MSE


def example(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(shape, generator=generator).requires_grad_()
    return outputs, 3 + torch.randn(shape, generator=generator)


def batch(targets):
    return Batch(torch.zeros(len(targets), 1), targets)


def numbers(sums):
    return {name: value.numpy() for name, value in sums.items()}


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 4)])
def test_the_parts_of_micro_batches_add_up_to_the_mean_over_all_elements(shape):
    outputs, targets = example(*shape)
    n_valid = torch.tensor(targets.numel())
    parts = [MSE()(outputs[rows], batch(targets[rows]), n_valid) for rows in (slice(0, 2), slice(2, 6))]
    total = parts[0].total + parts[1].total
    torch.testing.assert_close(total, F.mse_loss(outputs, targets))
    (gradient,) = torch.autograd.grad(total, outputs)
    torch.testing.assert_close(gradient, 2 * (outputs - targets).detach() / targets.numel())
    assert parts[0].parts == {}


def test_bf16_outputs_are_compared_in_fp32():
    outputs, targets = example(64)
    low = outputs.detach().bfloat16()
    terms = MSE()(low, batch(targets), torch.tensor(64))
    assert terms.total.dtype == torch.float32
    torch.testing.assert_close(terms.total, F.mse_loss(low.float(), targets))


def test_a_last_dimension_of_one_is_removed_and_not_broadcast():
    outputs, targets = example(5)
    column = MSE()(outputs[:, None], batch(targets), torch.tensor(5)).total
    torch.testing.assert_close(column, F.mse_loss(outputs, targets))


@pytest.mark.parametrize("outputs", [torch.zeros(5, 2), torch.zeros(1), torch.zeros(5, 1, 1), (torch.zeros(5),)])
def test_outputs_of_another_shape_are_refused(outputs):
    with pytest.raises(ConfigError, match=r"for targets of \[5\]: objective=mse compares them one by one"):
        MSE().check(outputs, torch.zeros(5))


def test_class_ids_are_refused():
    with pytest.raises(ConfigError, match="targets are torch.int64, and objective=mse takes numbers"):
        MSE().check_targets(torch.zeros(2, dtype=torch.int64))
    for use in (lambda ids: MSE()(torch.zeros(2), ids, torch.tensor(2)), lambda ids: MSE().sums(torch.zeros(2), ids)):
        with pytest.raises(ConfigError, match="targets are torch.int64"):
            use(batch(torch.zeros(2, dtype=torch.int64)))


def test_r2_is_the_explained_share_of_the_variance_over_all_batches():
    outputs, targets = example(40, 2)
    outputs = (targets + 0.5 * outputs).detach()
    halves = [numbers(MSE().sums(outputs[rows], batch(targets[rows]))) for rows in (slice(0, 10), slice(10, 40))]
    metrics = MSE().metrics({name: np.asarray(halves[0][name] + halves[1][name]) for name in halves[0]})
    spread = (targets - targets.mean(dim=0)).square().sum()
    assert metrics["loss"] == pytest.approx(F.mse_loss(outputs, targets).item(), rel=1e-6)
    assert metrics["r2"] == pytest.approx(1 - ((outputs - targets).square().sum() / spread).item(), rel=1e-5)


def test_predicting_the_mean_explains_nothing_and_equal_targets_have_no_r2():
    targets = torch.tensor([1.0, 2.0, 3.0, 6.0])
    at_mean = MSE().metrics(numbers(MSE().sums(torch.full((4,), 3.0), batch(targets))))
    assert at_mean["r2"] == pytest.approx(0)
    assert np.isnan(MSE().metrics(numbers(MSE().sums(targets, batch(torch.ones(4)))))["r2"])
