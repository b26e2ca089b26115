"""Every command of the table of refusals is refused with its whole message; some are started as processes."""

import re
import shlex

import pytest

from stabletrain.config.rules import RANKS, RULES
from tests.refusals.commands import place, refusal
from tests.refusals.table import FILE, read
from tests.runs import python

ROWS = read()

FAST = {row.command for row in ROWS[::10]}
"""Rows of every section, in the fast tier."""

WRONG_TYPES = ['Guard(model, "adam")', "Guard(loss_fn, optimizer)", 'Guard(model, optimizer, max_norm="1")']
WRONG_TYPES += ["Guard.attach(model, [optimizer, of_another_model])"]

AS_PROCESSES = ["train optimizer.lr=-1", "train steps=[", "train --steps 100", "prepare text.txt run", "trian"]
"""Rows of different ways to the message: an option's class, Hydra's parser, no option, a command, no command."""


def is_beside(command):
    """Whether a command, or what its message names, needs `stabletrain/beside/`."""
    of_the_core = command.split(" ")[0] in ("train", "prepare", "sample", "diagnose", "replay")
    of_the_core |= command.startswith("Guard")
    return not of_the_core or " faults" in command or "forecast." in command


@pytest.fixture(scope="module", autouse=True)
def _place(tmp_path_factory):
    with place(tmp_path_factory.mktemp("refused")):
        yield


@pytest.mark.beside(when=lambda command: is_beside(command))
@pytest.mark.slow(unless=lambda command: command in FAST)
@pytest.mark.parametrize(("command", "message"), [row[1:] for row in ROWS], ids=[row.command for row in ROWS])
def test_a_command_is_refused_with_its_whole_message(request, command, message):
    if command in WRONG_TYPES and request.config.getoption("--types"):
        pytest.skip("where types are checked, that check refuses it first")
    assert refusal(command) == message


@pytest.mark.beside(when=lambda command: is_beside(command))
@pytest.mark.parametrize("command", AS_PROCESSES)
def test_a_process_prints_one_message_and_exits_with_2(tmp_path, command):
    [message] = [row.message for row in ROWS if row.command == command]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch()
    (tmp_path / "text.txt").touch()
    done = python("-m", "stabletrain.cli.commands", *shlex.split(command), cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if not line.startswith("usage: ")]
    assert [line.removeprefix("stabletrain: ").removeprefix("error: ") for line in said] == [message]
    assert (done.returncode, done.stdout) == (2, "")


def test_every_rule_has_a_row():
    """`tests/config/test_checks.py` has those of several ranks."""
    for rule in RULES:
        pattern = re.sub(r"\\{[^{}]+\\}", ".+", re.escape(f"{rule.message}; fix: {rule.fix}"))
        found = [row for row in ROWS if re.fullmatch(pattern, row.message)]
        assert found or rule in RANKS, f"add to {FILE.name} what breaks the rule, and its message: {rule.message}"


def test_every_line_of_the_table_belongs_to_a_row():
    assert len(FILE.read_text(encoding="utf-8").splitlines()) == 2 * len(ROWS) + len({row.section for row in ROWS})
    assert len({row.command for row in ROWS}) == len(ROWS)
