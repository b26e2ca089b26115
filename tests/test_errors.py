"""Errors: their exit codes, and suggestions for mistyped names."""

import pytest

from stabletrain.errors import (
    ConfigError,
    Interrupted,
    RankLost,
    StabletrainError,
    TrainingHalted,
    closest,
    did_you_mean,
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
