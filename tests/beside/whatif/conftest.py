"""The run that the tests of a what-if share. None of them may write into it."""

import shutil
from dataclasses import replace

import pytest

from stabletrain.beside.whatif import healing
from tests.beside.whatif.given import trained
from tests.once import once


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory):
    return once(tmp_path_factory, "whatif_run", trained)


@pytest.fixture
def run(shared_run, tmp_path):
    """A copy of the run, for a test that writes into it."""
    return shutil.copytree(shared_run, tmp_path / "run")


@pytest.fixture
def few_arms(monkeypatch):
    """Has a what-if judge and try few of its arms, in shorter rounds: each is a run, and takes a second to begin."""

    def plan_few(asked, plan=healing.plan):
        return plan(replace(asked, past=16, steps=16, arms=("skip", "lr_half", "lr_usual")))

    monkeypatch.setattr(healing, "plan", plan_few)
    return plan_few
