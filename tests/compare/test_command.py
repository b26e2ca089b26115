"""`stabletrain compare` as a whole: its output, the files it writes, and the arguments it rejects."""

import csv
import json
import sys
from pathlib import Path

import pytest

from stabletrain.cli.commands import main
from stabletrain.compare.command import MISSING_SHOWN, compare, page_beside, print_sensitivity, terminal
from stabletrain.compare.reading.runs import read_run
from stabletrain.compare.sensitivity import Arm
from stabletrain.compare.table import ENDLESS
from stabletrain.errors import ConfigError
from tests.compare.written import six_runs, write


@pytest.fixture(autouse=True)
def a_pipe(monkeypatch):
    """Standard output is a pipe without a known width."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def sweep(tmp_path):
    return six_runs(tmp_path / "sweep")


def test_seeds_share_a_row_unless_each_run_is_requested(sweep, capsys):
    compare([sweep])
    assert any(line.startswith("1, 4") for line in capsys.readouterr().out.splitlines())
    compare([sweep], each=True)
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "qknorm" in line] == ["1", "4"]


def test_csv_contains_every_run_and_column(sweep, tmp_path, capsys):
    compare([sweep], csv=tmp_path / "runs.csv", rows=1)
    with open(tmp_path / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["1", "4", "0", "3", "2", "5"]
    assert rows[0]["val_loss"] == "1.25"
    assert rows[0]["settings.stability"] == "qknorm"
    assert f"table    {tmp_path / 'runs.csv'}" in capsys.readouterr().err


def test_sensitivity_is_printed_and_drawn_if_learning_rates_differ(tmp_path, capsys):
    for number, rate in enumerate((1e-3, 1e-2)):
        write(tmp_path / "sweep" / str(number), [f"optimizer.lr={rate}"], loss=2.0 + number)
    compare([tmp_path / "sweep"], picture=tmp_path / "curves.svg")
    seen = capsys.readouterr()
    assert "| optimizer.lr | 0.001 | 0.01 | sensitivity |" in seen.out
    assert "| all | 2.000 | 3.000 | 0.500 |" in seen.out
    assert f"picture  {tmp_path / 'curves.svg'}" in seen.err
    assert "peak learning rate" in (tmp_path / "curves.svg").read_text()


def test_the_picture_shows_training_losses_if_learning_rates_do_not_differ(sweep, tmp_path, capsys):
    for run in sweep.iterdir():
        lines = [{"step": step, "train/loss": 5.0 / step} for step in range(1, 10)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    compare([sweep], picture=tmp_path / "losses.svg")
    assert "sensitivity" not in capsys.readouterr().out
    assert "training loss (nats)" in (tmp_path / "losses.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--sort", "nothing"], "--sort nothing: there is no such column: use one of run"),
        (["--rows", "-1"], "--rows -1 is below 0"),
        (["--png", "a.xyz"], "use .svg, .png, .pdf"),
        (["--png", "no/a.svg"], "no/a.svg: the folder no does not exist: create it first"),
        (["--csv", "no/a.csv"], "no/a.csv: the folder no does not exist: create it first"),
        (["--html", "no/a.html"], "no/a.html: the folder no does not exist: create it first"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_arguments_are_rejected_in_one_line_before_anything_is_printed(
    sweep, tmp_path, monkeypatch, capsys, arguments, reason
):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", str(sweep), *arguments]) == 2
    seen = capsys.readouterr()
    assert reason in seen.err
    assert seen.err.count("\n") == 1
    assert not seen.out


def test_an_output_file_in_a_missing_folder_is_rejected_before_any_run_is_read(tmp_path):
    with pytest.raises(ConfigError, match=r"no/a\.csv: the folder .*no does not exist: create it first"):
        compare([tmp_path / "no runs here"], csv=tmp_path / "no" / "a.csv")


def test_a_folder_without_runs_is_rejected(tmp_path, capsys):
    assert main(["compare", str(tmp_path)]) == 2
    assert f"{tmp_path} contains no runs: name a run folder or a sweep folder" in capsys.readouterr().err


def test_the_page_is_written_to_the_sweep_folder_and_never_to_a_run_folder(sweep, tmp_path):
    compare([sweep])
    assert (sweep / "report.html").read_text().startswith("<!DOCTYPE html>")
    (sweep / "report.html").unlink()
    compare([sweep / "0", sweep / "1"])
    assert (sweep / "report.html").exists()
    assert not (sweep / "0" / "report.html").exists()
    compare([sweep], html=tmp_path / "mine.html")
    assert (tmp_path / "mine.html").stat().st_size > 100_000


def test_the_page_of_a_run_in_the_working_directory_is_written_to_its_parent(sweep, monkeypatch):
    monkeypatch.chdir(sweep / "0")
    assert page_beside(Path(), read_run(Path())) == sweep / "report.html"
    assert page_beside(Path(".."), read_run(Path("../0"))) == Path("../report.html")


def test_a_page_that_cannot_be_written_is_an_error_only_if_it_was_requested(sweep, tmp_path, capsys):
    (sweep / "report.html").mkdir()
    assert main(["compare", str(sweep)]) == 0
    assert "name another file with --html" in capsys.readouterr().err
    (tmp_path / "folder").mkdir()
    assert main(["compare", str(sweep), "--html", str(tmp_path / "folder")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_first_missing_runs_are_named_and_the_others_counted(capsys):
    missing = [f"optimizer.lr={rate}: no such run" for rate in range(MISSING_SHOWN + 3)]
    print_sensitivity([Arm("all", {}, (0.1,), missing[:4]), Arm("other", {}, (0.1,), missing[4:])])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missing")]
    assert lines == [*(f"missing  {line}" for line in missing[:MISSING_SHOWN]), "missing  and 3 more"]


def test_a_pipe_has_no_width_limit_unless_columns_sets_one(monkeypatch):
    assert terminal(wide=False).width == ENDLESS
    monkeypatch.setenv("COLUMNS", "72")
    assert terminal(wide=False).width == 72
    assert terminal(wide=True).width == ENDLESS
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert terminal(wide=False).width < ENDLESS
