"""Checks that a withheld step of a user's loop is explained: cause, operation, line of the user's code, samples."""

import importlib
import inspect
import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from stabletrain.errors import TrainingHalted
from stabletrain.forensics.incident_list import incidents
from stabletrain.guard.guard import Guard
from stabletrain.guard.in_code import IN_CODE
from stabletrain.guard.policy import RollbackGuard
from stabletrain.guard.saved_step import replay_loop_step
from tests.guard.given import Loop, batches, bits, network, same
from tests.runs import ROOT, python


def record_of(guard):
    """The newest incident's `diagnosis.json`."""
    return json.loads((guard.incidents[-1].path / "diagnosis.json").read_text())


def here(offset=0):
    """`file:line` of the caller, plus `offset` lines."""
    frame = inspect.currentframe().f_back
    return f"{__file__}:{frame.f_lineno + offset}"


def spoilt(batch, row, value=math.nan):
    """The same batch with one bad input."""
    x, y = batch[0].clone(), batch[1]
    x[row, 1] = value
    return x, y


def test_a_nan_in_the_batch_is_named_with_its_sample(tmp_path):
    loop = Loop(tmp_path)
    data = batches(4)
    loop.run([*data[:2], spoilt(data[2], 5)])
    record = record_of(loop.guard)
    assert (record["cause"], record["kind"], record["step"]) == ("poison_input", "nonfinite", 3)
    assert [sample["index"] for sample in record["samples"]] == [5]
    assert record["fix"] == ["clean sample 5 of the batch"]
    assert [path.name for path, _ in incidents(tmp_path)] == ["step-00000003"]
    assert loop.guard.incidents[0].lines[0].startswith("step 3: poison_input")


def test_in_a_label_it_is_a_label(tmp_path):
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    x, y = torch.randn(6, 4), torch.randn(6)
    y[2] = math.inf
    guard.step(lambda batch: F.mse_loss(model(batch["x"])[:, 0], batch["target"]), batch={"x": x, "target": y})
    assert record_of(guard)["cause"] == "bad_label"
    assert "'target' of the batch holds 1 of 1 values" in guard.incidents[0].verdict


@pytest.mark.parametrize("loss_fn", [F.mse_loss, F.binary_cross_entropy_with_logits, lambda x, y: (x - y).mean()])
def test_an_empty_batch_is_called_empty(tmp_path, loss_fn):
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    for size in (6, 0):
        guard.step(lambda x, y: loss_fn(model(x)[:, 0], y), batch=(torch.randn(size, 4), torch.rand(size)))
    record = record_of(guard)
    assert (record["cause"], record["verdict"]) == ("bad_label", "the batch is empty")
    assert record["fix"][0].startswith("skip an empty batch")
    assert record["also"] == []


def test_an_empty_micro_batch_is_named_by_its_number(tmp_path):
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    for size in (6, 0):
        guard.backward(lambda x: model(x).mean() / 2, batch=torch.randn(size, 4))
    guard.update()
    assert record_of(guard)["verdict"] == "micro-batch 1 is empty"


def test_a_target_out_of_its_range_blames_the_sample(tmp_path):
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    for value in (1.0, 1e30):
        y = torch.full((6,), 1.0)
        y[4] = value
        guard.step(lambda x, y: F.mse_loss(model(x)[:, 0], y), batch=(torch.randn(6, 4), y))
    record = record_of(guard)
    assert (record["cause"], record["fix"][0]) == ("bad_batch", "clean sample 4 of the batch")
    assert record["verdict"].startswith("sample 4 of the batch holds a value of 1e+30 in element 1 of the batch")


def test_a_weight_that_was_never_initialised_halts_the_loop_and_is_named(tmp_path):
    loop = Loop(tmp_path, checksum_every=1)
    torch.nn.init.constant_(loop.model[0].bias, math.nan)
    with pytest.raises(TrainingHalted, match=r"step 1: loss is nan: .* not finite before the first step"):
        loop.run(batches(2))
    record = record_of(loop.guard)
    assert record["cause"] == "uninitialised"
    assert record["fix"][0].startswith("initialise 0.bias")


