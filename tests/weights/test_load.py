"""Tensors put into a model by name: what fits, what does not, and which names are the same."""

import pytest
import torch
from torch import nn

from stabletrain.errors import ConfigError
from stabletrain.weights.load import fit, load_, without_wrappers


def net(width=4, classes=3):
    """A small network with buffers, and values that no initialisation gives."""
    model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, classes))
    for number, tensor in enumerate(model.state_dict().values()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 10 * number)
    return model


class Tied(nn.Module):
    """An embedding and a head that share their matrix, which the state dict holds twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight


def same(model, tensors):
    return all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())


def test_weights_and_buffers_are_copied_into_the_tensors_of_the_model():
    source, model = net(), nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    held = [id(tensor) for tensor in model.parameters()]
    found = fit(model, source.state_dict())
    assert found.whole
    assert found.differences() == ""
    load_(model, found)
    assert same(model, source.state_dict())
    assert [id(tensor) for tensor in model.parameters()] == held
    assert model[1].running_mean.tolist() == [40, 41, 42, 43]
    source[0].weight.data.zero_()
    assert model[0].weight.abs().sum() > 0, "no memory is shared with the source"


def test_values_take_the_dtype_of_the_parameter():
    narrow = {
        name: value.bfloat16() if value.is_floating_point() else value for name, value in net().state_dict().items()
    }
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    load_(model, fit(model, narrow))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model[0].weight.tolist() == narrow["0.weight"].tolist()
    low = nn.Linear(2, 4, dtype=torch.bfloat16)
    load_(low, fit(low, {"weight": net()[0].weight.data, "bias": net()[0].bias.data}))
    assert low.weight.dtype == torch.bfloat16
    assert torch.equal(low.weight, net()[0].weight.bfloat16())


def test_each_kind_of_difference_is_counted_and_named():
    given = {**net(classes=5).state_dict(), "extra": torch.ones(1)}
    del given["1.running_var"]
    given["0.weight"] = given["0.weight"].to(torch.int8)  # quantised: its scale is elsewhere
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = fit(model, given)
    assert not found.whole
    assert found.differences() == (
        "1 missing from the source: 1.running_var; 1 not in the model: extra; 3 of another shape or type: 0.weight "
        "torch.int8 in the source, torch.float32 in the model, 2.weight [5, 4] in the source, [3, 4] in the model, "
        "2.bias [5] in the source, [3] in the model"
    )
    load_(model, found)
    for name in ("0.weight", "1.running_var", "2.weight", "2.bias"):
        assert torch.equal(model.state_dict()[name], before[name])
    many = fit(model, {f"layer{i}": torch.ones(1) for i in range(8)})
    assert "8 not in the model: layer0, layer1, layer2 and 5 more" in many.differences()


@pytest.mark.parametrize(
    "wrapped", ["module.{}", "_orig_mod.{}", "module._orig_mod.{}", "_orig_mod.module.{}", "module.module.{}"]
)
def test_the_prefixes_of_wrapped_models_are_removed_if_more_names_then_fit(wrapped):
    given = {wrapped.format(name): value for name, value in net().state_dict().items()}
    assert fit(net(), given).whole
    del given[wrapped.format("2.bias")]
    assert fit(net(), given).missing == ["2.bias"], "the others still fit"
    own = nn.ModuleDict({"module": net()})
    assert fit(own, own.state_dict()).whole, "a model may have a part of that name"


def test_wrappers_are_removed_wherever_they_stand():
    assert without_wrappers("module._orig_mod.blocks.0._checkpoint_wrapped_module.up.weight") == "blocks.0.up.weight"
    assert without_wrappers("blocks.0.module.weight") == "blocks.0.module.weight"


def test_a_tied_tensor_needs_only_one_of_its_names():
    values = torch.arange(6.0).view(3, 2)
    for given in ({"embedding.weight": values}, {"head.weight": values}, dict.fromkeys(Tied().state_dict(), values)):
        model = Tied()
        found = fit(model, given)
        assert found.whole
        load_(model, found)
        assert torch.equal(model.head.weight, values)
    apart = fit(Tied(), {"embedding.weight": values, "head.weight": values + 1})
    assert "head.weight differs from embedding.weight, which is the same tensor" in apart.differences()


def test_weights_that_are_not_finite_are_refused_and_the_model_is_unchanged():
    given = {name: value.clone() for name, value in net().state_dict().items()}
    given["2.weight"][1, 2] = torch.nan
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"1 of its tensors are not finite: 2.weight"):
        load_(model, fit(model, given))
    assert same(model, before)


def test_what_modules_save_besides_tensors_comes_along():
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    source, model = Counting(2, 2), Counting(2, 2)
    source.count = 7
    load_(model, fit(model, source.state_dict()))
    assert model.count == 7
    plain = fit(model, nn.Linear(2, 2).state_dict())
    assert plain.whole, "a file of tensors cannot have it"
