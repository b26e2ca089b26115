"""The table of refusals, `refused.txt`: what is typed after `stabletrain`, or a call of `Guard`, and the message.

A section begins with `# <its title>`, a row with `$ <command>`, and the line below it is the whole message.
"""

import re
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("refused.txt")


class Row(NamedTuple):
    """A refused command and its message."""

    section: str
    command: str
    message: str


def read() -> list[Row]:
    """Returns the rows of the table."""
    sections = re.split(r"^# (.*)\n", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return [
        Row(title, command, message)
        for title, text in zip(sections[::2], sections[1::2], strict=True)
        for command, message in re.findall(r"^\$ (.*)\n(.*)\n", text, re.MULTILINE)
    ]
