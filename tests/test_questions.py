"""Each question that people ask has a source, and a page and heading that exist, or it says that nothing answers it."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"

ROW = re.compile(r"^\| (?P<question>.+?) \| \[[^]]+ #\d+\]\((?P<source>\S+)\) \| (?P<answer>.+) \|$", re.MULTILINE)

SOURCE = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+")

LINK = re.compile(r"\[[^]]+\]\((?P<page>[\w./-]+\.md)#(?P<anchor>[\w-]+)\)")

UNANSWERED = "nothing answers this: "

QUESTIONS = [*ROW.finditer((DOCS / "questions.md").read_text(encoding="utf-8"))]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them; a heading that repeats gets none here."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
    made = [re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles]
    return {anchor for anchor in made if made.count(anchor) == 1}


def test_an_anchor_is_that_of_the_heading_and_never_of_code():
    page = "# What's `a.b`?\n\n```\n# code\n```\n\n## kill -9 at last\n\n## Twice\n\n## Twice\n"
    assert anchors(page) == {"whats-ab", "kill--9-at-last"}


def test_there_are_thirty_questions_each_once():
    assert len(QUESTIONS) == 30
    assert len({found["question"] for found in QUESTIONS}) == 30
    assert len({found["source"] for found in QUESTIONS}) == 30
    rows = [line for line in (DOCS / "questions.md").read_text(encoding="utf-8").splitlines() if "github.com" in line]
    assert len(rows) == 30, "a row has another form"


@pytest.mark.parametrize("found", QUESTIONS, ids=lambda found: found["source"].split("/", 3)[-1])
def test_a_question_has_a_source_and_a_page_and_heading_that_exist(found):
    assert SOURCE.fullmatch(found["source"])
    links = [*LINK.finditer(found["answer"])]
    assert bool(links) != found["answer"].startswith(UNANSWERED), found["answer"]
    assert len(links) == found["answer"].count("]("), "a link without a heading"
    for link in links:
        page = DOCS / link["page"]
        assert page.is_file(), link["page"]
        assert link["anchor"] in anchors(page.read_text(encoding="utf-8")), link[0]
