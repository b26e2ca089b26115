"""Blocks are found in every kind of model, without knowing it."""

import pytest
from torch import nn
from torchvision.models import resnet18, vit_b_16

from stabletrain.monitors.module_groups import blocks, by_place
from tests.monitors.watched import tiny_gpt, tiny_resnet


def layer():
    return nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())


def test_blocks_of_the_models_here():
    assert [*blocks(tiny_gpt())] == ["blocks.0", "blocks.1"]
    assert [*blocks(tiny_resnet())] == ["stages.0.0", "stages.1.0", "stages.2.0"]


@pytest.mark.slow
def test_blocks_of_others():
    assert [*blocks(resnet18())] == [f"layer{stage}.{i}" for stage in (1, 2, 3, 4) for i in (0, 1)]
    assert [*blocks(vit_b_16())][:2] == ["encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"]
    nested = nn.ModuleDict({"wte": nn.Embedding(3, 2), "h": nn.ModuleList([nn.TransformerEncoderLayer(2, 1)])})
    assert [*blocks(nn.ModuleDict({"transformer": nested}))] == ["transformer.h.0"]


def test_a_stack_of_stacks_of_layers_has_blocks():
    assert [*blocks(nn.Sequential(layer(), layer(), nn.Linear(2, 2)))] == ["0", "1"]


def test_a_model_that_stacks_nothing_is_watched_by_its_children():
    assert [*blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))] == ["0", "1"]
    assert [*blocks(nn.Bilinear(2, 2, 2))] == []


def test_every_parameter_has_one_place():
    model = tiny_gpt()
    places = by_place([name for name, _ in model.named_parameters()], blocks(model))
    assert [*places] == ["embedding", "blocks.0", "blocks.1", "norm", "head"]
    assert sum(len(names) for names in places.values()) == len([*model.parameters()])
    many = nn.Sequential(*(layer() for _ in range(11)))
    assert by_place(["1.0.weight", "10.0.weight"], blocks(many)) == {"1": ["1.0.weight"], "10": ["10.0.weight"]}
