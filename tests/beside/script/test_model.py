"""The model of an optimizer: the smallest module that holds its parameters, or one made of several."""

import torch
from torch import nn

from stabletrain.beside.script.model import model_of


def test_it_is_the_smallest_module_that_holds_all_and_of_wrappers_the_outermost():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapper = nn.Sequential(inner)
    larger = nn.ModuleList([wrapper, nn.Linear(2, 2)])
    assert model_of([*inner.parameters()]) is wrapper
    assert model_of([*larger.parameters()]) is larger
    assert model_of([*inner[0].parameters()]) is inner[0]


def test_else_it_is_made_of_several_and_of_the_tensors_in_none():
    class Encoder(nn.Linear):
        pass

    parts, alone = [Encoder(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)], torch.zeros(3, requires_grad=True)
    trained = [alone, *(parameter for part in parts for parameter in part.parameters())]
    made = model_of(trained)
    assert {id(each) for each in made.parameters()} == {id(each) for each in trained}
    assert sorted(name for name, _ in made.named_parameters()) == [
        "BareTensors.0", "Encoder.bias", "Encoder.weight",
        "Linear1.bias", "Linear1.weight", "Linear2.bias", "Linear2.weight",
    ]  # fmt: skip
