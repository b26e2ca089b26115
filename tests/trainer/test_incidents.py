"""Which skipped steps are investigated, what is recorded of each, and what an investigation gets."""

import math
from dataclasses import replace

import pytest
import torch

from stabletrain.forensics.agreement import NotInvestigated
from stabletrain.guard.engine import explain, explain_held
from stabletrain.guard.policy import NoGuard, SkipGuard
from stabletrain.monitors.rolling import Alarm
from stabletrain.records import Transform
from stabletrain.stability import precision as precisions
from stabletrain.trainer.incidents import UNUSED_BATCHES, StepOfRun, make_repro
from stabletrain.trainer.loop import run_monitors
from tests.trainer.given import CPU, Handler, batch, executed, make_run, reading

NAN = {"applied": False, "loss": math.nan}
SPIKE = {"applied": False, "loss": 40.0}
BAD_DATA = {"applied": False, "bad_data": True}
OVERFLOW = {"applied": False, "overflow": True, "loss_scale": 1024.0}


@pytest.fixture(autouse=True)
def _computed_again(monkeypatch):
    """The readings here are made up, so a step that is computed again would come out otherwise."""
    monkeypatch.setattr("stabletrain.trainer.incidents.differs_when_repeated", lambda *_: False)


def skipped(*rows, handler=None, guard=None, data=None):
    """A run whose steps, from 7 on, were all skipped."""
    run = make_run(guard=guard or SkipGuard(max_consecutive=4), handler=handler)
    for step, row in enumerate(rows, 7):
        numbers = reading(step, **row)
        run.state.executed_steps = step + 100
        verdict = run.tools.guard.judge(numbers)
        explain_held(StepOfRun(run, executed(numbers, data)), verdict)
    return run


def events(run, kind):
    return [(step, fields) for each, step, fields in run.output.tracker.events if each == kind]


def test_a_skipped_step_is_recorded_with_its_numbers():
    run = skipped(NAN)
    ((step, fields),) = events(run, "skip")
    assert step == 7
    assert math.isnan(fields.pop("loss"))
    assert fields == {
        "kind": "nonfinite",
        "reason": "loss is nan",
        "tick": 107,
        "grad_norm": 0.5,
        "loss_scale": 1.0,
    }


def test_bad_data_is_recorded_with_the_samples_that_are_bad():
    data = batch()
    data.targets[2] = 9
    ((_, fields),) = events(skipped(BAD_DATA, data=data), "skip")
    (sample,) = fields["samples"]
    assert (sample["index"], sample["id"], sample["fault"]) == (2, 2, "label")
    assert "9" in fields["reason"]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (NAN, "nonfinite"),
        (SPIKE, "spike"),
        (BAD_DATA, "bad_data"),
        *(({**BAD_DATA, name: math.inf}, "nonfinite") for name in ("loss", "grad_norm", "buffers")),
    ],
    ids=["nan", "spike", "bad data", "bad data and loss", "bad data and gradient", "bad data and buffers"],
)
def test_the_first_of_several_in_a_row_is_investigated(row, kind):
    run = skipped(row, row, row)
    assert run.forensics.handler.kinds == [kind]
    assert [step for step, _ in events(run, "incident")] == [7]
    assert [step for step, _ in events(run, "skip")] == [7, 8, 9]
    assert run.forensics.handler.newest == run.tools.guard.kind


def test_an_overflow_that_calibrates_the_loss_scale_is_recorded_only():
    run = skipped(OVERFLOW, OVERFLOW, guard=NoGuard())
    assert len(events(run, "skip")) == 2
    assert run.forensics.handler.kinds == []
    assert run.output.tracker.notes == []


@pytest.mark.parametrize(("last", "investigated"), [(NAN, ["spike", "nonfinite"]), (SPIKE, ["spike"])])
def test_the_step_that_ends_the_run_is_investigated_if_its_reason_is_another(last, investigated):
    assert skipped(SPIKE, SPIKE, SPIKE, last).forensics.handler.kinds == investigated


def test_what_is_not_investigated_is_mentioned_with_its_number():
    run = skipped(NAN, NAN, handler=Handler(files=False))
    assert run.output.tracker.notes == [
        "step 7: loss is nan; update skipped (nonfinite, number 1)",
        "step 8: loss is nan; update skipped (nonfinite, number 2)",
    ]
    assert run.forensics.handler.newest == ""


def test_the_halt_is_reported_elsewhere():
    run = skipped(NAN, guard=SkipGuard(max_consecutive=1), handler=Handler(files=False))
    assert run.output.tracker.notes == []


def test_a_filed_incident_is_recorded_shown_and_sent():
    run = skipped(NAN)
    tracker = run.output.tracker
    ((step, fields),) = events(run, "incident")
    assert step == 7
    assert fields == {
        "tick": 107,
        "kind": "nonfinite",
        "cause": "lr",
        "verdict": "too high",
        "fix": ["lower it"],
        "path": "incidents/step-7-01",
    }
    assert tracker.notes == ["what"]
    assert tracker.alerts == [("incident: lr", "what")]


def test_an_incident_that_cannot_be_investigated_is_one_line_and_the_step_is_skipped_as_before(monkeypatch):
    def declines(*_, **__):
        raise NotInvestigated("rank 1: no memory")

    handler = Handler()
    monkeypatch.setattr(handler, "handle", declines)
    run = skipped(NAN, handler=handler)
    assert run.output.tracker.notes == [
        "step 7: this incident is not investigated: rank 1: no memory",
        "step 7: loss is nan; update skipped (nonfinite, number 1)",
    ]
    ((step, fields),) = events(run, "not_investigated")
    assert (step, fields) == (7, {"tick": 107, "kind": "nonfinite", "reason": "rank 1: no memory"})
    assert not events(run, "incident")
    assert handler.newest == ""


def test_samples_that_cannot_be_inspected_do_not_end_the_run(monkeypatch):
    monkeypatch.setattr("stabletrain.trainer.incidents.bad_samples", lambda *_: 1 / 0)
    run = skipped(BAD_DATA)
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
    run, numbers, data = make_run(), reading(7, **BAD_DATA), batch()
    bad = torch.zeros(4, 1)
    bad[2] = math.nan
    raw = replace(data, transform=Transform(lambda inputs, each: inputs + each, bad))
    run.data.load = lambda step: raw
    repro = make_repro(run, executed(numbers, raw), numbers)
    for found in (repro.batch, repro.fresh()):
        assert found.transform is None
        assert torch.equal(found.inputs[3], data.inputs[3])
        assert found.inputs[2].isnan().all()
    ((_, fields),) = events(skipped(BAD_DATA, data=raw), "skip")
    assert [each["index"] for each in fields["samples"]] == [2]
