"""How the program was started, and where its files lie."""

import sys

import pytest

from stabletrain import program
from stabletrain.program import called, program_in, program_name, started, torchrun_target

COMMAND = ["stabletrain", "train"]
STARTS = {
    "/venv/bin/python /venv/bin/stabletrain train seed=1": (COMMAND, ["-m", *COMMAND], ["seed=1"]),
    "python -m stabletrain train seed=1": (["python", "-m", *COMMAND], ["-m", *COMMAND], ["seed=1"]),
    "python -u -X importtime -m stabletrain.cli.commands train -m seed=1,2": (
        ["python", "-m", *COMMAND],
        ["-m", *COMMAND],
        ["-m", "seed=1,2"],
    ),
    "python train.py seed=1": (["python", "train.py"], ["train.py"], ["seed=1"]),
    "python /stabletrain/train.py data.path=stabletrain train": (
        ["python", "/stabletrain/train.py"],
        ["/stabletrain/train.py"],
        ["data.path=stabletrain", "train"],
    ),
    "python -m pytest stabletrain": (["python", "pytest"], ["pytest"], ["stabletrain"]),
}


@pytest.fixture
def start(monkeypatch):
    """A function that makes this process look as if a command line had started it."""

    def as_if(line):
        words = line.split()
        script = next((word for word in words[1:] if word.endswith((".py", "bin/stabletrain"))), "pytest")
        monkeypatch.setattr(sys, "orig_argv", words)
        monkeypatch.setattr(sys, "argv", [script, "resolved=1"])

    return as_if


@pytest.mark.parametrize("line", STARTS)
def test_the_program_is_read_from_the_command_line(start, line):
    start(line)
    found = started()
    assert (found.program, found.for_torchrun, found.typed) == STARTS[line]
    assert found.command == line
    assert found.resolved == ["resolved=1"]


def test_a_call_from_python_is_told_as_the_command(start):
    start("python -m ipykernel_launcher -f x.json")
    with called(["seed=1", "resume=auto"], ["seed=1", "hydra.run.dir=x"]):
        assert started().command == "stabletrain train seed=1 resume=auto"
        assert started().resolved == ["seed=1", "hydra.run.dir=x"]
        assert (program_name(), torchrun_target()) == ("stabletrain train", "-m stabletrain train")
    assert started().command == "python -m ipykernel_launcher -f x.json"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("/usr/bin/python3 train.py -m seed=1,2", "/usr/bin/python3 train.py"),
        ("python /venv/bin/stabletrain train -m seed=1,2", "stabletrain train"),
        ("/venv/bin/python3 -u /venv/bin/stabletrain train seed=1", "stabletrain train"),
        ("'/my venv/bin/python3' '/my venv/bin/stabletrain' train seed=1", "stabletrain train"),
        ("'/my venv/bin/python3' train.py seed=1", "'/my venv/bin/python3' train.py"),
        ("python train.py it's", "python train.py"),
        ("python -u -m stabletrain train seed=1", "python -u -m stabletrain train"),
        ("stabletrain train seed=1", "stabletrain train"),
        ("something else", "python train.py"),
    ],
)
def test_a_recorded_command_line_names_its_program(start, command, named):
    start("python train.py")
    assert program_in(command) == named


def test_in_a_checkout_messages_name_the_script_unless_the_command_was_used(start):
    start("python train.py")
    assert (program_name(), torchrun_target()) == ("python train.py", "train.py")
    start("python /venv/bin/stabletrain prepare text shards")
    assert (program_name(), torchrun_target()) == ("stabletrain train", "-m stabletrain train")


def test_an_installed_package_has_its_own_conf_and_names_the_command(start, tmp_path, monkeypatch):
    start("python train.py")
    for place in ("stabletrain/conf", "conf"):  # the second one belongs to another package
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(program, "PACKAGE", tmp_path / "stabletrain")
    assert program.conf_folder() == tmp_path / "stabletrain" / "conf"
    assert not program.in_checkout()
    assert program_name() == "stabletrain train"
