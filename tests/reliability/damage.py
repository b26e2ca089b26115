"""Damages one file of a folder: bytes, JSON and YAML values, tensors. Each damage is drawn from a `random.Random`."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

DEPTH = 100_000
"""Nesting that no parser follows."""

RAW = "@raw@"
"""Stands for text that is not the JSON of any value, until the file is written."""

RAWS = {
    "deep list": "[" * DEPTH + "]" * DEPTH,
    "deep object": '{"a":' * DEPTH + "0" + "}" * DEPTH,
    "nested": "[" * 800 + "]" * 800,
    "huge integer": "1" + "0" * 5000,
    "large integer": "1" + "0" * 400,
    "NaN": "NaN",
    "infinity": "1e999",
    "surrogate": '"\\ud800"',
}
"""Text for a value, by name."""

VALUES = [None, True, False, "", "x", "NaN", "../../../etc/passwd", "\x1b[31m\n", "a" * 5000, -5, 0, 65.5, 1e308, 2**63]
VALUES += [[], {}, [None], [[]], {"": None}, {"step": "x"}]
"""Values of other types, and absurd ones of the same."""


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value in a tree of dicts and lists, the tree's own first."""
    yield path
    if isinstance(tree, dict | list):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from places(child, (*path, key))


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Returns the tree with another value at a path; changes the tree."""
    if not path:
        return value
    above = tree
    for key in path[:-1]:
        above = above[key]
    above[path[-1]] = value
    return tree


def damaged_tree(tree: Any, draw: random.Random, raws: bool) -> tuple[Any, str, str]:
    """Returns a tree with one thing wrong, the raw text for `RAW` in it, and what was done."""
    paths = [*places(tree)]
    path = draw.choice(paths if draw.random() < 0.1 else paths[1:] or paths)
    name = "/".join(map(str, path)) or "the whole"
    kind = draw.random()
    if kind < 0.15 and path and isinstance(path[-1], str):
        above = tree
        for key in path[:-1]:
            above = above[key]
        del above[path[-1]]
        return tree, "", f"{name} removed"
    if kind < 0.35 and raws:
        what = draw.choice([*RAWS])
        return put(tree, path, RAW), RAWS[what], f"{name} = {what}"
    value = draw.choice(VALUES)
    return put(tree, path, value), "", f"{name} = {str(value)[:20]!r}"


def written(tree: Any, raw: str, draw: random.Random) -> str:
    """Returns the JSON of a damaged tree, sometimes with a key that occurs twice."""
    text = json.dumps(tree).replace(f'"{RAW}"', raw)
    if isinstance(tree, dict) and tree and draw.random() < 0.1:
        key = draw.choice([*tree])
        text = f"{text[:-1]}, {json.dumps(key)}: {json.dumps(draw.choice(VALUES))}}}"
    return text


def in_json(file: Path, draw: random.Random) -> str:
    """Damages a JSON file."""
    tree, raw, what = damaged_tree(json.loads(file.read_text()), draw, raws=file.name != "manifest.json")
    file.write_text(written(tree, raw, draw))
    return what


def in_lines(file: Path, draw: random.Random) -> str:
    """Damages one line of a file of JSON lines."""
    lines = file.read_text().splitlines()
    number = draw.randrange(len(lines))
    tree, raw, what = damaged_tree(json.loads(lines[number]), draw, raws=True)
    lines[number] = written(tree, raw, draw)
    file.write_text("\n".join(lines) + "\n")
    return f"line {number + 1}: {what}"


def in_yaml(file: Path, draw: random.Random) -> str:
    """Damages a value of a YAML file."""
    tree, raw, what = damaged_tree(yaml.safe_load(file.read_text()), draw, raws=True)
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    file.write_text(text.replace(RAW, raw) if "huge" not in what else text.replace(RAW, raw[:400]))
    return what


def in_tensors(file: Path, draw: random.Random) -> str:
    """Gives one tensor another dtype or shape, or leaves it out."""
    tensors = load_file(file)
    if not tensors:
        return truncated(file, draw)
    name = draw.choice(sorted(tensors))
    kind = draw.choice(["int64", "int8", "bool", "float64", "shape", "removed", "scalar"])
    if kind == "removed":
        del tensors[name]
    elif kind == "shape":
        tensors[name] = torch.zeros(*tensors[name].shape, 2)
    elif kind == "scalar":
        tensors[name] = torch.zeros(())
    else:
        tensors[name] = tensors[name].to(getattr(torch, kind))
    save_file(tensors, file)
    return f"{name}: {kind}"


def truncated(file: Path, draw: random.Random) -> str:
    """Cuts a file off."""
    content = file.read_bytes()
    cut = draw.randrange(max(len(content), 1))
    file.write_bytes(content[:cut])
    return f"cut to {cut} bytes"


def flipped(file: Path, draw: random.Random) -> str:
    """Flips one to eight bits."""
    content = bytearray(file.read_bytes())
    for _ in range(draw.randint(1, 8)):
        if content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return "bits flipped"


def zeroed(file: Path, draw: random.Random) -> str:
    """Replaces a stretch by zeros, as a crash of the machine leaves them."""
    content = bytearray(file.read_bytes())
    start = draw.randrange(max(len(content), 1))
    content[start:] = bytes(len(content) - start)
    file.write_bytes(content)
    return f"zeros from byte {start}"


def foreign(file: Path, draw: random.Random) -> str:
    """Replaces the content by something else: nothing, random bytes, bytes that are not UTF-8, other JSON."""
    contents: dict[str, bytes] = {
        "empty": b"",
        "random bytes": draw.randbytes(2000),
        "not UTF-8": b'{"step": "\xff\xfe"}\n',
        "number": b"5",
        "null": b"null",
        "list": b"[]",
        "object": b"{}",
        "text": b'"x"',
        "deep": RAWS["deep list"].encode(),
        "half of a line": b'{"step": 3, "tr',
    }
    what = draw.choice([*contents])
    file.write_bytes(contents[what])
    return what


def replaced(file: Path, draw: random.Random) -> str:
    """Puts something else in the file's place: a folder, a link to itself, nothing."""
    file.unlink()
    what = draw.choice(["folder", "loop", "missing", "link to nothing"])
    if what == "folder":
        file.mkdir()
    elif what == "loop":
        file.symlink_to(file.name)
    elif what == "link to nothing":
        file.symlink_to("gone")
    return what


ANY: list[Callable[[Path, random.Random], str]] = [truncated, flipped, zeroed, foreign, replaced]
"""Damages of any file."""

INSIDE = {".json": in_json, ".jsonl": in_lines, ".yaml": in_yaml, ".safetensors": in_tensors}
"""Damages of a file's values, by its ending."""


def damage(folder: Path, draw: random.Random) -> str:
    """Damages one file below a folder, values twice as often as bytes; returns what was done."""
    part = folder / draw.choices(["outputs", "multirun", "shards"], [8, 1, 1])[0]
    files = [file for file in sorted(part.rglob("*")) if file.is_file() and file.name != ".lock"]
    name = draw.choice(sorted({file.name for file in files}))
    alike = [file for file in files if file.name == name]
    file = alike[-1] if draw.random() < 0.5 else draw.choice(alike)  # often that of the newest checkpoint
    shown = str(file.relative_to(folder))
    inside = INSIDE.get(file.suffix)
    if inside is None or draw.random() < 1 / 3:
        return f"{shown}: {draw.choice(ANY)(file, draw)}"
    return f"{shown}: {inside(file, draw)}"


def copied(base: Path, place: Path) -> Path:
    """Copies a folder of runs."""
    shutil.copytree(base, place, symlinks=True)
    return place
