"""The same fault in a run of `train.py` and in a loop of the user's own: the same events and lines, word for word.

Each test trains the same model on the same batches through both doors. What differs, and why:

- The files of an incident have other names, and a fix is an override for `train.py` but code for an own loop. A
  diagnosis is less sure in an own loop, because a closure may depend on anything.
- `train.py` computes a step again after it was restored, so it reads the same batch; an own loop goes on with any.
- `train.py` counts each computation of a step (`tick`), an own loop each step.
"""

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.errors import TrainingHalted
from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.handler import IncidentHandler
from stabletrain.guard import RollbackGuard, SkipGuard
from stabletrain.guard import loop_guard as loop_guards
from stabletrain.guard.guard import Guard
from stabletrain.trainer.loop import train
from tests.trainer.given import Batches, Recorder, batch, make_run

DUE = 10
"""A step with a fault; it is computed twice, as every fifth one is."""

INHERENT = ("path", "fix")
"""Fields of events that belong to one of the doors."""


class Spoilt(nn.Linear):
    """A linear layer that calls `spoil` with its input and output, in training."""

    spoil = staticmethod(lambda inputs, output: output)

    def forward(self, input):
        output = super().forward(input)
        return self.spoil(input, output) if self.training else output


class Door:
    """A way to train: the parts of it that a fault reaches.

    Attributes:
        model, optimizer: of 4 inputs and 3 classes, with the same weights each time.
        before: called with the number of a step, counted from 1, before it begins.
    """

    def __init__(self, model, optimizer, guard, tracker, folder):
        self.model, self.optimizer, self.guard, self.tracker, self.folder = model, optimizer, guard, tracker, folder
        self.before = lambda step: None
        self.halted = ""
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters(), 1):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) / number)

    def events(self, *kinds, without=()):
        """Returns the events of these kinds, of all kinds by default, without what only one door has."""
        left_out = {*INHERENT, *without}
        found = [
            (kind, step, {name: value for name, value in fields.items() if name not in left_out})
            for kind, step, fields in self.tracker.events
            if not kinds or kind in kinds
        ]
        return json.loads(json.dumps(found))  # NaN equals NaN in text only

    @property
    def record(self):
        """Returns the newest incident's `diagnosis.json`."""
        return json.loads(max(self.folder.glob("step-*/diagnosis.json")).read_text())

    def lines(self):
        """Returns the lines that are printed, without those that name files and fixes, and without confidence."""
        said = [re.sub(r" \(\d+% sure\)", "", line) for line in self.tracker.notes]
        return [line for line in said if not line.startswith("fix: ") and str(self.folder) not in line]


class OfTrainer(Door):
    """A run of `train.py`."""

    def __init__(self, folder, guard, steps):
        handler = IncidentHandler(keep_state=False)
        self.run = run = make_run(guard=guard, steps=steps, eval_every=steps, handler=handler)
        handler.open(folder, RunSettings())
        run.state.model.__class__ = Spoilt
        super().__init__(run.state.model, run.state.optimizer, guard, run.output.tracker, folder)
        door, get = self, run.data.batches.get

        def told(step):
            door.before(step + 1)
            return get(step)

        run.data.batches.get = told

    @property
    def snapshots(self):
        return self.run.saved.snapshots

    def train(self):
        """Trains; keeps the message of a halt."""
        try:
            train(self.run)
        except TrainingHalted as error:
            self.halted = str(error)


