"""The comparison as it is printed: its order, its width, and what it marks."""

import json

import pytest

from stabletrain.cli.commands import main
from tests.beside.comparison.written import six_runs


@pytest.fixture(autouse=True)
def a_pipe(monkeypatch, tmp_path):
    """Standard output is a pipe without a known width."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)  # the page of several folders is written into the working folder


@pytest.fixture
def sweep(tmp_path):
    return six_runs(tmp_path / "sweep")


def printed(capsys, *arguments):
    assert main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def first_words(out):
    """The first word of each line of the table itself."""
    lines = out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("──"))
    body = []
    for line in lines[start + 1 :]:
        if not line[:1].isdigit() or "more rows" in line:
            break
        body.append(line.split()[0])
    return body


def test_what_finished_comes_first_by_loss_then_what_is_not_over_then_diverged_then_broken(sweep, capsys):
    out = printed(capsys, sweep, "--each")
    assert first_words(out) == ["1", "4", "0", "3", "2", "5"]


def test_seeds_are_one_row_and_the_best_is_marked(sweep, capsys):
    out = printed(capsys, sweep)
    (line,) = [line for line in out.splitlines() if "  qknorm" in line]
    assert line.startswith("1, 4")
    assert "1.5000 *" in line, "the mean of 1.25 and 1.75; 1.0 was halted, 1.1 is not over"
    assert "1.2500-1.7500" in line
    assert sum("*" in each for each in out.splitlines()) == 1


def test_what_all_have_in_common_is_said_once_above_the_table(sweep, capsys):
    for number in ("2", "3", "5"):
        (sweep / number / "run.json").unlink()
        (sweep / number / "metrics.jsonl").unlink()
        (sweep / number / "events.jsonl").unlink()
        (sweep / number).rmdir()
    head, *table = printed(capsys, sweep).splitlines()
    assert head.startswith("3 runs · finished · ")
    assert "card NVIDIA H100 80GB HBM3 · precision bf16" in head
    assert head.endswith("all with steps=9")
    assert not any("H100" in line or "bf16" in line for line in table)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_table_fits_the_terminal_and_names_what_it_left_out(sweep, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = printed(capsys, sweep, "--each")
    assert max(map(len, out.splitlines())) <= width
    assert "val loss" in out
    assert "stability" in out
    wide = printed(capsys, sweep, "--each", "--wide")
    left_out = " ".join(out.split("columns that do not fit: ")[1].split(";")[0].split()).split(", ")
    head = next(line for line in wide.splitlines() if line.startswith("run "))
    assert left_out
    assert all(name in head for name in left_out)
    assert "do not fit" not in wide


def test_a_run_of_another_kind_among_a_sweep_leaves_the_table_readable(sweep, capsys, monkeypatch):
    for run in sweep.iterdir():
        record = json.loads((run / "run.json").read_text()) if run.name != "5" else {"status": "finished"}
        other = [f"model.key_number_{key}={run.name == '5'}" for key in range(20)]
        (run / "run.json").write_text(
            json.dumps(record | {"overrides": [*record.get("overrides", ["seed=3"]), *other]})
        )
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, sweep, "--each").splitlines()
    assert max(map(len, lines)) <= 80
    head = next(line for line in lines if line.startswith("run "))
    assert "stability" in head
    assert "val loss" in head
    assert "status" in head, "settings that say nothing new go before what was measured"
    assert "model.key_number_19" in "".join(lines[lines.index(head) :])
    assert len(first_words("\n".join(lines))) == 6, "one line a run"


def test_a_pipe_gets_every_column_as_plain_text(sweep, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    out = printed(capsys, sweep)
    assert "\x1b" not in out
    assert "do not fit" not in out
    assert "parameters" in out


def test_rows_are_sorted_by_any_column_or_setting(sweep, capsys):
    assert first_words(printed(capsys, sweep, "--each", "--sort", "best_val_loss"))[:2] == ["2", "3"]
    assert first_words(printed(capsys, sweep, "--each", "--sort", "stability"))[:2] == ["3", "0"]


def test_only_as_many_rows_as_are_asked_for_are_printed(sweep, capsys):
    out = printed(capsys, sweep, "--each", "--rows", "2")
    assert first_words(out) == ["1", "4"]
    assert "4 more rows: --rows 0 shows all" in out
    assert len(first_words(printed(capsys, sweep, "--each", "--rows", "0"))) == 6


def test_a_single_run_is_a_row(sweep, capsys):
    assert first_words(printed(capsys, sweep / "0")) == ["0"]
