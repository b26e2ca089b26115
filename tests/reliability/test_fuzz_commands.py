"""Random command lines: they can be drawn again, and a line that ends badly is counted as such."""

import pytest

from tests.reliability.fuzz_commands import Outcome, counts, known
from tests.reliability.fuzz_lines import line


def test_a_line_is_the_same_each_time_and_others_differ():
    assert line(0, 7) == line(0, 7)
    assert len({tuple(line(0, number)) for number in range(50)}) > 40


@pytest.mark.parametrize(
    ("code", "out", "err", "fault"),
    [
        (0, "step 2/2", "", ""),
        (2, "", "stabletrain: seed=a is not a whole number\n", ""),
        (3, "", "stabletrain: halted\n", ""),
        (None, "", "", "hang"),
        (1, "", "Traceback (most recent call last):\n", "traceback"),
        (1, "", "no\n", "exit code 1"),
        (-9, "", "", "exit code -9"),
        (2, "", "", "no message"),
        (2, "", "a\n" * 20, "flood"),
        (0, "\x1b[31m", "", "control characters"),
    ],
)
def test_what_is_wrong_with_an_end_is_said(code, out, err, fault):
    assert Outcome(0, [], code, out, err).fault() == fault


def test_ends_are_counted_and_read_from_a_log(tmp_path):
    assert counts(["worked", "refused", "hang", "hang"]) == {
        "lines": 4,
        "worked": 1,
        "refused": 1,
        "halted": 0,
        "failed": 2,
        "hang": 2,
    }
    (tmp_path / "log").write_text('{"part": "built", "line": 3, "end": "worked"}\n{"part": "other", "line": 4}\n')
    assert known(tmp_path / "log", "built") == {3: "worked"}
    assert known(None, "built") == {}
