"""Faults in a step: exactly the planned element, only at the planned tick."""

import contextlib

import pytest
import torch

from stabletrain.beside.faults import Activation, BitFlip, Gradient, LearningRate
from stabletrain.errors import ConfigError
from stabletrain.tracking.metrics import read_jsonl
from tests.beside.faults.given import (
    CADENCE,
    INF,
    NAN,
    NEVER,
    Scaled,
    bad_elements,
    differing,
    fresh,
    gradients,
    ran,
    samples,
    step,
    weights,
)
from tests.runs import TINY_GPT


@pytest.mark.parametrize(
    "fault",
    [Gradient(at=[4]), Activation(at=[4]), BitFlip(at=[4])],
    ids=["gradient", "activation", "bitflip"],
)
def test_a_tick_comes_once_however_often_the_step_does(fault):
    state = fresh()
    untouched = state.model
    fault.state(state, Scaled())
    bad = []
    for _ in range(9):
        if state.executed_steps == 5:  # a rollback: weights and step of the start, the tick stays
            restored = fresh()
            untouched.load_state_dict(restored.model.state_dict())
            state.step = 0
        before = weights(state)
        step(state, applied=False)
        bad.append(bool(bad_elements(gradients(state))) or differing(before, weights(state)) > 0)
    assert bad == [False] * 4 + [True] + [False] * 4


@pytest.mark.parametrize(
    ("fault", "times"),
    [(Gradient(at=[4]), 1), (BitFlip(at=[4], bit=31), 1), (LearningRate(at=[4]), 2)],
    ids=["gradient", "bitflip", "learning rate"],
)
def test_in_a_replay_only_what_belongs_to_the_run_comes_again(fault, times, capsys):
    state = fresh()
    fault.state(state, Scaled())
    for _ in range(2):
        state.executed_steps = 3
        for _ in range(3):
            step(state)
    assert capsys.readouterr().err.count("at tick 4") == times


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_exactly_one_element_of_one_gradient_is_bad(value, micro_batches):
    state = fresh()
    Gradient(at=[2], value=value, parameter="1.weight").state(state, Scaled(1024.0))
    for tick in range(4):
        step(state, micro_batches, scale=1024.0, applied=False)
        found = gradients(state)
        assert bad_elements(found) == (tick == 2)
        assert bad_elements([state.model[1].weight.grad]) == (tick == 2)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_finite_gradient_arrives_as_it_was_written(scale):
    state, clean = fresh(), fresh()
    Gradient(at=[0], value=1e4).state(state, Scaled(scale))
    step(state, scale=scale, applied=False)
    step(clean, scale=scale, applied=False)
    assert differing(gradients(state), gradients(clean)) == 1
    assert max(gradient.max().item() for gradient in gradients(state)) == 1e4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [NAN, -INF, 512.0])
def test_exactly_one_element_of_one_output_is_bad_in_the_first_micro_batch(value, dtype):
    clean, state = fresh(), fresh()
    Activation(at=[2], value=value, module="0").state(state, Scaled())
    seen = []
    for each in (clean, state):
        given = []
        each.model[1].register_forward_pre_hook(lambda _, inputs, given=given: given.append(inputs[0].detach().clone()))
        autocast = torch.autocast("cpu", dtype) if dtype != torch.float32 else contextlib.nullcontext()
        for tick in range(4):
            each.optimizer.zero_grad()
            for part in range(2):
                with autocast:
                    out = each.model(samples(10 * tick + part))
                out.float().sum().backward()
            each.executed_steps += 1
        seen.append(given)
    assert {output.dtype for output in seen[1]} == {dtype}
    for number, (one, other) in enumerate(zip(*seen, strict=True)):
        changed = ~((one == other) | (one.isnan() & other.isnan()))
        assert changed.sum() == (number == 4)
        if number == 4:
            assert str(float(other[changed])) == str(value)


def test_a_compiled_model_runs_uncompiled_for_a_bad_activation_only():
    state = fresh()
    Activation(at=[1]).state(state, Scaled())
    state.model.compile(backend="eager")
    compiled = state.model._compiled_call_impl
    bad = []
    for _ in range(3):
        step(state, applied=False)
        bad.append(bad_elements(gradients(state)) > 0)
    assert bad == [False, True, False]
    assert state.model._compiled_call_impl is compiled


def test_an_evaluation_never_has_a_bad_activation_left_over_from_a_step():
    state = fresh()
    Activation(at=[0]).state(state, Scaled())
    state.optimizer.zero_grad()  # the step has an empty batch, so nothing is run
    with torch.no_grad():
        assert torch.isfinite(state.model(samples(0))).all()


def test_a_step_begins_with_gradients_gone_or_at_zero_as_it_asks():
    state = fresh()
    Gradient(at=[NEVER]).state(state, Scaled())
    step(state)
    state.optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in state.model.parameters())
    state.optimizer.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in state.model.parameters())


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_a_burst_of_the_learning_rate_lasts_its_length_and_leaves_nothing(fused):
    state = fresh(lambda parameters: torch.optim.SGD(parameters, lr=0.01, fused=fused))
    LearningRate(at=[2], factor=50.0, length=2).state(state, Scaled())
    rates = []
    for _ in range(6):
        before = weights(state)
        step(state)
        moved = before[0] - state.model[0].weight.detach()
        rates.append((moved.sum() / gradients(state)[0].sum()).item())
        assert state.optimizer.param_groups[0]["lr"] == 0.01
    assert rates == pytest.approx([0.01, 0.01, 0.5, 0.5, 0.01, 0.01], rel=1e-2)


def test_a_burst_whose_update_is_skipped_does_not_affect_the_next():
    state = fresh()
    LearningRate(at=[1], factor=50.0).state(state, Scaled())
    for tick in range(3):
        before = weights(state)
        step(state, applied=tick != 1)
        moved = (before[0] - state.model[0].weight.detach()).sum() / gradients(state)[0].sum()
        assert moved.item() == pytest.approx(0.0 if tick == 1 else 0.1, rel=1e-2)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Gradient(at=[0], parameter="1.wieght"), "faults.parameter=1.wieght is not a parameter"),
        (BitFlip(at=[0], parameter="3.weight"), "faults.parameter=3.weight is not a parameter"),
        (Activation(at=[0], module="7"), "faults.module=7 names no module"),
    ],
    ids=["gradient", "bitflip", "activation"],
)
def test_a_missing_parameter_or_module_is_refused_before_the_first_step(fault, message):
    with pytest.raises(ConfigError, match=message):
        fault.state(fresh(), Scaled())


@pytest.mark.slow
def test_a_burst_of_the_learning_rate_is_neither_saved_nor_logged(tmp_path):
    given = [*TINY_GPT, *CADENCE, "schedule=constant", "guard=off"]
    burst, _ = ran(tmp_path / "burst", *given, "faults=learning_rate", "faults.at=[4]", "faults.factor=10")
    clean, _ = ran(tmp_path / "clean", *given)
    assert not torch.equal(*(next(iter(job.state.model.parameters())) for job in (burst, clean)))
    rates = {line["lr"] for line in read_jsonl(tmp_path / "burst" / "metrics.jsonl") if "lr" in line}
    assert rates == {line["lr"] for line in read_jsonl(tmp_path / "clean" / "metrics.jsonl") if "lr" in line}
    assert burst.state.optimizer.param_groups[0]["lr"] == clean.state.optimizer.param_groups[0]["lr"]
