"""What a model and its data must agree on: sizes taken from the data, refusals, and how ranks share batches."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from stabletrain.config.make import Choice
from stabletrain.errors import ConfigError
from stabletrain.parallel.ranks import Ranks
from stabletrain.records import Batch
from stabletrain.stability.objective import CrossEntropy
from stabletrain.trainer.contract import (
    DEFAULT_VAL_BATCHES,
    checked,
    context_length,
    cost,
    make_model,
    output_note,
    units,
    validation,
    vocabulary,
)


class Sized(nn.Module):
    """Records the sizes it was given."""

    def __init__(self, vocab_size=1, block_size=1, num_classes=1, in_channels=1, width=1):
        super().__init__()
        self.sizes = {"vocab_size": vocab_size, "block_size": block_size}
        self.sizes |= {"num_classes": num_classes, "in_channels": in_channels}
        self.layer = nn.Linear(width, 1)


class Frozen(nn.Module):
    """Has nothing to train."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1).requires_grad_(False)


class Counted:
    """Three numbered validation batches; the last is the smaller one."""

    vocab_size = 256

    def batches(self, size, split):
        assert split == "val"
        return 3

    def batch(self, step, size, split):
        assert 0 <= step < 3
        rows = size if step < 2 else 1
        return Batch(torch.full((rows, 2), step), torch.full((rows, 2), step))


class Endless:
    """Does not say how many batches it has; one class a sample."""

    def batch(self, step, size, split):
        return Batch(torch.full((size, 2), float(step)), torch.full((size,), step))


def choice_of(target, **keys):
    return Choice("model", {"_target_": f"{__name__}.{target}", **keys})


def model_of(data, target="Sized", **keys):
    return make_model(choice_of(target, **keys), SimpleNamespace(**data), CrossEntropy())


# ---- the model


def test_every_null_is_filled_from_the_data_and_a_number_is_kept():
    data = {"vocab_size": 100, "block_size": 32, "num_classes": 10, "in_channels": 3}
    model = model_of(data, vocab_size=None, block_size=None, num_classes=None, in_channels=None)
    assert model.sizes == data
    model = model_of(data, vocab_size=128, block_size=64, num_classes=10, in_channels=3)
    assert model.sizes == {"vocab_size": 128, "block_size": 64, "num_classes": 10, "in_channels": 3}


def test_a_key_that_the_model_does_not_have_is_not_given_to_it():
    assert model_of({"vocab_size": 100, "block_size": 32}, block_size=None).sizes["vocab_size"] == 1


@pytest.mark.parametrize(
    ("key", "wanted", "needed"),
    [("vocab_size", 99, 100), ("block_size", 31, 32), ("num_classes", 9, 10), ("in_channels", 4, 3)],
)
def test_a_size_that_does_not_fit_the_data_is_refused(key, wanted, needed):
    with pytest.raises(ConfigError, match=f"model.{key}={wanted} does not fit the data, which needs {needed}"):
        model_of({key: needed}, **{key: wanted})


def test_a_size_that_is_null_and_not_in_the_data_is_refused():
    with pytest.raises(ConfigError, match="model.vocab_size is null, and the data has no vocab_size: set"):
        model_of({}, vocab_size=None)
    assert model_of({}, vocab_size=7).sizes["vocab_size"] == 7


def test_what_is_no_model_to_train_is_refused():
    with pytest.raises(ConfigError, match="builtins.dict gives a dict, not an nn.Module"):
        make_model(Choice("model", {"_target_": "builtins.dict"}), SimpleNamespace(), CrossEntropy())
    with pytest.raises(ConfigError, match="Frozen has no parameters to train"):
        model_of({}, target="Frozen")


# ---- the model's output


class Scored(NamedTuple):
    """An output with other tensors before its logits."""

    aux: torch.Tensor
    logits: torch.Tensor


RETURNS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda logits: logits,
    "object": lambda logits: SimpleNamespace(logits=logits, loss=None),
    "named tuple": lambda logits: Scored(logits[:1], logits),
    "tuple": lambda logits: (logits, {}),
    "dict": lambda logits: {"logits": logits},
    "list": lambda logits: [logits],
    "object without": lambda logits: SimpleNamespace(logits=None),
    "tuple without": lambda logits: ({}, logits),
    "flat": lambda logits: logits[:, 0],
}