def test_a_closure_that_cannot_run_again_says_so_and_proposes_nothing_else(tmp_path):
    """As in reinforcement learning, where the forward pass lies before the closure."""
    model = nn.Linear(4, 3)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    for scale in (1.0, math.nan):
        logits = model(torch.randn(6, 4)) * scale
        guard.step(lambda: F.cross_entropy(logits, torch.zeros(6, dtype=torch.long)))  # noqa: B023
    record = record_of(guard)
    assert (record["cause"], record["confidence"]) == ("unknown", 0.0)
    assert record["verdict"].endswith("the closure could not be run again: its forward pass lies before it")
    assert record["fix"] == ["run the forward pass inside the closure: then the operation is named"]


def test_values_that_are_always_nan_are_no_fault(tmp_path):
    """NaN may mark what is missing."""
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)

    def loss(x, y):
        there = ~y.isnan()
        error = (model(x)[:, 0][there] - y[there]).square()
        return (error / (x[:, 0] != 9).float()[there]).mean()

    for step in range(4):
        x, y = torch.randn(6, 4), torch.randn(6)
        y[step] = math.nan
        x[5, 0] = 9.0 if step == 3 else 0.0
        guard.step(loss, batch=(x, y))
    record = record_of(guard)
    assert record["cause"] == "unsafe_op"
    assert record["origin"]["op"] == "aten.div"


def test_a_loss_written_out_in_the_loop_is_named_with_its_line(tmp_path):
    loop = Loop(tmp_path)
    x, y = batches(1)[0]
    for scale in (1.0, 1e5):
        logits = lambda x: loop.model(x) * scale  # noqa: B023, E731 the loop's own variable
        loop.guard.step(
            lambda x, y: -torch.log(torch.softmax(logits(x), -1)[range(8), y]).mean(),  # noqa: B023
            batch=(x, y),
        )
        line = here(-3)
    record = record_of(loop.guard)
    assert (record["cause"], record["origin"]["op"], record["origin"]["module"]) == (
        "unsafe_op",
        "aten.log",
        "objective",
    )
    assert record["origin"]["source"] == line
    assert record["fix"] == [f"{line}: take log(x + eps), or log_softmax instead of log(softmax)"]


class Root(nn.Module):
    """A length: its gradient at 0 is not finite."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return x.square().sum(1).sqrt()

    line = f"{__file__}:{inspect.currentframe().f_lineno - 2}"


def rooted(tmp_path, **options):
    """A guarded model with `Root`, which fails for a sample of zeros, in the backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Dropout(0.2), Root())
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), folder=tmp_path, **options)
    return model, guard


def with_zeros(batch, row):
    """The same batch with a sample of zeros."""
    x, y = batch[0].clone(), batch[1]
    x[row] = 0.0
    return x, y


def fails_at_zeros(x):
    """Returns 0, or NaN if a sample is all zeros."""
    return 0.0 * (1.0 / x.abs().sum(1)).sum()


def distance(model):
    """A regression's loss."""
    return lambda x, y: (model(x) - y).abs().mean()


def test_a_fault_of_the_backward_pass_names_operation_module_line_and_sample(tmp_path):
    model, guard = rooted(tmp_path)
    data = batches(4)
    for batch in [*data[:3], with_zeros(data[3], 6)]:
        guard.step(distance(model), batch=batch)
    record = record_of(guard)
    assert record["cause"] == "unsafe_op"
    assert (record["origin"]["direction"], record["origin"]["module"]) == ("backward", "2")
    assert record["origin"]["source"] == Root.line
    assert [sample["index"] for sample in record["samples"]] == [6]
    replays = record["replays"]
    assert replays["same"]["bitwise_equal_to_reading"] is True
    assert (replays["fp32"]["finite"], replays["fresh_batch"]["finite"]) == (False, True)
    assert "Guard(rollback=True)" in replays["older_state"]["not_run"]


