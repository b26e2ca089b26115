"""Errors: their exit codes, and suggestions for mistyped names."""

import importlib
import json
import traceback
from functools import partial

import pytest
import torch
import yaml

import stabletrain
from stabletrain.errors import (
    PACKAGE,
    ConfigError,
    Interrupted,
    RankLost,
    StabletrainError,
    TrainingHalted,
    closest,
    did_you_mean,
    is_own,
    own_traceback,
)


def test_the_closest_name_is_found_and_a_distant_one_is_not():
    known = ["steps", "seed", "device"]
    assert closest("stepz", known) == "steps"
    assert closest("banana", known) == ""
    assert closest("steps", []) == ""


def test_a_higher_cutoff_requires_more_similarity():
    assert closest("stabs", ["steps"], cutoff=0.5) == "steps"
    assert closest("stabs", ["steps"], cutoff=0.9) == ""


def test_a_suggestion_is_a_question_or_empty():
    assert did_you_mean("stepz", iter(["steps"])) == "; did you mean steps?"
    assert did_you_mean("banana", ["steps"]) == ""
    assert did_you_mean("stabs", ["steps"], cutoff=0.9) == ""


@pytest.mark.parametrize(("kind", "code"), [(ConfigError, 2), (TrainingHalted, 3), (RankLost, 1)])
def test_every_error_has_its_exit_code(kind, code):
    error = kind("what happened")
    assert isinstance(error, StabletrainError)
    assert (error.exit_code, str(error)) == (code, "what happened")


@pytest.mark.parametrize(("saved", "code"), [(True, 75), (False, 130)])
def test_an_interrupted_run_asks_to_be_tried_again_only_if_its_state_is_saved(saved, code):
    error = Interrupted("SIGTERM", saved=saved)
    assert (error.exit_code, error.saved, str(error)) == (code, saved, "SIGTERM")
    assert isinstance(error, StabletrainError)
    assert StabletrainError.exit_code == 1, "the code of other errors stays"


def raised(act):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        act()
    error = caught.value
    error.__traceback__ = error.__traceback__.tb_next  # without the frame of this function
    return error


def from_users_code(act, file="/home/user/mine.py"):
    """An error in a file of the user's, which calls `act`."""
    scope = {"act": act}
    exec(compile("def forward():\n    return act()\n", file, "exec"), scope)
    return raised(scope["forward"])


def test_of_an_error_in_the_users_code_only_its_own_lines_are_shown():
    layer = torch.nn.Linear(3, 2)
    error = from_users_code(partial(layer, torch.ones(4)))
    assert "nn/modules/module.py" in "".join(traceback.format_exception(error))
    header, frame, last = own_traceback(error).splitlines()
    assert (header, frame) == ("Traceback (most recent call last):", '  File "/home/user/mine.py", line 2, in forward')
    assert last.startswith("RuntimeError: ")


def test_the_cause_of_the_users_error_is_shown_too():
    def wrapping():
        try:
            json.loads("{")
        except ValueError as error:
            raise LookupError("no such sample") from error

    told = own_traceback(from_users_code(wrapping))
    assert "JSONDecodeError: Expecting property name" in told
    assert "json/decoder.py" not in told
    assert "/home/user/mine.py" in told
    assert told.endswith("LookupError: no such sample\n")


def test_an_error_without_the_users_code_is_not_shortened():
    assert own_traceback(raised(partial(json.loads, "{"))) is None
    assert own_traceback(from_users_code(partial(json.loads, "{"), f"{PACKAGE}step.py")) is None


@pytest.mark.parametrize("module", [torch, stabletrain, yaml, importlib, pytest])
def test_libraries_are_not_the_users_code(module):
    assert not is_own(module.__file__)


def test_a_linked_file_is_the_users_if_its_target_is(tmp_path):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "mine.py").write_text("")
    link = tmp_path / "site-packages" / "mine.py"
    link.symlink_to(tmp_path / "mine.py")
    assert is_own(str(link))
    assert not is_own(str(tmp_path / "site-packages" / "other.py"))
