"""The pictures of `docs/pictures.py` are those of today's code, and say what the code says."""

import re
from xml.etree import ElementTree

import pytest

from docs.pictures import PICTURES, WIDTH, comments, first_sentences, order
from stabletrain.records import Verdict
from tests.laws.test_imports import MAY_SEE, NOUNS
from tests.runs import ROOT

pytestmark = pytest.mark.beside  # one picture shows that folder

SVG = "{http://www.w3.org/2000/svg}"

NARROW = 4.5
"""Pixels that a letter takes at least, on average."""


def words(file):
    """The texts of a picture, line after line."""
    tree = ElementTree.parse(ROOT / "docs" / file)
    return [node.text for node in tree.iter(f"{SVG}text")]


@pytest.mark.parametrize("file", PICTURES)
def test_a_picture_is_that_of_today(file):
    assert (ROOT / "docs" / file).read_text(encoding="utf-8") == PICTURES[file](), "run: python docs/pictures.py"


def test_every_part_is_in_the_picture():
    shown = words("architecture.svg")
    small = " ".join(shown[shown.index("Small modules, which the parts above share") :]).replace(",", "").split()
    names = {{"train": "train.py", "beside": "beside/*.py"}.get(room, room) for room in MAY_SEE}
    assert names <= {*shown, *small}
    assert {*small} >= NOUNS


def test_every_stage_of_a_step_and_every_verdict_is_in_the_picture():
    text = " ".join(words("step.svg"))
    for name in ("compute", "forward_backward", "commit"):
        assert len(comments("step.py", name)) >= 4
        for sentence in first_sentences("step.py", name):
            assert sentence[1:20] in text
    assert {verdict.value for verdict in Verdict} <= {*words("step.svg")}


def test_the_host_reads_a_step_between_the_two_halves_of_the_next():
    assert order() == ["compute", "judge_step", "commit"]


@pytest.mark.parametrize("file", PICTURES)
def test_no_text_leaves_the_picture(file):
    for node in ElementTree.parse(ROOT / "docs" / file).iter(f"{SVG}text"):
        assert float(node.get("x")) + NARROW * len(node.text) <= WIDTH, node.text


@pytest.mark.parametrize("file", PICTURES)
def test_a_picture_has_colours_for_dark_pages_and_a_background_of_its_own(file):
    text = (ROOT / "docs" / file).read_text(encoding="utf-8")
    light, dark = text.partition("prefers-color-scheme: dark")[::2]
    for kind in re.findall(r"^\.(\w+) {.*(?:fill|stroke): #", light, re.MULTILINE):
        assert f".{kind} {{" in dark, f"{kind} has no colour for dark pages"
    assert 'class="page"' in text
