"""What an investigation of a step of the trainer gets, and what is recorded of bad samples."""

import math
from dataclasses import replace

import pytest
import torch

from stabletrain.guard.engine import explain, explain_held
from stabletrain.guard.policy import SkipGuard
from stabletrain.monitors.rolling import Alarm
from stabletrain.records import Transform
from stabletrain.stability import precision as precisions
from stabletrain.trainer.incidents import UNUSED_BATCHES, StepOfRun, make_repro
from stabletrain.trainer.loop import run_monitors
from tests.trainer.given import CPU, batch, executed, make_run, reading

NAN = {"applied": False, "loss": math.nan}


def skipped(data):
    """A run whose step 7 was skipped because of bad data."""
    run, numbers = make_run(guard=SkipGuard()), reading(7, applied=False, bad_data=True)
    explain_held(StepOfRun(run, executed(numbers, data)), run.tools.guard.judge(numbers))
    return run


def events(run, kind):
    return [(step, fields) for each, step, fields in run.output.tracker.events if each == kind]


def test_bad_data_is_recorded_with_the_samples_that_are_bad():
    data = batch()
    data.targets[2] = 9
    ((_, fields),) = events(skipped(data), "skip")
    (sample,) = fields["samples"]
    assert (sample["index"], sample["id"], sample["fault"]) == (2, 2, "label")
    assert "9" in fields["reason"]


def test_samples_that_cannot_be_inspected_do_not_end_the_run(monkeypatch):
    monkeypatch.setattr("stabletrain.trainer.incidents.bad_samples", lambda *_: 1 / 0)
    run = skipped(batch())
    assert [fields["samples"] for _, fields in events(run, "skip")] == [[]]


def test_the_handler_is_told_classes_bounds_and_the_whole_optimizer():
    run = make_run(guard=SkipGuard())
    numbers = reading(**NAN)
    assert explain(StepOfRun(run, executed(numbers)), "nonfinite")
    (request,) = run.forensics.handler.requests
    assert request.classes == 3
    assert request.optimizer is run.state.optimizer
    assert request.limits == run.tools.guard.bounds
    run.parallel.has_whole_moments = False
    explain(StepOfRun(run, executed(numbers)), "nonfinite")
    assert run.forensics.handler.requests[1].optimizer is None


@pytest.mark.parametrize(
    ("precision", "kind", "applied", "investigated"),
    [
        ("fp16", "vanishing", True, ["loss_scale"]),
        ("fp16", "vanishing", False, []),
        ("fp16", "explosion", True, []),
        ("fp32", "vanishing", True, []),
    ],
)
def test_vanishing_gradients_are_investigated_in_fp16_if_the_step_was_applied(precision, kind, applied, investigated):
    chosen = precisions.fp16(CPU, 1024.0, 2000, 1.0) if precision == "fp16" else precisions.fp32(CPU)
    run = make_run(precision=chosen)
    numbers = reading(applied=applied)
    run.monitoring.monitors.after = lambda *_: ({}, [Alarm(kind, "x")])
    run_monitors(run, executed(numbers))
    assert run.forensics.handler.kinds == investigated


def test_a_repro_is_of_the_step_and_its_fresh_batch_is_one_the_run_never_reads():
    run = make_run()
    numbers = reading(8, applied=False, loss_scale=64.0)
    step = executed(numbers, batch(7))
    repro = make_repro(run, step, numbers)
    assert repro.model is run.state.model
    assert (repro.step, repro.loss_scale, repro.part, repro.micro_batches) == (7, 64.0, None, 1)
    assert repro.batch is step.batch
    assert repro.buffers == []
    assert not repro.applied
    assert torch.equal(repro.fresh().inputs, batch(UNUSED_BATCHES * 9).inputs)


def test_the_state_given_to_an_investigation_is_older_than_the_step():
    run = make_run()
    for step in (5, 6, 7):
        run.state.step = step
        run.saved.snapshots.take(step, {"step": step}, run.state)
    numbers = reading(8, applied=False)
    explain(StepOfRun(run, executed(numbers)), "nonfinite")
    (states,) = run.forensics.handler.states
    assert states.gather() is run.state.model
    assert states.gather_older() == {"step": 6}


def test_a_replay_reads_the_batch_as_the_model_read_it():
    """The host's batch may be raw; forensics looks at values, saves them, and mixes samples of two batches."""
    run, numbers, data = make_run(), reading(7, applied=False, bad_data=True), batch()
    bad = torch.zeros(4, 1)
    bad[2] = math.nan
    raw = replace(data, transform=Transform(lambda inputs, each: inputs + each, bad))
    run.data.load = lambda step: raw
    repro = make_repro(run, executed(numbers, raw), numbers)
    for found in (repro.batch, repro.fresh()):
        assert found.transform is None
        assert torch.equal(found.inputs[3], data.inputs[3])
        assert found.inputs[2].isnan().all()
    ((_, fields),) = events(skipped(raw), "skip")
    assert [each["index"] for each in fields["samples"]] == [2]
