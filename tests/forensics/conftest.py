"""Fixtures that the tests of this folder share."""

import pytest
import torch
from torch import nn

from stabletrain.forensics.repro import Repro
from stabletrain.records import Batch
from stabletrain.trainer.build import build
from tests.forensics.diagnosis.given import READING
from tests.runs import TINY_GPT, composed


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """The tools of a step of a small GPT in fp32. They work with any other model too."""
    with composed(*TINY_GPT, "checkpoint=off", "monitors=none", "precision=fp32", "parallel=auto") as cfg:
        return build(cfg, tmp_path_factory.mktemp("run")).tools


@pytest.fixture
def repro(tools):
    """A step of a small model on four samples with ids and sources."""
    batch = Batch(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64), torch.arange(40, 44), list("abcd"))
    return Repro(nn.Linear(3, 2), [], 49, batch, 2, tools, 1.0, torch.device("cpu"), READING)
