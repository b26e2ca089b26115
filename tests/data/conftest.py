"""Fixtures of the tests of data: a text file, and a folder of class folders."""

import pytest

from tests.data.given import picture


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i} äöü\n" for i in range(300)))
    return tmp_path / "a.txt"


@pytest.fixture
def folder(tmp_path):
    """Two classes of ten images each; the red value of an image is its number."""
    for label in range(2):
        for i in range(10):
            picture(tmp_path / "set" / f"class{label}" / f"{i}.png", 100 * label + i)
    return tmp_path / "set"