class Answering(nn.Module):
    """Returns its logits in one of the ways of `RETURNS`; `reads` looks at a value, `fails` raises an error."""

    def __init__(self, returns, reads=False, fails=False):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.returns, self.reads, self.fails, self.calls = returns, reads, fails, 0

    def forward(self, inputs):
        self.calls += 1
        if self.reads and inputs.max().item() > 100:
            raise ValueError("inputs are too large")
        if self.fails:
            raise ValueError("fails")
        return RETURNS[self.returns](self.net(inputs))


def answering(returns, **keys):
    """A model that returns its logits in this way, accepted as a run accepts it."""
    torch.manual_seed(0)
    return make_model(choice_of("Answering", returns=returns, **keys), Endless(), CrossEntropy())


@pytest.mark.parametrize(
    ("returns", "note"),
    [
        ("object", "model output of type SimpleNamespace: its .logits are taken as the logits"),
        ("named tuple", "model output of type Scored: its .logits are taken as the logits"),
        ("tuple", "model output of type tuple: its first element is taken as the logits"),
    ],
)
@pytest.mark.parametrize("reads", [False, True], ids=["", "reads values"])
def test_logits_are_taken_out_of_an_object_or_a_tuple(returns, note, reads):
    model, plain = answering(returns, reads=reads), answering("tensor")
    assert output_note(model) == note
    assert model.state_dict().keys() == plain.state_dict().keys()
    for each in (model, copy.deepcopy(model)):
        each.eval()
        assert torch.equal(each(torch.ones(3, 2)), plain.eval()(torch.ones(3, 2)))


@pytest.mark.parametrize("returns", ["tensor", "tuple"])
@pytest.mark.parametrize("reads", [False, True], ids=["", "reads values"])
def test_the_trial_changes_nothing(returns, reads):
    torch.manual_seed(0)
    untried = Answering(returns, reads)
    drawn = torch.rand(3)
    model = answering(returns, reads=reads)
    assert torch.equal(torch.rand(3), drawn), "no random number was drawn"
    assert (model.calls, model.training) == (0, True)
    before = untried.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_returns_a_tensor_gets_no_hook():
    model = answering("tensor")
    assert not model._forward_hooks
    assert output_note(model) == ""


@pytest.mark.parametrize(
    ("returns", "gave"),
    [
        ("dict", "a dict"),
        ("list", "a list"),
        ("object without", "a SimpleNamespace"),
        ("tuple without", "a tuple"),
        ("flat", "[2]"),
    ],
)
def test_an_output_without_logits_is_refused_with_what_is_expected(returns, gave):
    with pytest.raises(ConfigError) as refusal:
        answering(returns)
    assert str(refusal.value) == (
        f"model: forward() gave {gave} for targets of [2]: logits are [batch, classes], or [batch, time, vocab] for "
        "text; return them, an object with .logits, or a tuple that begins with them; for another loss than "
        "cross-entropy choose an objective: mse, bce or your own"
    )


def test_a_model_that_fails_in_the_trial_is_left_to_training():
    model = answering("tuple", fails=True)
    assert output_note(model) == ""
    with pytest.raises(ValueError, match="fails"):
        model(torch.ones(3, 2))
    model.fails = False
    assert isinstance(model(torch.ones(3, 2)), torch.Tensor), "its logits are taken"


def test_the_vocabulary_is_the_models_then_the_datas_then_that_of_the_first_embedding():
    plain = nn.Sequential(nn.Embedding(50, 2), nn.Embedding(7, 2))
    assert vocabulary(plain, SimpleNamespace()) == 50
    assert vocabulary(plain, SimpleNamespace(vocab_size=40)) == 40
    said = nn.Linear(2, 2)
    said.vocab_size = 30
    assert vocabulary(said, SimpleNamespace(vocab_size=40)) == 30
    assert vocabulary(nn.Linear(2, 2), SimpleNamespace()) is None


def test_the_context_length_is_the_models_then_the_datas():
    model, data = nn.Linear(2, 2), SimpleNamespace(block_size=16)
    assert context_length(model, data) == 16
    assert context_length(model, object()) is None
    model.block_size = 8
    assert context_length(model, data) == 8


