"""Hashes of the user's source files that a step runs through, so that a replay notices if they have changed.

These are the files that define the classes and functions of the model and of the step's tools, and the files that they
import. Files of stabletrain, PyTorch, the standard library and installed packages do not count.
"""

import ast
import hashlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import resolve_name
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import nn

from stabletrain.errors import is_own
from stabletrain.stored.json_files import read_file
from stabletrain.tools import Tools


def hashes(model: nn.Module, tools: Tools, since: float) -> dict[str, dict[str, str | None]]:
    """Returns `file` and `sha256` of each of the user's modules that the step runs through.

    The hash is None if the file was written after `since`, in `time.time()` seconds. The run had imported the old file
    by then, so it may execute other code than the file now contains.
    """
    return {name: {"file": file, "sha256": hash_of(file, since)} for name, file in files(model, tools).items()}


def compare(
    then: Mapping[str, Mapping[str, str | None]], model: nn.Module, tools: Tools
) -> tuple[list[str], list[str]]:
    """Returns the files that have changed since `hashes` returned `then`, and the files that may have changed."""
    now = files(model, tools)
    known = {now[name]: one["sha256"] for name, one in then.items() if name in now}
    changed = [file for file, digest in known.items() if digest is not None and digest != hash_of(file)]
    return changed, [file for file, digest in known.items() if digest is None]


def hash_of(file: str, since: float = math.inf) -> str | None:
    """The SHA-256 of a file; None if it was written after `since` or cannot be read."""
    try:
        return None if os.stat(file).st_mtime > since else hashlib.sha256(read_file(Path(file))).hexdigest()
    except OSError:
        return None


def files(model: nn.Module, tools: Tools) -> dict[str, str]:
    """Returns the name and the file of each of the user's modules that forward and backward run through."""
    objects = [*model.modules(), tools.sanitizer, tools.precision, tools.objective.plain, tools.determinism]
    waiting = [name for each in objects for value in (each, *attributes_of(each)) for name in module_names(value)]
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if name in found or not isinstance(file, str) or not is_own(file):
            continue
        found[name] = file
        waiting += imports(file, getattr(module, "__package__", None) or "")
    return dict(sorted(found.items()))


def imports(file: str, package: str) -> Iterator[str]:
    """Yields the names of the modules that a source file imports, also inside functions; some may not exist."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from accumulate(alias.name.split("."), "{}.{}".format)  # a.b.c imports a and a.b too
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # a relative import from outside a package
                origin = resolve_name("." * node.level + (node.module or ""), package)
                yield from (origin, *(f"{origin}.{alias.name}" for alias in node.names))


def attributes_of(value: Any) -> list[Any]:
    """The attributes of an object; empty if it has no `__dict__`."""
    return list(getattr(value, "__dict__", {}).values())


def module_names(value: Any) -> Iterator[str]:
    """The name of the module that a class, a function or an object's class comes from."""
    try:
        name = value.__module__
    except Exception:  # a user's object may raise anything
        return
    if isinstance(name, str):
        yield name
