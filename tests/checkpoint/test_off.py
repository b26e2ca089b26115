"""checkpoint=off: nothing is written, and every question that the loop asks has an answer."""

import inspect

import pytest

from stabletrain.checkpoint.checkpoints import Checkpoints
from stabletrain.checkpoint.off import NoCheckpoints
from stabletrain.errors import ConfigError


def test_a_save_writes_nothing(tmp_path):
    off, events = NoCheckpoints(), []
    off.open(tmp_path / "checkpoints", lambda *event, **more: events.append(event))
    off.save(10, {"a": 1}, info={}, healthy=True, val_loss=1.0, anchors=[5])
    off.wait()
    off.finish_quietly()
    off.rewind(5)
    assert (list(tmp_path.iterdir()), events) == ([], [])


def test_there_is_never_one_to_continue_from_and_none_is_due():
    off = NoCheckpoints()
    assert not off.keeps
    assert [step for step in range(1000) if off.due(step)] == []
    assert (off.newest(), off.newest(healthy_only=True, at_most=5)) == (None, None)
    assert (off.oldest(), off.preferred(), off.best(), off.unsaved()) == (None, None, None, None)
    assert off.reaches(0)


def test_a_checkpoint_of_another_run_is_found_by_the_given_reader(tmp_path):
    off, read = NoCheckpoints(), []

    class Damaged(Exception):
        pass

    def verify(path):
        read.append(path)
        raise Damaged

    off.open(tmp_path, lambda *event: None, verify=verify)
    with pytest.raises(Damaged):
        off.find(tmp_path / "step-00000004")
    assert read == [tmp_path / "step-00000004"]
    with pytest.raises(ConfigError, match="holds no usable checkpoint"):
        off.find(tmp_path)


def test_the_checkpoints_that_are_kept_answer_the_same_questions():
    for name, method in inspect.getmembers(NoCheckpoints, inspect.isfunction):
        ours = list(inspect.signature(method).parameters)
        assert list(inspect.signature(getattr(Checkpoints, name)).parameters) == ours, name
