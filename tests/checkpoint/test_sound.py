"""A checkpoint whose checksums are right is read only if it can be the state of a run."""

import copy
import re

import pytest
import torch
from torch import nn

from stabletrain.checkpoint.capture import capture
from stabletrain.checkpoint.sound import check_skeleton, check_state, check_tensors
from stabletrain.checkpoint.tree import flatten
from stabletrain.monitors.rolling import RollingStats
from stabletrain.records import TrainState
from stabletrain.stability.guard import RollbackGuard
from stabletrain.trainer.history import History
from tests.checkpoint.given import Run


def state():
    """A state after an update, its parts, and its tree."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = TrainState(model, torch.optim.AdamW(model.parameters()), step=20, executed_steps=20)
    model(torch.randn(5, 3)).sum().backward()
    state.optimizer.step()
    parts = {"guard": RollbackGuard(), "history": History(val={"val/loss": 2.0}), "recent": RollingStats()}
    parts["guard"].limits.loss._spikes.load_state_dict({"values": [1.0, 2.0], "judged": 2, "spikes": 0})
    return state, parts, capture(state, parts)


def skeleton_of(tree):
    """The content of `state.json`, and dtypes and shapes of the tensors."""
    model, training = {"model": tree["model"]}, {key: each for key, each in tree.items() if key != "model"}
    (tensors, one), (more, other) = flatten(model["model"]), flatten(training)
    names = {"float32": "F32", "int64": "I64"}
    both = {**tensors, **more}
    dtypes = {name: names[str(tensor.dtype).removeprefix("torch.")] for name, tensor in both.items()}
    return {"model": one, "training": other}, dtypes, {name: list(tensor.shape) for name, tensor in both.items()}


def put(tree, path, value):
    """Puts a value at a path; `None` as the value's class removes the key."""
    *above, last = path.split(".")
    for key in above:
        tree = tree[int(key) if isinstance(tree, list) else key]
    tree[int(last) if isinstance(tree, list) else last] = value


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("training", [], "training is [], not an object"),
        ("model", None, "model is null, not an object"),
        *[("training.step", value, "training/step is") for value in ("x", None, 65.5, -5, True, 21, 2**40)],
        *[("training.tick", value, "training/tick is") for value in ("x", None, -5)],
        ("training.skipped", [["a", 1]], "training/skipped/0/0"),
        ("training.skipped", [[5, 3]], "no range"),
        ("training.skipped", [[1, 2, 3]], "no range"),
        ("training.parts", None, "training/parts is null"),
        ("training.parts.guard", 5, "training/parts/guard is 5"),
        ("training.optimizer", None, "training/optimizer is null"),
        ("training.optimizer.param_groups", {}, "param_groups is {}"),
        ("training.optimizer.param_groups.0.params", [5], "params/0 is 5"),
        ("training.optimizer.state", [], "optimizer/state is []"),
        ("training.optimizer.kind", 5, "optimizer/kind is 5"),
    ],
)
def test_absurd_values_are_refused(path, value, says):
    skeleton, _, _ = skeleton_of(state()[2])
    check_skeleton(skeleton, 20, parted=False)
    put(skeleton, path, value)
    with pytest.raises(ValueError, match=re.escape(says)):
        check_skeleton(skeleton, 20, parted=False)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("model.0~weight", {"$tensor": "1.num_batches_tracked"}, "model/0.weight holds I64"),
        ("model.0~weight", 5, "model/0.weight is missing, or no tensor"),
        ("training.optimizer.state.0~weight.exp_avg", {"$tensor": "optimizer/state/0.bias/exp_avg"}, "shape, [4, 3]"),
        ("training.optimizer.state.0~weight.exp_avg", {"$tensor": "1.num_batches_tracked"}, "holds I64, not floats"),
        ("training.optimizer.state.0~weight.exp_avg", None, "shape, [4, 3]"),
        ("training.optimizer.state.0~weight.step", 5, "another step"),
        ("training.optimizer.state.0~weight", {}, ""),
    ],
)
def test_tensors_that_are_no_weights_or_moments_are_refused(path, value, says):
    skeleton, dtypes, shapes = skeleton_of(state()[2])
    check_tensors(skeleton, dtypes, shapes)
    put({"training": {"optimizer": {"state": Dotted(skeleton["training"]["optimizer"]["state"])}},
         "model": Dotted(skeleton["model"])}, path, value)  # fmt: skip
    if says:
        with pytest.raises(ValueError, match=re.escape(says)):
            check_tensors(skeleton, dtypes, shapes)
    else:  # as before the first update
        check_tensors(skeleton, dtypes, shapes)


