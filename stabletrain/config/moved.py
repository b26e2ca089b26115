"""A table of moved import paths, so that stored files and users' code with the old paths keep working.

Run folders and incidents store the `_target_` of every option. Users' YAML files have `_target_`s too, and users' code
imports modules such as `stabletrain.records`. When a module or a class moves, its old path is added to `MOVED`.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MOVED: dict[str, str] = {
    "stabletrain.compare": "stabletrain.comparison",
    "stabletrain.forensics.desk": "stabletrain.forensics.handler",
    "stabletrain.forensics.desk.Forensics": "stabletrain.forensics.handler.IncidentHandler",
    "stabletrain.forensics.desk.NoForensics": "stabletrain.forensics.handler.NoIncidentHandler",
    "stabletrain.parallel.auto": "stabletrain.parallel.options.auto",
    "stabletrain.parallel.ddp": "stabletrain.parallel.options.ddp",
    "stabletrain.parallel.fsdp": "stabletrain.parallel.options.fsdp",
    "stabletrain.stability.clipping.adagc": "stabletrain.stability.clipping.adaptive",
    "stabletrain.stability.clipping.agc": "stabletrain.stability.clipping.adaptive",
    "stabletrain.stability.clipping.none": "stabletrain.stability.clipping.fixed",
    "stabletrain.stability.clipping.norm": "stabletrain.stability.clipping.fixed",
    "stabletrain.stability.clipping.per_module": "stabletrain.stability.clipping.fixed",
    "stabletrain.stability.clipping.value": "stabletrain.stability.clipping.fixed",
    "stabletrain.stability.clipping.zclip": "stabletrain.stability.clipping.adaptive",
    "stabletrain.stability.chunked_loss": "stabletrain.stability.objective.chunked_loss",
    "stabletrain.stability.optimizers.spam": "stabletrain.stability.optimizers.adamw",
    "stabletrain.stability.optimizers.stable_adamw": "stabletrain.stability.optimizers.adamw",
    "stabletrain.state.checkpoint": "stabletrain.checkpoint.checkpoints",
    "stabletrain.tools": "stabletrain.protocols",
    "stabletrain.watch.monitors": "stabletrain.monitors.monitors",
}
"""Old dotted path -> new one, for a package (with everything below it), a module or a class.

A class maps in `_target_`s only. If users import a class that has a new name, its module keeps the old name as well.
"""

FUNCTIONS = ("stabletrain.compare",)
"""Packages in `MOVED` whose name in `stabletrain` is a function today."""


def now(path: str) -> str:
    """Returns today's path: replaces the longest prefix of `path` that has moved."""
    head, tail = path, ""
    while head:
        if head in MOVED:
            return MOVED[head] + tail
        head, dot, last = head.rpartition(".")
        tail = dot + last + tail
    return path


def updated(tree: Any) -> Any:
    """Returns a copy of a configuration (plain values) with every `_target_` replaced by today's path."""
    if isinstance(tree, dict):
        return {
            key: now(value) if key == "_target_" and isinstance(value, str) else updated(value)
            for key, value in tree.items()
        }
    return [updated(each) for each in tree] if isinstance(tree, list) else tree


class Finder(MetaPathFinder):
    """Finds a module by its old path."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the spec of a moved module, or of a package whose modules have all moved; else None."""
        new, gone = now(fullname), any(old.startswith(f"{fullname}.") for old in MOVED)
        if new == fullname and not gone:
            return None
        if PathFinder.find_spec(fullname, path) is not None:  # the old path still exists, such as `parallel.ddp`
            return None
        return ModuleSpec(fullname, None, is_package=True) if new == fullname else ModuleSpec(fullname, Moved(new))


class Moved(Loader):
    """Loads the module at the new path: the same object, so its classes are identical under both paths."""

    def __init__(self, path: str) -> None:
        self.path = path

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Imports the module at the new path."""
        module = import_module(self.path)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own spec, which the import has replaced. Does not execute the module again."""
        module.__spec__ = self.spec


class OldPackage(ModuleType):
    """A moved package whose name is a function today: `from stabletrain.compare import frame` finds it here.

    Python sets an imported submodule as an attribute of its package, which would replace the function. It does not do
    this for a module that is in `sys.modules` already.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__file__ = __file__
        vars(self)["__path__"] = []  # a package, so that `Finder` is asked for its modules

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(MOVED[self.__name__]), name)


def install() -> None:
    """Makes every later import look into the table first."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
        sys.modules.update({name: OldPackage(name) for name in FUNCTIONS})
