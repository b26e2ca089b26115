"""What a script trains is guarded as it is: the same bits until something happens, and then as if it had not."""

import json

import pytest
import torch

from stabletrain.beside.script.start import start, stop
from stabletrain.guard.loop_guard import guard_of
from tests.beside.script.given import KINDS, Adversarial, Plain, train
from tests.guard.given import same


@pytest.fixture
def guarded(tmp_path):
    start(folder=str(tmp_path / "incidents"), max_incidents=0)
    yield tmp_path / "incidents"
    stop()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_healthy_script_trains_to_the_same_bits_and_nothing_is_said(kind, guarded, capsys):
    found, loop = train(kind)
    guards = [guard_of(part) for part in loop.parts if isinstance(part, torch.optim.Optimizer)]
    assert all(guard.last.applied for guard in guards)
    stop()
    assert same(found, train(kind)[0])
    assert capsys.readouterr() == ("", "")
    assert torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind is not Adversarial], ids=lambda k: k.__name__)
def test_a_bad_batch_leaves_everything_as_if_its_step_had_not_been(kind, guarded):
    found, loop = train(kind, bad=(1, 7))
    assert guard_of(loop.optimizer).skips["nonfinite"] == 2
    stop()
    expected = train(kind, held=(1, 7))[0]
    if kind.__name__ in ("Clipped",):
        pass
    assert same(found, expected), [k for k in found if not same({k: found[k]}, {k: expected[k]})]