def test_in_a_micro_batch_it_names_the_micro_batch(tmp_path):
    model, guard = rooted(tmp_path, rollback=True)
    data = batches(8)
    data[7] = with_zeros(data[7], 2)
    for step in range(4):
        guard.backward(distance(model), batch=data[2 * step])
        guard.backward(distance(model), batch=data[2 * step + 1])
        guard.update()
    record = record_of(guard)
    assert record["origin"]["source"] == Root.line
    assert record["samples"] == [{"index": 10, "micro_batch": 1, "row": 2}]
    assert record["replays"]["older_state"]["finite"] is False, "older weights fail with this batch too"


def test_a_closure_without_batch_is_explained_as_far_as_it_can_be(tmp_path):
    model, guard = rooted(tmp_path)
    x, y = with_zeros(batches(1)[0], 1)
    guard.step(lambda: distance(model)(x, y))
    record = record_of(guard)
    assert record["origin"]["source"] == Root.line
    assert record["samples"] == []
    assert "pass it as guard.step(closure, batch=...)" in record["replays"]["fresh_batch"]["not_run"]
    assert any(why.startswith("culprit samples: the closure takes no batch") for why in record["not_looked_at"])


def live(model, optimizer):
    """Every bit that a rerun could reach."""
    generators = (torch.get_rng_state(), np.random.get_state()[1], random.getstate())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    attributes = [{k: v for k, v in vars(m).items() if not k.startswith("_")} for m in model.modules()]
    return bits(model, optimizer), generators, gradients, attributes, torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("policy", [None, RollbackGuard(snapshot_every=2, healthy_after=0)], ids=["skip", "rollback"])
def test_an_investigation_puts_everything_back(tmp_path, policy, monkeypatch):
    model, guard = rooted(tmp_path, policy=policy)
    seen = []
    explain = guard._incidents.investigate

    def watched(*arguments):
        before = live(model, guard._loop.optimizer)
        found = explain(*arguments)
        assert found
        after = live(model, guard._loop.optimizer)
        seen.append(None)
        assert same(before[0], after[0])
        assert torch.equal(before[1][0], after[1][0])
        assert np.array_equal(before[1][1], after[1][1])
        assert before[3:] == after[3:]
        for a, b in zip(before[2], after[2], strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        return found

    monkeypatch.setattr(guard._incidents, "investigate", watched)
    data = batches(6)
    for batch in [*data[:5], with_zeros(data[5], 6)]:
        guard.step(distance(model), batch=batch)
    assert seen == [None]
    assert model[2].calls == 6, "a counter of the module has counted the loop's calls only"


def test_a_rerun_that_ends_half_way_leaves_the_generators_alone(tmp_path):
    drawn = []
    for incidents_ in (0, 5):
        model, guard = rooted(tmp_path / str(incidents_), max_incidents=incidents_)
        calls = []

        def loss(x, y):
            calls.append(torch.rand(len(calls) + 1))  # noqa: B023
            if len(calls) > 1:  # noqa: B023
                raise ValueError("only once")
            return distance(model)(x, y)  # noqa: B023

        torch.manual_seed(3)
        guard.step(loss, batch=with_zeros(batches(1)[0], 3))
        assert guard.skipped == 1
        assert (len(calls) > 1) is (incidents_ > 0)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]


def test_the_losses_after_an_incident_are_those_without_the_diagnosis(tmp_path):
    losses = []
    for incidents_ in (0, 5):
        model, guard = rooted(tmp_path / str(incidents_), max_incidents=incidents_)
        data = batches(10)
        data[4] = with_zeros(data[4], 3)
        torch.manual_seed(3)
        losses.append([float(guard.step(distance(model), batch=batch)) for batch in data])
        assert len(guard.incidents) == min(incidents_, 1)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("how", ["closure", "guard"])
