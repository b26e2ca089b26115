"""After a restore, training continues bitwise as if uninterrupted; what does not fit is named."""

import copy
import json

import pytest
import torch
from torch import nn

from stabletrain.checkpoint.capture import _home, capture, restore
from stabletrain.checkpoint.snapshots import Snapshots
from stabletrain.checkpoint.tree import Piece, flatten, to_host, unflatten
from stabletrain.errors import ConfigError
from stabletrain.records import TrainState


class Net(nn.Module):
    """Shared weights, a BatchNorm with its counters, a convolution whose memory may be channels_last."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs):
        return self.head(self.norm(self.conv(self.embed(inputs).transpose(1, 2))).mean(-1))


class Counter:
    def __init__(self, window=()):
        self.window = torch.tensor(window)

    def state_dict(self):
        return {"window": self.window, "n": len(self.window)}

    def load_state_dict(self, state, /):
        self.window = state["window"]


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95)),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), amsgrad=True, foreach=False, capturable=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
}


def begin(kind="adamw", seed=0, width=8):
    torch.manual_seed(seed)
    model = Net(width)
    with_decay = [p for p in model.parameters() if p.ndim >= 2]
    without = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": with_decay, "weight_decay": 0.1, "peak_lr": 3e-4},
        {"params": without, "weight_decay": 0.0},
    ]
    return TrainState(model, OPTIMIZERS[kind](groups))


def train(state, steps):
    for _ in range(steps):
        torch.manual_seed(state.step)
        inputs = torch.randint(0, 11, (4, 6))
        state.optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(state.model(inputs), inputs[:, 0]).backward()
        state.optimizer.step()
        state.step += 1


def through_disk(tree):
    tensors, skeleton = flatten(to_host(tree))
    return unflatten(json.loads(json.dumps(skeleton)), tensors)


def everything(state):
    """Model, moments, counters and groups as one flat list to compare bit for bit."""
    packed = state.optimizer.state_dict()
    flat = dict(state.model.state_dict())
    flat |= {f"{i}/{k}": v for i, values in packed["state"].items() for k, v in values.items()}
    flat |= {f"group{i}/{k}": v for i, g in enumerate(packed["param_groups"]) for k, v in g.items()}
    return flat


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            assert (value.dtype, value.device) == (b[name].dtype, b[name].device), name
            assert torch.equal(value, b[name]), name
        else:
            assert value == b[name], name
            assert type(value) is type(b[name]), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "trained"])
def test_training_goes_on_bitwise(kind, fresh):
    straight = begin(kind)
    train(straight, 3)
    straight.skipped = [(5, 9)]
    saved = through_disk(capture(straight, {"guard": Counter([1.0, 2.0])}))
    resumed, guard = begin(kind, seed=1), Counter()
    if not fresh:
        train(resumed, 5)
    restore(saved, resumed, {"guard": guard})
    assert_same(everything(resumed), everything(straight))
    assert resumed.step == 3
    assert resumed.skipped == [(5, 9)]
    assert torch.equal(guard.window, torch.tensor([1.0, 2.0]))
    train(straight, 4)
    train(resumed, 4)
    assert_same(everything(resumed), everything(straight))


def test_a_snapshot_can_be_restored_twice():
    state, guard = begin(), Counter([1.0])
    train(state, 2)
    snapshot = to_host(capture(state, {"guard": guard}))
    expected = copy.deepcopy(everything(state))
    for _ in range(2):
        train(state, 3)
        guard.window.fill_(9.0)
        restore(snapshot, state, {"guard": guard})
        assert_same(everything(state), expected)
        assert torch.equal(guard.window, torch.tensor([1.0]))
        guard.window.fill_(7.0)


def test_state_that_was_not_there_shares_no_memory_with_the_snapshot():
    state = begin()
    train(state, 1)
    held = state.optimizer.state[next(state.model.parameters())]
    held["trace"] = torch.ones(1)  # of another shape than the parameter
    snapshot = to_host(capture(state, {}))
    for _ in range(2):
        del held["trace"]
        restore(snapshot, state, {})
        held = state.optimizer.state[next(state.model.parameters())]
        assert held["trace"].item() == 1.0
        held["trace"].fill_(7.0)


def test_restoring_writes_into_the_memory_that_is_there():
    state = begin()
    train(state, 2)
    pointers = [p.data_ptr() for p in state.model.parameters()]
    moments = [v.data_ptr() for s in state.optimizer.state.values() for v in s.values()]
    snapshot = to_host(capture(state, {}))
    train(state, 1)
    restore(snapshot, state, {})
    assert [p.data_ptr() for p in state.model.parameters()] == pointers
    assert [v.data_ptr() for s in state.optimizer.state.values() for v in s.values()] == moments


def test_moments_that_did_not_exist_then_are_gone_again():
    state = begin()
    snapshot = to_host(capture(state, {}))
    train(state, 1)
    restore(snapshot, state, {})
    assert not state.optimizer.state


def test_a_frozen_parameter_has_no_moments_and_needs_none():
    state = begin()
    state.model.conv.weight.requires_grad_(False)
    train(state, 2)
    resumed = begin(seed=1)
    restore(through_disk(capture(state, {})), resumed, {})
    assert_same(everything(resumed), everything(state))


def test_moments_belong_to_names_not_positions():
    def two(order):
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in order})
        return TrainState(model, torch.optim.Adam(model.parameters()))

    state = two("ab")
    loss = state.model["a"].weight.sum() + 5 * state.model["b"].weight.sum()
    loss.backward()
    state.optimizer.step()
    other = two("ba")
    restore(through_disk(capture(state, {})), other, {})
    for name in "ab":
        now = other.optimizer.state[other.model[name].weight]
        assert torch.equal(now["exp_avg"], state.optimizer.state[state.model[name].weight]["exp_avg"])


def test_new_moments_lie_in_memory_as_their_parameter_does():
    torch.manual_seed(0)
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    state = TrainState(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 4, 8, 8)).sum().backward()
    state.optimizer.step()
    saved = through_disk(capture(state, {}))
    state.optimizer.state.clear()
    restore(saved, state, {})
    assert state.optimizer.state[model.weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


def test_state_of_another_dtype_than_its_parameter_keeps_it():
    state = begin("sgd")
    weight = state.model.conv.weight
    state.optimizer.state[weight] = {
        "count": torch.tensor(2**53 + 1),
        "exact": torch.tensor(0.1, dtype=torch.float64),
    }
    resumed = begin("sgd")
    restore(through_disk(capture(state, {})), resumed, {})
    back = resumed.optimizer.state[resumed.model.conv.weight]
    assert torch.equal(back["count"], torch.tensor(2**53 + 1))
    assert torch.equal(back["exact"], torch.tensor(0.1, dtype=torch.float64))


def test_how_the_update_is_computed_stays_the_running_programs():
    state, fused = begin("adamw"), begin("fused")
    train(state, 1)
    restore(through_disk(capture(state, {})), fused, {})
    assert fused.optimizer.param_groups[0]["fused"] is True
    train(fused, 1)
    assert fused.optimizer.state[fused.model.conv.weight]["step"] == 2


class Counting(torch.optim.SGD):
    """Counts its steps in an argument, as Prodigy and schedule-free optimizers do."""

    def __init__(self, params, lr, momentum=0.0, count=0):
        super().__init__(params, lr=lr, momentum=momentum)
        self.defaults["count"] = count
        for group in self.param_groups:
            group["count"] = count

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["lr"] = 0.1 / group["count"]
        return super().step(closure)


def counting(**options):
    state = begin("sgd")
    return TrainState(state.model, Counting(state.model.parameters(), lr=0.1, **options))


def test_what_an_optimizer_counts_in_its_arguments_is_restored():
    straight = counting()
    train(straight, 3)
    saved = through_disk(capture(straight, {}))
    for steps in (0, 5):
        resumed = counting()
        train(resumed, steps)
        restore(saved, resumed, {})
        assert resumed.optimizer.param_groups[0]["count"] == 3
    train(straight, 4)
    train(resumed, 4)
    assert_same(everything(resumed), everything(straight))


def test_an_argument_changed_for_the_resumed_run_takes_effect():
    straight = counting()
    train(straight, 3)
    resumed = counting(momentum=0.5, count=100)
    restore(through_disk(capture(straight, {})), resumed, {})
    assert (resumed.optimizer.param_groups[0]["momentum"], resumed.optimizer.param_groups[0]["count"]) == (0.5, 100)


def test_a_checkpoint_of_before_has_no_arguments():
    straight = counting()
    train(straight, 3)
    saved = through_disk(capture(straight, {}))
    del saved["optimizer"]["options"]
    resumed = counting()
    restore(saved, resumed, {})
    assert resumed.optimizer.param_groups[0]["count"] == 0


def test_where_new_state_lives_follows_pytorchs_rule():
    """A step counter is on the CPU unless the kernel reads it on the device; `meta` stands for another device."""
    parameter = torch.zeros(2, device="meta")
    assert _home("step", parameter, {"fused": None, "capturable": False}) == torch.device("cpu")
    for group in ({"fused": True}, {"capturable": True}):
        assert _home("step", parameter, group) == parameter.device
    assert _home("exp_avg", parameter, {}) == parameter.device


def test_names_are_the_models_own_when_it_is_compiled_in_place():
    state = begin()
    names = list(state.model.state_dict())
    state.model.compile()
    assert list(capture(state, {})["model"]) == names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: setattr(s.model, "extra", nn.Linear(2, 2)),
            "'extra.weight' is in the model, not in the checkpoint",
        ),
        (lambda s: delattr(s.model, "norm"), "'norm.weight' is in the checkpoint, not in the model"),
        (
            lambda s: setattr(s.model, "conv", nn.Conv1d(8, 8, 5)),
            r"'conv.weight' is \[8, 8, 3\] in the checkpoint and \[8, 8, 5\] in the model",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_named_and_left_alone(change, message):
    state = begin()
    train(state, 1)
    saved = through_disk(capture(state, {}))
    other = begin(seed=1)
    change(other)
    other.optimizer = torch.optim.AdamW(other.model.parameters())
    before = copy.deepcopy(other.model.state_dict())
    with pytest.raises(ConfigError, match=f"{message}.*resume with the options the run began with"):
        restore(saved, other, {})
    assert_same(dict(other.model.state_dict()), dict(before))


def test_an_optimizer_that_does_not_fit_is_named():
    state = begin()
    saved = through_disk(capture(state, {}))
    with pytest.raises(ConfigError, match="optimizer SGD: it holds the state of AdamW"):
        restore(saved, begin("sgd"), {})
    one_group = begin()
    one_group.optimizer = torch.optim.AdamW(one_group.model.parameters())
    with pytest.raises(ConfigError, match="has 2 parameter groups, the optimizer 1"):
        restore(saved, one_group, {})
    moved = begin()
    first, second = moved.optimizer.param_groups
    second["params"].append(first["params"].pop(0))
    with pytest.raises(ConfigError, match=r"'embed.weight' is in parameter group 0 of only one"):
        restore(saved, moved, {})
    moved = begin()
    first, second = moved.optimizer.param_groups
    first["params"].append(second["params"].pop())
    with pytest.raises(ConfigError, match=r"' is in parameter group 0 of only one"):
        restore(saved, moved, {})


def test_state_of_another_shape_is_replaced_and_not_spread_over_the_old_one():
    state = begin()
    train(state, 1)
    name, weight = next(iter(state.model.named_parameters()))
    state.optimizer.state[weight]["trace"] = torch.ones(1)
    saved = through_disk(capture(state, {}))
    state.optimizer.state[weight]["trace"] = torch.zeros(3)
    restore(saved, state, {})
    assert torch.equal(state.optimizer.state[weight]["trace"], torch.ones(1)), name


class Refusing(Counter):
    """A part that refuses every state, with one kind of error."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def load_state_dict(self, state):
        raise self.kind("wrong")


