"""`Guard(recheck_every=...)`: a gradient or update that comes out differently a second time is a machine's fault."""

import json
import logging
from typing import ClassVar

import pytest
import torch

from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.guard import rerun as guard_repeat
from stabletrain.guard.checks import recheck
from stabletrain.guard.checks.recheck import LEARNING_REPEATS
from stabletrain.guard.guard import Guard
from stabletrain.guard.policy import RollbackGuard
from tests.guard.given import Loop, batches, network, same


class Wrong(torch.autograd.Function):
    """Passes a gradient back, wrong by one part in a million on its first call."""

    calls: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Wrong.calls.append(1)
        return gradient * (1 + 1e-6) if len(Wrong.calls) == 1 else gradient


def trained(folder, at=None, steps=10, **options):
    """Ten steps, in one of which (counted from 0) the backward pass is wrong once."""
    loop, Wrong.calls = Loop(folder, **options), []
    for number, batch in enumerate(batches(steps)):
        torch.manual_seed(number)
        loop.guard.step(broken(loop) if number == at else loop.loss, batch=batch)
    return loop


def broken(loop):
    """The loop's closure, with one activation whose gradient is wrong once."""

    def closure(x, y):
        hook = loop.model[0].register_forward_hook(lambda module, inputs, output: Wrong.apply(output))
        try:
            return loop.loss(x, y)
        finally:
            hook.remove()

    return closure


def test_repeating_changes_no_bit(tmp_path):
    often, never = trained(tmp_path / "often", recheck_every=2), trained(tmp_path / "never")
    assert same(often.bits(), never.bits())
    assert often.guard.skipped == 0
    assert often.guard.last.recheck == 0.0


def test_a_gradient_that_was_wrong_once_is_named_and_the_step_taken_again(tmp_path):
    loop = trained(tmp_path / "run", at=5, recheck_every=2)
    assert same(loop.bits(), trained(tmp_path / "clean").bits())
    assert (loop.guard.skipped, loop.guard.machine_faults) == (0, 1)
    (incident,) = loop.guard.incidents
    assert incident.cause == "hardware_fault"
    record = json.loads((incident.path / "diagnosis.json").read_text())
    assert record["kind"] == "recheck"
    assert "a third computation equals the second: the first was wrong" in record["evidence"]


def test_a_step_that_is_not_due_is_not_repeated(tmp_path):
    loop = trained(tmp_path, at=6, recheck_every=2)
    assert loop.guard.skipped == 0
    assert Wrong.calls == [1]


def test_with_rollback_nothing_goes_back_because_the_state_is_good(tmp_path):
    loop = trained(tmp_path, at=5, recheck_every=2, policy=RollbackGuard(snapshot_every=1, healthy_after=1))
    assert (loop.guard.skipped, loop.guard.machine_faults) == (0, 1)
    assert loop.guard.rolled_back == 0
    assert loop.guard.last.applied


def test_a_closure_that_never_repeats_is_said_once_and_left_alone(tmp_path, caplog):
    loop, calls = Loop(tmp_path, recheck_every=2), []

    def closure(x, y):
        calls.append(1)
        return loop.loss(x, y) * (1 + 0.1 * len(calls))

    with caplog.at_level(logging.WARNING, "stabletrain"):
        for x, y in batches(8):
            loop.guard.step(closure, batch=(x, y))
    assert loop.guard.skips["recheck"] == 1
    assert loop.guard.incidents == []
    assert caplog.text.count("never gives the same bits with this model") == 1


@pytest.mark.parametrize("why", ["no batch", "changed batch", "fp16"])
def test_steps_whose_bits_cannot_be_expected_again_are_left_out(tmp_path, why):
    calls = []
    loop = Loop(tmp_path, recheck_every=1, **({"precision": "fp16"} if why == "fp16" else {}))

    def closure(x, y):
        calls.append(1)
        if why == "changed batch":
            x.mul_(0.5)
        return loop.loss(x, y)

    for x, y in batches(3):
        if why == "no batch":
            loop.guard.step(lambda x=x, y=y: closure(x, y))
        else:
            loop.guard.step(closure, batch=(x, y))
    assert loop.guard.skips["recheck"] == 0
    assert len(calls) == 3


