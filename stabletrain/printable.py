"""Text for the terminal and for tables, in which control characters are shown escaped: `\\x1b`, `\\x07`, `\\u202e`.

File names, data and generated text may contain anything. As they are, such characters would move the cursor, change
colours and titles, or turn the direction of what follows. Every other character stays as it is, in any language.
"""

import re
import sys
from contextlib import suppress
from typing import Any

CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, delete, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of text
    "\u2028\u2029\ud800-\udfff]"  # separate lines; halves of characters, from bytes of a file name that are no UTF-8
)
"""Characters that a terminal does not show but acts on, or that cannot be written."""


def printable(text: str) -> str:
    """Returns text with control characters escaped; newlines and tabs stay."""
    return CONTROL.sub(lambda found: escaped(found[0]), text)


def one_line(text: str) -> str:
    """Returns text as one line without control characters, for a cell of a table: newlines and tabs are escaped too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def escaped(character: str) -> str:
    """Returns a character as Python would write it."""
    return f"\\x{ord(character):02x}" if ord(character) < 0x100 else f"\\u{ord(character):04x}"


def is_round(count: int) -> bool:
    """Returns whether a repeated message is shown at this count: at 1, 2, 3, 10, 100, 1000 and so on."""
    return count <= 3 or count in (10**power for power in range(1, 9))


def say(text: object = "", *, file: Any = None, end: str = "\n", flush: bool = False) -> None:
    """Prints text with control characters escaped; `file` is standard output unless another stream is given.

    Characters that the stream's encoding lacks are escaped too.
    """
    stream = sys.stdout if file is None else file
    words = printable(str(text)) + end  # one write: lines of several ranks must not run into one another
    try:
        print(words, file=stream, end="", flush=flush)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        print(words.encode(encoding, "backslashreplace").decode(encoding), file=stream, end="", flush=flush)


def warn(message: str) -> None:
    """Prints one line to standard error. Ignores a closed stream."""
    with suppress(OSError):
        say(f"stabletrain: {message}", file=sys.stderr)
