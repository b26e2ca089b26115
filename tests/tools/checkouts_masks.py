"""Compares two folders of a case, and reports the first difference.

All files are compared: tensors bit by bit, everything else as text. Only this is masked: times, speeds and peak memory;
randomly drawn names; import paths and line numbers of the package, which may move; words that were renamed.
"""

import csv
import importlib.util
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

MASK = "*"

RENAMED = [(r"(?<![A-Za-z])heat(?=s?(?![A-Za-z]))", "round"), (r"(?<=/)scene\.json\b", "step.json")]
"""Patterns of words that were renamed on purpose, in file names and in text, and the new words."""

CLOCK = {
    *("time", "started", "ended", "resumed", "began"),
    *("hours", "seconds", "lost_seconds", "guard/lost_seconds", "compile_seconds"),
    *("tokens_per_s", "images_per_s", "samples_per_s", "units_per_s", "memory/peak_gb", "peak_memory_gb", "pid"),
    *("_runtime", "_timestamp", "_wandb", "_wandb.runtime"),
    "rolled_back_for",  # a checksum of the mistake, with the line of the package where it was found
    "settings",  # of an incident: a hash of the configuration, with import paths
}
"""JSON keys and CSV columns that hold times, speeds, memory, process ids, or hashes that depend on import paths."""

HEADS = {"tokens/s", "images/s", "samples/s", "units/s", "peak GB", "memory, GB", "time", "seconds"}
"""The same for columns of printed tables and of pages."""

FACTS = "(?:tokens|images|samples) (?:per|a) second|GB of (?:peak memory|memory at the peak)|seconds of training"
"""The same for figures of a page."""

TEXT = [
    (r"""(_target_["']?: ?["']?)stabletrain\.[\w.]+""", rf"\1{MASK}"),
    (r'(?m)^( *)File "[^"]*\bstabletrain/[^"]*", line .*\n(?:\1  .*\n)*', ""),  # the package's frames of a traceback
    (r"[^\s\"'(]*\bstabletrain/[\w/]+\.py:\d+", f"stabletrain/{MASK}"),
    (r"\d{4}-\d\d-\d\d[T /_]\d\d[:-]\d\d[:-]\d\d(\.\d+)?(\+00:00)?", MASK),
    (r"[\d.,]+[kM]? (tok|img|sample)s?/s", rf"{MASK} \1/s"),
    (r"(?<![\w:.])\d+:\d\d(:\d\d)? left", f"{MASK} left"),
    (r"\b[\d.,]+ (s|seconds)\b", rf"{MASK} \1"),
    (r"\b(process|pid:?|PID) \d+", rf"\1 {MASK}"),
    (r"(wandb-client-artifact://)\w+", rf"\1{MASK}"),
    (r"(\.tmp-)\d+", rf"\1{MASK}"),  # the id of the writing process
    (r"\bscene\.json\b", "step.json"),
    (r"\b([IWE])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ ", rf"\1{MASK} "),  # PyTorch's log
]
"""Patterns in text, and their replacements."""

PICTURES = [(r'(#|id=")[mp][0-9a-f]{10}', rf"\1{MASK}")]
"""The same for SVG: matplotlib draws random names."""

PAGES = [
    (r'(<td class="number">)[\d.,]+( (?:tokens|images|samples)</td><td class="number">)[^<]*', rf"\1{MASK}\2{MASK}"),
    (rf"(<dt>)({FACTS}|id|started|ended|resumed|pid)(</dt><dd>)[^<]*", rf"\1\2\3{MASK}"),
]
"""The same for HTML."""


