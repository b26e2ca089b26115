"""The first picture of README.md is drawn from recorded runs, and its incident names the line that has the bug."""

import json
import re

import pytest
import torch

from docs.held import DATA, PICTURE, draw
from examples.no_eps import WINDOW, Model
from tests.runs import ROOT
from tests.test_docs_pictures import SVG, ElementTree

pytestmark = pytest.mark.beside  # `docs/pictures.py` shows that folder


def test_the_picture_is_that_of_the_recorded_runs():
    found = json.loads(DATA.read_text(encoding="utf-8"))
    assert PICTURE.read_text(encoding="utf-8") == draw(found), "run: python docs/held.py --draw"
    assert found["off"]["nan"] > 0
    assert found["held"]["nan"] == found["fixed"]["nan"] == 0
    assert None not in found["fixed"]["losses"]


def test_the_incident_names_the_line_of_today():
    fix = json.loads(DATA.read_text(encoding="utf-8"))["incident"]["fix"]
    file, line = re.search(r"(examples/\w+\.py):(\d+)", fix).groups()
    assert "self.eps).sqrt()" in (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]


def test_no_text_leaves_its_frame():
    texts = [node for node in ElementTree.parse(PICTURE).iter(f"{SVG}text") if float(node.get("y")) > 80]
    assert texts
    for node in texts:
        assert len(node.text) <= 36, node.text


@pytest.mark.parametrize(("eps", "finite"), [(0.0, False), (1e-6, True)])
def test_equal_bytes_make_a_nan_without_an_epsilon(eps, finite):
    tokens = torch.randint(256, (2, 2 * WINDOW))
    tokens[1, -WINDOW:] = 45  # a line of dashes
    logits = Model(eps=eps)(tokens)
    assert logits[0].isfinite().all()
    assert bool(logits[1, -1].isfinite().any()) is finite
