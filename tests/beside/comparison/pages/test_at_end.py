"""A run leaves its own page however it ends, and never ends otherwise because of it."""

import os
import subprocess
import sys

import pytest

from stabletrain.beside.comparison.pages.at_end import PageAtEnd
from stabletrain.printable import printable
from tests.beside.comparison.made_pages import made
from tests.runs import ROOT, TINY_GPT, command

SHORT = [*TINY_GPT, "steps=6", "eval_every=6", "log_every=1", "hydra.run.dir=run"]


def page(folder):
    return (folder / "run" / "report.html").read_text()


def test_a_finished_run_has_its_page_with_what_it_wrote(tmp_path):
    done = command(*SHORT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Finished after 6 steps, validation loss" in page(tmp_path)
    sample = (tmp_path / "run" / "sample.txt").read_text()
    assert printable(sample.strip("\n").split("\n")[0]) in done.stdout
    assert "<h2>Sample</h2>" in page(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        (["faults=input", "faults.at=[1,2,3,4,5]", "guard=skip", "guard.max_consecutive=2"], 3, "Halted after"),
        (["faults=kill", "faults.at=[]"], 2, None),
    ],
    ids=["halted", "refused"],
)
def test_a_run_that_ends_early_keeps_its_code(tmp_path, overrides, code, said):
    done = command(*SHORT, *overrides, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    if said:
        assert said in page(tmp_path)
    else:
        assert not (tmp_path / "run" / "report.html").exists()


def test_it_can_be_switched_off_and_then_loads_nothing(tmp_path):
    assert command(*SHORT, "report=false", cwd=tmp_path).returncode == 0
    assert not (tmp_path / "run" / "report.html").exists()
    assert not (tmp_path / "run" / "sample.txt").exists()
    loaded = "[m for m in ('pandas', 'orjson', 'numpy') if m in sys.modules]"
    code = f"import sys, stabletrain.beside.comparison.pages.at_end; print({loaded})"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"


def test_what_goes_wrong_is_one_warning(tmp_path, capsys, monkeypatch):
    made(tmp_path / "run")
    monkeypatch.setattr("stabletrain.beside.comparison.pages.one_run.run_page", lambda run: 1 / 0)
    PageAtEnd(tmp_path / "run").write("text")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "ZeroDivisionError" in said
    assert "the run is not affected" in said
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_folder_that_takes_nothing_is_one_warning(tmp_path, capsys):
    (tmp_path / "run").write_text("a file where the folder should be")
    PageAtEnd(tmp_path / "run").write("text")
    assert capsys.readouterr().err.count("\n") == 1


def test_a_page_that_a_kill_prevented_is_written_later_and_no_other(tmp_path):
    folder = tmp_path / "run"
    made(folder)
    report = folder / "report.html"
    assert PageAtEnd(folder).write_if_missing()
    assert "</html>" in page(tmp_path)
    report.write_text("complete")
    assert not PageAtEnd(folder).write_if_missing()
    os.utime(report, (1, 1))  # that of the run before it was continued
    assert PageAtEnd(folder).write_if_missing()
    assert "</html>" in page(tmp_path)
    assert not PageAtEnd(tmp_path / "nothing").write_if_missing()
