"""Which part of a model plays which role, for models that say so and for those that do not."""

import torch
from torch import nn

from stabletrain.stability.parameter_roles import classifier, embeddings


class Says(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.after = nn.Linear(2, 3), nn.Linear(3, 3)

    def classifier(self):
        return self.out


class HasAForwardOfThatName(Says):
    def classifier(self, x):
        return self.out(x)


class HasAModuleOfThatName(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(2, 3))


def test_a_model_names_its_classifier_itself_else_it_is_the_last_linear_layer():
    says, forward, module = Says(), HasAForwardOfThatName(), HasAModuleOfThatName()
    assert classifier(says) is says.out
    assert classifier(forward) is forward.after
    assert classifier(module) is module.classifier[1]
    assert classifier(nn.Conv2d(1, 1, 1)) is None


def test_embeddings_of_both_kinds_are_found():
    model = nn.ModuleList([nn.Embedding(2, 2), nn.Linear(2, 2), nn.EmbeddingBag(2, 2)])
    assert embeddings(model) == [model[0], model[2]]
    assert all(isinstance(table.weight, torch.Tensor) for table in embeddings(model))