def test_an_overflow_of_fp16_is_told_from_a_fault_in_every_precision(tmp_path, how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 3))
    guard = Guard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        folder=tmp_path,
        **({"precision": "fp16"} if how == "guard" else {}),
    )

    def loss(x, y):
        with torch.autocast("cpu", torch.float16, enabled=how == "closure" or torch.is_autocast_enabled("cpu")):
            return F.cross_entropy(model(x), y)

    for step, batch in enumerate(batches(6)):
        if step == 5:
            with torch.no_grad():
                model[0].weight.mul_(3e2)
                model[1].weight.mul_(3e4)
        guard.step(loss, batch=batch)
    record = record_of(guard)
    assert record["cause"] == "fp16_overflow"
    assert (record["origin"]["module"], record["origin"]["dtype"]) == ("1", "float16")
    assert record["replays"]["fp32"]["finite"] is True
    if how == "guard":
        assert "bf16" in record["fix"][0]


def test_a_spike_names_the_batch(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), folder=tmp_path)
    loss = lambda x: model(x).square().mean()  # noqa: E731
    for step in range(20):
        x = torch.randn(8, 4).clamp(-1, 1) * (1 + 1e-2 * torch.randn(8, 1)) + 3.0
        x[4] *= 1e4 if step == 19 else 1.0
        guard.step(loss, batch=(x,))
    record = record_of(guard)
    assert (record["kind"], record["cause"]) == ("spike", "bad_batch")
    assert record["verdict"].startswith("sample 4 of the batch holds a value of")
    assert record["fix"] == ["clean sample 4 of the batch", IN_CODE["clipping="]]


def test_corrupt_moments_are_found(tmp_path):
    loop = Loop(tmp_path, rollback=True)
    loop.run(batches(5))
    state = loop.optimizer.state[loop.model[4].weight]
    state["exp_avg_sq"][0, 0] = math.nan
    loop.run(batches(1))  # the update itself spreads the NaN into a weight: the next step is withheld
    loop.run(batches(1))
    assert not loop.guard.last.applied
    assert record_of(loop.guard)["cause"] == "corrupt_state"


def test_a_closure_that_changes_its_batch_is_not_taken_for_a_hardware_fault(tmp_path):
    loop = Loop(tmp_path)

    def loss(x, y):
        x.mul_(x.abs() < 1e10)
        x[0, 0].clamp_(max=1e30)
        return loop.loss(x / (x[0, 0] != 5), y)

    data = batches(3)
    data[2][0][0, 0] = 5.0
    loop.run(data, loss)
    assert record_of(loop.guard)["cause"] == "unsafe_op"
    assert record_of(loop.guard)["replays"]["same"]["bitwise_equal_to_reading"] is None


def test_the_same_mistake_is_filed_once_and_the_budget_holds(tmp_path, caplog):
    model, guard = rooted(tmp_path, max_incidents=2)
    data = batches(8)
    for number, batch in enumerate(data):
        guard.step(distance(model), batch=with_zeros(batch, 1) if number % 2 else batch)
    assert guard.skipped == 4
    assert len(guard.incidents) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"] * len(caplog.records)
    assert sum("details:" in record.message for record in caplog.records) == 1


