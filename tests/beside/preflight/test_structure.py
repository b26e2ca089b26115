"""Parameters, groups and modes: what is said of one fault of each kind, and nothing of what only looks like one."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.beside.preflight.structure import check, structure_of
from tests.beside.preflight.plain import Plain, said


class Stale(Plain):
    """A layer is replaced after the optimizer was made, by one of another size."""

    def make_optimizers(self):
        made = super().make_optimizers()
        self.model[2] = nn.Linear(8, 2)
        return made

    def loss(self, batch):
        return F.mse_loss(self.model(batch[0])[:, :1], batch[1])


class LeftOut(Plain):
    """A bias is in no group."""

    def make_optimizers(self):
        return [torch.optim.SGD([self.model[0].weight, self.model[0].bias, self.model[2].weight], lr=0.1)]


class Twice(Plain):
    """Two optimizers update the last layer after one backward pass."""

    def make_optimizers(self):
        return [*super().make_optimizers(), torch.optim.SGD(self.model[2].parameters(), lr=0.1)]


class InTurn(Twice):
    """Two optimizers have the last layer, each with a backward pass of its own."""

    def step(self, batch):
        for optimizer in self.optimizers:
            self.zero_grad()
            loss = self.backward(batch)
            optimizer.step()
        self.schedule()
        return loss


class Hidden(Plain):
    """The last layer is kept in a plain list."""

    def make_model(self):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        model.layers = [nn.Linear(8, 1)]
        return model

    def loss(self, batch):
        return F.mse_loss(self.model.layers[0](self.model(batch[0])), batch[1])


class Unused(Plain):
    """A layer that the loss does not use."""

    def make_model(self):
        model = super().make_model()
        model.add_module("more", nn.Linear(8, 8))
        return model

    def loss(self, batch):
        return F.mse_loss(self.model[:3](batch[0]), batch[1])


class SomeBatches(Unused):
    """The layer is used by the last batch of an epoch alone."""

    def loss(self, batch):
        hidden = self.model[:2](batch[0])
        if torch.equal(batch[0], self.batch(2)[0]):
            hidden = self.model.more(hidden)
        return F.mse_loss(self.model[2](hidden), batch[1])


class LongEpoch(Unused):
    """The layer is not used by the first batches of a long epoch."""

    epoch = 1000


class ByHand(Unused):
    """The layer has no gradient, and the loop itself moves it."""

    def schedule(self):
        with torch.no_grad():
            self.model.more.weight.mul_(0.9)
            self.model.more.bias.add_(0.1)


class Dead(Plain):
    """No unit of a ReLU is active."""

    def make_model(self):
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        nn.init.constant_(model[0].bias, -100.0)
        return model


class ZeroHead(Plain):
    """The last layer begins at 0: no gradient reaches the first at first."""

    def make_model(self):
        model = super().make_model()
        nn.init.zeros_(model[2].weight)
        return model


class Language(Plain):
    """An embedding and a head of its size."""

    def make_model(self):
        model = nn.Sequential(nn.Embedding(5, 8), nn.Dropout(0.5), nn.Linear(8, 5, bias=False))
        self.tie(model)
        return model

    def tie(self, model):
        model[2].weight = model[0].weight

    def batch(self, step, rank=0):
        tokens = (torch.arange(4) + step) % 5
        return tokens, (tokens + 1) % 5

    def loss(self, batch):
        return F.cross_entropy(self.model(batch[0]), batch[1])


class Copied(Language):
    """The head is a copy of the embedding."""

    def tie(self, model):
        model[2].weight = nn.Parameter(model[0].weight.detach().clone())


class SameMemory(Language):
    """Head and embedding are two parameters in the same memory."""

    def tie(self, model):
        model[2].weight.data = model[0].weight.data


class Zeros(Language):
    """Head and embedding both begin at 0, and were never tied."""

    def tie(self, model):
        nn.init.zeros_(model[0].weight)
        nn.init.zeros_(model[2].weight)


class Evaluating(Language):
    """An evaluation at the end of an epoch leaves the model in eval mode."""

    def schedule(self):
        super().schedule()
        if self.position == 3:
            self.model.eval()


class NoDropout(Language):
    """Eval mode in which nothing behaves differently."""

    def make_model(self):
        model = super().make_model()
        model[1].p = 0.0
        return model.eval()


class OwnMode(nn.Module):
    """Reads its mode, as modules with functional dropout do."""

    def __init__(self, matters):
        super().__init__()
        self.matters, self.layer = matters, nn.Linear(6, 1)

    def forward(self, x):
        return self.layer(F.dropout(x, 0.5, self.training and self.matters))


class OwnDropout(Plain):
    """A class of the user's own with dropout, in eval mode."""

    matters = True

    def make_model(self):
        return nn.Sequential(OwnMode(self.matters)).eval()


