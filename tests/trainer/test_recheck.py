"""A gradient or update that is computed wrongly once is seen, named and undone; a model that never repeats is told."""

import json

import pytest
import torch
from torch import nn

from stabletrain.errors import TrainingHalted
from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.handler import IncidentHandler
from stabletrain.stability.guard import RollbackGuard, SkipGuard
from stabletrain.trainer.loop import train
from tests.trainer.given import make_run

DUE = 10
"""A step that is computed twice; every fifth one is."""


class FromHere(nn.Linear):
    """A linear layer that calls `spoil` with its output, in training."""

    spoil = staticmethod(lambda output: output)

    def forward(self, input):
        output = super().forward(input)
        return self.spoil(output) if self.training else output


def flipped(tensor):
    """A copy with one bit of the exponent of one element flipped."""
    tensor = tensor.detach().clone()
    tensor.view(torch.int32).view(-1)[1] ^= 1 << 24
    return tensor


def a_run(folder=None, guard=None, every=5, steps=20, adam=False):
    """A run whose model can be spoilt, with the same weights each time."""
    handler = None if folder is None else IncidentHandler(keep_state=False)
    guard = guard or RollbackGuard(recheck_every=every, snapshot_every=3, healthy_after=2)
    run = make_run(guard=guard, steps=steps, eval_every=steps, handler=handler)
    if folder is not None:
        handler.open(folder, RunSettings())
    model = run.state.model
    model.__class__ = FromHere
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters(), 1):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) / number)
    if adam:
        run.state.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return run


def spoil_gradient(run, steps=(DUE,), calls=(1,), change=flipped):
    """Makes the forward pass wrong in these calls of each of these steps, once per step number and call."""
    done = {}

    def spoil(output):
        step = run.state.step + 1
        done[step] = done.get(step, 0) + 1
        wrong = step in steps and done[step] in calls
        return output + (change(output) - output.detach()) if wrong else output

    run.state.model.spoil = spoil


def spoil_update(run, step=DUE, name="weight"):
    """Makes the update of one tensor wrong, the first time that this step is run."""
    optimizer, done = run.state.optimizer, []
    update = optimizer.step

    def wrongly():
        update()
        if run.state.step + 1 == step and not done:
            done.append(step)
            parameter = dict(run.state.model.named_parameters())[name]
            parameter.data.copy_(flipped(parameter.data))

    optimizer.step = wrongly


def bits_of(run):
    state = run.state.optimizer.state.values()
    moments = [value for each in state for value in each.values() if isinstance(value, torch.Tensor)]
    return [*(parameter.detach() for parameter in run.state.model.parameters()), *moments]


def assert_same(run, other):
    for mine, theirs in zip(bits_of(run), bits_of(other), strict=True):
        assert torch.equal(mine, theirs)


def events(run, kind):
    return [(step, fields) for each, step, fields in run.output.tracker.events if each == kind]


def clean(**options):
    run = a_run(**options)
    train(run)
    return run


def incident(folder):
    (path,) = folder.glob("step-*/diagnosis.json")
    return json.loads(path.read_text())


def test_without_a_fault_nothing_is_said_and_no_bit_changes():
    run, without = clean(every=1), clean(every=0)
    assert_same(run, without)
    assert run.output.tracker.notes == without.output.tracker.notes == []
    assert [bound.agreed for bound in run.tools.guard.recheck.bounds.values()] == [20, 20]


@pytest.mark.slow(unless=lambda call: call == 1)
@pytest.mark.parametrize(("call", "third"), [(1, "second"), (2, "first")])
def test_a_gradient_that_is_wrong_once_is_named_and_its_batch_is_read_again(tmp_path, call, third):
    run = a_run(tmp_path)
    spoil_gradient(run, calls=(call,))
    train(run)
    assert_same(run, clean())
    assert [(step, fields["kind"]) for step, fields in events(run, "skip")] == [(DUE, "recheck")]
    ((step, fields),) = events(run, "restore")
    assert (step, fields["to"], fields["loaded"]) == (DUE, DUE - 1, DUE - 1), (
        "the state is good: only the step is wrong"
    )
    found = incident(tmp_path)
    assert (found["kind"], found["cause"], found["step"]) == ("recheck", "hardware_fault", DUE)
    assert "weight" in found["verdict"]
    assert "device cpu (cpu), host" in found["verdict"]
    assert "rank 0" in found["verdict"]
    assert f"a third computation equals the {third}" in " ".join(found["evidence"])


@pytest.mark.slow(unless=lambda adam: adam)
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adamw"])
def test_an_update_that_is_wrong_once_is_named_and_undone(tmp_path, adam):
    run = a_run(tmp_path, adam=adam)
    spoil_update(run)
    train(run)
    assert_same(run, clean(adam=adam))
    assert not events(run, "skip")
    ((step, fields),) = events(run, "restore")
    assert (step, fields["to"]) == (DUE, DUE - 1)
    found = incident(tmp_path)
    assert (found["kind"], found["cause"]) == ("recheck", "hardware_fault")
    assert "the optimizer's update" in found["verdict"]
    assert "a third computation equals the second" in " ".join(found["evidence"])


@pytest.mark.slow
def test_each_tensor_has_its_turn():
    run = a_run()
    spoil_update(run, name="bias")  # step 10 repeats the weight's update
    train(run)
    assert not events(run, "restore")
    run = a_run()
    spoil_update(run, step=15, name="bias")
    train(run)
    assert len(events(run, "restore")) == 1


@pytest.mark.slow
def test_without_snapshots_a_wrong_gradient_is_computed_again_and_a_wrong_update_halts():
    run = a_run(guard=SkipGuard(recheck_every=5))
    spoil_gradient(run)
    train(run)
    assert run.history.updates == 20
    assert run.tools.guard.skips["recheck"] == 0
    assert run.tools.guard.machine_faults == 1
    assert run.tools.guard.healthy
    run = a_run(guard=SkipGuard(recheck_every=5))
    spoil_update(run)
    with pytest.raises(TrainingHalted, match="update came out differently"):
        train(run)


@pytest.mark.slow
def test_a_step_is_taken_again_only_so_often_without_progress():
    run = a_run(every=1)
    spoil_gradient(run, steps=(5, 7, 9, 11))
    train(run)
    assert len(events(run, "restore")) == 3
    assert run.tools.guard.skips["recheck"] == 1, "the fourth without progress is skipped"


def test_a_model_that_never_repeats_is_no_fault_and_is_told_once(tmp_path):
    run, calls = a_run(tmp_path), []

    def drift(output):
        calls.append(1)
        return output + 1e-3 * len(calls)

    run.state.model.spoil = drift
    train(run)
    assert len(events(run, "recheck_varies")) == 1
    assert not [*tmp_path.iterdir()]
    assert not events(run, "rollback")
    assert run.history.updates == 19, "the first repetition could not know it"
    assert run.tools.guard.recheck.bounds["gradient"].varies
    assert len(run.output.tracker.notes) == 1


@pytest.mark.slow
def test_a_third_computation_that_fails_does_not_end_the_run(tmp_path):
    run, failed = a_run(tmp_path), []
    spoil_gradient(run)
    spoil = run.state.model.spoil

    def fails(output):
        if run.state.step == DUE and not failed:  # the step is counted already: this is the third
            failed.append(True)
            raise RuntimeError("out of memory")
        return spoil(output)

    run.state.model.spoil = fails
    train(run)
    assert_same(run, clean())
    assert "there was no third computation" in incident(tmp_path)["evidence"]
