"""Mistakes in a loss of the user's own are one message that names the loss and what to return."""

from functools import partial

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.records import Batch, LossTerms
from stabletrain.stability.objective import Custom

BATCH = Batch(torch.zeros(4, 2), torch.zeros(4))


def called(returned):
    """Calls a loss that returns `returned(outputs)`."""

    def mine(outputs, batch, n_valid):
        return returned(outputs)

    return Custom(mine)(torch.ones(4, 1, requires_grad=True), BATCH, torch.tensor(4))


def terms(total, parts):
    """LossTerms of wrong types, which the type checks of these tests would refuse."""
    made = LossTerms(torch.zeros(()))
    object.__setattr__(made, "total", total)
    object.__setattr__(made, "parts", parts)
    return made


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: x.square()[:, 0], "mine returned a tensor of [4]: return its mean, a scalar, or LossTerms"),
        (lambda x: {"loss": x.mean()}, "mine returned a dict: return a scalar tensor"),
        (lambda x: None, "mine returned a NoneType: return a scalar tensor"),
        (lambda x: 1.0, "mine returned a float: return a scalar tensor"),
        (lambda x: terms(1.0, {}), "mine returned LossTerms(float, dict): use LossTerms(total, {'name': term})"),
        (lambda x: terms(x.mean(), [x]), "mine returned LossTerms(Tensor, list): use LossTerms(total, {"),
        (lambda x: LossTerms(x.mean(), {"each": x}), "mine: each has the shape [4, 1]: return a scalar"),
        (lambda x: LossTerms(x.mean(), {"loss": x.mean()}), "mine names a term `loss`, which is the total"),
        (lambda x: torch.tensor(x.mean().item()), "mine returned a loss without a gradient: compute it from the out"),
    ],
)
def test_a_wrong_return_is_named(returned, message):
    with pytest.raises(ConfigError) as error:
        called(returned)
    assert message in str(error.value)


def test_a_loss_without_a_gradient_is_no_mistake_in_an_evaluation():
    with torch.no_grad():
        assert float(called(lambda x: x.mean()).total) == 1.0


class Measured:
    """A loss whose metrics are given."""

    def __init__(self, found):
        self.found = found

    def __call__(self, outputs, batch, n_valid):
        return outputs.mean()

    def metrics(self, outputs, batch):
        return self.found


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "metrics() of Measured returned a NoneType: return {'name': mean}"),
        ({"each": torch.ones(4)}, "metrics() of Measured: each has the shape [4]: return a mean"),
        ({"loss": 3.0}, "metrics() of Measured: loss is a term of the loss: rename it"),
    ],
)
def test_wrong_metrics_are_named(found, message):
    with torch.no_grad(), pytest.raises(ConfigError) as error:
        Custom(Measured(found)).sums(torch.ones(4, 1), BATCH)
    assert message in str(error.value)


def test_a_loss_with_parameters_is_refused_because_nothing_would_train_them():
    class Learnt(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, outputs, batch, n_valid):
            return self.weight * outputs.mean()

    with pytest.raises(ConfigError, match="Learnt has parameters, which no optimizer would train"):
        Custom(Learnt())


def test_a_function_with_arguments_from_its_yaml_keeps_its_name():
    def mine(outputs, batch, n_valid, delta):
        return None

    objective = Custom(partial(mine, delta=1.0))
    assert objective.name.endswith("mine")
    with pytest.raises(ConfigError, match="mine returned a NoneType"):
        objective(torch.ones(4, 1), BATCH, torch.tensor(4))