def test_micro_batches_are_repeated_together(tmp_path):
    loop = Loop(tmp_path, recheck_every=1)
    for number in range(3):
        for x, y in batches(2, seed=number):
            loop.guard.backward(lambda x, y: loop.loss(x, y) / 2, batch=(x, y))
        loop.guard.update()
    assert loop.guard.skipped == 0
    assert loop.guard.last.recheck == 0.0


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"recheck_every=-1\) is below 0"):
        Loop(tmp_path, recheck_every=-1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"only a closure can be run again"):
        Guard.attach(model, optimizer, folder=tmp_path, recheck_every=5)


def counted(loop, failing=()):
    """The loop's closure, and its calls in each step, counted from 0; the calls `failing` have too little memory."""
    counts = {}

    def closure(x, y):
        step = loop.guard._loop.steps
        counts[step] = counts.get(step, 0) + 1
        if (step, counts[step]) in failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loop.loss(x, y)

    return closure, counts


def test_the_second_step_is_repeated_so_that_memory_is_needed_at_once(tmp_path):
    loop = Loop(tmp_path, recheck_every=4)
    closure, counts = counted(loop)
    for batch in batches(10):
        loop.guard.step(closure, batch=batch)
    assert [step for step, count in counts.items() if count == 2] == [1, 3, 7]
    assert loop.guard._loop.policy.recheck.agreed("gradient") == 2


@pytest.mark.parametrize("step", [1, 3])
def test_too_little_memory_ends_the_check_and_not_the_loop(tmp_path, caplog, step):
    loop, plain = Loop(tmp_path, recheck_every=4), Loop(tmp_path)
    closure, counts = counted(loop, failing=[(step, 2)])
    with caplog.at_level(logging.WARNING, "stabletrain"):
        for number, batch in enumerate(batches(10)):
            for each, run in ((loop, closure), (plain, plain.loss)):
                torch.manual_seed(number)
                each.guard.step(run, batch=batch)
    assert same(loop.bits(), plain.bits())
    assert caplog.text.count("too little memory to compute a gradient and an update twice") == 1
    assert [each for each, count in counts.items() if count == 2] == ([1] if step == 1 else [1, 3])
    assert loop.guard.skipped == 0


@pytest.mark.parametrize("known", [0, 1], ids=["first", "later"])
def test_a_third_computation_that_fails_does_not_end_the_loop(tmp_path, known):
    loop, Wrong.calls = Loop(tmp_path, recheck_every=2), []
    wrong = 1 + 2 * known
    for number, batch in enumerate(batches(8)):
        torch.manual_seed(number)
        closure = broken(loop) if number == wrong else loop.loss
        calls = []

        def third(x, y, closure=closure, calls=calls, number=number):
            calls.append(1)
            if number == wrong and len(calls) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return closure(x, y)

        loop.guard.step(third, batch=batch)
    if known:
        (incident,) = loop.guard.incidents
        record = json.loads((incident.path / "diagnosis.json").read_text())
        assert "there was no third computation" in record["evidence"]
    assert loop.guard.skips["recheck"] == (not known)


# ---- the update of one tensor


def wrongly_updated(folder, at=6, steps=10, **options):
    """Steps of which one updates one tensor wrongly, once: that whose turn it is in step 6 of `recheck_every=3`.

    Returns the loop, and its bits after each step.
    """
    usual = {"policy": RollbackGuard(snapshot_every=2, healthy_after=1), "recheck_every": 3}
    loop = Loop(folder, **usual | options)
    update, done, after = loop.optimizer.step, [], [loop.bits()]

    def wrongly():
        update()
        done.append(True)
        if len(done) == at:
            weight = [*loop.model.parameters()][2]  # the turn after those of steps 0 and 3
            weight.data.mul_(1.5)

    loop.optimizer.step = wrongly
    for number, batch in enumerate(batches(steps)):
        torch.manual_seed(number)
        loop.guard.step(loop.loss, batch=batch)
        after.append(loop.bits())
    return loop, after


def test_an_update_that_was_wrong_once_is_named_and_the_newest_intact_state_is_put_back(tmp_path):
    loop, after = wrongly_updated(tmp_path)
    assert same(after[6], after[4]), "the newest snapshot"
    assert loop.guard.machine_faults == 1
    (found,) = loop.guard.incidents
    assert found.cause == "hardware_fault"
    record = json.loads((found.path / "diagnosis.json").read_text())
    assert (record["kind"], record["step"]) == ("recheck", 6)
    assert "the optimizer's update" in record["verdict"]
    assert "1.weight" in record["verdict"]
    assert "a third computation equals the second: the first was wrong" in record["evidence"]


