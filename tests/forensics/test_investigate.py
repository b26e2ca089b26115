"""An investigation names the cause with its evidence, keeps to its time limit, and changes nothing live."""

import math
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.forensics import replay as replay_module
from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.investigate import Checks, IncidentRequest, divisor_history, investigate, origin_of
from stabletrain.forensics.probes.attention_scores import Scores
from stabletrain.forensics.repro import Repro
from stabletrain.forensics.rerun import VARIANTS
from stabletrain.forensics.subject import StepSubject
from stabletrain.forensics.trace.recorder import Trace
from stabletrain.records import IGNORE_INDEX, Batch
from tests.forensics import faulty
from tests.forensics.diagnosis.given import READING
from tests.forensics.faulty import Around, line

BROKEN = READING._replace(loss=math.nan, grad_norm=math.nan)
SETTING = RunSettings(choices={"precision": "fp32"}, values={"optimizer.lr": 1e-3}, loss_limit=6.0, norm_limit=20.0)


def samples(seed=0, size=4):
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(size, 3, generator=generator), torch.randint(2, (size,), generator=generator))


@pytest.fixture
def repro(tools):
    """A function that makes the repro of a step; `part` is a module within the model."""

    def repro(part, batch=None, **more):
        model = Around(part)
        chosen = {"reading": BROKEN, "fresh": lambda: samples(1), **more}
        buffers = [buffer.clone() for buffer in model.buffers()]
        acting = replace(
            tools, objective=tools.objective.plain
        )  # the model has no separate head, so the loss needs whole logits
        return Repro(model, buffers, 49, batch or samples(), 1, acting, 1.0, torch.device("cpu"), **chosen)

    return repro


def looked_into(repro, kind="nonfinite", **more):
    setting = more.pop("setting", SETTING)
    return investigate(StepSubject(repro), IncidentRequest(kind, **{"classes": 2, **more}), setting)


def test_an_unsafe_operation_is_named_with_its_line_and_the_outcomes_of_the_replays(repro):
    found = looked_into(repro(faulty.LogOfZero()))
    assert (found.diagnosis.cause, found.failures) == ("unsafe_op", [])
    origin = found.evidence.origin
    assert (origin.module, origin.op, origin.source) == ("part", "aten.log", line(faulty.LogOfZero))
    assert [*found.evidence.outcomes] == [*VARIANTS]
    assert {name: found.evidence.finite(name) for name in VARIANTS} == {
        **dict.fromkeys(("same", "fp32", "fresh_batch"), False),
        "older_state": None,
    }
    assert found.evidence.culprits.others_too, "every batch fails at that line"
    assert found.seconds > 0


def test_a_bad_label_is_found_without_a_replay(repro):
    batch = samples()
    batch.targets[2] = 9
    found = looked_into(repro(faulty.LogOfZero(), batch))
    assert found.diagnosis.cause == "bad_label"
    assert [sample["index"] for sample in found.evidence.samples] == [2]
    assert found.evidence.outcomes == {}
    assert found.evidence.origin is None


def test_a_false_alarm_of_the_loss_scale_causes_no_replay(repro):
    found = looked_into(repro(nn.Identity(), reading=READING), "loss_scale")
    assert found.evidence.outcomes == {}
    assert found.evidence.underflow is None, "there is no loss scale in fp32"


def test_weights_that_were_corrupt_before_the_step_are_blamed(repro):
    step = repro(nn.Linear(3, 3))
    with torch.no_grad():
        step.model.part.weight[0, 0] = math.inf
    found = looked_into(step)
    assert found.diagnosis.cause == "corrupt_state"
    assert [damage.name for damage in found.evidence.damage] == ["part.weight"]


def test_an_older_state_that_is_normal_shows_how_far_the_weights_have_moved(repro):
    step = repro(nn.Linear(3, 3))
    weights = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.mul_(1e20)
    step = replace(step, older=lambda: {"model": weights, "step": 39})
    found = looked_into(step)
    assert found.diagnosis.cause == "lr_too_high"
    assert (found.evidence.finite("same"), found.evidence.normal("older_state")) == (False, True)
    assert found.evidence.drift.steps == 10
    assert found.evidence.drift.grown == pytest.approx(1e20, rel=1e-3)
    assert not math.isfinite(found.evidence.size("log_z_mean"))
    assert math.isfinite(found.evidence.before["monitors/log_z_mean"])