def test_an_error_that_a_nan_has_caused_is_explained_and_raised(tmp_path, caplog):
    """PyTorch's binary cross-entropy refuses NaN."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)

    def loss(x, y):
        raised = torch.exp(model(x)[:, 0] * 1e4)
        return F.binary_cross_entropy(raised / raised, y)

    line = f"{__file__}:{loss.__code__.co_firstlineno + 1}"
    before = bits(model)
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        guard.step(loss, batch=(torch.ones(3, 4) * torch.sign(model.weight.detach()), torch.ones(3)))
    assert same(before, bits(model))
    assert "before this RuntimeError, aten.exp in objective gave NaN or Inf" in caplog.text
    assert f"at: {line}" in caplog.text
    assert "called from" not in caplog.text, "the loop itself called it"
    with pytest.raises(ValueError, match="another"):
        guard.step(lambda: (_ for _ in ()).throw(ValueError("another")))
    assert "ValueError" not in caplog.text, "nothing was wrong with the values"


def test_an_error_that_a_nan_in_the_batch_has_caused_names_the_batch(tmp_path, caplog):
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    x = torch.randn(3, 4)
    x[1, 2] = math.nan
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        guard.step(lambda x, y: F.binary_cross_entropy(model(x)[:, 0], y), batch=(x, torch.ones(3)))
    assert "before this RuntimeError, sample 1 of the batch: element 0 of the batch holds 1 of 4 values" in caplog.text


def test_a_batch_that_cannot_be_read_hides_no_error_of_the_closure(tmp_path):
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)

    def loss(x):
        raise ValueError("of the closure")

    with pytest.raises(ValueError, match="of the closure"):
        guard.step(loss, batch=torch.empty(3, 4, device="meta"))


def test_an_autocast_around_the_guard_is_entered_again(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    for number, (x, y) in enumerate(batches(3)):
        root = float(number != 2)  # the derivative of a root has no finite value at 0; the loss is finite
        with torch.autocast("cpu", torch.bfloat16):
            guard.backward(
                lambda x, y, z: F.cross_entropy(out := model(x), y) + (out.sum() * 0 + z).sqrt(),
                batch=(x, y, torch.tensor(root)),
            )
        guard.update()
    record = record_of(guard)
    assert record["replays"]["same"]["bitwise_equal_to_reading"] is True
    assert record["replays"]["same"]["loss"] != record["replays"]["fp32"]["loss"], "bf16 rounds"


def test_a_loss_that_updates_have_driven_up_is_not_blamed_on_the_initial_weights(tmp_path):
    weight = torch.ones(4, requires_grad=True)
    guard = Guard([weight], torch.optim.SGD([weight], lr=1e12), folder=tmp_path)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(8):
        guard.step(lambda: ((x @ weight).square() ** 2).mean())
        if guard.incidents:
            break
    record = record_of(guard)
    assert (record["cause"], record["step"] <= 3) == ("lr_too_high", True)
    assert record["verdict"].startswith("the loss was")


# ---- replay in another process


MODULE = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


def loss(x, y):
    return ((model(x)[:, 0] - y) / (x[:, 0] != 9)).square().mean()
"""

SCRIPT = """
import torch
from mine import loss, model
from stabletrain.guard.guard import Guard

guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), folder="found"{more})
for step in range(6):
    x, y = torch.randn(8, 4), torch.randn(8)
    x[2, 0] = 9.0 if step == 5 else 0.0
    guard.step({closure}, batch=(x, y))
"""


def ran(*arguments, cwd):
    """The exit code and the output of a process of its own."""
    done = python(*arguments, cwd=cwd, PYTHONPATH=str(ROOT))
    return done.returncode, done.stdout + done.stderr


REPLAY = ("-m", "stabletrain.cli.commands", "replay", "found/step-00000006")


