"""The mean of the last healthy states: which states those are, where they come from, and what is averaged."""

import json
import shutil

import pytest
import torch

from stabletrain.beside.whatif.arms import Arm, mean_of_states
from stabletrain.beside.whatif.base import read_base
from stabletrain.beside.whatif.edits import EARLIER_STATES, averaged_steps, mean_weights, states_at
from stabletrain.beside.whatif.start import find_origin, prepare, start_of
from stabletrain.checkpoint.folder import find
from stabletrain.errors import ConfigError
from tests.beside.whatif.test_start import EVERY, TROUBLE, same


def saved(run, step):
    return find(run / "checkpoints" / f"step-{step:08d}")


def test_the_states_are_the_last_healthy_ones_from_before_the_trouble(shared_run):
    base = read_base(shared_run, 80)
    assert averaged_steps(base, 60, 60, 60) == (20, 40, 60)
    assert averaged_steps(base, 80, 80, 60) == (40, 60, 80), "60 and 40 were kept"
    assert averaged_steps(base, 80, 80, 20) == (40, 60, 80), "they are computed again with the start"
    assert averaged_steps(base, 40, 40, 40) == (20, 40), "the initial weights are no state of training"
    assert averaged_steps(base, 47, 47, 40) == (20, 40, 47)
    # After the trouble the run wrote states of steps 80, 100, 120; at tick 99 none of these.
    assert averaged_steps(base, 99, 99, 60) == (60, 80, 99), "80 is computed again, and not taken from the run"
    assert averaged_steps(base, 99, 99, 99) == (40, 60, 99)


def test_states_from_before_a_change_of_settings_do_not_count(run):
    record = json.loads((run / "run.json").read_text())
    record["changes"] = [{"step": 40, "keys": {"optimizer.lr": [3e-3, 1e-3]}}]
    (run / "run.json").write_text(json.dumps(record))
    assert averaged_steps(read_base(run, 60), 60, 60, 60) == (60,)
    assert averaged_steps(read_base(run, 80), 80, 80, 60) == (60, 80)
    record["changes"] = [{"step": 40, "keys": {"log_every": [10, 1]}}]
    (run / "run.json").write_text(json.dumps(record))
    assert averaged_steps(read_base(run, 60), 60, 60, 60) == (20, 40, 60), "this changes no step"


def test_a_mean_needs_two_states():
    assert "a mean needs two" in mean_of_states((60,)).refused
    assert mean_of_states((40, 60)).about == "the mean of the weights after steps 40 and 60"


def test_the_mean_is_that_of_the_numbers_and_integers_are_the_newest():
    models = [
        {"weight": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "running_mean": torch.tensor(each), "count": number}
        for each, number in ((1.0, torch.tensor(3)), (2.0, torch.tensor(4)), (6.0, torch.tensor(5)))
    ]
    found = mean_weights(models)
    assert found["weight"].tolist() == [1.0, 2.0]
    assert found["weight"].dtype == torch.bfloat16
    assert found["running_mean"] == 3.0
    assert found["count"] == 5
    with pytest.raises(ConfigError, match="not of the same model"):
        mean_weights([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}])


def test_the_edited_copy_has_the_mean_weights_and_the_newest_moments(shared_run, tmp_path):
    base, start = read_base(shared_run, 60), saved(shared_run, 60)
    tree = start_of(Arm("mean", edit="mean", states=(20, 40, 60)), start, TROUBLE, base, tmp_path).load()
    each = [saved(shared_run, step).load_model() for step in (20, 40, 60)]
    for name, weight in tree["model"].items():
        torch.testing.assert_close(weight, torch.stack([model[name] for model in each]).mean(0))
    assert not torch.equal(tree["model"]["head.weight"], each[-1]["head.weight"])
    same(tree, start.load(), "optimizer")
    assert (tree["step"], tree["tick"]) == (60, 60)


def test_states_are_saved_while_the_start_is_computed_again(run, tmp_path):
    shutil.rmtree(run / "checkpoints" / "step-00000060")
    base, origin = read_base(run, 80), find_origin(EVERY, run, TROUBLE, None)
    assert origin.source is not None
    assert origin.source.step == 40
    steps = averaged_steps(base, 80, 80, 40)
    start = prepare(base, origin, tmp_path)
    found = states_at(steps, base, start, tmp_path)
    assert [each.path.parent for each in found] == [
        run / "checkpoints",
        tmp_path / EARLIER_STATES,
        tmp_path / "start" / "checkpoints",
    ]
    assert [each.load()["tick"] for each in found] == [40, 60, 80]
    shutil.rmtree(tmp_path / EARLIER_STATES)
    with pytest.raises(ConfigError, match="the state after step 60 is not in "):
        states_at(steps, base, start, tmp_path)
