"""What the tests of checkpoints start from."""

import pytest

from tests.checkpoint.given import Run


@pytest.fixture
def run(tmp_path):
    """Checkpoints of a new run folder."""
    return Run(tmp_path)
