"""The run that the tests of a what-if share. None of them may write into it."""

import shutil

import pytest

from tests.beside.whatif.given import trained
from tests.once import once


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory):
    return once(tmp_path_factory, "whatif_run", trained)


@pytest.fixture
def run(shared_run, tmp_path):
    """A copy of the run, for a test that writes into it."""
    return shutil.copytree(shared_run, tmp_path / "run")
