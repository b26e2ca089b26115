"""A loss of the user's own: what it may return, and how micro-batches and ranks are weighted."""

from typing import NamedTuple

import pytest
import torch

from stabletrain.errors import ConfigError
from stabletrain.records import Batch, LossTerms
from stabletrain.stability.objective import Custom
from stabletrain.stability.precision.autocast import widen


@pytest.fixture(autouse=True)
def _without_gradients():
    """Most of the losses here are constants, which training refuses."""
    with torch.no_grad():
        yield


def batch(rows=6, targets=None):
    inputs = torch.arange(float(rows))[:, None]
    return Batch(inputs, torch.zeros(rows) if targets is None else targets)


def scalar(outputs, batch, n_valid):
    return outputs.square().mean()


def named(outputs, batch, n_valid):
    total = outputs.square().sum() / n_valid
    return LossTerms(total, {"reconstruction": 0.75 * total, "kl": 0.25})


def test_scalar_means_are_weighted_by_samples():
    whole, loss = batch(6), Custom(scalar)
    parts = whole.split(3)
    assert [part.share for part in parts] == [pytest.approx(1 / 3)] * 3
    total = sum(loss(part.inputs, part, torch.tensor(1)).total for part in parts)
    torch.testing.assert_close(total, whole.inputs.square().mean())
    shard = whole.shard(slice(0, 2)).split(2)
    assert [part.share for part in shard] == [pytest.approx(1 / 6)] * 2


def test_named_terms_are_divided_by_the_valid_targets_of_the_step():
    terms = Custom(named)(batch(6).inputs, batch(6), torch.tensor(12))
    assert terms.total.item() == pytest.approx(55 / 12)
    assert float(terms.parts["reconstruction"]) == pytest.approx(0.75 * 55 / 12)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda: torch.zeros(3), r"returned a tensor of \[3\]: return its mean"),
        (lambda: None, "returned a NoneType: return a scalar tensor"),
        (lambda: {"loss": 1}, "returned a dict"),
        (lambda: LossTerms(torch.zeros(()), {"loss": 0.0}), "names a term `loss`"),
        (lambda: LossTerms(torch.zeros(()), {"kl": torch.zeros(2)}), r"kl has the shape \[2\]"),
        (lambda: LossTerms(torch.zeros(2)), r"total has the shape \[2\]"),
    ],
)
def test_any_other_return_is_refused(returned, message):
    with pytest.raises(ConfigError, match=message):
        Custom(lambda outputs, batch, n_valid: returned())(None, batch(), torch.tensor(1))


def test_terms_that_change_their_names_are_refused():
    names = iter(["kl", "kl", "other"])
    loss = Custom(lambda outputs, batch, n_valid: LossTerms(torch.zeros(()), {next(names): 0.0}))
    for _ in range(2):
        loss(None, batch(), torch.tensor(1))
    with pytest.raises(ConfigError, match="return the same terms in every step"):
        loss(None, batch(), torch.tensor(1))


def test_a_callable_with_other_arguments_is_refused():
    with pytest.raises(ConfigError, match=r"cannot be called with \(outputs, batch, n_valid\)"):
        Custom(lambda outputs, targets: outputs)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_it_gets_half_precision_outputs_in_fp32_wherever_they_are():
    low = torch.ones(2, dtype=torch.bfloat16)
    found = widen({"a": (low, [low]), "b": Pair(low, torch.ones(1, dtype=torch.int64)), "c": None})
    assert found["a"][0].dtype == found["a"][1][0].dtype == found["b"].first.dtype == torch.float32
    assert isinstance(found["b"], Pair)
    assert found["b"].second.dtype == torch.int64
    assert found["c"] is None


def test_a_loss_of_half_precision_outputs_is_computed_in_fp32():
    outputs = torch.tensor([[1.0], [0.0078125]], dtype=torch.bfloat16)  # in bf16, 1 + 2^-14 is 1
    total = Custom(scalar)(outputs, batch(2), torch.tensor(2)).total
    assert total.item() == (1 + 2**-14) / 2


def test_an_evaluation_weights_scalars_by_samples_and_not_by_valid_targets():
    ignored = torch.tensor([1, -100, -100, -100])
    sums = [Custom(scalar).sums(each.inputs, each) for each in (batch(2, torch.ones(2).long()), batch(4, ignored))]
    mean = Custom(scalar).metrics({name: (sums[0][name] + sums[1][name]).numpy() for name in sums[0]})
    assert mean["loss"] == pytest.approx((0 + 1 + 0 + 1 + 4 + 9) / 6)


def test_an_evaluation_averages_losses_and_terms_and_its_own_metrics():
    class Loss:
        couples_samples = True

        def __call__(self, outputs, batch, n_valid):
            return named(outputs, batch, n_valid)

        def metrics(self, outputs, batch):
            return {"largest": outputs.amax()}

    loss = Custom(Loss())
    assert loss.couples_samples
    first, second = batch(2), batch(4)
    sums = [loss.sums(each.inputs, each) for each in (first, second)]
    found = loss.metrics({name: (sums[0][name] + sums[1][name]).numpy() for name in sums[0]})
    assert found["loss"] == pytest.approx((0 + 1 + 0 + 1 + 4 + 9) / 6)
    assert found["kl"] == pytest.approx(0.25)
    assert found["largest"] == pytest.approx((2 * 1 + 4 * 3) / 6)


def test_a_ranks_own_mean_is_by_samples_for_a_scalar_and_by_targets_for_terms():
    ids = torch.tensor([1, -100, -100, 1])
    shard = batch(8, ids.repeat(2)).shard(slice(0, 2))  # a quarter of the samples, and 1 of 4 valid targets
    by_samples, by_targets = Custom(scalar), Custom(named)
    for loss in (by_samples, by_targets):
        loss(shard.inputs, shard, torch.tensor(4))
    assert by_samples.own_factor(shard) == pytest.approx(4)
    assert by_targets.own_factor(shard) == pytest.approx(4)
    uneven = batch(8, ids.repeat(2)).shard(slice(1, 3))
    assert by_samples.own_factor(uneven) == pytest.approx(4)
    assert by_targets.own_factor(uneven) == pytest.approx(4 / 1), "no valid target: divided as by one"