def difference(old: Path, new: Path) -> str:
    """Returns the first difference between two folders of a case, and the number of differing files; empty if there is
    none.
    """
    files = [files_of(folder) for folder in (old, new)]
    ids = [random_names(folder) for folder in (old, new)]
    found = []
    for name in sorted({*files[0], *files[1]}, key=importance):
        if name not in files[0] or name not in files[1]:
            found.append(f"{name} is only in the {'new' if name in files[1] else 'old'} checkout's folder")
        elif name.endswith(".safetensors"):
            found.append(in_tensors(name, files[0][name], files[1][name]))
        else:
            texts = [masked(each[name], drawn) for each, drawn in zip(files, ids, strict=True)]
            found.append(in_text(name, *texts))
    found = [each for each in found if each]
    more = f" (and {len(found) - 1} more files)" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else ""


def files_of(folder: Path) -> dict[str, Path]:
    """Returns the files of a case by name; of W&B's folders, which are named by time, only the recorded runs."""
    found = {}
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        if not file.is_file() or "__pycache__" in parts:
            continue
        if "wandb" not in parts:
            found[renamed("/".join(parts))] = file
        elif file.suffix == ".wandb" and not file.is_symlink():
            start = "/".join(parts[: parts.index("wandb") + 1])
            found[f"{start}/{sum(name.startswith(start) for name in found)}.wandb"] = file
    return found


def renamed(text: str) -> str:
    """Returns a text with the new words in place of the old ones."""
    for pattern, word in RENAMED:
        text = re.sub(pattern, word, text)
    return text


def importance(name: str) -> tuple[int, str]:
    """Returns a sort key that puts the most telling files first: exit codes, messages, events, numbers."""
    ends = (".code", ".err", "events.jsonl", "metrics.jsonl", "state.json", ".safetensors", ".out", "run.json", ".json")
    return next((place for place, end in enumerate(ends) if name.endswith(end)), len(ends)), name


def random_names(folder: Path) -> list[str]:
    """Returns the ids of the runs in a folder."""
    records = [json.loads(file.read_text()) for file in folder.rglob("run.json")]
    return [record["id"] for record in records if record.get("id")]


def masked(file: Path, drawn: list[str]) -> str:
    """Returns a file's text with its masks applied."""
    content = in_wandb(file).encode() if file.suffix == ".wandb" else file.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return repr(content)
    kind = KINDS.get(file.suffix) or (in_json if text.startswith(("[", "{")) else in_table)
    text = renamed(kind(text))
    if file.name == "manifest.json" and file.parent.name.startswith("step-"):
        text = re.sub(r'("(bytes|sha256)": )[^,\n]+', rf"\1{MASK}", text)  # of state.json, which holds times
    patterns = {".svg": PICTURES, ".html": PAGES}.get(file.suffix, [])
    for pattern, mask in [*patterns, *TEXT]:
        text = re.sub(pattern, mask, text)
    for name in drawn:
        text = re.sub(rf"\b{name}\b", MASK, text)
    if file.name.endswith(".torchrun.err"):  # lines of several processes in any order, then torchrun's report
        said = text.partition("Traceback (most recent call last):\n")[0].splitlines()
        text = "\n".join(sorted(line for line in said if not re.match(rf"[IWE]{re.escape(MASK)} ", line)))
    elif file.suffix == ".err":  # the prefetching thread reports faults in data at no fixed time
        lines = text.splitlines()
        injected = [line for line in lines if "fault injected" in line]
        text = "\n".join([*(line for line in lines if line not in injected), *sorted(injected)])
    return text


def in_json(text: str) -> str:
    """Formats JSON with one line per value, and masks it."""
    try:
        return json.dumps(without_clock(json.loads(text)), indent=1)
    except ValueError:
        return text


def in_jsonl(text: str) -> str:
    """Masks lines of JSON."""
    return "\n".join(
        json.dumps(without_clock(json.loads(line))) if line.strip() else line for line in text.splitlines()
    )


def in_csv(text: str) -> str:
    """Masks rows of CSV."""
    rows = list(csv.reader(io.StringIO(text)))
    head = rows[0] if rows else []
    return "\n".join(
        ",".join(MASK if name in CLOCK and row is not head else cell for name, cell in zip(head, row, strict=False))
        for row in rows
    )


