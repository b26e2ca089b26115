"""Draws `architecture.svg` and `step.svg` from the code: `python docs/pictures.py`.

`tests/test_docs_pictures.py` compares them. Nothing in them is written here but what `WORDS`, `OUTCOMES` and `VERDICTS`
hold:

| picture | from |
|---|---|
| the parts | the docstrings of the packages; `MAY_SEE` of `tests/laws/test_imports.py` |
| a step | the comments of `compute`, `forward_backward` and `commit` in `step.py`; the order of calls in the loop |

An SVG of plain text needs no library, and is the same on every machine. Its colours follow the reader's light or dark
mode. It draws its own background, so that it can be read on any page.
"""

import ast
import html
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # `tests` is not installed
from stabletrain.records import Verdict
from tests.laws.test_imports import BESIDE, MAY_SEE, NOUNS

ROOT = Path(__file__).parents[1]

PACKAGE = ROOT / "stabletrain"

HERE = Path(__file__).parent

WIDTH = 860
"""Width of both pictures in pixels, about that of a page on GitHub: text keeps its size."""

STYLE = """
text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1c2733 }
.title { font-size: 16px; font-weight: 600 }
.name { font-size: 13px; font-weight: 600 }
.quiet { font-size: 11px; fill: #5b6b7d }
.page { fill: #ffffff }
.box { fill: #f3f6fa; stroke: #b9c6d6 }
.other { fill: #fdf6ea; stroke: #dcc79b }
.good { fill: #e8f6ec; stroke: #7fbf92 }
.bad { fill: #fcecec; stroke: #d99a9a }
.key { fill: #e4eefc; stroke: #6f9fe0 }
.line { stroke: #7b8ba0; fill: none; stroke-width: 1.4 }
.tip { fill: #7b8ba0 }
@media (prefers-color-scheme: dark) {
  text { fill: #e2e8f0 }
  .quiet { fill: #9fb0c3 }
  .page { fill: #10161e }
  .box { fill: #1b2531; stroke: #43546a }
  .other { fill: #2b2515; stroke: #6f5f37 }
  .good { fill: #16301f; stroke: #3f7d54 }
  .bad { fill: #361d1f; stroke: #8c4a4e }
  .key { fill: #16273f; stroke: #3f6fb0 }
  .line { stroke: #8798ad }
  .tip { fill: #8798ad }
}
"""


# ---- drawing


class Picture:
    """A picture that is drawn from the top down.

    Attributes:
        height: where the next thing may begin.
    """

    def __init__(self, title: str, about: str) -> None:
        self.title, self.about = title, about
        self.parts: list[str] = []
        self.height = 0.0
        self.text(16, 30, title, "title")
        self.height = 42.0
        for line in wrap(about, WIDTH - 32):
            self.height += 15
            self.text(16, self.height - 5, line, "quiet")
        self.height += 8

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Writes one line; `y` is its base line."""
        kind = f' class="{kind}"' if kind else ""
        middle = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{kind}{middle}>{html.escape(words, quote=False)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draws a box."""
        size = f'width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" {size} rx="6" class="{kind}"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draws a line with a tip at its end; the last part is vertical or horizontal."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="line"/>')
        (x0, y0), (x, y) = points[-2:]
        if x0 == x:
            back = -7 if y > y0 else 7
            tip = [(x, y), (x - 4, y + back), (x + 4, y + back)]
        else:
            back = -7 if x > x0 else 7
            tip = [(x, y), (x + back, y - 4), (x + back, y + 4)]
        self.parts.append(f'<polygon points="{" ".join(f"{x:g},{y:g}" for x, y in tip)}" class="tip"/>')

    def box(self, box: "Box", x: float, y: float, width: float, height: float) -> None:
        """Draws a box with its lines."""
        self.rect(x, y, width, height, box.kind)
        for words, kind, base in box.lines(width):
            self.text(x + 10, y + base, words, kind)

    def svg(self) -> str:
        """Returns the picture as a file."""
        height = self.height + 14
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img"'
        head += f' width="{WIDTH}" height="{height:g}">'
        page = f'<rect width="{WIDTH}" height="{height:g}" rx="8" class="page"/>'
        title = f"<title>{html.escape(self.title)}</title>\n<desc>{html.escape(self.about)}</desc>"
        return "\n".join([head, title, f"<style>{STYLE}</style>", page, *self.parts, "</svg>\n"])