@pytest.mark.parametrize("kind", [LookupError, TypeError, ValueError, AttributeError, RuntimeError])
def test_whatever_a_part_says_of_a_state_that_does_not_fit_is_told_in_one_line(kind):
    saved = through_disk(capture(begin(), {"guard": Counter([1.0])}))
    with pytest.raises(ConfigError, match="state of 'guard' does not fit"):
        restore(saved, begin(), {"guard": Refusing(kind)})


def test_a_part_that_does_not_fit_is_named():
    saved = through_disk(capture(begin(), {"guard": Counter([1.0])}))
    with pytest.raises(ConfigError, match="has no state of 'scaler'"):
        restore(saved, begin(), {"scaler": Counter()})
    saved["parts"]["guard"] = {}
    with pytest.raises(ConfigError, match="state of 'guard' does not fit"):
        restore(saved, begin(), {"guard": Counter()})


def test_an_optimizer_over_strange_parameters_is_refused():
    state = begin()
    state.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ConfigError, match=r"a parameter of shape \[3\] that the model does not have"):
        capture(state, {})


def test_a_sharded_model_is_gathered_and_cut_up_again(tmp_path):
    """FSDP's DTensors, in a world of one: plain tensors in the tree, DTensors in the model."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    distributed.init_process_group("gloo", store=distributed.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def sharded(seed):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
            fully_shard(model, mesh=mesh)
            return TrainState(model, torch.optim.AdamW(model.parameters()))

        def step(state):
            state.model(torch.ones(3, 4)).sum().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()

        state, resumed = sharded(0), sharded(1)
        step(state)
        tree = through_disk(capture(state, {}))
        assert type(tree["model"]["0.weight"]) is torch.Tensor
        restore(tree, resumed, {})
        step(state)
        step(resumed)
        for a, b in zip(state.model.parameters(), resumed.model.parameters(), strict=True):
            assert isinstance(b, DTensor)
            assert torch.equal(a.full_tensor(), b.full_tensor())
        snapshots = Snapshots()
        snapshots.take(2, capture(state, {}), state)
        assert snapshots.newest(1) is None
        assert isinstance(snapshots.newest(2)["model"]["0.weight"], Piece), "as it is kept"
    finally:
        distributed.destroy_process_group()
