"""A place that all of pytest's processes share, so that what torchrun did once serves them all; a group of one rank."""

import os

import pytest

from stabletrain.parallel import ranks


@pytest.fixture(scope="session")
def shared_place(tmp_path_factory):
    """The session's temporary folder, whichever process asks."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture
def group_of_one(monkeypatch):
    """This process as the only rank of a group: what the ranks exchange is its own."""
    from torch import distributed

    monkeypatch.setattr(ranks, "_HOST_GROUPS", {})
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield ranks.Ranks(0, 1, 0, launched=True)
    distributed.destroy_process_group()
