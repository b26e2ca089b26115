"""The command `stabletrain run`: a script runs as with `python script.py`, and what it trains is guarded.

The script is `__main__`: it sees its own `sys.argv`, `sys.path`, `__file__` and exit code, and its tracebacks show no
frame of this package. A halt of the guard that the script does not catch ends it with exit code 3.
"""

import argparse
import atexit
import builtins
import io
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, NoReturn

from stabletrain.beside.script.check import Check, Ended
from stabletrain.beside.script.start import start
from stabletrain.errors import TrainingHalted
from stabletrain.printable import say

if TYPE_CHECKING:
    from stabletrain.beside.preflight.report import Report

PACKAGE = str(Path(__file__).parents[2]) + os.sep

DESCRIPTION = """Runs a training script as python does, and guards every optimizer that it makes: a step with NaN, Inf
or a spike changes nothing, and is explained. The script is not changed. Until something happens, its results
and its output are those without the guard. With --check, its first updates are checked instead for what would
never make a NaN, and it is ended: docs/preflight.md."""

EXAMPLES = """examples:
  stabletrain run train.py --lr 1e-3
  stabletrain run --check train.py --lr 1e-3
  stabletrain run --folder runs/1/incidents -m mypackage.train --lr 1e-3
  torchrun --nproc_per_node=2 -m stabletrain run train.py --lr 1e-3
in a notebook: %load_ext stabletrain"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `run`. Everything after the script is the script's own."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = (
        "stabletrain run [-h] [--folder FOLDER] [--rollback] [--max-incidents N] [--loss KIND] [-m] script [args ...]\n"
        "       stabletrain run --check [--json] [-m] script [args ...]"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="guard nothing: check the first updates for silent faults, end the script, exit with 1 if there is one",
    )
    parser.add_argument("--json", action="store_true", help="with --check: print the findings as JSON")
    parser.add_argument("--folder", default="incidents", help="where incidents are written (default: %(default)s)")
    parser.add_argument(
        "--rollback", action="store_true", help="keep snapshots, and go back to one if skipping does not help"
    )
    parser.add_argument(
        "--max-incidents",
        type=int,
        metavar="N",
        default=10,
        help="how many incidents are explained, 0 for none (default: %(default)s)",
    )
    parser.add_argument(
        "--loss",
        choices=("minimized", "policy", "adversarial"),
        default="minimized",
        help="what the losses are; a trend of the other two is no alarm (default: %(default)s)",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module, as in python -m")
    parser.add_argument("script", help="a Python file; with -m the name of a module")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="args", help="arguments of the script")


def run(typed: Sequence[str]) -> int:
    """Runs the command with the words after `stabletrain run`; see `run_script`."""
    parser = argparse.ArgumentParser(prog="stabletrain run", allow_abbrev=False)
    add_arguments(parser)
    chosen = parser.parse_args([*typed])
    if chosen.max_incidents < 0:
        parser.error(f"--max-incidents {chosen.max_incidents} is below 0: 10 is usual, 0 explains none")
    if not chosen.folder:
        parser.error("--folder is empty, perhaps from a variable that is not set: name a folder")
    if chosen.json and not chosen.check:
        parser.error("--json prints the findings of --check, which is not given; fix: --check --json")
    return run_script(chosen)


def run_script(chosen: argparse.Namespace) -> int:
    """Runs the script as `__main__`; returns the process's exit code, or raises the script's own `SystemExit`."""
    try:
        source = None if chosen.module else read(absolute(chosen.script))
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"  # in Python's words, and with its exit code
        say(f"stabletrain run: can't open file {error.filename!r}: {why}", file=sys.stderr)
        return 2
    check = Check(show_as_json if chosen.json else show) if chosen.check else None
    if check is None:
        options = {name: getattr(chosen, name) for name in ("max_incidents", "rollback", "loss")}
        start(folder=os.path.abspath(chosen.folder), **options)
    else:
        check.begin()
    set_path(chosen.script, is_module=chosen.module)
    sys.argv = ["-m" if chosen.module else chosen.script, *chosen.words]
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__builtins__=builtins)
    found = 0
    try:
        if source is None:
            vars(runpy)["_run_module_as_main"](chosen.script)  # what `python -m` itself runs
        else:
            path = absolute(chosen.script)
            vars(main).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
            exec(compile(source, path, "exec", dont_inherit=True), vars(main))
    except (Ended, SystemExit) as ended:
        found = 0 if check is None else check.end()
        if isinstance(ended, SystemExit) and (ended.code or check is None):
            raise
    except BaseException as error:
        if check is not None:
            check.end()
        return code_after(error)
    else:
        found = 0 if check is None else check.end()
    return found


def show(report: "Report") -> int:
    """Prints what a check has found; returns the exit code."""
    say(report, flush=True)
    return 1 if report.faults else 0


def show_as_json(report: "Report") -> int:
    """Prints it as JSON."""
    from stabletrain.tracking.metrics import print_json

    print_json(report.as_json())
    return 1 if report.faults else 0


def absolute(script: str) -> str:
    """Returns the path of a script as Python shows it."""
    return script if os.path.isabs(script) else os.path.join(os.getcwd(), script.removeprefix("./"))


def read(path: str) -> bytes:
    """Returns the source of a script."""
    with io.open_code(path) as file:
        return file.read()


def set_path(script: str, *, is_module: bool) -> None:
    """Puts the folder first in `sys.path` that Python itself would put there."""
    if getattr(sys.flags, "safe_path", False):  # python -P
        return
    # What is there now belongs to `python -m stabletrain`, or to the command `stabletrain`.
    own = {os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))}
    if sys.path and sys.path[0] in own:
        del sys.path[0]
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.realpath(script)))


def code_after(error: BaseException) -> int:
    """Shows an error that has ended the script, as Python does; returns the exit code."""
    if isinstance(error, TrainingHalted):
        say(f"stabletrain: {error}", file=sys.stderr)
        return error.exit_code
    hide_own_frames(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        end_by_signal()
    return 1


def hide_own_frames(error: BaseException | None, seen: frozenset[int] = frozenset()) -> None:
    """Removes the frames of this package from the traceback of an error, and of those that caused it.

    An error that this package itself has raised keeps those from the script on.
    """
    if error is None or id(error) in seen:
        return
    frames = []
    each = error.__traceback__
    while each is not None:
        frames.append(each)
        each = each.tb_next
    own = [frame.tb_frame.f_code.co_filename.startswith(PACKAGE) for frame in frames]
    first = own.index(False) if False in own else len(own)
    kept = (
        frames[first:] if own[-1:] == [True] else [frame for frame, mine in zip(frames, own, strict=True) if not mine]
    )
    shown: TracebackType | None = None
    for frame in reversed(kept):
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = shown
    for cause in (error.__cause__, error.__context__):
        hide_own_frames(cause, seen | {id(error)})


def end_by_signal() -> NoReturn:
    """Ends this process as Python does after Ctrl-C: by the signal, so that a shell knows; all else runs before."""
    threading._shutdown()  # ty: ignore[missing-attribute]  no stub knows it
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(130)
