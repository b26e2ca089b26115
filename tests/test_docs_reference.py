"""The reference in `docs/reference/` is that of today's options, keys, bounds and public names."""

import re

import pytest
import yaml

import stabletrain
from docs.options import GROUPS, bound, options, pages, run_keys
from tests.runs import CONF, ROOT

FOLDERS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())

WITHOUT_BOUND = {"data.modality", "init.modality", "model.modality", "data.path", "data.root", "data.seed"}
WITHOUT_BOUND |= {"faults.module", "faults.parameter", "precision.recipe", "wandb.project", "init_from", "resume"}
WITHOUT_BOUND |= {f"model.{group}" for group in FOLDERS}  # the chosen option of that group
"""Keys whose bound is in the sentence about them, or that take any text."""

LONGEST = 1500
"""Words of a page."""


# The docstrings of stabletrain/beside say what some keys of faults do.
@pytest.mark.beside
@pytest.mark.parametrize("place", pages())
def test_a_page_is_that_of_today(place):
    assert (ROOT / "docs" / place).read_text(encoding="utf-8") == pages()[place], "run: python docs/tables.py"
    assert len(pages()[place].split()) <= LONGEST


def test_every_group_has_a_page_and_no_page_is_of_a_group_that_is_gone():
    assert sorted(GROUPS) == FOLDERS
    written = {file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs/reference/options").iterdir()}
    assert written == {place for place in pages() if place.startswith("reference/options/")}


@pytest.mark.beside
@pytest.mark.parametrize("group", FOLDERS)
def test_every_option_and_key_of_a_group_is_on_its_page(group):
    page = (ROOT / f"docs/reference/options/{group}.md").read_text(encoding="utf-8")
    assert {option.name for option in options(group)} == {file.stem for file in (CONF / group).glob("*.yaml")}
    for option in options(group):
        assert re.search(rf"^\| `{option.name}` \| \w", page, re.MULTILINE), f"{option.name} is not said to do anything"
        values = yaml.safe_load((CONF / group / f"{option.name}.yaml").read_text(encoding="utf-8"))
        if group not in ("stability", "experiment"):
            assert [key.name for key in option.keys] == [key for key in values if key not in ("_target_", "defaults")]
        for key in option.keys:
            rows = [row for row in page.splitlines() if row.startswith(f"| `{key.name}` |")]
            assert any(f"`{key.default}`" in row for row in rows)
            assert key.effect, f"{group}/{option.name}.yaml: say what {key.name} does, in a comment on its line"


@pytest.mark.beside
def test_every_key_has_a_bound_or_takes_anything():
    lacking = set()
    for place, text in pages().items():
        group = "" if place == "reference/options.md" else place.split("/")[-1].removesuffix(".md") + "."
        rows = [
            re.split(r" (?<!\\)\| ", row.strip("| ")) for row in text.partition("key |")[2].splitlines() if "|" in row
        ]
        lacking |= {group + row[0].strip("`") for row in rows if len(row) >= 4 and not row[-2].strip()}
    assert lacking <= WITHOUT_BOUND


def test_the_keys_of_the_run_are_those_of_the_configuration():
    values = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    assert [key.name for key in run_keys()] == [key for key in values if key not in ("defaults", "hydra")]
    assert all(key.effect for key in run_keys())


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("is below 1; fix: steps=1 or more", "≥ 1"),
        ("is not above 0: no gradient would be left", "> 0"),
        ("is above 31, the sign bit of a weight", "≤ 31"),
        ("is outside [0, optimizer.reset_interval=500): the full rate", "in [0, optimizer.reset_interval)"),
        ("are not two numbers in [0, 1): [0.9, 0.95] is customary", "two numbers in [0, 1)"),
        ("is unknown: choose coupled or independent or corrected", "`coupled`, `independent`, `corrected`"),
        (">= steps=1000: samples never reach their full length", "< steps"),
        ("is not a number; fix: optimizer.lr=0.003", ""),
        ("does nothing with objective=mse", ""),
    ],
)
def test_a_bound_is_read_from_the_message_that_refuses_a_value(message, wanted):
    assert bound(message) == wanted


def test_every_public_name_is_in_the_reference_of_the_python_functions():
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: stabletrain\.(\S+)$", page, re.MULTILINE))
    assert {*stabletrain.__all__} <= shown
    adapters = {file.stem for file in (ROOT / "stabletrain/adapters").glob("[a-z]*.py")}
    assert {f"adapters.{name}.GuardCallback" for name in adapters} <= shown