class Dotted:
    """A dict whose keys are written with `~` in place of dots."""

    def __init__(self, own):
        self.own = own

    def __getitem__(self, key):
        return self.own[key.replace("~", ".")]

    def __setitem__(self, key, value):
        self.own[key.replace("~", ".")] = value


@pytest.mark.parametrize(("key", "dtype"), [("step", "BOOL"), ("step", "I64"), ("exp_avg", "F64")])
def test_moments_of_another_dtype_than_the_others_are_refused(key, dtype):
    skeleton, dtypes, shapes = skeleton_of(state()[2])
    with pytest.raises(ValueError, match=f"another {key}"):
        check_tensors(skeleton, {**dtypes, f"optimizer/state/0.bias/{key}": dtype}, shapes)


def test_moments_that_one_parameter_lacks_are_refused():
    skeleton, dtypes, shapes = skeleton_of(state()[2])
    del skeleton["training"]["optimizer"]["state"]["0.bias"]["exp_avg"]
    with pytest.raises(ValueError, match="another exp_avg"):
        check_tensors(skeleton, dtypes, shapes)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("parts.guard.consecutive", "x", 'parts/guard/consecutive is "x", where the run has 0'),
        ("parts.guard.consecutive", -5, "parts/guard/consecutive is -5"),
        ("parts.guard.trouble", True, "parts/guard/trouble is true"),
        ("parts.guard.skips", None, "parts/guard/skips is null, where the run has an object"),
        ("parts.guard.lowered", [0, 0], "parts/guard/lowered has 2 values, where the run has 3"),
        ("parts.guard.lowered", [0, 0, "x"], "parts/guard/lowered/2"),
        ("parts.guard.known", ["x"], "parts/guard/known/0"),
        ("parts.guard.limits.loss.window.values", ["x"], "values/0"),
        ("parts.guard.limits.loss.window.values", {}, "values is an object"),
        ("parts.guard.limits.loss.window.judged", 1.5, "judged is 1.5"),
        ("parts.guard.limits.loss.first", [None], "first/0 is null"),
        ("parts.recent.active", [1.0, "x"], "active/1"),
        ("parts.recent.raised", [5], "raised/0 is 5"),
        ("parts.history.val", {"val/loss": "x"}, "val/val/loss"),
        ("parts.history.best_loss", torch.ones(2), "is a tensor [2] of float32"),
        ("model.0~weight", torch.ones(4, 3, dtype=torch.int8), "model/0.weight holds int8"),
        ("model.1~num_batches_tracked", torch.tensor(1.0), "model/1.num_batches_tracked holds float32"),
        ("model.0~weight", 5, "model/0.weight is no tensor"),
        ("optimizer", {}, "optimizer/kind is missing"),
    ],
)
def test_a_state_that_the_run_cannot_have_is_refused(path, value, says):
    live, parts, tree = state()
    tree = copy.deepcopy(tree)
    fresh = {"guard": RollbackGuard(), "history": History(), "recent": RollingStats()}
    for now in (parts, fresh):
        check_state(tree, live.model, now)
    put({**tree, "model": Dotted(tree["model"])} if path.startswith("model") else tree, path, value)
    for now in (parts, fresh):
        with pytest.raises(ValueError, match=re.escape(says)):
            check_state(tree, live.model, now)


@pytest.mark.parametrize("key", ["model", "optimizer", "step", "skipped", "parts"])
def test_a_state_without_a_key_is_refused(key):
    live, parts, tree = state()
    del tree[key]
    with pytest.raises(ValueError, match=f"{key} is missing"):
        check_state(tree, live.model, parts)


def test_a_users_own_part_may_hold_anything():
    class Own:
        def state_dict(self):
            return {"count": 0}

    live, parts, tree = state()
    tree["parts"]["own"] = {"count": "x", "more": None}
    check_state(tree, live.model, {**parts, "own": Own()})


def test_a_rejected_checkpoint_is_skipped_until_it_is_written_again(tmp_path, capsys):
    run = Run(tmp_path)
    for step in (10, 20):
        run.save(step)
    newest = run.newest()
    assert run.checkpoints.accept(newest, "")
    assert not run.checkpoints.accept(newest, f"{newest.path} is damaged: parts is null")
    assert capsys.readouterr().err.count("checkpoint skipped") == 1
    assert (run.newest().step, run.preferred().step) == (10, 10)
    run.save(20)
    assert run.newest().step == 20