@pytest.mark.slow
def test_a_step_whose_closure_can_be_imported_is_replayed_from_its_folder(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(SCRIPT.format(closure="loss", more=""))
    assert ran("script.py", cwd=tmp_path)[0] == 0
    code, text = ran(*REPLAY, cwd=tmp_path)
    assert code == 0, text
    assert "bitwise equal: the step is not finite, as in the run" in text
    (tmp_path / "mine.py").write_text(MODULE.replace("(x[:, 0] != 9)", "(x[:, 0] != 10)"))
    code, text = ran(*REPLAY, cwd=tmp_path)
    assert "fixed by the change in" in text


def test_a_replay_measures_the_gradients_of_the_optimizers_parameters_only(tmp_path, monkeypatch):
    (tmp_path / "partly_trained.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    made = importlib.import_module("partly_trained")
    optimizer = torch.optim.SGD(made.model[3].parameters(), lr=0.1)
    guard = Guard(made.model, optimizer, folder=tmp_path / "found")
    x, y = torch.zeros(8, 4), torch.randn(8)
    for _ in range(40):
        guard.step(made.loss, batch=(x, y))
    guard.step(made.loss, batch=(x, y * 1e6))
    folder = guard.incidents[0].path
    assert replay_loop_step(folder).outcome.bitwise_equal_to_reading
    earlier = json.loads((folder / "step.json").read_text())
    del earlier["trained"]
    (folder / "step.json").write_text(json.dumps(earlier))
    assert replay_loop_step(folder).outcome.grad_norm > guard.last.grad_norm
    monkeypatch.delitem(sys.modules, "partly_trained")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closure", "more", "why"),
    [
        ("lambda x, y: loss(x, y)", "", "the closure is defined in the script itself"),
        ("loss", ", keep_state=False", "Guard(keep_state=False) does not save the weights"),
    ],
)
def test_where_it_cannot_be_the_report_says_why(tmp_path, closure, more, why):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(SCRIPT.format(closure=closure, more=more))
    assert ran("script.py", cwd=tmp_path)[0] == 0
    code, text = ran(*REPLAY, cwd=tmp_path)
    assert (code, why in text) == (2, True), text
    folder = Path(tmp_path, "found/step-00000006")
    assert f"Not possible: {why}" in (folder / "report.md").read_text()
    assert {file.name for file in folder.iterdir()} == {"diagnosis.json", "report.md", "batch.safetensors"}


def test_a_model_with_a_network_in_a_library_names_the_users_own_line(tmp_path):
    from torchvision.ops import FrozenBatchNorm2d

    norm = FrozenBatchNorm2d(3, eps=0.0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Unflatten(1, (3, 1, 1)), norm)
    norm.running_var[1] = 0.0
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    guard.step(lambda x: model(x).mean(), batch=(torch.randn(4, 3),))
    line = here(-1)
    origin = record_of(guard)["origin"]
    assert "torchvision" in origin["source"]
    assert origin["called_from"] == line


def test_network_is_the_same_for_the_same_seed():
    assert same(bits(network(1)), bits(network(1)))


def test_a_closure_that_counts_its_calls_is_no_fault_of_the_machine(tmp_path):
    model, calls = nn.Linear(4, 1), []
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)

    def loss(x):
        calls.append(0)
        return model(x).mean() * (math.nan if len(calls) == 3 else 1.0)

    for _ in range(3):
        guard.step(loss, batch=(torch.ones(2, 4),))
    record = record_of(guard)
    assert record["confidence"] <= 0.6
    assert record["fix"][0].startswith("check that the closure depends on its batch")


@pytest.mark.parametrize("whole", [torch.empty(0), torch.ones(5)], ids=["empty", "constant"])
def test_a_tensor_without_samples_may_be_the_same_in_every_batch(tmp_path, whole):
    loop = Loop(tmp_path)
    *steps, (x, y) = batches(4)
    loop.run([(x, y, whole) for x, y in steps], lambda x, y, whole: loop.loss(x, y) + fails_at_zeros(x))
    loop.run([(with_zeros((x, y), 3)[0], y, whole)], lambda x, y, whole: loop.loss(x, y) + fails_at_zeros(x))
    assert record_of(loop.guard)["replays"]["fresh_batch"]["finite"]


def test_where_the_loop_reuses_the_memory_of_inputs_the_step_is_no_example_of_another_batch(tmp_path):
    loop, buffer = Loop(tmp_path), torch.empty(8, 4)
    *steps, last = batches(4)

    def refilled():
        for x, y in [*steps, with_zeros(last, 3)]:
            yield buffer.copy_(x), y

    loop.run(refilled(), lambda x, y: loop.loss(x, y) + fails_at_zeros(x))
    record = record_of(loop.guard)
    # BatchNorm takes no single sample: the search ends at two.
    assert [sample["index"] for sample in record["samples"]] == [2, 3]
    assert record["replays"]["fresh_batch"]["not_run"].startswith("the loop reuses the memory of a batch")


