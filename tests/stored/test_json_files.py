"""A JSON file is a value of the declared type, or is refused in one sentence."""

import os
from typing import Any, Literal, TypedDict

import pytest

from stabletrain.stored.json_files import Count, DamagedFile, MissingFile, Number, check_type, parse, read_record


class Inner(TypedDict):
    step: Count


class Outer(TypedDict, total=False):
    name: str | None
    flag: bool
    loss: Number
    lines: list[Inner]
    by_name: dict[str, int]
    kind: Literal["one", "two"]
    anything: Any


FITS = [
    {},
    {"name": None, "flag": True, "loss": 2, "lines": [{"step": 0}], "by_name": {"a": -5}, "kind": "two"},
    {"name": "x", "loss": "NaN", "lines": [], "by_name": {}, "anything": [{}], "unknown": {"a": [1]}},
]

DIFFERS = {
    '{"name": 5}': "name is 5, not a text",
    '{"flag": 1}': "flag is 1, not true or false",
    '{"loss": "5"}': 'loss is "5", not a number',
    '{"loss": true}': "loss is true, not a number",
    '{"lines": {}}': "lines is {}, not a list",
    '{"lines": [{"step": 1}, {"step": -5}]}': "lines/1/step is -5, not a whole number of at least 0",
    '{"lines": [{"step": 65.5}]}': "lines/0/step is 65.5, not a whole number",
    '{"lines": [{"step": true}]}': "lines/0/step is true, not a whole number",
    '{"lines": [{}]}': "lines/0 is {}, not an object with the key step",
    '{"by_name": {"a": null}}': "by_name/a is null, not an integer",
    '{"kind": "three"}': 'kind is "three", not one of one, two',
    "[]": "its content is [], not an object",
    "null": "its content is null, not an object",
    "": "it is empty",
    '{"name": ': "it is not valid JSON",
    "[" * 100_000: "it is nested too deeply",
    '{"a":' * 200 + "0" + "}" * 200: "it is nested too deeply",
    '{"a": 1' + "0" * 5000 + "}": "it is not valid JSON",
    '{"a": 1' + "0" * 400 + "}": "an integer of more than 63 bits",
    '{"a": "\\ud800"}': "a text that is no valid Unicode",
}


@pytest.mark.parametrize("value", FITS)
def test_a_value_of_the_type_fits(value):
    check_type(value, Outer)


@pytest.mark.parametrize("text", DIFFERS, ids=lambda text: text[:30])
def test_another_value_is_refused_with_its_place(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(DamagedFile) as raised:
        read_record(file, Outer)
    assert str(raised.value).startswith(f"{file} is damaged: ")
    assert DIFFERS[text] in str(raised.value)
    assert len(str(raised.value)) < len(str(file)) + 100


def test_what_has_the_right_type_is_told_from_what_has_not(tmp_path):
    (tmp_path / "x.json").write_text('{"name": "a", "flag": 3, "unknown": 5}')
    with pytest.raises(DamagedFile) as raised:
        read_record(tmp_path / "x.json", Outer)
    assert raised.value.usable == {"name": "a", "unknown": 5}


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    with pytest.raises(MissingFile, match="is missing"):
        read_record(tmp_path / "gone.json", Outer)
    (tmp_path / "loop.json").symlink_to("loop.json")
    with pytest.raises(DamagedFile, match="cannot be read: Too many levels"):
        read_record(tmp_path / "loop.json", Outer)
    with pytest.raises(DamagedFile, match="cannot be read: Is a directory"):
        read_record(tmp_path, Outer)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(DamagedFile, match="cannot be read: not a file"):
        read_record(tmp_path / "pipe.json", Outer)


def test_bytes_that_are_not_utf_8_are_no_json():
    with pytest.raises(ValueError, match="not valid JSON"):
        parse(b'{"a": "\xff\xfe"}')