def test_only_the_tensor_whose_turn_it_is_and_only_in_a_step_that_is_due_is_repeated(tmp_path):
    for options in ({"at": 5}, {"recheck_every": 2}):  # the third turn is another tensor's
        loop, _ = wrongly_updated(tmp_path, **options)
        assert loop.guard.machine_faults == 0


def test_without_snapshots_a_wrong_update_halts_the_loop(tmp_path):
    with pytest.raises(TrainingHalted, match="step 6: the optimizer's update came out differently"):
        wrongly_updated(tmp_path, policy=None)


def test_an_update_is_repeated_although_the_closure_takes_no_batch(tmp_path):
    loop = Loop(tmp_path, recheck_every=1)
    for x, y in batches(5):
        loop.guard.step(lambda x=x, y=y: loop.loss(x, y))
    assert [loop.guard._loop.policy.recheck.agreed(part) for part in ("gradient", "update")] == [0, 5]


# ---- where bits may differ


@pytest.fixture
def inexact(monkeypatch):
    """A machine that adds in any order, as a card does by default."""
    for module in (recheck, guard_repeat):
        monkeypatch.setattr(module, "repeats_exactly", lambda *_: False)


def rounding(loop, at=None, factor=1.5):
    """A closure that rounds otherwise each time; in one step, counted from 0, its first run is far off."""
    calls = {}

    def closure(x, y):
        step = loop.guard._loop.steps
        calls[step] = calls.get(step, 0) + 1
        off = factor if (step, calls[step]) == (at, 1) else 1.0
        return loop.loss(x, y) * off * (1 + 1e-6 * (sum(calls.values()) % 3))

    return closure


def test_a_limit_is_learnt_and_a_gradient_beyond_it_is_a_fault(tmp_path, inexact):
    loop = Loop(tmp_path, recheck_every=1)
    closure, steps = rounding(loop, at=LEARNING_REPEATS + 1), LEARNING_REPEATS + 3
    for number, batch in enumerate(batches(steps)):
        loop.guard.step(closure, batch=batch)
        bound = loop.guard._loop.policy.recheck.bounds["gradient"]
        assert bound.learnt == min(number + 1, LEARNING_REPEATS)
    (found,) = loop.guard.incidents
    record = json.loads((found.path / "diagnosis.json").read_text())
    assert (record["kind"], record["cause"], record["step"]) == ("recheck", "hardware_fault", LEARNING_REPEATS + 2)
    assert "is usual on this machine" in " ".join(record["evidence"])


def test_until_then_no_finite_difference_is_a_fault(tmp_path, inexact):
    loop = Loop(tmp_path, recheck_every=1)
    closure = rounding(loop, at=LEARNING_REPEATS - 2)
    for batch in batches(LEARNING_REPEATS + 2):
        loop.guard.step(closure, batch=batch)
    assert (loop.guard.skipped, loop.guard.machine_faults, loop.guard.incidents) == (0, 0, [])


def test_an_update_may_differ_there_too_although_the_closure_takes_no_batch(tmp_path, inexact):
    loop = Loop(tmp_path, recheck_every=1)
    x, y = batches(1)[0]
    loop.guard.step(lambda: loop.loss(x, y))
    assert loop.guard._loop.policy.recheck.exact is False


# ---- a step that is taken again


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_an_error_of_a_step_that_is_taken_again_leaves_everything_as_before_it(tmp_path, error):
    loop, calls = Loop(tmp_path, recheck_every=2), []
    loop.run(batches(3))
    before = loop.bits()

    def closure(x, y):
        calls.append(True)
        if len(calls) == 4:  # the step, its repetition, the third, and the step again
            loop.loss(x, y)
            raise error
        return loop.loss(x, y) * (1.5 if len(calls) == 1 else 1.0)

    with pytest.raises(error):
        loop.guard.step(closure, batch=batches(1)[0])
    assert same(loop.bits(), before)
    loop.run(batches(1))
    assert loop.guard.last.applied
