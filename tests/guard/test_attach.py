"""Checks `Guard.attach`: a loop that is not edited keeps its bits, and its unsafe steps are not run."""

import copy
import io
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

from stabletrain.errors import ConfigError
from stabletrain.guard.attach import MAX_CALLS, notice_steps, replace_method
from stabletrain.guard.guard import Guard
from tests.guard.given import batches, bits, network, same

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


class Loop:
    """A loop as others write it: micro-batches, clipping, a scheduler, perhaps a scaler or a closure."""

    def __init__(self, make=OPTIMIZERS["adamw"], scaler=None, closure=False, with_loss=False):
        self.model = WithLoss(network()) if with_loss else network()
        self.optimizer, self.scaler, self.closure = make(self.model.parameters()), scaler, closure
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.5)
        self.before = {}

    def loss(self, x, y):
        """Forward and loss of one micro-batch."""
        return self.model(x, y) if isinstance(self.model, WithLoss) else F.cross_entropy(self.model(x), y)

    def backward(self, x, y):
        """Forward and backward of a step, in two micro-batches; returns its loss."""
        self.optimizer.zero_grad()
        total = 0.0
        for part in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = self.loss(*part) / 2
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total = total + loss.detach()
        if self.scaler is not None and not fused(self.optimizer):
            self.scaler.unscale_(self.optimizer)
        if self.scaler is None or not fused(self.optimizer):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return total

    def run(self, data):
        """Steps through the data; returns the losses."""
        torch.manual_seed(2)
        losses = []
        for batch in data:
            self.before = bits(self.model, self.optimizer)
            if self.closure:
                losses.append(float(self.optimizer.step(lambda batch=batch: self.backward(*batch))))
            else:
                losses.append(float(self.backward(*batch)))
                if self.scaler is None:
                    self.optimizer.step()
                else:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
            self.schedule.step()
            self.model.eval()
            with torch.no_grad():
                self.model(batch[0], batch[1]) if isinstance(self.model, WithLoss) else self.model(batch[0])
            self.model.train()
        return losses


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, y):
        """Cross-entropy, written in an unsafe way."""
        return -torch.softmax(self.inner(x) * torch.where(x[:, :1] == 9, 1e6, 1.0), -1)[range(len(y)), y].log().mean()


def fused(optimizer):
    """Whether it takes scaled gradients."""
    return bool(optimizer.param_groups[0].get("fused"))


CASES = {
    "plain": {},
    "fused": {"make": OPTIMIZERS["fused"]},
    "closure": {"closure": True},
    "scaler": {"scaler": 64.0},
    "scaler, fused": {"scaler": 64.0, "make": OPTIMIZERS["fused"]},
}


def made(case, tmp_path=None, **options):
    """A loop, guarded if `tmp_path` is given."""
    scaler = GradScaler("cpu", init_scale=case["scaler"], growth_interval=3) if "scaler" in case else None
    loop = Loop(**{**case, "scaler": scaler})
    if tmp_path is None:
        return loop, None
    if scaler is not None:
        options["scaler"] = scaler
    return loop, Guard.attach(loop.model, loop.optimizer, folder=tmp_path, **options)


@pytest.mark.parametrize("name", CASES)
def test_a_clean_loop_keeps_its_bits(tmp_path, name):
    plain, _ = made(CASES[name])
    loop, guard = made(CASES[name], tmp_path)
    assert loop.run(batches(12)) == plain.run(batches(12))
    assert same(bits(loop.model, loop.optimizer), bits(plain.model, plain.optimizer))
    assert loop.schedule.last_epoch == plain.schedule.last_epoch
    assert (guard.skipped, guard.last.step) == (0, 12)


@pytest.mark.parametrize("name", CASES)
def test_an_unsafe_step_changes_no_bit_and_the_sample_is_named(tmp_path, name):
    loop, guard = made(CASES[name], tmp_path)
    data = batches(9)
    data[8][0][5, 2] = math.nan
    loop.run(data[:8])
    loop.run(data[8:])
    after = bits(loop.model, loop.optimizer)
    assert same(without_lr(loop.before), without_lr(after))
    assert not guard.last.applied
    record = json.loads((guard.incidents[0].path / "diagnosis.json").read_text())
    assert record["cause"] == "poison_input"
    assert (record["samples"][0]["micro_batch"], record["samples"][0]["row"]) == (1, 1)
    loop.run(batches(3))
    assert guard.last.applied


def without_lr(found):
    """Without what the loop's own scheduler changes."""
    return {name: value for name, value in found.items() if not name.endswith(".lr")}