class OwnDropoutOff(OwnDropout):
    """The same without dropout: the mode makes no difference."""

    matters = False


FAULTS = {
    Stale: (
        "the optimizers hold 2 parameters that are not the model's, and 2 of the model's 4 are in no group (2.weight, "
        "2.bias): they were replaced after the optimizer was made",
        ("2.weight", "2.bias", "optimizers.0.param_groups[0].params[2]", "optimizers.0.param_groups[0].params[3]"),
        "make the optimizer after the last change",
    ),
    LeftOut: (
        "in no group of an optimizer, so never updated: 2.bias (1 of 4 trainable parameters)",
        ("2.bias",),
        "give them to the optimizer",
    ),
    Twice: (
        "updated twice a step with the same gradient, by optimizers.0 and optimizers.1: 2.weight, 2.bias",
        ("2.weight", "2.bias"),
        "leave them out of one of the two",
    ),
    Hidden: (
        "the loss depends on layers[0].weight, layers[0].bias, and PyTorch does not see them: they are in a plain "
        "list, dict or attribute, so that they are never trained, saved or moved to a device",
        ("layers[0].weight", "layers[0].bias"),
        "keep layers in nn.ModuleList",
    ),
    Unused: (
        "no gradient in all 3 batches of an epoch, as the loss does not use them: more.weight, more.bias (2 "
        "parameters)",
        ("more.weight", "more.bias"),
        "use them in forward",
    ),
    Dead: (
        "the gradient is exactly 0 in all 3 batches of an epoch, also with random values in place of weights that "
        "begin at 0: 0.weight, 0.bias, 2.weight (3 parameters); a factor is 0, or no unit behind them is active",
        ("0.weight", "0.bias", "2.weight"),
        "look for a factor of 0",
    ),
    Copied: (
        "2.weight equals 0.weight in all 40 values and is another parameter: a copy has split tied weights, which "
        "training moves apart",
        ("2.weight", "0.weight"),
        "assign the parameter itself, after all copies: 2.weight = 0.weight",
    ),
    SameMemory: (
        "2.weight and 0.weight are two parameters in the same memory: each step updates it twice",
        ("2.weight", "0.weight"),
        "assign the parameter itself",
    ),
    Evaluating: (
        "the model is in eval mode from step 4 on: dropout does nothing (1)",
        ("model", "1"),
        "call model.train()",
    ),
    OwnDropout: ("the model is in eval mode: OwnMode.forward reads self.training (0)", ("model", "0"), "model.train()"),
}


@pytest.mark.parametrize("loop", FAULTS, ids=lambda loop: loop.__name__)
def test_a_fault_is_told_with_its_places_and_what_to_do(loop):
    text, places, fix = FAULTS[loop]
    found = said(check, loop)
    assert (found.verdict, found.text) == ("fault", text)
    assert set(found.places) == set(places)
    assert fix in found.fix


@pytest.mark.parametrize("loop", [Plain, SomeBatches, ZeroHead, Language, Zeros, NoDropout])
def test_nothing_is_said_of_a_clean_loop(loop):
    assert said(check, loop).verdict == "passed"


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (LongEpoch, "no gradient in the first 32 batches"),
        (ByHand, "no gradient, and changed all the same"),
        (OwnDropoutOff, "the model is in eval mode: OwnMode.forward reads self.training"),
        (InTurn, "in two optimizers, which is right only if each has a backward pass of its own"),
    ],
)
def test_what_may_be_meant_is_a_note(loop, text):
    found = said(check, loop)
    assert found.verdict == "note"
    assert found.text.startswith(text)


@pytest.mark.parametrize("left_out", [("0.weight", "0.bias"), ("0.weight",), ("0.bias", "2.weight", "2.bias")])
def test_leaving_out_most_of_the_model_is_a_note(left_out):
    class Part(Plain):
        def make_optimizers(self):
            trained = [each for name, each in self.model.named_parameters() if name not in left_out]
            return [torch.optim.SGD(trained, lr=0.1)]

    found = said(check, Part)
    assert (found.verdict, found.places) == ("note", left_out)


def test_a_parameter_in_no_group_that_the_step_itself_changes_is_a_note():
    class ByHand(LeftOut):
        def step(self, batch):
            loss = super().step(batch)
            with torch.no_grad():
                self.model[2].bias -= 0.1
            return loss

    found = said(check, ByHand)
    assert (found.verdict, found.places) == ("note", ("2.bias",))
    assert found.text.startswith("in no group of an optimizer, and changed all the same, by something else: 2.bias")


