"""The version stands in four files, and is one; the description for a package index has no relative link."""

import re

import stabletrain
from tests.runs import ROOT


def found(file, pattern):
    """What a pattern's group matches first in a file of the repository."""
    return re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)[1]


def test_the_version_is_the_same_wherever_it_stands():
    assert found("pyproject.toml", r'^version = "(.+)"$') == stabletrain.__version__
    assert found("CITATION.cff", r"^version: (.+)$") == stabletrain.__version__
    assert found("CHANGELOG.md", r"^## \[(\d[^]]*)\]") == stabletrain.__version__
    assert f"## Notes for {stabletrain.__version__}\n" in (ROOT / "docs" / "development" / "release.md").read_text()


def test_the_licence_is_the_same_wherever_it_stands():
    assert found("pyproject.toml", r'^license = "(.+)"$') == found("CITATION.cff", r"^license: (.+)$") == "Apache-2.0"


def test_the_description_for_a_package_index_has_no_relative_link():
    text = (ROOT / found("pyproject.toml", r'^readme = "([^"]+)"')).read_text(encoding="utf-8")
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https://")] == []


def test_the_changelog_is_short():
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split()) <= 800