def test_a_model_that_returns_its_loss_is_explained_whole(tmp_path, caplog):
    loop, guard = made({"with_loss": True}, tmp_path)
    data = batches(5)
    data[4][0][6, 0] = 9.0
    loop.run(data)
    record = json.loads((guard.incidents[0].path / "diagnosis.json").read_text())
    assert (record["cause"], record["origin"]["op"]) == ("unsafe_op", "aten.log")
    assert record["replays"]["fresh_batch"]["finite"] is True
    assert [(sample["micro_batch"], sample["row"]) for sample in record["samples"]] == [(1, 2)]
    assert "one bad gradient has spread to all" in caplog.text


def test_where_the_loop_computes_the_loss_the_incident_says_what_was_not_run(tmp_path):
    loop, guard = made({}, tmp_path)
    loop.loss = lambda x, y: F.cross_entropy(loop.model(x), y) * (math.nan if x[0, 0] == 7 else 1.0)
    data = batches(4)
    data[3][0][0, 0] = 7.0
    loop.run(data)
    assert not guard.last.applied
    record = json.loads((guard.incidents[0].path / "diagnosis.json").read_text())
    assert record["cause"] == "unknown"
    assert record["not_looked_at"][0].startswith("the loop computes its loss itself")
    assert record["replays"]["same"]["finite"] is None, "a normal forward pass says nothing about the step"
    assert record["verdict"].startswith("loss nan")


@pytest.mark.parametrize("clips", [False, True])
def test_a_loop_that_does_not_clip_is_not_told_that_clipping_spreads_nan(tmp_path, caplog, clips):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Guard.attach(model, optimizer, folder=tmp_path)
    (model(torch.randn(6, 4)).sum() * math.nan).backward()
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert ("one bad gradient has spread to all" in caplog.text) is clips


def test_an_adapter_records_how_the_loss_is_computed(tmp_path):
    loop, guard = made({}, tmp_path)
    unsafe = lambda x, y: F.cross_entropy(loop.model(x), y) / (x[:, 0] != 7).float().min()  # noqa: E731

    def recorded(x, y):
        loss = unsafe(x, y)
        guard.record(unsafe, (x, y), loss)
        return loss

    loop.loss = recorded
    data = batches(4)
    data[3][0][2, 0] = 7.0
    loop.run(data)
    assert guard.last.loss == math.inf
    record = json.loads((guard.incidents[0].path / "diagnosis.json").read_text())
    assert (record["cause"], record["origin"]["op"]) == ("unsafe_op", "aten.div")
    assert record["samples"] == [{"index": 2, "micro_batch": 0, "row": 2}]


def test_a_spike_is_withheld_too(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard.attach(model, optimizer, folder=tmp_path, max_incidents=0)
    for number, (x, y) in enumerate(batches(20)):
        before = bits(model)
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * (1e4 if number == 19 else 1.0)).backward()
        optimizer.step()
        assert same(before, bits(model)) is (number == 19)
    assert guard.skips["spike"] == 1


@pytest.mark.parametrize("max_incidents", [0, 10])
def test_an_update_that_is_not_finite_once_is_undone_explained_and_taken_again(tmp_path, max_incidents):
    loop, clean = (Loop(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)) for _ in range(2))
    updates = []
    guard = Guard.attach(loop.model, loop.optimizer, folder=tmp_path, max_incidents=max_incidents)

    def spoil(*_):
        updates.append(True)
        if len(updates) == 3:
            loop.model[4].weight.data[1, 1] = math.nan

    loop.optimizer.register_step_post_hook(spoil)
    data = batches(5)
    assert loop.run(data) == clean.run(data)
    assert same(bits(loop.model, loop.optimizer), bits(clean.model, clean.optimizer))
    assert (guard.skipped, guard.machine_faults, guard.last.applied) == (0, 1, True)
    assert [each.cause for each in guard.incidents] == ["hardware_fault"] * bool(max_incidents)


def test_what_the_loop_does_itself_is_refused(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"Guard.attach\(max_norm=...\): the loop itself does that"):
        Guard.attach(model, optimizer, max_norm=1.0)
    guard = Guard.attach(model, optimizer, folder=tmp_path)
    with pytest.raises(ConfigError, match=r"this guard is attached to optimizer.step\(\)"):
        guard.step(lambda: model(torch.ones(2, 4)).mean())


def test_two_forward_calls_before_the_backward_pass_are_one_step(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, folder=tmp_path)
    for number, (x, y) in enumerate(batches(4)):
        before = bits(model)
        optimizer.zero_grad()
        x = x * (math.nan if number == 2 else 1.0)
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(x * 2), y)).backward()
        optimizer.step()
        assert same(before, bits(model)) is (number == 2)
    assert guard.skipped == 1


def test_forward_calls_that_train_nothing_are_no_part_of_the_step(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, folder=tmp_path)
    for number, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)
        model.eval()(x)
        model.train()
        before = bits(model)
        x[5, 0] = math.nan if number == 2 else 1.0
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert same(before, bits(model)) is (number == 2), "with the statistics of the call without gradients"
    assert guard.skipped == 1
    assert "sample 5 " in guard.incidents[0].verdict


