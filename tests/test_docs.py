"""The documentation says what the program does: transcripts, length, and plain words.

`mkdocs build --strict` checks links.
"""

import re
import subprocess
from pathlib import Path

import pytest

from docs.tables import TABLES, with_commands, with_table
from tests.runs import ROOT
from tests.test_questions import anchors
from tests.transcripts import PAGES, Transcript, difference, masked, run, transcripts, working_folder

ALL = [found for page in PAGES for found in transcripts(page)]

FAST = [found for found in ALL if found.mark == "fast"]

SLOW = [found for found in ALL if found.mark == ""]

(FIRST_RUN, *_) = [found for found in SLOW if found.page.name == "quickstart.md"]
"""Runs with W&B on, as for users."""

NOT_RUN = {"needs a card", "needs W&B", "needs a cluster", "takes minutes", "needs a data set", "run by tests/refusals"}
"""Reasons for which a transcript is not run."""

DOCS = [*(ROOT / "docs").rglob("*.md")]

BANNED = re.compile(r"\b(somebody|whoever|nobody|a person|that which)\b", re.IGNORECASE)


def name(found: Transcript) -> str:
    return f"{found.page.name}:{found.line}"


@pytest.mark.parametrize(
    "found",
    [
        *(pytest.param(found, id=name(found)) for found in FAST),
        *(pytest.param(found, id=name(found), marks=[pytest.mark.beside, pytest.mark.slow]) for found in SLOW),
    ],
)
def test_a_transcript_is_what_the_program_prints_today(tmp_path, found):
    folder = working_folder(tmp_path / "page", wandb=found == FIRST_RUN)
    for command, wanted in found.steps:
        problem = difference(wanted, run(command, folder))
        assert problem is None, f"{name(found)}: $ {command}\n{problem}"


def test_every_transcript_says_whether_it_is_run():
    assert FAST
    assert SLOW
    for found in ALL:
        assert found.mark is not None, f"{name(found)}: put <!-- transcript --> before the block"
        assert found.runs or found.mark in NOT_RUN, f"{name(found)}: {found.mark} is not in NOT_RUN"


def test_masks_hide_numbers_and_places_but_no_words():
    assert masked("step  260: loss 11.67 is a spike") == masked("step 31: loss 2.5e-3 is a spike")
    assert masked("run outputs/2026-11-21/16-45-39") == "run outputs/<date>/<time>"
    assert masked("at /usr/lib/python3.11/parse.py at byte 24321") == masked("at .../topics.py at byte 7")
    assert masked("finished  34 s  1:48 left") == masked("finished  1:02  59 s left")
    assert masked("loss is high") != masked("loss is low")


def test_a_difference_is_found():
    printed = ["first", "second 2", "third"]
    assert difference(["first", "...", "third"], printed) is None
    assert difference(["first", "second 7", "third"], printed) is None
    assert difference(["first", "third"], printed) is not None, "a line is missing"
    assert difference(["first", "second 2"], printed) is not None, "more is printed"
    assert difference(["...", "fourth"], printed) is not None


@pytest.mark.parametrize("page", TABLES)
def test_a_table_of_the_code_is_on_its_page(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert with_table(text, [*TABLES[page]()]) == text, "run: python docs/tables.py"
    assert with_table(text.replace("| `", "| `other ", 1), [*TABLES[page]()]) == text, "a row that differs is replaced"


def test_the_page_of_refusals_has_every_refused_command():
    text = (ROOT / "docs" / "reference" / "refused.md").read_text()
    assert with_commands(text) == text, "run: python docs/tables.py"
    assert with_commands(text.replace("$ stabletrain train", "$ other", 1)) == text, "a row that differs is replaced"


def test_the_readme_is_short_and_its_step_is_the_real_one():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    step = (ROOT / "stabletrain" / "step.py").read_text(encoding="utf-8")
    real = {line.partition("#")[0].strip() for line in step.splitlines()}
    block, own_loop = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "from stabletrain import Guard" in own_loop
    shown = [line.partition("#")[0].strip() for line in block.splitlines() if line.strip()]
    assert len(shown) >= 15
    for line in shown:
        assert line in real, f"step.py has no line {line!r}"


def listed(*patterns: str) -> list[str]:
    """The files of the project of these kinds, without recorded runs."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [file for file in files if "fixtures" not in file and (ROOT / file).is_file()]


def test_a_page_that_code_or_a_yaml_names_exists_with_its_heading():
    named = {
        (file, *found.groups())
        for file in listed("*.py", "*.yaml", "*.toml", "*.sh", "*.txt")
        for found in re.finditer(r"\b(docs/[\w/]+\.md)(?:#([\w-]+))?", (ROOT / file).read_text(encoding="utf-8"))
    }
    assert len({page for _, page, _ in named}) > 10
    for file, page, heading in named:
        assert (ROOT / page).is_file(), f"{file} names {page}"
        assert heading is None or heading in anchors((ROOT / page).read_text(encoding="utf-8")), (
            f"{file}: {page}#{heading}"
        )


def test_a_page_that_is_read_from_top_to_bottom_is_short():
    pages = {page.name: len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")}
    assert len(pages) > 10
    assert {name: words for name, words in pages.items() if words > 1500} == {}


def test_no_text_uses_banned_words():
    found = [
        f"{file}:{number}: {match[0]}"
        for file in listed("*.py", "*.md", "*.yaml")
        if file != "tests/test_docs.py"
        for number, line in enumerate((ROOT / file).read_text(encoding="utf-8").splitlines(), 1)
        for match in BANNED.finditer(line)
    ]
    assert not found, "\n".join(found)


OF_RUNS = re.compile(r"\b(bit for bit|bit-identical|bitwise equal|same bits)\b")
"""Says that two runs, or a step and its replay, are equal."""

OTHER_EQUALITIES = {"activation_checkpointing.md", "log.md", "objectives.md", "plugins.md", "weights.md"}
"""Pages that say it of other things: of batches, files, parts computed twice, and the versions of this package."""


@pytest.mark.parametrize(
    "page", ["README.md", "slurm/README.md", *sorted(str(page.relative_to(ROOT)) for page in DOCS)]
)
def test_a_page_that_promises_equal_bits_says_what_a_card_needs_for_them(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    promised = OF_RUNS.search(text) and Path(page).name not in OTHER_EQUALITIES
    assert not promised or "determinism=strict" in text
