"""`stabletrain compare` as a whole: its output, the files it writes, and the arguments it rejects."""

import csv
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from stabletrain.beside.comparison.command import MISSING_SHOWN, compare, page_for, print_sensitivity, terminal
from stabletrain.beside.comparison.sensitivity import Arm
from stabletrain.beside.comparison.table import ENDLESS
from stabletrain.cli.commands import main
from stabletrain.errors import ConfigError
from stabletrain.printable import CONTROL
from tests.beside.comparison.written import six_runs, write


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
    assert [line.split()[0] for line in out.splitlines() if "  qknorm" in line] == ["1", "4"]


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


def test_the_page_of_a_sweep_is_in_its_folder_and_that_of_anything_else_in_the_working_folder(sweep, monkeypatch):
    monkeypatch.chdir(sweep.parent)
    for folders in ([Path("sweep")], [sweep, Path("sweep")]):
        assert page_for(folders, None) == (folders[0] / "report.html", "")
    for folders in ([sweep / "0", sweep / "1"], [sweep / "0"], [sweep, sweep / "0"]):
        assert page_for(folders, None) == (Path("compare.html"), "")
    assert page_for([sweep], Path("mine.html")) == (Path("mine.html"), "")
    compare([sweep])
    assert (sweep / "report.html").read_text().startswith("<!DOCTYPE html>")
    compare([sweep / "0", sweep / "1"])
    assert Path("compare.html").stat().st_size > 100_000
    assert not (sweep / "0" / "report.html").exists()


def test_a_page_of_other_runs_is_never_overwritten(sweep, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    other = six_runs(tmp_path / "other")
    write(tmp_path / "third" / "0")
    compare([sweep, other])
    first = Path("compare.html").read_bytes()
    compare([sweep, tmp_path / "third"])
    assert (
        "page     compare-2.html (compare.html is not the page of these runs, so it was kept)"
        in capsys.readouterr().err
    )
    assert Path("compare.html").read_bytes() == first
    compare([tmp_path / "third", Path("sweep")])
    assert "page     compare-2.html (" in capsys.readouterr().err, "the same folders: the page is written again"
    (sweep / "report.html").write_text("the user's own page")
    compare([sweep])
    assert (sweep / "report.html").read_text() == "the user's own page"
    assert (sweep / "report-2.html").exists()
    compare([other, sweep], html=Path("compare.html"))
    assert main(["compare", "sweep", "--html", "compare.html"]) == 2
    assert capsys.readouterr().err.endswith(
        "stabletrain: --html compare.html: this file exists, and is not the page of these runs: name another file, or "
        "delete it\n"
    )


def test_a_page_is_recognized_after_its_sweep_has_moved(sweep, tmp_path):
    compare([sweep])
    sweep.rename(tmp_path / "moved")
    assert page_for([tmp_path / "moved"], None) == (tmp_path / "moved" / "report.html", "")


def test_a_copy_of_a_run_counts_once_and_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(Path("a/0"), ["seed=0"], id="aaaa")
    write(Path("a/1"), ["seed=1"], id="bbbb", loss=1.5)
    shutil.copytree("a", "b")
    compare([Path("a"), Path("b")], csv=Path("runs.csv"))
    out = capsys.readouterr().out
    assert out.startswith("2 runs\n")
    assert any(line.startswith("0, 1 ") for line in out.splitlines())
    assert "copy     b/0 holds the same run as a/0 (id aaaa): counted once" in out
    with open("runs.csv", newline="") as file:
        assert [row["problem"] for row in csv.DictReader(file)] == [
            "counted once: run bbbb is also in b/1",
            "counted once: run aaaa is also in b/0",
        ]
    assert (
        "Not counted, because the run id is the same: b/1 (a copy of a/1); b/0 (a copy of a/0)."
        in Path("compare.html").read_text()
    )


def test_where_the_names_of_runs_clash_their_folders_are_shown(sweep, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "other" / "1", ["stability=palm"], loss=0.5)
    compare([sweep, tmp_path / "other"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "  palm" in line] == ["other/1"]
    assert any(line.startswith("sweep/1 +1 ") for line in lines)
    assert not any("sweep" in line.split() for line in lines), "the column would say the same"


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


def test_control_characters_and_newlines_in_names_and_values_break_no_table(tmp_path, capsys):
    names = ["a\x1b[31m\nb", "c\rd\u202e"]
    for number, name in enumerate(names):
        run = tmp_path / "runs" / name
        write(run, [f"optimizer.lr={10.0**-number}", f"data.path='x\x07\ny{number}'"], loss=2.0)
    compare([tmp_path / "runs"], each=True, csv=tmp_path / "runs.csv")
    seen = capsys.readouterr()
    assert not CONTROL.search(seen.out + seen.err)
    assert r"a\x1b[31m\nb" in seen.out
    with open(tmp_path / "runs.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len((tmp_path / "runs.csv").read_text().splitlines()) == 3
    assert {row["run"] for row in table} == {r"a\x1b[31m\nb", r"c\x0dd\u202e"}


@pytest.mark.parametrize("kind", ["file", "page", "loop", "pipe in a sweep", "long"])
def test_whatever_a_name_is_the_search_for_a_free_page_ends(sweep, tmp_path, capsys, kind):
    place = {"page": sweep / "report.html", "long": tmp_path / ("x" * 300)}.get(kind, tmp_path / "it")
    if kind in ("file", "page"):
        place.write_text("hello")
    elif kind == "loop":
        place.symlink_to(place)
    elif kind == "pipe in a sweep":
        os.mkfifo(sweep / "report.html")
        place = sweep
    code = main(["compare", str(place)])
    err = capsys.readouterr().err
    assert (code, "report-2.html" in err) == (
        (0, True) if kind == "pipe in a sweep" else (1 if kind == "long" else 2, False)
    )
    assert code == 0 or err.count("\n") == 1


@pytest.mark.parametrize("name", ["sweep.json", "1/run.json", "1/metrics.jsonl"])
def test_a_table_never_replaces_a_record(sweep, capsys, name):
    (sweep / "sweep.json").write_text("{}")
    before = (sweep / name).read_bytes()
    assert main(["compare", str(sweep), "--csv", str(sweep / name)]) == 2
    assert "exists and is no table" in capsys.readouterr().err
    assert (sweep / name).read_bytes() == before