class Centers(Plain):
    """The loss has learned numbers of its own, in an attribute of the loop."""

    def __init__(self):
        super().__init__()
        self.centers = nn.Embedding(3, 1)

    def loss(self, batch):
        return super().loss(batch) + (self.model(batch[0]) - self.centers.weight[0]).square().mean()


def test_parameters_of_the_loss_that_no_optimizer_holds_are_found_by_their_name_in_the_loop():
    found = said(check, Centers)
    assert (found.verdict, found.places) == ("fault", ("centers.weight",))
    assert found.text == (
        "the loss depends on centers.weight, which is not in the model and in no optimizer: never updated"
    )
    assert found.fix.startswith("give them to an optimizer")


def test_parameters_of_the_loss_that_something_trains_are_a_note():
    class ByHand(Centers):
        def step(self, batch):
            loss = super().step(batch)
            with torch.no_grad():
                self.centers.weight -= 0.1 * self.centers.weight.grad
            return loss

    class ByAnother(Centers):
        def __init__(self):
            super().__init__()
            self.another = torch.optim.SGD(self.centers.parameters(), lr=0.1)

    for loop in (ByHand, ByAnother):
        found = said(check, loop)
        assert (found.verdict, found.places) == ("note", ("centers.weight",))
        assert "right only if they are another network's, or not to be trained" in found.text


def test_parameters_of_another_network_are_a_note():
    class Generator(Plain):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(self.model, nn.Linear(1, 20), nn.Linear(20, 20), nn.Linear(20, 1))
            self.optimizers = self.make_optimizers()
            self.schedulers = []
            self.critic = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1, bias=False))

        def loss(self, batch):
            return self.critic(self.model(batch[0])).mean()

    found = said(check, Generator)
    assert (found.verdict, {*found.places}) == ("note", {"critic.0.weight", "critic.0.bias", "critic.1.weight"})


@pytest.mark.parametrize("loop", [LeftOut, Copied, SameMemory], ids=lambda loop: loop.__name__)
def test_model_and_optimizers_alone_show_it_too(loop):
    made = loop()
    [found] = structure_of(made.model, made.optimizers)
    text, places, _ = FAULTS[loop]
    assert (found.verdict, found.text, set(found.places)) == ("fault", text, set(places))


def test_a_copied_model_is_stale_without_a_loss():
    loop = Plain()
    [found] = structure_of(copy.deepcopy(loop.model), loop.optimizers)
    assert found.verdict == "fault"
    assert found.text.startswith("the optimizers hold 4 parameters that are not the model's, and 4 of the model's 4")


def test_an_extra_parameter_of_the_optimizer_is_a_note_without_a_loss():
    loop = Plain()
    loop.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    [found] = structure_of(loop.model, loop.optimizers)
    assert (found.verdict, found.places) == ("note", ("optimizers.0.param_groups[1].params[0]",))


def test_a_parameter_twice_in_an_optimizer():
    loop = Plain()
    loop.optimizers[0].param_groups.append({"params": [loop.model[2].bias], "lr": 0.1})
    [found] = structure_of(loop.model, loop.optimizers)
    assert (found.verdict, found.places) == ("fault", ("2.bias",))
    assert found.text == "twice in the groups of optimizers.0, so updated twice a step: 2.bias"


def test_frozen_parts_may_be_in_eval_mode_and_a_single_norm_is_a_note():
    def model():
        return nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 1))

    frozen, norm, part = model(), model(), model()
    frozen[0].requires_grad_(False).eval()
    norm[0][1].eval()
    part[0].eval()
    verdicts = {}
    for name, each in {"frozen": frozen, "norm": norm, "part": part}.items():
        parameters = [parameter for parameter in each.parameters() if parameter.requires_grad]
        [found] = structure_of(each, [torch.optim.SGD(parameters, lr=0.1)])
        verdicts[name] = found.verdict, found.places
    assert verdicts == {"frozen": ("passed", ()), "norm": ("note", ("0.1",)), "part": ("fault", ("0.1",))}


def test_layers_that_begin_as_copies_of_each_other_are_not_tied():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    [found] = structure_of(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    assert found.verdict == "passed"


def test_nothing_is_changed():
    loop = Copied()
    before, numbers = copy.deepcopy(loop.model.state_dict()), torch.get_rng_state()
    structure_of(loop.model, loop.optimizers)
    assert all(torch.equal(value, before[name]) for name, value in loop.model.state_dict().items())
    assert torch.equal(numbers, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in loop.model.parameters())
