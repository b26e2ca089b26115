"""Control characters are shown escaped wherever text leaves, and every other character as it is."""

import ast
import io
from pathlib import Path

import pytest

import stabletrain
from stabletrain.printable import CONTROL, is_round, one_line, printable, say

NASTY = {
    "\x1b[31mred": r"\x1b[31mred",
    "a\rb": r"a\x0db",
    "\x07": r"\x07",
    "\x7f\x9b31m": r"\x7f\x9b31m",
    "\u202ecod.exe": r"\u202ecod.exe",
    "\u2066\u2069\u200e\u061c": r"\u2066\u2069\u200e\u061c",
    "\udcff.txt": r"\udcff.txt",
    "\u2028": r"\u2028",
}


@pytest.mark.parametrize("text", NASTY)
def test_control_characters_are_escaped(text):
    assert printable(text) == NASTY[text]
    assert one_line(f"{text}\n\tb") == rf"{NASTY[text]}\n\tb"


def test_other_characters_newlines_and_tabs_stay():
    text = "ä ß 模型 🚀 👩\u200d🔬 עברית e\u0301\n\tx\\y"
    assert printable(text) == text
    assert not CONTROL.search(text)


def test_say_escapes_what_the_stream_cannot_encode():
    stream = io.TextIOWrapper(buffer := io.BytesIO(), encoding="ascii")
    say("ü\x1b\udcff", file=stream, end="!", flush=True)
    assert buffer.getvalue() == rb"\xfc\x1b\udcff!"


def test_no_file_of_the_package_prints_in_another_way():
    for file in Path(stabletrain.__file__).parent.rglob("*.py"):
        if file.name == "printable.py":
            continue
        calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        names = [call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls]
        assert "print_exc" not in names, file
        assert not any(isinstance(call, ast.Name) and call.id == "print" for call in calls), file


def test_repeated_messages_are_logged_less_and_less_often():
    assert [count for count in range(1, 2001) if is_round(count)] == [1, 2, 3, 10, 100, 1000]
    assert is_round(10**6)


def test_a_line_is_one_write_so_that_those_of_several_ranks_do_not_run_into_one_another():
    class Pieces(io.StringIO):
        def write(self, text):
            pieces.append(text)
            return super().write(text)

    pieces = []
    say("a line", file=Pieces())
    assert [piece for piece in pieces if piece] == ["a line\n"]
