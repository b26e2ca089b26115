"""What the loss makes of its batch is followed to the loss functions and the first layers; nothing is changed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.beside.preflight.loop import Loop
from stabletrain.beside.preflight.tracing import LOSSES, running, tensors_of, trace


def traced(loss, batch, model=None):
    model = model or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    loop = Loop(model, [], lambda batch: loss(model, batch), lambda step, rank=0: batch)
    return trace(loop, batch)


X, Y = torch.randn(6, 4), torch.arange(6) % 3


def test_targets_are_followed_through_what_the_loss_does_with_them():
    def loss(model, batch):
        out = model(batch["x"]).float()
        return F.cross_entropy(out, batch["y"].long(), ignore_index=7) + F.mse_loss(out, F.one_hot(batch["y"], 3) * 2.0)

    classes, squared = traced(loss, {"x": X, "y": Y}).uses
    assert (classes.function, classes.sources, classes.raw) == ("cross_entropy", ("batch['y']",), True)
    assert (classes.classes, classes.ignored, classes.predicts) == (3, 7, True)
    assert (squared.function, squared.sources, squared.raw) == ("mse_loss", ("batch['y']",), False)
    assert classes.line.startswith(__file__)


def test_targets_of_the_loss_itself_or_of_the_model_come_from_no_batch():
    def loss(model, batch):
        out = model(batch[0])
        made = F.cross_entropy(out, torch.zeros(6, dtype=torch.long)), F.mse_loss(out, torch.ones_like(batch[0][:, :3]))
        with torch.no_grad():
            soft = model(batch[0] + 1)
        return sum(made) + F.mse_loss(out - soft, soft)

    uses = traced(loss, (X, Y)).uses
    assert [each.sources for each in uses] == [(), (), ()]
    assert [each.predicts for each in uses] == [True, True, False]


def test_each_loss_function_of_pytorch_is_followed_but_for_those_without_targets():
    known = {name for name in dir(F) if name.endswith(("_loss", "cross_entropy", "_div", "_with_logits"))}
    without = {"triplet_margin_loss", "triplet_margin_with_distance_loss"}
    assert known - without <= {*LOSSES}
    assert not without & {*LOSSES}
    assert {*LOSSES} - known <= {"linear_cross_entropy"}  # from PyTorch 2.14 on


ONE = torch.ones(6)


@pytest.mark.parametrize(
    ("call", "target"),
    [
        (lambda out, y: F.margin_ranking_loss(out[:, 0], out[:, 1], y - 1), Y - 1),
        (lambda out, y: F.cosine_embedding_loss(out, 2 * out, target=y.sign()), Y.sign()),
        (lambda out, y: nn.HingeEmbeddingLoss()(out[:, 0], y - 1), Y - 1),
        (lambda out, y: nn.MultiMarginLoss()(out, y), Y),
        (lambda out, y: nn.GaussianNLLLoss()(out[:, 0], y.float(), ONE), Y.float()),
    ],
)
def test_targets_are_seen_at_their_place_in_each_loss(call, target):
    [use] = traced(lambda model, batch: call(model(batch[0]), batch[1]), (X, Y)).uses
    assert torch.equal(use.target, target)
    assert use.sources == ("batch[1]",)


LETTERS, LENGTHS = torch.tensor([[2, 1, 1], [2, 2, 0]]), torch.tensor([2, 1])


@pytest.mark.parametrize("letters", [LETTERS, torch.tensor([2, 1, 2])])
@pytest.mark.parametrize("as_module", [False, True])
def test_targets_of_a_ctc_loss_are_the_letters_of_each_row_up_to_its_length(letters, as_module):
    def loss(model, batch):
        logs = model(batch[0]).log_softmax(-1).expand(2, 6, 3).transpose(0, 1)
        call = nn.CTCLoss(blank=0) if as_module else F.ctc_loss
        return call(logs, batch[1], (6, 6), batch[2])

    [use] = traced(loss, (X, letters, LENGTHS)).uses
    assert use.target.tolist() == [[2, 1], [2, 0]]
    assert (use.sources, use.raw, use.classes, use.ignored) == (("batch[1]", "batch[2]"), False, 3, 0)


def test_the_first_layers_are_those_that_get_the_batch_alone():
    def loss(model, batch):
        return model(batch[0] / 2).sum()

    [given] = traced(loss, (X, Y)).inputs
    assert torch.equal(given.value, X / 2)
    assert (given.module, given.sources, given.weight.shape) == ("0", ("batch[0]",), (8, 4))
    normed = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))
    assert traced(loss, (X, Y), normed).inputs == []


def test_an_error_of_the_loss_comes_after_what_was_seen():
    found = traced(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1] + 9), (X, Y))
    assert isinstance(found.error, IndexError)
    assert found.uses[0].target.max() == 11


def test_a_compiled_model_is_not_compiled_for_it():
    def refuses(graph, inputs):
        raise AssertionError("it was compiled")

    model = nn.Linear(4, 3)
    compiled = torch.compile(model, backend=refuses)
    assert len(traced(lambda _, batch: F.cross_entropy(compiled(batch[0]), batch[1]), (X, Y), model).uses) == 1


def test_hooks_are_gone_afterwards_and_names_are_those_of_the_innermost_modules():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()))
    names = []
    with running(model) as modules:
        model[1][0].register_forward_pre_hook(lambda *_: names.append([*modules]))
        model(X)
    assert names == [["", "1", "1.0"]]
    assert not modules
    assert [len(each._forward_pre_hooks) for each in model.modules()] == [0, 0, 0, 1]


def test_tensors_are_found_in_nested_batches():
    found = tensors_of({"a": [X, (Y, "text")], "b": None})
    assert [*found] == ["batch['a'][0]", "batch['a'][1][0]"]
    assert [*tensors_of(X)] == ["batch"]
