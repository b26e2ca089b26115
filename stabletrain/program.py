"""The program: where its configuration lies, and how it was started, for the commands that it records and suggests.

Training is started by `python train.py` in a checkout, by `stabletrain train` anywhere, or by `stabletrain.train` from
Python. For the last, the command that does the same is recorded and suggested: `stabletrain train`.
"""

import shlex
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent

SCRIPT, COMMAND = "python train.py", "stabletrain train"

MODULES = ("stabletrain", "stabletrain.cli.commands")
"""Modules with which `python -m` runs the command `stabletrain`."""


def conf_folder() -> Path:
    """Returns the folder of the config groups: `conf/` of a checkout, or `stabletrain/conf` of an installed package."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"


def in_checkout() -> bool:
    """Whether the package lies in a checkout, with `train.py` and `slurm/` beside it."""
    return (PACKAGE.parent / "train.py").is_file() and not (PACKAGE / "conf").is_dir()


class Started(NamedTuple):
    """How training was started.

    Attributes:
        program: starts one process: `python train.py` or `stabletrain train`, as words.
        for_torchrun: the same after `torchrun` and its options: `train.py` or `-m stabletrain train`.
        typed: the words after the program.
        resolved: the same once `resume` names a folder; in a process that a launcher started, the sweep's.
        command: the whole command line, for the run's record.
    """

    program: list[str]
    for_torchrun: list[str]
    typed: list[str]
    resolved: list[str]
    command: str


_CALLED: ContextVar[Started | None] = ContextVar("called", default=None)


@contextmanager
def called(typed: Sequence[str], resolved: Sequence[str]) -> Generator[None]:
    """A context in which training is started from Python, with the same words as after `stabletrain train`."""
    words = ["stabletrain", "train"]
    token = _CALLED.set(Started(words, ["-m", *words], [*typed], [*resolved], shlex.join([*words, *typed])))
    try:
        yield
    finally:
        _CALLED.reset(token)


def started() -> Started:
    """Returns how training was started, from the call or from this process's command line."""
    if (call := _CALLED.get()) is not None:
        return call
    words, (script, *resolved) = sys.orig_argv, sys.argv
    if (place := command_place(words)) is not None:
        program = ["stabletrain", "train"]
        launcher = ["python", "-m"] if "-m" in words[:place] else []
        return Started([*launcher, *program], ["-m", *program], words[place + 2 :], resolved, shlex.join(words))
    typed = words[words.index(script) + 1 :] if script in words else words[1:]
    return Started(["python", script], [script], typed, resolved, shlex.join(words))


def command_place(words: Sequence[str]) -> int | None:
    """Returns where a command line of Python names the command `stabletrain`; None if it runs something else."""
    after_option = True  # the first word is the interpreter
    for place, word in enumerate(words):
        if not after_option and (word == "-c" or not word.startswith("-")):
            return place if word in MODULES or Path(word).name == "stabletrain" else None
        after_option = not after_option and word in ("-X", "-W")
    return None


def program_in(command: str) -> str:
    """Returns what to type for the program of a recorded command line, without the words after it.

    The command `stabletrain` is a file that Python was started with: it is named as it is typed, without the paths.
    """
    try:
        words = shlex.split(command)
    except ValueError:  # not written by this package
        words = command.split()
    if (place := command_place(words)) is not None:
        return shlex.join(words[: place + 2]) if "-m" in words[:place] else COMMAND
    if words[:2] == COMMAND.split():
        return COMMAND
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    return program_name() if script is None else shlex.join(words[: script + 1])


def program_name() -> str:
    """Returns the name of the program in messages: `python train.py`, or `stabletrain train`."""
    return SCRIPT if started().program[-1] != "train" and in_checkout() else COMMAND


def torchrun_target() -> str:
    """Returns what torchrun starts: `train.py`, or `-m stabletrain train`."""
    return "train.py" if program_name() == SCRIPT else f"-m {COMMAND}"
