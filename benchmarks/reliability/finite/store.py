"""Recordings on disk: one JSON object a line, while the campaign runs; compressed, to be committed.

Numbers keep five significant digits, the lengths of weights seven. The lines of a setting lie together: a faulty run
equals its clean partner until the fault, and LZMA stores that part once.
"""

import json
import lzma
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

COMMITTED = Path(__file__).parent / "recordings"
DIGITS = {"weights": 7}


def reduced(recording: dict[str, Any]) -> dict[str, Any]:
    """Returns the recording with rounded series; NaN and Inf become strings."""
    series = {
        name: [rounded(value, DIGITS.get(name, 5)) for value in values]
        for name, values in recording.get("series", {}).items()
    }
    val = [[tick, rounded(value, 6)] for tick, value in recording["val"]]
    return {**recording, "series": series, "val": val}


def rounded(value: float, digits: int) -> float | int | str:
    """Rounds to significant digits; whole numbers become integers, NaN and Inf strings."""
    if not math.isfinite(value):
        return str(float(value))
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the recordings of a folder, compressed or not; a half line at the end is left out."""
    for file in sorted(folder.glob("*.jsonl*")):
        opened = lzma.open(file, "rt") if file.suffix == ".xz" else file.open()
        with opened as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield restored(json.loads(line))


def restored(recording: dict[str, Any]) -> dict[str, Any]:
    """Returns the recording with floats in the place of "nan" and "inf"."""
    recording["series"] = {name: [float(v) for v in values] for name, values in recording["series"].items()}
    recording["val"] = [[tick, float(value)] for tick, value in recording["val"]]
    return recording


def append(folder: Path, recording: dict[str, Any]) -> None:
    """Appends one recording to the file of its part."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{recording['part']}_{recording['mode']}.jsonl"
    if file.exists() and not file.read_bytes()[-1:] == b"\n":  # a run was killed while it wrote
        file.write_bytes(file.read_bytes().rpartition(b"\n")[0] + b"\n")
    with file.open("a") as lines:
        lines.write(json.dumps(reduced(recording), separators=(",", ":")) + "\n")


def pack(found: Iterable[dict[str, Any]], folder: Path) -> list[Path]:
    """Writes recordings compressed, a file for each part, sorted so that similar ones are neighbours."""
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[dict[str, Any]]] = {}
    for recording in found:
        groups.setdefault(f"{recording['part']}_{recording['mode']}", []).append(reduced(recording))
    files = []
    for name, group in sorted(groups.items()):
        group.sort(key=lambda one: (one["model"], one["precision"], one["seed"], one["name"]))
        text = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in group)
        files.append(folder / f"{name}.jsonl.xz")
        files[-1].write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    return files
