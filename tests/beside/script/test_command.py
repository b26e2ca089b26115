"""`stabletrain run` runs a script as `python` does: the same output, the same exit code, the same traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stabletrain.beside.script import command
from tests.parallel.launches import finish, start
from tests.runs import ROOT, python

HERE = Path(__file__).parent
RUN = ["-m", "stabletrain", "run"]


def run(*words, cwd):
    """Exit code, output and errors of a Python process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, input="typed", capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def forked(*words, cwd):
    """The same in a fork, where torch is imported already; nothing is typed."""
    done = python(*words, cwd=cwd, PYTHONPATH=str(ROOT))
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        [str(HERE / "ends.py"), "error"],
        [str(HERE / "ends.py"), "text", "--help", "--folder", "-x"],
        [str(HERE / "ends.py"), "interrupt"],
        ["-m", "tests.beside.script.ends", "error"],
        pytest.param([str(HERE / "whole.py"), "well"], marks=pytest.mark.slow),
    ],
    ids=lambda words: f"{Path(words[0]).name} {words[1]}",
)
def test_a_script_behaves_as_without_it(words, tmp_path):
    process = forked if Path(words[0]).name == "whole.py" else run  # the former trains
    assert process(*RUN, *words, cwd=tmp_path) == process(*words, cwd=tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_process_that_the_script_spawns_is_guarded_and_a_halt_ends_the_script(tmp_path):
    options = ["--folder", "found", "--max-incidents", "1"]
    code, out, err = run(*RUN, *options, str(HERE / "whole.py"), "bad", cwd=tmp_path)
    assert (code, out) == (3, "[True, True, True]\n")
    assert err.splitlines()[-1].startswith("stabletrain: step 100: ")
    assert "Traceback" not in err
    assert {each.name for each in (tmp_path / "found").iterdir()} == {"events.jsonl", "step-00000001", "step-00000003"}


@pytest.mark.slow
def test_ranks_of_torchrun_agree_on_the_first_step_too(tmp_path):
    done = finish(start(2, *RUN, str(HERE / "ranks.py"), cwd=tmp_path))
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr[-2000:]
    assert {each.name for each in (tmp_path / "incidents").iterdir()} == {
        "events.jsonl", "step-00000001", "step-00000003",
    }  # fmt: skip
    assert done.stderr.count("is not guarded: several ranks train, and the model is not wrapped") == 1


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--max-incidents", "-1", "x.py"], "--max-incidents -1 is below 0"),
        (["--folder", "", "x.py"], "--folder is empty"),
        ([], "the following arguments are required: script"),
        (["--fold", "x", "x.py"], "unrecognized arguments"),
    ],
)
def test_a_wrong_option_gets_one_message(typed, said, capsys):
    with pytest.raises(SystemExit) as ended:
        command.run(typed)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_script_that_is_not_there_gets_pythons_own_message(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.run(["none.py"]) == 2
    assert capsys.readouterr().err == (
        f"stabletrain run: can't open file '{tmp_path}/none.py': [Errno 2] No such file or directory\n"
    )
