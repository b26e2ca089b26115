"""A place that all of pytest's processes share, so that what torchrun did once serves them all."""

import os

import pytest


@pytest.fixture(scope="session")
def shared_place(tmp_path_factory):
    """The session's temporary folder, whichever process asks."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