def test_a_mark_of_missing_values_is_not_blamed_for_another_fault(tmp_path):
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)

    def loss(x, y):
        there = ~y.isnan()
        return ((model(x)[:, 0] - y.nan_to_num()).square() * there / (x[:, 0] != 9)).mean()

    for step in range(3):
        x, y = torch.randn(6, 4), torch.randn(6)
        if step == 2:
            y[1], x[4, 0] = math.nan, 9.0
        guard.step(loss, batch=(x, y))
    record = record_of(guard)
    assert (record["cause"], record["origin"]["op"]) == ("unsafe_op", "aten.div")
    assert 4 in [sample["index"] for sample in record["samples"]]


@pytest.mark.parametrize(
    "odd", [torch.eye(8).to_sparse(), torch.ones(8, dtype=torch.complex128)], ids=["sparse", "complex"]
)
def test_a_batch_that_cannot_be_written_is_explained_and_written_as_far_as_it_can_be(tmp_path, odd):
    loop = Loop(tmp_path)
    x, y = batches(1)[0]
    loop.guard.step(lambda x, y, odd: loop.loss(x, y) / (y[3] * 0), batch=(x, y, odd))
    assert not loop.guard.last.applied
    assert record_of(loop.guard)["cause"] == "unsafe_op"
    assert {*load_file(loop.guard.incidents[0].path / "batch.safetensors")} == {"0/0", "0/1"}


def module_of(source, name, monkeypatch):
    """A module made in memory, which has no file."""
    made = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    exec(source, vars(made))
    return made


def test_a_closure_of_a_module_without_file_is_explained_although_it_cannot_be_replayed(tmp_path, monkeypatch):
    made = module_of(MODULE, "made_in_memory", monkeypatch)
    guard = Guard(made.model, torch.optim.SGD(made.model.parameters(), lr=0.1), folder=tmp_path)
    guard.step(made.loss, batch=(torch.full((8, 4), 9.0), torch.randn(8)))
    record = record_of(guard)
    assert (record["cause"], record["not_replayable"]) == ("unsafe_op", "the module 'made_in_memory' has no file")


def test_a_step_whose_batch_cannot_be_written_says_so(tmp_path, monkeypatch):
    made = module_of(MODULE, "made_in_memory", monkeypatch)
    made.__file__ = str(tmp_path / "mine.py")
    guard = Guard(made.model, torch.optim.SGD(made.model.parameters(), lr=0.1), folder=tmp_path)
    exec("def all_three(x, y, odd):\n    return loss(x, y)", vars(made))
    guard.step(made.all_three, batch=(torch.full((8, 4), 9.0), torch.randn(8), torch.eye(8).to_sparse()))
    why = "the batch cannot be saved: it holds a tensor of torch.sparse_coo and torch.float32"
    assert record_of(guard)["not_replayable"] == why


def test_a_dictionary_that_the_loop_refills_is_no_reason_to_know_nothing(tmp_path):
    model, batch = nn.Linear(4, 1), {}
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    for step in range(3):
        batch["x"], batch["y"] = torch.randn(6, 4), torch.randn(6)
        if step == 2:
            batch["x"][5, 0] = math.nan
        guard.step(lambda b: F.mse_loss(model(b["x"])[:, 0], b["y"]), batch=batch)
    assert record_of(guard)["cause"] == "poison_input"
    assert record_of(guard)["samples"][0]["index"] == 5


def test_folders_of_earlier_processes_do_not_count_against_the_budget(tmp_path):
    for step in range(3):
        (tmp_path / f"step-{step:08d}").mkdir()
    loop = Loop(tmp_path, max_incidents=1)
    data = batches(4)
    loop.run([data[0], spoilt(data[1], 2), data[2], spoilt(data[3], 1)])
    assert [each.path.name for each in loop.guard.incidents] == ["step-00000002-2"], "and one that is there is kept"
