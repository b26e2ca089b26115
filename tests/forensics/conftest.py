"""Fixtures that the tests of this folder share."""

import pytest

from stabletrain.trainer.build import build
from tests.runs import TINY_GPT, composed


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """The tools of a step of a small GPT in fp32. They work with any other model too."""
    with composed(*TINY_GPT, "checkpoint=off", "monitors=none", "precision=fp32", "parallel=auto") as cfg:
        return build(cfg, tmp_path_factory.mktemp("run")).tools
