"""Writes the tables of the package into their pages: `python docs/tables.py`. `tests/test_docs.py` compares them.

They are those of `config/rules.py`, of `config/resuming.py`, and of `tests/refusals/refused.txt`: every refused command
with its message; and the pages of `reference/`, which `options.py` makes.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from stabletrain.config.resuming import CHANGED_BETWEEN, CHANGED_FROM, CHANGED_TO, GROUPS, KEYS, Row
from stabletrain.config.rules import ANY_KEY, ANY_TYPED, RULES

WORDS = {
    "default": "the default",
    "corrected": "the value in this type, or the default",
    "nearest": "the key that was meant, or leave it out",
    "kind": "of the default's type",
    "lacking": "the model has no attention, or its YAML takes no `<key>`",
    "instead": "the option of `<key>` that does nothing, with a preset `stability=none` and the rest of what it sets",
    "option": "<option>",
    "sizes": "<nearest>",
    "sizes_in_one": "<nearest>",
    "sharing": "<nearest>",
    "copies": "`<shard>` x `<replicate>`",
    "modality": "<tokens or images>",
    "model.modality": "<the other>",
    "fitting": "an option for that kind of data",
    "example_model": "`model=gpt_nano` or `model=resnet20`",
    "reference": "<key>: ${<key>}",
}
"""What the pages write for the names in messages and fixes, where `<name>` would say too little."""


def refused() -> Iterator[str]:
    """Yields the lines of the table of what is refused."""
    yield from ("| key | what is wrong | fix |", "|---|---|---|")
    for rule in RULES:
        keys = rule.keys if rule.keys in (ANY_KEY, ANY_TYPED) else ", ".join(f"`{key}`" for key in rule.keys.split())
        message = re.sub(r"^{(override|chosen|typed|key)}:? ", "", rule.message)
        yield f"| {keys} | {as_code(filled(message))} | {as_code(filled(rule.fix))} |"


def filled(template: str) -> str:
    """Returns a message or a fix with words for its names."""
    return re.sub(r"{([\w.]+)}", lambda found: WORDS.get(found[1], f"<{found[1]}>"), template)


def as_code(text: str) -> str:
    """Returns a text with each `key=value` and each `<name>` in it as code: a page would take `<name>` for HTML."""
    return re.sub(r"(`[^`]*`)|([\w.<>]+=[\w.<>]+|<[\w .']+>)", lambda found: found[1] or f"`{found[2]}`", text)


def resumes() -> Iterator[str]:
    """Yields the lines of the table of what a resume may change."""
    yield from ("| change | kind | what happens |", "|---|---|---|")
    for group, row in GROUPS.items():
        yield line(f"`{group}`", row)
        for (one, option), each in CHANGED_TO.items():
            if one == group:
                yield line(f"`{group}={option}`", each)
        for (one, option), each in CHANGED_FROM.items():
            if one == group:
                yield line(f"`{group}={option}` to another", each)
        for (one, pair), each in CHANGED_BETWEEN.items():
            if one == group:
                yield line(f"`{group}` between {' and '.join(f'`{option}`' for option in sorted(pair))}", each)
    for key, row in KEYS.items():
        yield line(f"`{key}`", row)


def line(change: str, row: Row) -> str:
    """Returns a line about a change, with the fix if it is refused."""
    return f"| {change} | {row.kind} | {as_code(f'{row.text}; {row.fix}' if row.fix else row.text)} |"


def commands() -> Iterator[str]:
    """Yields the lines of the table of refused commands: each with its message, in sections."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.refusals.table import read

    section = ""
    for row in read():
        if row.section != section:
            yield from ([] if not section else ["```", ""])
            yield from (f"### {row.section}", "", "<!-- transcript: run by tests/refusals -->", "```text")
            section = row.section
        prompt = ">>>" if row.command.startswith("Guard") else "$ stabletrain"
        yield from (f"{prompt} {row.command}", row.message)
    yield "```"


COMMANDS = "## Every refused command\n"
"""The heading of the last part of `reference/refused.md`, which `commands` writes."""

TABLES = {"reference/refused.md": refused, "reference/resume.md": resumes}
"""The page of each table, by its place in `docs/`."""


def with_table(text: str, lines: list[str]) -> str:
    """Returns a page with its table, which begins with the same heading, replaced."""
    old = re.search(rf"^{re.escape(lines[0])}\n(\|.*\n)*", text, re.MULTILINE)
    assert old is not None, "the page has no such table"
    return text.replace(old[0], "\n".join(lines) + "\n")


def with_commands(text: str) -> str:
    """Returns the page of refusals with its last part, the sections of the refused commands, replaced."""
    before, heading, rest = text.partition(COMMANDS)
    assert heading, "the page has no such part"
    return before + heading + rest.partition("\n### ")[0] + "\n" + "\n".join(commands()) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # `docs` is not installed
    from docs.options import pages

    for page, table in TABLES.items():
        file = Path(__file__).parent / page
        text = with_table(file.read_text(encoding="utf-8"), [*table()])
        file.write_text(with_commands(text) if COMMANDS in text else text, encoding="utf-8")
    for place, text in pages().items():
        (file := Path(__file__).parent / place).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
