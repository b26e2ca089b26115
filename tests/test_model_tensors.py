"""The tensors of a model are those that a walk finds, whatever changes the model, and are found once until then."""

import gc
from collections.abc import Callable
from weakref import ref

import pytest
import torch
from torch import nn

from stabletrain.model_tensors import ModelTensors, tensors_of


def model_of_all_kinds() -> nn.Module:
    """Returns a model with nested modules, a module without tensors, a shared parameter, and buffers."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3))
    model = nn.ModuleDict({"inner": inner, "outer": nn.Linear(3, 3), "list": nn.ParameterList([torch.ones(2)])})
    model["outer"].weight = inner[0].weight
    model.register_buffer("mask", torch.ones(3))
    model.register_buffer("later", None)
    return model


def weight() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3, 3))


def rebind(module: nn.Module, name: str) -> None:
    """Gives a module another dict of tensors, with one more."""
    vars(module)[name] = {**vars(module)[name], "more": weight()}


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a parameter is set": lambda m: setattr(m["inner"][0], "weight", weight()),
    "a parameter is set behind the module's back": lambda m: m["inner"][0]._parameters.update(bias=weight()),
    "a parameter is added to a module without any": lambda m: m["inner"][1]._parameters.update(scale=weight()),
    "a parameter is deleted": lambda m: delattr(m["inner"][2], "weight"),
    "a parameter is None now": lambda m: setattr(m["outer"], "bias", None),
    "a parameter is replaced in the memory of the old one": lambda m: (
        delattr(m["outer"], "bias"),
        setattr(m["outer"], "bias", nn.Parameter(torch.zeros(3))),
    ),
    "a shared parameter is shared no more": lambda m: setattr(m["outer"], "weight", weight()),
    "a list of parameters grows": lambda m: m["list"].append(weight()),
    "a parameter is frozen": lambda m: m["outer"].bias.requires_grad_(False),
    "two parameters change places": lambda m: vars(m["inner"][2])["_parameters"].update(
        weight=m["inner"][2].bias, bias=m["inner"][2].weight
    ),
    "a weight is parametrized": lambda m: nn.utils.parametrizations.weight_norm(m["inner"][0]),
    "a buffer is set": lambda m: setattr(m, "mask", torch.zeros(3)),
    "a buffer that was None is set": lambda m: setattr(m, "later", torch.zeros(3)),
    "a buffer is added to a module without any": lambda m: m["outer"].register_buffer("count", torch.zeros(3)),
    "a buffer is deleted": lambda m: delattr(m["inner"][2], "running_mean"),
    "a module is added": lambda m: m.add_module("new", nn.Linear(3, 3)),
    "a module is added to a module without any": lambda m: m["inner"][1].add_module("new", nn.Linear(3, 3)),
    "a module is replaced": lambda m: m["inner"].__setitem__(0, nn.Linear(3, 3)),
    "a module is deleted": lambda m: m["inner"].__delitem__(2),
    "the parameters are in another dict": lambda m: rebind(m["outer"], "_parameters"),
    "the buffers are in another dict": lambda m: rebind(m["outer"], "_buffers"),
    "the modules are in another dict": lambda m: vars(m["inner"]).update(_modules={"0": nn.Linear(3, 3)}),
}


def walked(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[torch.Tensor]]:
    parameters = [*model.parameters()]
    return parameters, [each for each in parameters if each.requires_grad], [*model.buffers()]


def assert_as_walked(found: ModelTensors, model: nn.Module) -> None:
    pairs = zip((found.parameters, found.trained, found.buffers), walked(model), strict=True)
    assert all([*map(id, mine)] == [*map(id, theirs)] for mine, theirs in pairs)


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_model_is_noticed(change):
    model = model_of_all_kinds()
    found = tensors_of(model)
    assert_as_walked(found, model)
    CHANGES[change](model)
    assert tensors_of(model) is found
    assert_as_walked(found, model)


def test_tensors_are_found_once(monkeypatch):
    model = model_of_all_kinds()
    found = tensors_of(model)
    monkeypatch.setattr(ModelTensors, "_walk", lambda self: pytest.fail("the model was walked again"))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
        parameter.grad = torch.ones_like(parameter)
    model.train(mode=False)
    found.find()


def test_a_tuple_is_another_object_only_if_its_tensors_changed():
    model = model_of_all_kinds()
    found = tensors_of(model)
    parameters, trained, buffers = found.parameters, found.trained, found.buffers
    model.mask = torch.zeros(3)
    found.find()
    assert found.parameters is parameters
    assert found.trained is trained
    assert found.buffers is not buffers
    buffers = found.buffers
    model["outer"].bias.requires_grad_(False)
    found.find()
    assert found.parameters is parameters
    assert found.trained is not trained
    assert found.buffers is buffers


class Chosen(nn.Module):
    """A module that shows some of its parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shown = nn.Linear(3, 3), nn.Linear(3, 3), 1

    def named_parameters(self, *args, **kwargs):
        return [*super().named_parameters(*args, **kwargs)][: self.shown]


def test_a_module_that_walks_in_its_own_way_is_asked_each_time():
    model = Chosen()
    found = tensors_of(model)
    model.shown = 2
    found.find()
    assert_as_walked(found, model)
    assert len(found.parameters) == 2


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_module_has_tensors_too():
    model = nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.BatchNorm1d(3))
    found = tensors_of(model)
    assert_as_walked(found, model)
    model[0].weight.requires_grad_(False)
    found.find()
    assert_as_walked(found, model)
    assert len(found.parameters) == 4


def test_a_model_is_freed_with_what_keeps_its_tensors():
    model = model_of_all_kinds()
    gone = ref(model)
    found = tensors_of(model)
    del model, found
    gc.collect()
    assert gone() is None