class Box(NamedTuple):
    """A box with a name, a sentence, and something quiet below.

    Attributes:
        kind: its class in the style.
    """

    name: str
    sentence: str = ""
    below: str = ""
    kind: str = "box"

    def lines(self, width: float) -> Iterator[tuple[str, str, float]]:
        """Yields each line, its class and its base line."""
        base = 4.0
        for words, kind, step, size in ((self.name, "name", 16, 7.8), (self.sentence, "", 15, 6.4)):
            for line in wrap(words, width - 20, size):
                base += step
                yield line, kind, base
        for line in wrap(self.below, width - 20, 5.9):
            base += 14
            yield line, "quiet", base + 1

    def height(self, width: float) -> float:
        """Returns how high it is."""
        return max(base for _, _, base in self.lines(width)) + 9


def wrap(words: str, width: float, size: float = 5.9) -> list[str]:
    """Returns a text in lines of at most `width` pixels, if a letter takes `size`."""
    return textwrap.wrap(words, int(width / size), break_long_words=False, break_on_hyphens=False)


# ---- the parts and what each may import

WORDS = {
    "title": "The parts of stabletrain, and what each may import",
    "about": "On the left, each part may import only parts that stand lower, and an arrow leads to one of them. "
    "tests/laws/test_imports.py holds the whole table. Drawn from it and from the docstrings by docs/pictures.py.",
    "beside": "No part on the left may import one of these. They may import those.",
    "small": "Small modules, which the parts above share",
}


