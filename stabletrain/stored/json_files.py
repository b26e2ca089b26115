"""Reads a JSON file as a value of a known type, or says in one sentence what is wrong with it.

A file on a disk may hold anything: a crash leaves zeros, a full disk half of a file, an editor a text in place of a
number. So the type of a file is declared once, as a `TypedDict`, and checked where the file is read. Code that uses the
value may rely on it.
"""

import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast

from stabletrain.errors import ConfigError
from stabletrain.stored.files import read_file

DEPTH = 100
"""Largest nesting of a value: deeper ones would exceed Python's recursion limit in the code that walks through them."""

LARGEST = 2**63
"""Bound of integers: larger ones have no float or numpy integer."""

Count = Annotated[int, "count"]
"""An integer of at least 0."""

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""A number as stabletrain writes it: what JSON cannot represent is a word."""

Record = TypeVar("Record")


class DamagedFile(ConfigError):
    """A file does not hold what stabletrain writes into it. The message names the file and the reason.

    Attributes:
        usable: of a file that holds an object, the keys whose values have the right types.
    """

    def __init__(self, message: str, usable: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.usable = usable or {}


class MissingFile(DamagedFile):
    """There is no such file."""


def read_record(file: Path, kind: type[Record]) -> Record:
    """Reads a JSON file.

    Args:
        file: its path.
        kind: the type of its value, usually a `TypedDict`; see `check_type`.

    Raises:
        MissingFile: it does not exist.
        DamagedFile: it cannot be read, is no JSON, or holds a value of another type.
    """
    try:
        content = read_file(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFile(f"{file} is missing") from error
    except OSError as error:
        raise DamagedFile(f"{file} cannot be read: {error.strerror or error}") from error
    value = None
    try:
        value = parse(content)
        check_type(value, kind)
    except ValueError as error:
        raise DamagedFile(f"{file} is damaged: {error}", usable_part(value, kind)) from error
    return cast("Record", value)


def usable_part(value: Any, kind: Any) -> dict[str, Any]:
    """Returns an object without the keys whose values have another type than a `TypedDict` says."""
    if not isinstance(value, dict):
        return {}
    hints = hints_of(kind)
    return {key: each for key, each in value.items() if key not in hints or difference(each, hints[key]) is None}


def parse(content: bytes | str) -> Any:
    """Parses JSON of bounded depth and size of numbers.

    Raises:
        ValueError: it is no such JSON; says why in a few words.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = "it is empty" if not content.strip() else "it is not valid JSON"
        raise ValueError("it is nested too deeply" if isinstance(error, RecursionError) else reason) from error
    check_plain(value)
    return value


def check_plain(value: Any) -> None:
    """Checks that code may walk through a parsed value, print it and compute with its numbers.

    Raises:
        ValueError: it is nested too deeply, an integer has more than 63 bits, or a text is no valid Unicode.
    """
    level, depth = [value], 0
    while level:
        if depth > DEPTH:
            raise ValueError("it is nested too deeply")
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.keys()
                below += each.values()
            elif isinstance(each, list):
                below += each
            elif isinstance(each, int) and not -LARGEST < each < LARGEST:
                raise ValueError("it holds an integer of more than 63 bits")
            elif isinstance(each, str) and not each.isascii():
                try:
                    each.encode()
                except UnicodeEncodeError:
                    raise ValueError("it holds a text that is no valid Unicode") from None
        level, depth = below, depth + 1


def check_type(value: Any, kind: Any, name: str = "") -> None:
    """Checks a parsed value against a type.

    Args:
        value: of `parse`.
        kind: a `TypedDict`, whose further keys may hold anything; `list[...]`, `dict[str, ...]`, a union, a `Literal`,
            `Any`, `Count`, `int`, `float` (also an integer), `str`, `bool` or `None`. A bool is no number. A value of
            `Annotated[one, other]` has both types.
        name: what the message calls the value.

    Raises:
        ValueError: the value has another type; the message gives its path and value.
    """
    if wrong := difference(value, kind):
        path, expected = wrong
        shown = "/".join(filter(None, [name, *path]))
        raise ValueError(f"{shown or 'its content'} is {brief(value_at(value, path))}, not {expected}")


def difference(value: Any, kind: Any) -> tuple[list[str], str] | None:
    """Returns the path of the first value of another type and what was expected there; None if there is none."""
    origin = typing.get_origin(kind)
    if typing.is_typeddict(kind):
        if not isinstance(value, dict):
            return [], "an object"
        for key, inner in hints_of(kind).items():
            if key not in value:
                if key in kind.__required_keys__:
                    return [], f"an object with the key {key}"
            elif wrong := difference(value[key], inner):
                return [key, *wrong[0]], wrong[1]
        return None
    if origin in (list, dict):
        if not isinstance(value, origin):
            return [], "a list" if origin is list else "an object"
        inner = typing.get_args(kind)[-1]
        for key, each in enumerate(value) if isinstance(value, list) else value.items():
            if wrong := difference(each, inner):
                return [str(key), *wrong[0]], wrong[1]
        return None
    if origin in (Union, types.UnionType):
        found = [difference(value, each) for each in typing.get_args(kind)]
        # The kind that fits best names the difference: one inside the value, if there is one.
        return None if None in found else max(cast("Any", found), key=lambda wrong: len(wrong[0]))
    if origin is Literal:
        return None if value in typing.get_args(kind) else ([], f"one of {', '.join(map(str, typing.get_args(kind)))}")
    if kind is Count:
        return None if is_int(value) and value >= 0 else ([], "a whole number of at least 0")
    if origin is Annotated:
        return next(filter(None, (difference(value, each) for each in typing.get_args(kind))), None)
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    fits = {
        int: is_int,
        float: lambda it: isinstance(it, float) or is_int(it),
    }.get(kind, lambda it: kind is Any or isinstance(it, kind))
    return None if fits(value) else ([], names[kind])


HINTS: dict[Any, dict[str, Any]] = {}


def hints_of(kind: Any) -> dict[str, Any]:
    """Returns the types of a `TypedDict`'s keys."""
    if kind not in HINTS:
        HINTS[kind] = typing.get_type_hints(kind, include_extras=True)
    return HINTS[kind]


def is_int(value: Any) -> bool:
    """Returns whether a value is an integer, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def value_at(value: Any, path: list[str]) -> Any:
    """Returns the value at a path."""
    for key in path:
        value = value[int(key)] if isinstance(value, list) else cast("Mapping[str, Any]", value)[key]
    return value


def brief(value: Any) -> str:
    """Returns a value as JSON, cut to a few characters."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value)
    return text if len(text) <= 30 else f"{text[:27]}..."
