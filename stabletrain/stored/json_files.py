"""Reads a JSON file as a value of a known type, or says in one sentence what is wrong with it.

A file on a disk may hold anything: a crash leaves zeros, a full disk half of a file, an editor a text in place of a
number. So the type of a file is declared once, as a `TypedDict`, and checked where the file is read. Code that uses the
value may rely on it.
"""

import errno
import json
import math
import os
import stat
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast

from stabletrain.errors import ConfigError


def read_file(path: Path) -> bytes:
    """Returns the content of a file.

    Raises:
        OSError: it cannot be read, or is a pipe, a device or a folder: reading a pipe could block forever.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
        return file.read()


def read_words(path: Path) -> str:
    """Returns the content of a file as text, in which bytes that are no UTF-8 are replaced; see `read_file`."""
    return read_file(path).decode("utf-8", errors="replace")


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
        shown = "/".join(filter(None, [name, *wrong.path]))
        raise ValueError(f"{shown or 'its content'} is {brief(wrong.value)}, not {wrong.expected}")


class Difference(NamedTuple):
    """A value that has another type, the keys that lead to it, and what was expected there."""

    path: list[str]
    value: Any
    expected: str


PLAIN = {int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
"""What messages call the plain types."""


def difference(value: Any, kind: Any) -> Difference | None:
    """Returns the first difference of a value from a type; None if there is none. See `check_type`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return None
    if typing.is_typeddict(kind):
        if not isinstance(value, dict):
            return Difference([], value, "an object")
        if missing := kind.__required_keys__ - value.keys():
            return Difference([], value, f"an object with the key {min(missing)}")
        return first_inside(value, {key: inner for key, inner in hints_of(kind).items() if key in value})
    if origin in (list, dict):
        if not isinstance(value, origin):
            return Difference([], value, "a list" if origin is list else "an object")
        keys = range(len(value)) if isinstance(value, list) else value
        return first_inside(value, dict.fromkeys(keys, arguments[-1]))
    if origin in (Union, types.UnionType):
        found = [difference(value, each) for each in arguments]
        # The kind that fits best names the difference: one inside the value, if there is one.
        return None if None in found else max(cast("Any", found), key=lambda wrong: len(wrong.path))
    if origin is Literal:
        return None if value in arguments else Difference([], value, f"one of {', '.join(map(str, arguments))}")
    if kind is Count:
        return None if is_int(value) and value >= 0 else Difference([], value, "a whole number of at least 0")
    if origin is Annotated:
        return next(filter(None, (difference(value, each) for each in arguments)), None)
    fits = isinstance(value, float) or is_int(value) if kind is float else isinstance(value, kind)
    return None if fits and not (kind is int and isinstance(value, bool)) else Difference([], value, PLAIN[kind])


def first_inside(value: Any, kinds: Mapping[Any, Any]) -> Difference | None:
    """Returns the first difference of the values of an object or a list from their types, by key."""
    for key, kind in kinds.items():
        if wrong := difference(value[key], kind):
            return wrong._replace(path=[str(key), *wrong.path])
    return None


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    """Returns the types of a `TypedDict`'s keys."""
    return typing.get_type_hints(kind, include_extras=True)


def is_int(value: Any) -> bool:
    """Returns whether a value is an integer, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def brief(value: Any) -> str:
    """Returns a value as JSON, cut to a few characters."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value)
    return text if len(text) <= 30 else f"{text[:27]}..."
