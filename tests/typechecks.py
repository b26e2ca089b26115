"""Checks the types and shapes that the package's functions declare, while the fast tier runs.

Every function is checked by beartype. Those that declare a shape are also checked by jaxtyping, which binds the
arguments of each call anew, and so would make the others many times slower.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, ForwardRef, get_args

import jaxtyping
from beartype import BeartypeConf, beartype

typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""Beartype as the tests use it: an int is also a float, as PEP 484 has it."""

WITH_SHAPES = jaxtyping.jaxtyped

MAX_DEFINED = 20
"""How often a function that is defined inside another is checked: each call of the other defines it, and beartype takes
a millisecond to prepare the checks of each."""

defined: Counter[CodeType] = Counter()
"""How often each such function has been defined."""


def install(package: str) -> None:
    """Checks each module of a package that is imported from now on."""
    jaxtyping.jaxtyped = jaxtyped_where_shapes_are
    jaxtyping.install_import_hook(package, f"{__name__}.typechecked")


def jaxtyped_where_shapes_are(function: Any = None, /, *, typechecker: Any = None) -> Any:
    """Stands for `jaxtyping.jaxtyped`: leaves a function without shapes to the type checker alone.

    One that has been defined inside another too often is left as it is.
    """
    if function is None:
        return lambda function: jaxtyped_where_shapes_are(function, typechecker=typechecker)
    if isinstance(function, FunctionType) and "<locals>" in function.__qualname__:
        defined[function.__code__] += 1
        if defined[function.__code__] > MAX_DEFINED:
            return function
    # Not the step that `Guard.attach` defines inside a function: closed.py knows jaxtyping's wrapper only.
    attached = "<locals>" in getattr(function, "__qualname__", "") and function.__module__ == "stabletrain.guard.attach"
    plain = isinstance(function, FunctionType) and not attached
    if typechecker is not None and plain and not has_shapes(function):
        return typechecker(function)
    return WITH_SHAPES(function, typechecker=typechecker)


def has_shapes(function: Callable) -> bool:
    """Returns whether an argument or the result of a function is declared with a shape."""
    return any(is_shape(each) for each in inspect.get_annotations(function).values())


def is_shape(annotation: Any) -> bool:
    """Returns whether a type is one of jaxtyping's, or has one as an argument; one in quotes may be any."""
    if isinstance(annotation, str | ForwardRef):
        return True
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(is_shape(each) for each in get_args(annotation) if each is not annotation)