class Counting(nn.Module):
    """Adds a buffer that it counts up: a second pass computes something else unless the buffer is put back."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.linear(x) + self.count * torch.arange(3)


@pytest.fixture
def replayed(monkeypatch):
    """The replays that ran: which variant, and whether on a compiled copy; and the compiled copies."""
    ran, copies, run, perform = [], [], StepSubject.replay, replay_module.forward_backward

    def noting(subject, variant):
        ran.append([variant, False])
        return run(subject, variant)

    def performing(model, *rest):
        if ran:
            ran[-1][1] = any(model is each for each in copies)
        return perform(model, *rest)

    monkeypatch.setattr(StepSubject, "replay", noting)
    monkeypatch.setattr(replay_module, "forward_backward", performing)
    monkeypatch.setattr(replay_module, "compile_", lambda model, shape: copies.append(model))
    return ran, copies


def test_of_a_compiled_step_only_the_unchanged_replay_is_compiled_last_and_once(repro, replayed):
    ran, copies = replayed
    step = repro(Counting(), reading=READING, compiled_for=(4, 3))
    weights = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    step = replace(step, older=lambda: {"model": weights, "step": 39})
    found = looked_into(step, "spike")
    eager = [["fp32", False], ["fresh_batch", False], ["older_state", False]]
    assert ran == [*eager, ["same", True], ["same", True]]
    assert len(copies) == 1, "the second replay runs what the first has compiled"
    assert found.evidence.outcomes["same"].bitwise_equal_to_reading is False
    assert found.evidence.repeats is True
    assert found.evidence.outcomes.keys() == {*VARIANTS}
    assert not found.failures


def test_the_compiled_copy_is_freed_when_no_further_replay_will_run(repro, replayed):
    _, copies = replayed
    step = repro(Counting(), reading=READING, compiled_for=(4, 3))
    different = StepSubject(step)
    outcome = different.replay("same")
    assert different._compiled_copy._model is copies[-1]
    assert replace(different.replay("same"), seconds=outcome.seconds) == outcome
    assert different._compiled_copy._model is None
    equal = StepSubject(replace(step, reading=READING._replace(loss=outcome.loss, grad_norm=outcome.grad_norm)))
    assert equal.replay("same").bitwise_equal_to_reading is True
    assert equal._compiled_copy._model is None


def test_an_eager_step_is_replayed_in_the_usual_order(repro, replayed):
    ran, copies = replayed
    assert looked_into(repro(Counting(), reading=READING), "spike").evidence.repeats is True
    assert ran == [[variant, False] for variant in (*VARIANTS, "same")]
    assert not copies


def test_the_sample_with_the_largest_input_is_compared_with_another_batch(repro):
    batch = replace(samples(), ids=torch.arange(40, 44))
    batch.inputs[3, 1] = -1e30
    seen = StepSubject(repro(nn.Identity(), batch)).largest_input()
    assert seen.sample == {"index": 3, "id": 43}
    assert (seen.largest, seen.elsewhere) == (float(torch.tensor(1e30)), float(samples(1).inputs.abs().max()))
    assert seen.sizes == pytest.approx(batch.inputs.abs().amax(1).tolist())
    assert StepSubject(repro(nn.Identity(), batch, fresh=None)).largest_input() is None


def test_a_target_counts_as_an_input_where_it_is_the_more_unusual(repro):
    batch = replace(samples(), targets=torch.tensor([0.0, 1.0, -1e30, 1.0]))
    seen = StepSubject(
        repro(nn.Identity(), batch, fresh=lambda: replace(samples(1), targets=torch.ones(4)))
    ).largest_input()
    assert (seen.sample["index"], seen.place, seen.elsewhere) == (2, " in its target", 1.0)


def test_nothing_live_is_changed(repro):
    step = repro(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), faulty.RootBackward()))
    step.model.part[0].weight.grad = torch.ones(3, 3)
    before = [tensor.clone() for tensor in (*step.model.state_dict().values(), torch.get_rng_state())]
    assert looked_into(step).diagnosis.cause == "unsafe_op"
    after = [*step.model.state_dict().values(), torch.get_rng_state()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(step.model.part[0].weight.grad, torch.ones(3, 3))
    assert step.model.stem.weight.grad is None


def test_at_the_time_limit_every_check_that_was_left_out_is_named(repro):
    found = looked_into(repro(faulty.LogOfZero(), deadline=time.monotonic()))
    assert found.diagnosis.cause == "unknown"
    assert "trace of the operations: the time limit was reached" in found.failures
    assert {outcome.not_run for outcome in found.evidence.outcomes.values()} == {"the time limit was reached"}


def test_a_failed_attempt_is_recorded_and_the_next_one_runs():
    attempt = Checks(math.inf)
    assert attempt("one", lambda: 3, 0) == 3
    assert attempt("two", lambda: [][1], "otherwise") == "otherwise"
    assert attempt("three", lambda: torch.ones(2) @ torch.ones(500 * "x"), 0) == 0
    assert attempt.failures[0] == "two: IndexError: list index out of range"
    assert "\n" not in attempt.failures[1]
    assert len(attempt.failures[1]) <= 207
    late = Checks(time.monotonic())
    assert late("four", lambda: 1 / 0, 5) == 5
    assert late.failures == ["four: the time limit was reached"]


def test_the_largest_score_is_read_from_softmax_and_ignores_masks_and_the_loss():
    with Scores() as scores:
        F.cross_entropy(torch.tensor([[900.0, 1.0]]), torch.tensor([0]))
        assert math.isnan(scores.largest)
        torch.tensor([3.0, -math.inf, -7.0]).softmax(0)
        torch.tensor([math.inf, 2.0]).softmax(0)
        torch.tensor([[1.0, 2.0]]).softmax(1)
        torch.zeros(0).softmax(0)
    assert scores.largest == 3.0


@pytest.mark.parametrize(
    ("work", "divisor_ops"),
    [
        (lambda x: x / x.square().mean().sqrt(), ["aten.sqrt", "aten.mean", "aten.pow"]),
        (lambda x: x / x.std(-1, keepdim=True), ["aten.std", "aten.mul"]),
        (lambda x: x / (x.var() + 1).sqrt().expand(4, 3), ["aten.sqrt", "aten.add", "aten.var", "aten.mul"]),
        (lambda x: x / x.tanh(), ["aten.tanh"]),
    ],
    ids=["root of a mean of squares", "std", "through add and expand", "stops at another function"],
)
def test_the_history_of_a_divisor_is_followed_back_to_its_sum(work, divisor_ops):
    with Trace(nn.Identity()) as recorded:
        work(torch.ones(4, 3) * 2)
    (index,) = [record.index for record in recorded.records if record.op == "aten.div"]
    assert divisor_history(recorded.records, index) == divisor_ops


def test_the_trace_of_a_healthy_step_has_no_origin(repro):
    assert origin_of(StepSubject(repro(nn.Linear(3, 3)))) == (None, [])


def test_staleness_is_1_if_the_second_moment_matches_the_gradients(repro):
    """The second moments are the squares of this step's gradients, so bias correction gives a ratio of 1."""
    step = repro(nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(step.model.parameters(), betas=(0.9, 0.99))
    logits = step.model(step.batch.inputs)
    F.cross_entropy(logits, step.batch.targets).backward()
    for parameter in step.model.parameters():
        second = parameter.grad.square() * (1 - 0.99)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg_sq": second}
    assert StepSubject(step).staleness(optimizer) == pytest.approx(1.0, rel=1e-3)


def test_a_batch_whose_targets_are_all_ignored_is_a_bad_label(repro):
    batch = replace(samples(), targets=torch.full((4,), IGNORE_INDEX))
    assert looked_into(repro(nn.Identity(), batch)).diagnosis.cause == "bad_label"
