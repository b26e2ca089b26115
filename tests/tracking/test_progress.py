"""The live line fits its terminal and keeps the important parts; anywhere else there are only plain lines."""

import io
import math
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from stabletrain.tracking.progress import Progress, bar_of, elapsed, fit, parts, short_number, thousands

ROOT = Path(__file__).parents[2]

METRICS = {"train/loss": 2.3123, "grad/norm": 0.8444, "lr": 2.9e-3}


def words(skipped=0, step=300, metrics=METRICS):
    return parts(step, 1500, metrics, 27_412.0, "tok", skipped, 92.0)


def test_the_line_says_all_of_it():
    assert "  ".join(words().values()) == (
        "step  300/1500  loss 2.31  grad 0.84  lr 2.9e-03  27.4k tok/s  skipped 0  1:32 left"
    )


@pytest.mark.parametrize("skipped", [0, 7])
def test_it_fits_every_width(skipped):
    for width in range(20, 200):
        kept = fit(words(skipped), width)
        columns = kept.pop("bar")
        head, *rest = kept.values()
        line = f"{head} {'━' * columns} {'  '.join(rest)}"
        assert len(line) <= max(width, len("step  300/1500  loss 2.31"))
        assert {"step", "loss"} <= kept.keys()
        assert columns == 0 or 8 <= columns <= 40


def test_the_least_important_goes_first():
    dropped = []
    for width in range(200, 20, -1):
        gone = [name for name in words() if name not in fit(words(), width) and name not in dropped]
        dropped += gone
    assert dropped == ["quiet", "lr", "rate", "grad", "left"]
    assert "skipped" in fit(words(skipped=7), 80)
    assert "quiet" not in fit(words(), 80)
    assert fit(words(), 80)["bar"] >= 8


def test_the_bar_is_as_long_as_the_share_done():
    assert bar_of(0.0, 10) == ("", "━" * 10)
    assert bar_of(1.0, 10) == ("━" * 10, "")
    assert bar_of(0.65, 10) == ("━━━━━━╸", "━━━")
    for tenth in range(-2, 13):
        assert len("".join(bar_of(tenth / 10, 17))) == 17


def test_numbers_are_short_and_nan_is_said():
    assert [short_number(v) for v in (2.3123, 0.00421, 1234.0, 123456.0, 0.0, math.nan, math.inf)] == [
        "2.31", "0.0042", "1234", "1.2e+05", "0", "nan", "inf"
    ]  # fmt: skip
    assert [thousands(v) for v in (950.4, 999.7, 7e3, 27_412.0, 1.2e6)] == ["950", "1.00k", "7.00k", "27.4k", "1.20M"]
    assert [elapsed(v) for v in (0.4, 92.0, 7500.0)] == ["0:00", "1:32", "2:05:00"]


def test_piped_it_is_plain_lines_every_so_many_steps_and_at_the_end():
    stream = io.StringIO()
    progress = Progress(10, stream)
    progress.start(25, 0)
    for step in range(1, 26):
        progress.update(step, METRICS, 950.0, "img", 0)
        if step == 12:
            progress.note("skip  step 12 [bold]")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line[:10] for line in lines] == ["step 10/25", "skip  step", "step 20/25", "step 25/25"]
    assert lines[1] == "skip  step 12 [bold]"
    assert "950 img/s" in lines[0]
    assert "\x1b" not in stream.getvalue()


def test_piped_only_a_long_evaluation_has_lines(monkeypatch):
    stream, now = io.StringIO(), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress(10, stream)
    progress.start(1000, 0)
    progress.update(500, METRICS, 950.0, "img", 0)
    for done in range(101):
        progress.evaluating(done, 100)
        now[0] += 1
    assert stream.getvalue().splitlines()[1:] == [
        "step 500/1000  evaluating 30/100  1:10 left",
        "step 500/1000  evaluating 60/100  0:40 left",
        "step 500/1000  evaluating 90/100  0:10 left",
    ]
    before = stream.getvalue()
    for done in range(21):
        progress.evaluating(done, 20)
        now[0] += 1
    assert stream.getvalue() == before


def test_time_left_counts_from_where_the_run_began(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("stabletrain.tracking.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Progress(1, stream)
    progress.start(1000, 900)  # resumed: 900 steps are not this process's
    now[0] += 10.0
    progress.update(910, METRICS, 1.0, "tok", 0)
    assert stream.getvalue().endswith("1:30 left\n")


class Gone(io.StringIO):
    tries = 0

    def write(self, text):
        self.tries += 1
        raise BrokenPipeError


def test_what_the_terminal_cannot_encode_is_escaped():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Progress(10, stream).note("a · b")
    assert stream.buffer.getvalue() == b"a \\xb7 b\n"


def test_a_closed_pipe_does_not_stop_training():
    stream = Gone()
    progress = Progress(1, stream)
    progress.start(2, 0)
    progress.update(1, METRICS, 1.0, "tok", 0)
    progress.note("still here")
    progress.close()
    assert stream.tries > 0, "it did try to write"


LIVE = """
import sys
from stabletrain.tracking import progress
progress.REFRESH = 0.0
line = progress.Progress(10)
line.start(40, 0)
for step in range(1, 41):
    line.update(step, {"train/loss": 1.0 / step, "grad/norm": 0.5, "lr": 1e-3}, 27400.0, "tok", 0)
    if step == 20:
        line.note("skip  step 20 [bold]")
for done in range(5):
    line.evaluating(done, 4)
line.close()
line.close()
print("rich" in sys.modules)
"""


def on_terminal(columns: int, **environment: str) -> str:
    """Returns the output on a terminal with that many columns."""
    ours, theirs = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-c", LIVE], stdout=theirs, stdin=theirs, stderr=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24", **environment},
    )  # fmt: skip
    os.close(theirs)
    sent = b""
    while True:
        try:
            chunk = os.read(ours, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            break
        if not chunk:
            break
        sent += chunk
    os.close(ours)
    assert done.wait(60) == 0, done.stderr.read() if done.stderr else ""
    if done.stderr:
        done.stderr.close()
    return sent.decode()


def test_on_a_terminal_it_is_one_live_line_with_notes_above():
    sent = on_terminal(80)
    assert "\x1b[2K" in sent  # a line is wiped before it is drawn again
    assert "\x1b[32m━" in sent
    assert "step 40/40" in sent
    assert "skip  step 20 [bold]\r\n" in sent
    assert "\x1b[1A" not in sent  # never more than one line
    assert sent.count("step 10/40") >= 1
    assert sent.index("evaluating 1/4") < sent.index("evaluating 3/4") < sent.rindex("loss 0.025"), (
        "the step at the end"
    )
    assert sent.rstrip().endswith("True")


def test_no_color_is_respected():
    sent = on_terminal(80, NO_COLOR="1")
    assert "\x1b[32m" not in sent
    assert "━" in sent


def test_a_dumb_terminal_gets_plain_lines():
    sent = on_terminal(80, TERM="dumb")
    assert "\x1b" not in sent
    assert sent.count("loss") == 4
    assert sent.rstrip().endswith("False")  # rich is not even imported