@cache
def sentence(room: str) -> str:
    """Returns the first sentence of a room's docstring."""
    place = PACKAGE / room
    file = ROOT / "train.py" if room == "train" else place / "__init__.py" if place.is_dir() else PACKAGE / f"{room}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = re.split(r"(?<=[\w)`])\. ", text.partition("\n\n")[0].replace("\n", " "))[0]
    assert first, f"{file} has no docstring"
    return first.rstrip(".:").replace("`", "")


def below(room: str) -> set[str]:
    """Returns the larger rooms that a room may import."""
    return {seen for seen in MAY_SEE[room] if seen in MAY_SEE and seen not in NOUNS}


@cache
def reach(room: str) -> frozenset[str]:
    """Returns the rooms that a room may import, and those that these may import, and so on."""
    return frozenset(below(room)).union(*(reach(seen) for seen in below(room)))


@cache
def nearest(room: str) -> list[str]:
    """Returns the rooms that a room may import and that no other of them may import."""
    return sorted(seen for seen in below(room) if not any(seen in reach(other) for other in below(room) - {seen}))


@cache
def level(room: str) -> int:
    """Returns on which line from the bottom a room stands: above all that it may import."""
    return 1 + max((level(seen) for seen in below(room)), default=0)


def room_box(room: str, kind: str = "box") -> Box:
    """Returns the box of a room."""
    name = "train.py" if room == "train" else room
    name = f"{BESIDE}/*.py" if room == BESIDE else name
    near = nearest(room)
    more = len(below(room)) - len(near)
    lines = ", ".join(near) + (f", and {more} more below" if more else "")
    return Box(name, sentence(room), f"may import {lines}" if near else "", kind)


def is_beside(room: str) -> bool:
    """Whether a room is of the folder beside, or holds its public names."""
    return room.split("/")[0] in (BESIDE, "adapters")


def architecture() -> str:
    """Returns the picture of the parts."""
    picture = Picture(WORDS["title"], WORDS["about"])
    left, gap, tower, wing = 16.0, 20.0, 548.0, 260.0
    rooms = [room for room in MAY_SEE if room not in NOUNS and not is_beside(room)]
    assert not any(is_beside(seen) for room in rooms for seen in below(room))
    top = picture.height + 6
    places: dict[str, tuple[float, float, float, float]] = {}
    y = top
    for line in lines_of(rooms):
        width = (tower - 10 * (len(line) - 1)) / len(line)
        boxes = [room_box(room, "key" if room == "step" else "box") for room in line]
        height = max(box.height(width) for box in boxes)
        for number, (room, box) in enumerate(zip(line, boxes, strict=True)):
            x = left + number * (width + 10)
            picture.box(box, x, y, width, height)
            places[room] = x, y, width, height
        y += height + 20
    connect(picture, places)
    bottom = y - 20
    # the wing
    x, y = left + tower + gap, top
    for line in wrap(WORDS["beside"], wing, 6.4):
        picture.text(x, y + 10, line)
        y += 17
    others = sorted((room for room in MAY_SEE if is_beside(room)), key=lambda room: (-level(room), room))
    for room in others:
        box = room_box(room, "other")
        picture.box(box, x, y, wing, box.height(wing))
        y += box.height(wing) + 8
    picture.height = max(bottom, y - 8) + 16
    small = Box(WORDS["small"], ", ".join(sorted(NOUNS)))
    picture.box(small, left, picture.height, WIDTH - 2 * left, small.height(WIDTH - 2 * left))
    picture.height += small.height(WIDTH - 2 * left)
    return picture.svg()


def lines_of(rooms: Sequence[str]) -> Iterator[list[str]]:
    """Yields the rooms of each line, the highest first, at most three in a line; each below what may import it."""
    at: dict[str, float] = {}
    for number in sorted({level(room) for room in rooms}, reverse=True):
        line = [room for room in rooms if level(room) == number]
        above = {room: [at[other] for other in at if room in nearest(other)] for room in line}
        line.sort(key=lambda room: (sum(above[room]) / len(above[room]) if above[room] else 0.5, room))
        for place, room in enumerate(line):
            at[room] = (place + 0.5) / len(line)
        for start in range(0, len(line), 3):
            yield line[start : start + 3]


def connect(picture: Picture, places: Mapping[str, tuple[float, float, float, float]]) -> None:
    """Draws an arrow from each room to those on the next line that it may import."""
    tops = sorted({y for _, y, _, _ in places.values()})
    for room, (x, y, width, height) in places.items():
        for seen in sorted(below(room) & places.keys()):
            other_x, other_y, other_width, _ = places[seen]
            if tops.index(other_y) == tops.index(y) + 1:
                low, high = max(x, other_x), min(x + width, other_x + other_width)
                if low < high:
                    middle = (low + high) / 2
                    picture.arrow((middle, y + height), (middle, other_y - 1))


# ---- a step over time

OUTCOMES = {
    "applied": "The optimizer's step runs. Its update is checked too, and undone if it is not finite.",
    "held": "Weights, moments and step counters keep their bits; the buffers are restored.",
}
"""What the gate decides on the device."""

VERDICTS = {
    "apply": "the update stays",
    "skip": "the step was held; the next batch follows",
    "keep": "the step again, without the samples at fault",
    "restore": "the step again, from an intact state: the machine was at fault",
    "rollback": "back to a healthy state, past the data since",
    "halt": "the run ends, and says why",
}
"""What follows from a verdict, by the value of `Verdict`."""


def function(file: str, name: str) -> ast.FunctionDef:
    """Returns a function of a file of the package."""
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


@cache
def comments(file: str, name: str) -> list[tuple[int, str]]:
    """Returns the comments of a function that have lines of their own: the last line of each, and its text."""
    node, text = function(file, name), (PACKAGE / file).read_text(encoding="utf-8")
    found: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        alone = token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
        if alone and node.lineno < line <= (node.end_lineno or 0):
            words = token.string.lstrip("# ")
            if found and found[-1][0] == line - 1:
                found[-1] = (line, f"{found[-1][1]} {words}")
            else:
                found.append((line, words))
    return found


SHORT = 70
"""A first sentence with fewer letters is followed by the second."""


def first_sentences(file: str, name: str) -> list[str]:
    """Returns the beginning of each of these comments: a sentence, or two."""
    found = []
    for _, text in comments(file, name):
        first, *others = re.split(r"(?<=[\w)])\. ", text.replace("`", "").rstrip("."))
        found.append(". ".join([first, *others[:1]]) if len(first) < SHORT else first)
    return found


def stages() -> list[tuple[str, list[str]]]:
    """Returns the stages of `compute` and `commit`; those of a micro-batch stand where `compute` runs it."""
    node = function("step.py", "compute")
    loop = next(each.lineno for each in ast.walk(node) if isinstance(each, ast.For))
    before = sum(line < loop for line, _ in comments("step.py", "compute"))
    computing = first_sentences("step.py", "compute")
    batch = [
        f"Each micro-batch: {words[0].lower()}{words[1:]}" for words in first_sentences("step.py", "forward_backward")
    ]
    return [
        ("compute: forward and backward", [*computing[:before], *batch, *computing[before:]]),
        ("commit: judge, clip, apply or hold", first_sentences("step.py", "commit")),
    ]


def order() -> list[str]:
    """Returns what the loop calls in an iteration, in its order."""
    node = function("trainer/loop.py", "training_loop")
    names = {"compute", "judge_step", "commit"}
    calls: dict[str, int] = {}
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            name = getattr(each.func, "attr", None) or getattr(each.func, "id", "")
            if name in names:
                calls[name] = min(calls.get(name, each.lineno), each.lineno)
    return sorted(calls, key=calls.__getitem__)


def closes_for() -> str:
    """Returns what closes the gate, as `commit` says it."""
    text = " ".join(words for _, words in comments("step.py", "commit"))
    found = re.search(r"It (closes for [^.]*)\.", text)
    assert found, "step.py no longer says what closes the gate"
    return found[1]


def step() -> str:
    """Returns the picture of a step over time."""
    assert order() == ["compute", "judge_step", "commit"], "the loop's order has changed: draw the lanes anew"
    assert {*VERDICTS} == {verdict.value for verdict in Verdict}
    about = (
        "The host launches step t + 1 before it reads the numbers of step t, so the device never waits for a verdict."
    )
    picture = Picture("A step over time: launched, applied or held, then read and judged", about)
    lanes(picture)
    fork(picture)
    lists(picture)
    return picture.svg()


def lanes(picture: Picture) -> None:
    """Draws what host and device do at the same time."""
    top, high, apart = picture.height + 8, 52.0, 46.0
    host, device = top, top + high + apart
    for y, name, what in ((host, "host", "Python"), (device, "device", "GPU")):
        picture.text(16, y + 24, name, "name")
        picture.text(16, y + 40, what, "quiet")
    blocks = [
        (host, 76, 236, Box("launch", "compute of step t + 1")),
        (host, 312, 470, Box("read step t", "and give its verdict", kind="key")),
        (host, 476, 626, Box("launch", "commit of step t + 1")),
        (host, 632, 728, Box("launch", "step t + 2")),
        (host, 734, 844, Box("read t + 1", "its verdict", kind="key")),
        (device, 76, 170, Box("commit t")),
        (device, 176, 530, Box("compute t + 1", "forward, backward, unscale, measure the norms")),
        (device, 536, 690, Box("commit t + 1", "gate, clip, update", kind="key")),
        (device, 696, 844, Box("compute t + 2")),
    ]
    for y, start, end, box in blocks:
        picture.box(box, start, y, end - start, high)
    middle = device - apart / 2
    picture.arrow((206, host + high), (206, device - 1))
    picture.arrow((586, host + high), (586, device - 1))
    picture.arrow((150, device), (150, middle), (391, middle), (391, host + high + 1))
    picture.text(220, middle - 6, "numbers of step t,", "quiet")
    picture.text(220, middle + 15, "copied without a wait", "quiet")
    picture.arrow((660, device), (660, middle), (789, middle), (789, host + high + 1))
    picture.height = device + high


def fork(picture: Picture) -> None:
    """Draws what the gate decides on the device, and what may follow from the verdict on the host."""
    start, top, width = picture.height, picture.height + 44, (WIDTH - 44) / 2
    applied = Box("gate open: applied", OUTCOMES["applied"], kind="good")
    held = Box("gate closed: held", OUTCOMES["held"], f"The gate {closes_for()}.", "bad")
    high = max(box.height(width) for box in (applied, held))
    middles = [16 + width / 2, 28 + width * 1.5]
    for box, middle in ((applied, middles[0]), (held, middles[1])):
        picture.box(box, middle - width / 2, top, width, high)
        picture.arrow((613, start), (613, start + 20), (middle, start + 20), (middle, top - 1))
    picture.text(middles[0] + 8, start + 38, "on the device: the host does not wait", "quiet")
    below = top + high + 24
    for middle in middles:
        picture.arrow((middle, top + high), (middle, below - 1))
    picture.rect(16, below, WIDTH - 32, 104, "key")
    picture.text(28, below + 22, "One step later the host reads the numbers. Its verdict is one of these:", "name")
    for number, verdict in enumerate(Verdict):
        x, y = 28 + number // 3 * 356, below + 46 + number % 3 * 20
        picture.text(x, y, verdict.value, "name")
        picture.text(x + 68, y, VERDICTS[verdict.value])
    picture.height = below + 104


def lists(picture: Picture) -> None:
    """Writes the stages, as the comments of `step.py` have them."""
    top, width = picture.height + 22, (WIDTH - 52) / 2
    ends = []
    for place, (name, texts) in enumerate(stages()):
        x, y = 16 + place * (width + 20), top + 12
        picture.text(x, y, f"{name}, in step.py", "name")
        for number, words in enumerate(texts, 1):
            for at, line in enumerate(wrap(words, width - 22, 6.4)):
                y += 16 if at else 20
                if not at:
                    picture.text(x + 14, y, f"{number}", "quiet", "end")
                picture.text(x + 22, y, line)
        ends.append(y)
    picture.height = max(ends) + 4


PICTURES = {"architecture.svg": architecture, "step.svg": step}
"""The function that draws each picture."""


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")