def in_page(text: str) -> str:
    """Masks a page, whose numbers are JSON."""
    pattern = r'(<script type="application/json" id="data">)(.*?)(</script>)'
    return re.sub(pattern, lambda found: f"{found[1]}{in_json(found[2])}{found[3]}", text, flags=re.DOTALL)


def in_wandb(file: Path) -> str:
    """Returns as JSON what an offline W&B run recorded."""
    reader = REPOSITORY / "tests" / "tracking" / "wandb_file.py"
    spec = importlib.util.spec_from_file_location("wandb_file", reader)
    assert spec is not None, reader
    assert spec.loader is not None, reader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return json.dumps(without_clock(module.read_file(file)), indent=1, default=sorted, sort_keys=True)


KINDS: dict[str, Callable[[str], str]] = {
    ".json": in_json,
    ".jsonl": in_jsonl,
    ".csv": in_csv,
    ".html": in_page,
}


def without_clock(tree: Any) -> Any:
    """Masks the values of `CLOCK`'s keys. Empty values stay, because they mean that there is none."""
    if isinstance(tree, list):
        return [without_clock(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    found = {}
    for key, value in tree.items():
        found[key] = MASK if key in CLOCK and value not in (None, [], "") else without_clock(value)
    if {"columns", "rows"} <= found.keys():  # the table of a page
        titles = [column.get("title") for column in found["columns"]]
        found["rows"] = [
            [MASK if title in HEADS else cell for title, cell in zip(titles, row, strict=True)] for row in found["rows"]
        ]
    return found


def in_table(text: str) -> str:
    """Separates the cells of printed tables by ` | `, because masked cells would change the widths of columns."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not re.fullmatch(r"─+", line) or not number:
            continue
        last = next(
            (n for n in range(number + 1, len(lines)) if not lines[n].startswith(" ") and "   " not in lines[n]),
            len(lines),
        )
        rows = [number - 1, *range(number + 1, last)]
        width = max(len(lines[row]) for row in rows)
        grid = [lines[row].ljust(width) for row in rows]
        blank = "".join(" " if all(row[place] == " " for row in grid) else "x" for place in range(width))
        spans = [match.span() for match in re.finditer(r"x+(?: {1,2}x+)*", blank)]
        heads = [grid[0][start:stop].strip() for start, stop in spans]
        for row, cells in zip(rows, grid, strict=True):
            words = [cells[start:stop].strip() for start, stop in spans]
            masked = [
                MASK if head in HEADS and row >= number else word for head, word in zip(heads, words, strict=True)
            ]
            lines[row] = " | ".join(masked)
        lines[number] = "-"
    return "\n".join(lines)


def in_text(name: str, old: str, new: str) -> str:
    """Returns the first line in which two texts differ, around the first differing character."""
    if old == new:
        return ""
    lines = [text.splitlines() for text in (old, new)]
    for number in range(max(map(len, lines))):
        one, other = (text[number] if number < len(text) else "(no line)" for text in lines)
        if one != other:
            at = next(
                (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
            )
            start = max(0, at - 40)
            return f"{name}, line {number + 1}: {one[start : at + 60]!r} became {other[start : at + 60]!r}"
    return f"{name}: line ends differ"


def in_tensors(name: str, old: Path, new: Path) -> str:
    """Returns the first tensor that differs by name, dtype, shape or any bit."""
    import torch  # already imported, with its threads limited
    from safetensors.torch import load_file

    one, other = load_file(old), load_file(new)
    for key in sorted({*one, *other}):
        if key not in one or key not in other:
            return f"{name}: {key} is only in the {'old' if key in one else 'new'} checkout's file"
        a, b = one[key], other[key]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{name}: {key} is {a.dtype} {[*a.shape]}, became {b.dtype} {[*b.shape]}"
        if not torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)):
            apart = (a.double() - b.double()).abs().max().item()
            return f"{name}: {key} differs, by {apart:.3g} at most"
    return ""