class OfOwnLoop(Door):
    """A loop with `Guard.step`."""

    def __init__(self, folder, guard, steps, monkeypatch):
        tracker, self.steps = Recorder(), steps
        monkeypatch.setattr(loop_guards, "LoopTracker", lambda *_: tracker)
        model = Spoilt(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"checksum_every": guard.checksum_every, "recheck_every": guard.recheck_every}
        self.loop = Guard(model, optimizer, folder=folder, policy=guard, max_norm=1.0, keep_state=False, **options)
        self.loop._loop.policy.lone_loss_is_spike = True  # as in `train.py`; an own loop's loss may be anything
        self.loop._loop.policy.in_own_loop = False  # an own loop's words for options are in `test_in_code.py`
        super().__init__(model, optimizer, self.loop._loop.policy, tracker, folder)

    @property
    def snapshots(self):
        return self.loop._loop.states.snapshots

    def train(self):
        """Trains; keeps the message of a halt."""
        batches = Batches()
        try:
            for step in range(self.steps):
                self.before(step + 1)
                read = batches.get(step)
                self.loop.step(lambda x, y: F.cross_entropy(self.model(x), y), (read.inputs, read.targets))
        except TrainingHalted as error:
            self.halted = str(error)


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Returns a function that trains through both doors with the same fault, and returns them."""

    def trained(spoil, guard=RollbackGuard, steps=14, **options):
        usual = {"recheck_every": 5, "checksum_every": 0}
        usual |= {"snapshot_every": 3, "healthy_after": 2} if guard is RollbackGuard else {}
        policies = [guard(**usual | options) for _ in range(2)]
        doors = [
            OfTrainer(tmp_path / "trainer" / "incidents", policies[0], steps),
            OfOwnLoop(tmp_path / "own" / "incidents", policies[1], steps, monkeypatch),
        ]
        for door in doors:
            spoil(door)
            door.train()
        return doors

    return trained


def is_of(inputs, steps):
    """Whether a forward pass is of one of these steps."""
    return any(torch.equal(inputs, batch(step - 1).inputs) for step in steps)


def flipped(tensor):
    """A copy with one bit of the exponent of one element flipped."""
    tensor = tensor.detach().clone()
    tensor.view(torch.int32).view(-1)[1] ^= 1 << 24
    return tensor


def not_finite(door, steps=(DUE,)):
    """A model whose output is NaN in these steps, whenever they are computed."""
    door.model.spoil = lambda inputs, output: output * math.nan if is_of(inputs, steps) else output


def far_off(door):
    """A model whose loss is far too large in one step. Its logits, which only the trainer sees, are normalized."""
    door.model.spoil = lambda inputs, output: (output * 1e4).log_softmax(-1) if is_of(inputs, (40,)) else output


def wrong_gradient(door, calls=(1,)):
    """A model that computes one step wrongly, in these calls."""
    done = []

    def spoil(inputs, output):
        done.extend([True] * is_of(inputs, (DUE,)))
        wrong = is_of(inputs, (DUE,)) and len(done) in calls
        return output + (flipped(output) - output.detach()) if wrong else output

    door.model.spoil = spoil


def wrong_update(door, change=flipped):
    """An optimizer that updates the weight wrongly in one step, once."""
    update, done = door.optimizer.step, []

    def wrongly():
        update()
        done.append(True)
        if len(done) == DUE:
            door.model.weight.data.copy_(change(door.model.weight.data))

    door.optimizer.step = wrongly


def drifting(door):
    """A model that never computes the same."""
    calls = []

    def drift(inputs, output):
        calls.append(True)
        return output + 1e-3 * len(calls)

    door.model.spoil = drift


def too_large(door):
    """A model whose second run of step 2, the rehearsal, does not fit into memory."""
    done = []

    def spoil(inputs, output):
        done.extend([True] * is_of(inputs, (2,)))
        if is_of(inputs, (2,)) and len(done) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return output

    door.model.spoil = spoil


def changed_weight(door, damaged=False):
    """A weight that changes between two steps, once; with `damaged`, the newest snapshot does too."""
    done = []

    def before(step):
        if step == DUE and not done:
            done.append(True)
            with torch.no_grad():
                door.model.weight[1, 1] += 1e-3
            if damaged:
                door.snapshots.newest(step)["model"]["weight"].view(torch.int32)[0, 0] ^= 1

    door.before = before


def same_words(doors, **left_out):
    """Asserts that both doors reported the same."""
    trainer, own = doors
    assert own.events(**left_out) == trainer.events(**left_out)
    assert own.lines() == trainer.lines()


def same_record(doors):
    """Asserts that both doors filed the same incident."""
    for key in ("kind", "cause", "verdict", "step", "rank"):
        assert doors[1].record[key] == doors[0].record[key], key


def kinds(door):
    return [kind for kind, *_ in door.tracker.events]


def test_a_loss_of_nan(both):
    doors = both(not_finite)
    assert kinds(doors[0]) == ["skip", "incident"]
    same_words(doors)
    same_record(doors)


def test_a_spike(both):
    doors = both(far_off, steps=42, sigma=4.0, window=32)
    assert kinds(doors[0]) == ["skip", "incident"]
    same_words(doors)
    same_record(doors)


def test_a_gradient_that_is_wrong_once(both):
    doors = both(wrong_gradient)
    assert kinds(doors[0]) == ["skip", "incident", "restore"]
    same_words(doors)
    assert doors[1].lines()[-1] == f"step {DUE}: taken again, with the same batch and learning rate"
    same_record(doors)


def test_an_update_that_is_wrong_once(both):
    doors = both(wrong_update)
    assert kinds(doors[0]) == ["distrust", "incident", "restore"]
    assert doors[1].events("distrust", "incident") == doors[0].events("distrust", "incident")
    same_record(doors)
    # `train.py` runs the steps from the restored state again, so it reaches the state before the step.
    (restored,), (mine,) = (door.events("restore") for door in doors)
    assert (restored[2].pop("to"), mine[2].pop("to")) == (DUE - 1, 9)
    assert mine == restored


def test_an_update_that_is_not_finite_once(both):
    def spoil(door):
        door.optimizer.param_groups[0]["momentum"] = 0.9  # not proven to stay finite, so the update is checked
        door.guard.update_check.failed = True  # so that the trainer has copies too, as after a first fault
        wrong_update(door, lambda weight: weight * math.nan)

    doors = both(spoil, recheck_every=0)
    assert kinds(doors[0]) == ["skip", "incident", "restore"]
    same_words(doors)
    same_record(doors)
    assert doors[1].record["cause"] == "hardware_fault"


def test_a_model_that_never_repeats(both):
    doors = both(drifting)
    assert kinds(doors[0]) == ["recheck_varies", "skip"]
    same_words(doors)


def test_too_little_memory(both):
    doors = both(too_large)
    assert kinds(doors[0]) == ["recheck_off"]
    same_words(doors)


def test_a_changed_weight(both):
    doors = both(changed_weight, checksum_every=1)
    assert kinds(doors[0]) == ["skip", "incident", "restore"]
    assert doors[1].events("skip", "incident") == doors[0].events("skip", "incident")
    same_record(doors)
    assert doors[1].events("restore", without=["to"]) == doors[0].events("restore", without=["to"])


def test_a_damaged_snapshot(both):
    doors = both(lambda door: changed_weight(door, damaged=True), checksum_every=1)
    assert kinds(doors[0]) == ["skip", "incident", "corrupt_snapshot", "restore"]
    told = ("skip", "incident", "corrupt_snapshot")
    assert doors[1].events(*told) == doors[0].events(*told)
    (line,) = [line for line in doors[0].lines() if "damaged" in line and "snapshot" in line]
    assert line in doors[1].lines()


def test_trouble_that_does_not_end(both):
    doors = both(lambda door: not_finite(door, (DUE, DUE + 1)), guard=SkipGuard, max_consecutive=2)
    assert kinds(doors[0]) == ["skip", "incident", "skip", "halt"]
    same_words(doors)
    assert doors[1].halted == doors[0].halted != ""


def test_a_rollback(both):
    doors = both(lambda door: not_finite(door, (DUE, DUE + 1)), patience=2, steps=DUE + 1)
    # `train.py` names the batches that it never reads again; an own loop is told how many they are. Afterwards the
    # trainer trains the steps again.
    expected = ["skip", "incident", "skip", "rollback"]
    assert kinds(doors[0])[:4] == kinds(doors[1]) == expected
    trainer, own = (door.events(without=["skipped"])[:4] for door in doors)
    assert own == trainer
    told = [[line.partition("; ")[0] for line in door.lines() if "rollback 1" in line] for door in doors]
    assert told[0] == told[1]
    assert len(told[0]) == 1
