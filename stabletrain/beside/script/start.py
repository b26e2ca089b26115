"""Begins to guard what this process trains: now, or as soon as the script has imported torch.

Torch is not imported before the script does: it reads variables of the environment, such as `OMP_NUM_THREADS`, which
the script may set first. Processes that are spawned by `multiprocessing` are guarded too; forked ones are anyway.
"""

import importlib.abc
import logging
import multiprocessing.spawn
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from stabletrain.printable import say

LOG = logging.getLogger("stabletrain")

ROOT = str(Path(__file__).parents[3])

MAKES_ONE = "stabletrain.guard.checks.written"
"""Makes an optimizer when it is imported, to see its attributes."""

IN_CHILD = """
import sys
sys.path.append({root!r})
from stabletrain.beside.script.start import start
sys.path.remove({root!r})
start(**{options!r})
"""
"""What a spawned process runs first. It may have another path than this process, which began as `python -m`."""


class LinesOnStderr(logging.Handler):
    """Prints each line on the present `sys.stderr`, however the script has set up logging."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a line."""
        say(f"stabletrain: {record.getMessage()}", file=sys.stderr, flush=True)


class AfterTorch(importlib.abc.MetaPathFinder):
    """Calls a function once, when `torch` has been imported."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds torch as the other finders do, and notes when its code has run."""
        if fullname != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        loader = None if spec is None else spec.loader
        if loader is None:
            return None
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            run(module)
            if self in sys.meta_path:  # a second import, after one that failed, comes here too
                sys.meta_path.remove(self)
            self._function()

        vars(loader)["exec_module"] = exec_module
        return spec


class InChild:
    """Is unpickled by a spawned process before anything else, which guards that process."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._code = IN_CHILD.format(root=ROOT, options=options)

    def __reduce__(self) -> Any:
        return exec, (self._code,)


STARTED: dict[str, Callable[[], Any]] = {}
"""What ends the watch of this process: `unwatch` of its optimizers, `undo` of all else; empty if nothing does."""


def start(**options: Any) -> None:
    """Guards what this process trains from now on.

    Args:
        options: `folder`, `rollback`, `max_incidents` and so on, as for `Guard.attach`; plain values.
    """
    stop()
    handler, found = LinesOnStderr(), AfterTorch(partial(_begin, options))
    prepare = multiprocessing.spawn.get_preparation_data
    LOG.addHandler(handler)
    propagate, LOG.propagate = LOG.propagate, False

    def undo() -> None:
        if found in sys.meta_path:
            sys.meta_path.remove(found)
        vars(multiprocessing.spawn)["get_preparation_data"] = prepare
        LOG.removeHandler(handler)
        LOG.propagate = propagate

    def prepare_and_guard(name: str) -> dict[str, Any]:
        return {**prepare(name), "stabletrain": InChild(options)}

    vars(multiprocessing.spawn)["get_preparation_data"] = prepare_and_guard
    STARTED["undo"] = undo
    if "torch" in sys.modules:
        _begin(options)
    else:
        sys.meta_path.insert(0, found)


def stop() -> None:
    """Ends it: optimizers that are made later are not guarded. Those that are guarded stay so."""
    for name in ("unwatch", "undo"):
        STARTED.pop(name, lambda: None)()


def load_ipython_extension(shell: Any) -> None:
    """Is called by `%load_ext stabletrain`: guards what later cells train.

    Args:
        shell: of IPython.
    """
    start(folder=str(Path("incidents").absolute()))


def unload_ipython_extension(shell: Any) -> None:
    """Is called by `%unload_ext stabletrain`.

    Args:
        shell: of IPython.
    """
    stop()


def _begin(options: dict[str, Any]) -> None:
    """Watches this process, which has imported torch."""
    from torch.optim import Optimizer

    inner = vars(Optimizer)["_patch_step_function"]

    def first(optimizer: Optimizer) -> None:
        inner(optimizer)
        if MAKES_ONE in sys.modules and not hasattr(sys.modules[MAKES_ONE], "GIVEN_TO_ALL"):
            return  # the script is importing the guard
        unwatch()
        # The guard is loaded with the first optimizer: a script that trains nothing does not wait for it.
        from stabletrain.beside.script.watch import Watch

        watch = Watch(options)
        watch.install()
        watch.notice(optimizer)
        STARTED["unwatch"] = watch.remove

    def unwatch() -> None:
        Optimizer._patch_step_function = inner

    Optimizer._patch_step_function = first  # ty: ignore[invalid-assignment]
    STARTED["unwatch"] = unwatch
