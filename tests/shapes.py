"""The documented shapes of `--json`, from `docs/reference/json.md`, and what in a value differs from one."""

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.runs import ROOT

PAGE = ROOT / "docs" / "reference" / "json.md"

WORDS = ("NaN", "Infinity", "-Infinity")

TYPES = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: (isinstance(value, int | float) and not isinstance(value, bool)) or value in WORDS,
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "any": lambda value: True,
}


def sections() -> dict[str, str]:
    """The text of each section of the page, by its heading: a command."""
    heads, texts = zip(*re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S), strict=True)
    return dict(zip(heads, texts, strict=True))


def shape(command: str) -> Any:
    """The documented shape of a command's JSON."""
    (block,) = re.findall(r"```json\n(.*?)```", sections()[command], re.S)
    return json.loads(block)


def strict(text: str) -> Any:
    """Parses strict JSON, without the bare words that Python's parser would take."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def differences(value: Any, wanted: Any, place: str = "") -> Iterator[str]:
    """Yields where a value has not the documented shape: types, missing keys, and keys that are not documented."""
    if isinstance(wanted, list):
        if not isinstance(value, list):
            yield f"{place}: {value!r} is no list"
            return
        for number, each in enumerate(value):
            yield from differences(each, wanted[0], f"{place}[{number}]")
    elif isinstance(wanted, dict):
        if not isinstance(value, dict):
            yield f"{place}: {value!r} is no object"
            return
        yield from in_object(value, wanted, place)
    elif not any(value == kind[1:-1] if kind[0] == "'" else TYPES[kind](value) for kind in wanted.split(" | ")):
        yield f"{place}: {value!r} is not {wanted}"


def in_object(value: dict, wanted: dict, place: str) -> Iterator[str]:
    """Yields the differences of an object's keys and values."""
    named = {key.removesuffix(" | null"): (key, each) for key, each in wanted.items() if "<" not in key}
    patterns = [(re.sub("<.*>", ".+", re.escape(key)), each) for key, each in wanted.items() if "<" in key]
    for name, (key, each) in named.items():
        if name not in value:
            yield f"{place}.{name} is missing"
        elif not (key.endswith(" | null") and value[name] is None):
            same = isinstance(each, str) and each.startswith("as ")
            yield from differences(value[name], wanted[each[3:]] if same else each, f"{place}.{name}")
    for name in value.keys() - named.keys():
        each = next((each for pattern, each in patterns if re.fullmatch(pattern, name)), None)
        if each is None:
            yield f"{place}.{name} is not documented"
        else:
            yield from differences(value[name], each, f"{place}.{name}")
