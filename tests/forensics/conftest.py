"""What the tests of this folder share: what acts in a step."""

import pytest

from stabletrain.trainer.build import build
from tests.runs import TINY_GPT, composed


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """What acts in a step of a small GPT in fp32; it takes a model of images or of anything else as well."""
    with composed(*TINY_GPT, "checkpoint=off", "monitors=none", "precision=fp32", "parallel=auto") as cfg:
        return build(cfg, tmp_path_factory.mktemp("run")).tools