def test_a_step_that_is_replaced_as_it_begins_runs_once_as_the_new_one():
    optimizer, ran = torch.optim.SGD(network().parameters(), lr=0.1), []

    def replaced():
        if not coming:
            return False
        name = coming.pop()
        replace_method(optimizer, "step", lambda inner: lambda *_: ran.append(name) or inner())
        return True

    coming = ["first"]
    notice_steps(optimizer, replaced)
    optimizer.step()
    assert ran == ["first"]
    coming.append("second")
    optimizer.step()
    assert ran == ["first", "first", "second", "first"], "what was begun with, and then the step as it is now"


def test_a_loop_that_calls_parts_of_the_model_gets_its_buffers_back_and_no_false_cause(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, folder=tmp_path)
    for number, (x, y) in enumerate(batches(4)):
        before = bits(model)
        optimizer.zero_grad()
        (F.cross_entropy(model[1:](model[0](x)), y) * (math.nan if number == 1 else 1.0)).backward()
        optimizer.step()
        assert same(before, bits(model)) is (number == 1)
    record = json.loads((guard.incidents[0].path / "diagnosis.json").read_text())
    assert record["cause"] == "unknown"
    assert record["not_looked_at"][0].startswith("no forward call of the model was seen")


def test_a_loop_that_never_steps_does_not_keep_every_batch(tmp_path):
    model = nn.Linear(4, 3)
    guard = Guard.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    for _ in range(300):
        model(torch.ones(1, 4))
    assert len(guard._recorder.begun.micro_batches) == MAX_CALLS < 300


def test_a_copy_of_the_model_is_not_guarded(tmp_path):
    model = network()
    guard = Guard.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    twin = copy.deepcopy(model)
    twin(torch.ones(2, 4))
    assert guard._recorder.begun is None
    restored = torch.load(io.BytesIO(pickled(model)), weights_only=False)
    restored(torch.ones(2, 4))
    assert guard._recorder.begun is None


def pickled(model):
    """What `torch.save` writes of a whole model."""
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_of_the_whole_model_leaves_no_trace_of_a_held_step(reentrant, tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, folder=tmp_path)
    for number, (x, y) in enumerate(batches(6)):
        x[0, 0] = math.nan if number in (2, 3) else 0.0
        before = bits(model)
        optimizer.zero_grad()
        F.cross_entropy(checkpoint(model, x.requires_grad_(), use_reentrant=reentrant), y).backward()
        optimizer.step()
        assert guard.last.applied == (number not in (2, 3))
        assert same(before, bits(model)) != guard.last.applied


def test_saved_tensors_of_the_loop_are_read_by_its_backward_pass_only(tmp_path):
    model, kept, weights = network(), [], torch.ones(8)
    guard = Guard.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    x, y = batches(1)[0]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda value: kept.append(value) or len(kept) - 1, lambda at: take(kept, at)
    ):
        loss = (F.cross_entropy(model(x), y, reduction="none") * weights).mean()
    loss.backward()
    guard._loop.optimizer.step()
    assert guard.last.loss == float(loss.detach())


def take(kept, at):
    """Returns a saved value, once."""
    value, kept[at] = kept[at], None
    assert value is not None
    return value


class Own(torch.optim.SGD):
    """An optimizer whose step takes a number, and returns one."""

    def step(self, factor=1.0):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-factor)
        return factor


def test_arguments_and_result_of_a_step_of_ones_own_pass_through(tmp_path):
    model = network()
    optimizer = Own(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, folder=tmp_path)
    x, y = batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    assert optimizer.step(0.5) == 0.5
    assert guard.last.applied


def test_a_saved_model_needs_nothing_of_this_package_to_be_loaded(tmp_path):
    model = network()
    guard = Guard.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    assert b"stabletrain" not in pickled(model)
    restored = torch.load(io.BytesIO(pickled(model)), weights_only=False)
    restored.load_state_dict(model.state_dict())
    assert not guard._loop.loads.noticed


def test_a_held_step_keeps_buffers_that_were_loaded_though_no_forward_call_was_seen(tmp_path):
    model = nn.ModuleList([network()])  # the loop calls its part
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, folder=tmp_path, max_incidents=0, checksum_every=1)
    loaded = {name: value + 1 for name, value in model.state_dict().items()}
    for number, (x, y) in enumerate(batches(6)):
        x[0, 0] = math.nan if number == 3 else 0.0
        if number == 3:
            model.load_state_dict(loaded)
            before = bits(model)
        optimizer.zero_grad()
        F.cross_entropy(model[0](x), y).backward()
        optimizer.step()
        if number == 3:
            assert same(before, bits(model))
    assert (guard.skips["nonfinite"], guard.skips["state"]) == (1, 0)
