"""The figures of `tests/tools/figures.py`: what counts as code, and what a parameter reaches."""

from textwrap import dedent

import pytest

from tests.tools.figures import Package, code_lines

LAWS = """
NOUNS = {"records"}
MAY_SEE = {"records": set(), "low": NOUNS, "high": NOUNS | {"low"}}
"""

LOW = """
from dataclasses import dataclass
from stabletrain.high import top

@dataclass
class Held:
    number: int
    cfg: object

    def reads(self):
        return self.cfg.lr

    def passes(self):
        last(self.cfg)

    def neither(self):
        return self.number

class Made:
    def __init__(self, given):
        self._given = given

    def method(self, cfg):
        return cfg

    def reads(self):
        return self._given

def last(cfg):
    return None

def prepared(cfg):
    return None

def keyword(*, cfg):
    top.back(cfg)

def never(cfg):
    return None
"""

HIGH = """
from functools import partial
from omegaconf import DictConfig
from stabletrain.low import deep
from stabletrain.low.deep import Held, Made, keyword, last, never

def start(cfg: DictConfig, made: Made):
    # a comment of its own
    other = cfg if cfg else None
    Held(1, other)
    Made(given=other)
    made.method(cfg)
    keyword(cfg=cfg)
    partial(deep.prepared, cfg)
    never(cfg.lr)

def back(cfg):
    return None

def annotated(config: "DictConfig"):
    return None
"""


@pytest.fixture
def package(tmp_path):
    """A package of two rooms, of which `high` is further up."""
    for name, text in {
        "tests/laws/test_imports.py": LAWS,
        "stabletrain/low/deep.py": LOW,
        "stabletrain/high/top.py": HIGH,
        "stabletrain/high/__init__.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(dedent(text))
    return Package(tmp_path)


def test_a_value_is_followed_by_position_keyword_partial_constructor_and_method(package):
    walk = package.walk("high/top.py:start:cfg")
    assert [found.name.partition(":")[2] for found in walk.reached] == [
        *("Held", "Held.reads", "Held.passes", "last"),
        *("Made", "Made.__init__", "Made.reads", "Made.method", "keyword", "back", "prepared"),
    ]
    assert package.climbs("high/top.py:start:cfg", walk) == 1, "keyword, in low, passes it on to back, in high"


def test_a_parameter_that_is_not_there_is_refused(package):
    with pytest.raises(SystemExit, match="no such function or parameter"):
        package.walk("high/top.py:start:nothing")


def test_functions_with_a_configuration_are_counted(package):
    assert package.totals()["functions that take cfg"] == 8
    assert package.totals()["comment lines"] == 1
    assert package.totals()["protocols"] == 0


def test_docstrings_comments_and_blank_lines_are_no_code():
    assert (
        code_lines('"""A module."""\n\n# why\nX = 1\n"""X."""\n\ndef f():\n    """Doc."""\n    return """a\nb"""\n')
        == 4
    )