# ---- units


@pytest.mark.parametrize(
    ("modality", "data", "expected"),
    [
        ("images", Counted(), ("img", "image")),
        ("text", Counted(), ("tok", "byte")),
        ("text", SimpleNamespace(vocab_size=50257), ("tok", "token")),
        (None, Endless(), ("sample", "sample")),
        (None, Counted(), ("tok", "byte")),
    ],
)
def test_what_the_pace_counts_and_a_loss_is_per(modality, data, expected):
    assert units(modality, data) == expected


def test_the_cost_is_of_a_sample_and_none_if_unknown():
    linear = nn.Linear(2, 5)
    assert cost(linear, Endless()) == (3 * 2 * 2 * 5, 1)
    assert cost(nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 5)), Counted()) == (2 * 3 * 2 * 4 * 5, 2)
    assert cost(linear, SimpleNamespace()) is None


# ---- batches


def test_a_batch_that_keeps_the_contract_is_returned_as_it_is():
    given = Batch(torch.zeros(2, 4), torch.zeros(2, dtype=torch.uint8))
    assert checked(given) is given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.zeros(2), torch.zeros(2)), "batch\\(\\) returned a tuple: return stabletrain.records.Batch"),
        (None, "batch\\(\\) returned a NoneType"),
        ((2, 3), "a batch has 2 inputs and 3 targets"),
    ],
)
def test_a_batch_that_breaks_the_contract_is_refused(given, message):
    if isinstance(given, tuple) and isinstance(given[0], int):
        inputs, targets, *dtype = given
        given = Batch(torch.zeros(inputs, 4), torch.zeros(targets, dtype=dtype[0] if dtype else torch.int64))
    with pytest.raises(ConfigError, match=message):
        checked(given)


@pytest.mark.parametrize("name", ["inputs", "targets"])
def test_what_is_no_tensor_is_refused_by_name(name):
    given = Batch(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    object.__setattr__(given, name, [1, 2])
    with pytest.raises(ConfigError, match=f"data: {name} is a list, not a tensor"):
        checked(given)


# ---- validation


def numbers(data, limit, *, rank=0, world_size=1):
    """For each batch a rank takes: its number, and whether its targets count."""
    batches = validation(data, 4, limit, Ranks(rank, world_size))
    return [(int(batch.inputs.flatten()[0]), batch.counted != 0) for batch in batches]


def test_one_process_takes_all_batches_in_order_or_the_first_few():
    assert numbers(Counted(), None) == [(0, True), (1, True), (2, True)]
    assert numbers(Counted(), 2) == [(0, True), (1, True)]
    assert numbers(Counted(), 99) == [(0, True), (1, True), (2, True)]
    assert len(numbers(Endless(), None)) == DEFAULT_VAL_BATCHES
    assert len(numbers(Endless(), 3)) == 3


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("limit", [None, 1, 2])
def test_ranks_take_equally_many_and_count_each_batch_once(world_size, limit):
    taken = [numbers(Counted(), limit, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert {len(each) for each in taken} == {-(-(limit or 3) // world_size)}
    counted = sorted(number for each in taken for number, counts in each if counts)
    assert counted == [*range(limit or 3)]
    repeated = {number for each in taken for number, counts in each if not counts}
    assert repeated <= {(limit or 3) - 1}


def test_the_progress_of_an_evaluation_is_shown_before_each_batch_and_at_the_end():
    shown = []
    for _ in validation(Counted(), 4, None, Ranks(), lambda done, total: shown.append((done, total))):
        shown.append("batch")
    assert shown == [(0, 3), "batch", (1, 3), "batch", (2, 3), "batch", (3, 3)]


def test_a_repeated_batch_is_marked_as_one_that_does_not_count():
    *before, last = validation(Counted(), 4, None, Ranks(1, 2))
    assert [batch.counted for batch in before] == [None]
    assert last.counted == 0
    assert last.targets.shape == last.inputs.shape == (1, 2)


def test_a_validation_batch_that_breaks_the_contract_is_refused():
    class Broken(Counted):
        def batch(self, step, size, split):
            return None

    with pytest.raises(ConfigError, match="returned a NoneType"):
        next(validation(Broken(), 4, None, Ranks()))
