"""Whole weights for replays: what they need in memory, and gathering that an error on one rank does not interrupt."""

from collections import Counter

import pytest
import torch

from stabletrain.checkpoint.snapshots import Snapshots
from stabletrain.parallel import whole
from stabletrain.parallel.fsdp import FSDP
from stabletrain.parallel.ranks import Ranks
from stabletrain.parallel.whole import WEIGHTS_IN_REPLAY, Gather, GatheredState, NotEnoughMemory, WholeState
from stabletrain.records import TrainState
from tests.monitors.watched import tiny_gpt
from tests.tools.fake_card import as_if_on_a_card


class Shard:
    """A rank's rows of a tensor of `shape`."""

    def __init__(self, shape, local):
        self.shape, self._local = torch.Size(shape), local

    def element_size(self):
        return self._local.element_size()

    def to_local(self):
        return self._local


@pytest.fixture
def sharded(group_of_one):
    """A sharded model, and its weights before it was sharded."""
    model = tiny_gpt()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    FSDP(group_of_one).shard(model)
    return model, before, group_of_one


@pytest.fixture
def three(monkeypatch):
    """Three ranks, each of which sends what `sent[rank]` lists; this process is rank 0 and its own sends count too."""
    sent = {1: [], 2: []}

    def gather(receive, send, group):
        parts = receive.view(3, -1)
        parts[0] = send
        for rank, waiting in sent.items():
            part = waiting.pop(0).flatten().view(torch.uint8)
            parts[rank, : part.numel()] = part

    monkeypatch.setattr(whole, "all_gather_tensor", gather)
    monkeypatch.setattr(whole, "host_group", lambda count: None)
    return sent


RANKS = Ranks(0, 3, 0, launched=True)


def test_shards_of_different_sizes_are_put_together(three):
    """Of four rows three ranks have two, two and none; of one row, one, none and none."""
    full, short = torch.arange(12.0).view(4, 3), torch.tensor([7.0], dtype=torch.float64)
    three[1], three[2] = [full[2:], short[:0]], [full[:0], short[:0]]
    targets = {"full": torch.zeros(4, 3), "short": torch.zeros(1, dtype=torch.float64), "more": torch.ones(1)}
    Gather({"full": Shard((4, 3), full[:2]), "short": Shard((1,), short)}, targets, RANKS).run()
    assert torch.equal(targets["full"], full)
    assert torch.equal(targets["short"], short)
    assert targets["more"] == 1


def test_an_error_is_raised_only_after_every_tensor_was_exchanged(three):
    full = torch.arange(6.0)
    three[1], three[2] = [full[2:4], full[2:4]], [full[4:], full[4:]]
    targets = {"a": torch.zeros(5), "b": torch.zeros(6)}  # the first target has another shape
    gather = Gather({name: Shard((6,), full[:2]) for name in targets}, targets, RANKS)
    with pytest.raises(RuntimeError, match="size"):
        gather.run()
    assert three == {1: [], 2: []}, "no rank waits for this one"
    assert torch.equal(targets["b"], full)


def test_a_model_that_lacks_a_parameter_is_refused_before_anything_is_sent():
    with pytest.raises(ValueError, match="the model built for the replay lacks 'a'"):
        Gather({"a": Shard((2,), torch.zeros(1))}, {"b": torch.zeros(2)}, RANKS)


def test_the_gathered_model_is_whole_and_the_rng_state_is_unchanged(sharded):
    model, before, ranks = sharded
    states = GatheredState(model, lambda: None, tiny_gpt, ranks)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    states.check()
    states.prepare()
    found = states.gather()
    assert torch.equal(torch.rand(3), expected)
    assert {type(parameter) for parameter in found.parameters()} == {torch.nn.Parameter}
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.state_dict().items())


def test_of_the_older_state_only_weights_are_gathered_and_only_from_the_host(sharded):
    model, before, ranks = sharded
    moments = {name: {"exp_avg": tensor} for name, tensor in model.named_parameters()}
    live = {"model": dict(model.state_dict()), "optimizer": {"state": moments}, "step": 3}
    snapshots = Snapshots()
    snapshots.take(3, live, TrainState(model, torch.optim.SGD(model.parameters())))
    tree = snapshots.newest(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    states = GatheredState(model, lambda: tree, tiny_gpt, ranks)
    states.prepare_older()
    found = states.gather_older()
    assert found.keys() == {"model", "step"}
    assert found["step"] == 3
    assert found["model"].keys() == before.keys()
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in before.items())


def test_without_an_older_state_nothing_is_gathered(sharded, monkeypatch):
    model, _, ranks = sharded
    calls = Counter()
    monkeypatch.setattr(Gather, "run", lambda self: calls.update(["run"]))
    states = GatheredState(model, lambda: None, tiny_gpt, ranks)
    states.prepare_older()
    assert states.gather_older() is None
    assert not calls


def test_a_whole_model_needs_no_memory_and_is_given_as_it_is():
    model, tree = tiny_gpt(), {"step": 1}
    states = WholeState(model, lambda: tree)
    states.check()
    states.prepare()
    states.prepare_older()
    assert states.gather() is model
    assert states.gather_older() is tree


@pytest.mark.parametrize("enough", [True, False])
def test_the_ranks_of_a_machine_share_its_memory(sharded, monkeypatch, enough):
    """On a CPU: the replays' copies, the older weights and the buffers, on each of three ranks."""
    model, _, ranks = sharded
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    largest = 4 * max(parameter.numel() for parameter in model.parameters())
    needed = 3 * ((WEIGHTS_IN_REPLAY + 1) * weights + 2 * largest)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(whole, "free_host_memory", lambda: needed if enough else needed - 1)
    states = GatheredState(model, lambda: None, tiny_gpt, ranks)
    if enough:
        states.check()
        return
    text = f"replays need the whole weights on every rank, {needed / 1e9:.3g} GB on the host, for the 3 ranks of this "
    with pytest.raises(NotEnoughMemory, match=text):
        states.check()


@pytest.mark.parametrize("enough", [True, False])
def test_memory_that_pytorch_has_reserved_and_does_not_use_counts_as_free(monkeypatch, enough):
    """On a card that training has filled, PyTorch holds all memory, used or not."""
    with as_if_on_a_card():
        model = tiny_gpt().to("cuda")
        needed = WEIGHTS_IN_REPLAY * 4 * sum(parameter.numel() for parameter in model.parameters())
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 10**9))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5000)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5000 + needed - 1000 - (not enough))
        states = GatheredState(model, lambda: None, tiny_gpt, Ranks())
        if enough:
            states.check()
            return
        with pytest.raises(NotEnoughMemory, match="GB on the card, but only"):
            states.check()
