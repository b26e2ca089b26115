"""`Update` overwrites one element after an optimizer's step: only then, and only if the step wrote something."""

import math

import pytest
import torch

from stabletrain.beside.faults import Update
from stabletrain.errors import ConfigError
from stabletrain.step import apply
from tests.beside.faults.given import CADENCE, INF, NAN, Scaled, bad_elements, differing, fresh, ran, step, weights
from tests.runs import TINY_GPT


def adamw(fused):
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=fused)


def moments(state, key):
    return [state.optimizer.state[p][key].clone() for p in state.model.parameters()]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("value", [NAN, INF, 7.0])
def test_one_element_of_one_weight_is_overwritten_by_the_update_of_its_tick(value, fused):
    clean, state = fresh(adamw(fused)), fresh(adamw(fused))
    Update(at=[2], value=value, parameter="1.weight").state(state, Scaled())
    for tick in range(3):
        assert differing(weights(clean), weights(state)) == 0, tick
        step(clean)
        step(state)
    changed = state.model[1].weight != clean.model[1].weight
    assert changed.sum() == 1
    assert torch.equal(state.model[1].weight[changed], torch.tensor([value])) or math.isnan(value)
    assert differing(weights(clean), weights(state)) == 1
    assert not differing(moments(clean, "exp_avg"), moments(state, "exp_avg"))
    state.optimizer.zero_grad()
    assert not state.optimizer._optimizer_step_post_hooks, "removed before the next step"


@pytest.mark.parametrize(("where", "key"), [("moment", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")])
def test_one_element_of_one_moment_is_overwritten(where, key):
    clean, state = fresh(adamw(True)), fresh(adamw(True))
    Update(at=[0], where=where).state(state, Scaled())  # the first step makes the moments
    step(clean)
    step(state)
    assert differing(weights(clean), weights(state)) == 0
    assert bad_elements(moments(state, key)) == 1


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_is_withheld_has_no_fault(fused, capsys):
    state = fresh(adamw(fused))
    Update(at=[1]).state(state, Scaled())
    step(state)
    before = weights(state)
    step(state, applied=False)
    apply(state.optimizer, torch.tensor(False))
    assert differing(before, weights(state)) == 0
    assert "fault injected" not in capsys.readouterr().err


def test_only_the_first_update_of_its_tick_has_the_fault():
    """A step that is undone and taken again is sound."""
    state = fresh(adamw(True))
    Update(at=[0]).state(state, Scaled())
    step(state)
    assert bad_elements(weights(state)) == 1
    state.model.load_state_dict(fresh(adamw(True)).model.state_dict())
    state.optimizer.step()
    assert bad_elements(weights(state)) == 0


@pytest.mark.parametrize("options", [{"where": "bias"}, {"at": []}])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match=f"faults.{next(iter(options))}="):
        Update(**({"at": [1]} | options))
    with pytest.raises(ConfigError, match="is not a parameter that the model trains"):
        Update(at=[1], parameter="9.weight").state(fresh(), Scaled())


@pytest.mark.parametrize("fused", ["true", "false"])
def test_in_a_run_one_update_leaves_a_nan(tmp_path, fused, capsys):
    """With `guard=off` the run is lost: nothing else stands behind the optimizer."""
    chosen = ["faults=optimizer", "faults.at=[3]", "guard=off", f"optimizer.fused={fused}", "eval_every=100"]
    job, _ = ran(tmp_path, *TINY_GPT, *CADENCE, *chosen, "steps=4")
    assert bad_elements(weights(job.state)) == 1
    assert "the update of tick 3 leaves nan in the weight of" in capsys.readouterr().err
