"""Recordings on disk: one JSON object a line, while the campaign runs; compressed, to be committed.

Numbers keep five significant digits, the lengths of weights seven. What is committed is what the tables are computed
from: events, final loss and digest of each run. The series of each step are kept only of the runs that `keeps_series`
names; the others' are made again by `record`.
"""

import json
import lzma
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

COMMITTED = Path(__file__).parent / "recordings"
DIGITS = {"weights": 7}
JUDGED = ("loss", "grad_norm", "lr", "update", "weights")
"""The series that slow spikes are searched in."""


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
    """Yields the recordings of a folder, compressed or not; a half line, from a kill, is left out."""
    for file in sorted(folder.glob("*.jsonl*")):
        content = file.read_bytes()
        for line in (lzma.decompress(content) if file.suffix == ".xz" else content).split(b"\n"):
            if line.endswith(b"}"):
                yield restored(json.loads(line))


def restored(recording: dict[str, Any]) -> dict[str, Any]:
    """Returns the recording with floats in the place of "nan" and "inf"."""
    recording["series"] = {name: [float(v) for v in values] for name, values in recording["series"].items()}
    recording["val"] = [[tick, float(value)] for tick, value in recording["val"]]
    return recording


def append(folder: Path, recording: dict[str, Any]) -> None:
    """Appends one recording to the file of its part."""
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps(reduced(recording), separators=(",", ":"))
    with (folder / f"{recording['part']}_{recording['mode']}.jsonl").open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a run was killed while it wrote this line
                line = "\n" + line
        file.write(line.encode() + b"\n")


def keeps_series(one: dict[str, Any]) -> bool:
    """Whether a run is committed with its series: faults of training in fp32 with one seed, and their partners.

    A test judges these again, and fails if the search for slow spikes has changed.
    """
    of_training = one["part"] == "partner" or one.get("group") == "training"
    return one["mode"] == "alarm" and of_training and (one["precision"], one["seed"]) == ("fp32", 3)


def committed(one: dict[str, Any]) -> dict[str, Any]:
    """Returns a recording as it is committed."""
    if keeps_series(one):
        return {**one, "series": {name: values for name, values in one["series"].items() if name in JUDGED}}
    return {**one, "series": {}, "val": []}


def pack(found: Iterable[dict[str, Any]], folder: Path) -> list[Path]:
    """Writes recordings compressed, a file for each part, sorted so that similar ones are neighbours."""
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[dict[str, Any]]] = {}
    for recording in {one["name"]: one for one in found}.values():  # a crashed run may have been made again
        groups.setdefault(f"{recording['part']}_{recording['mode']}", []).append(reduced(committed(recording)))
    files = []
    for name, group in sorted(groups.items()):
        group.sort(key=lambda one: (one["model"], one["precision"], one["seed"], one["name"]))
        text = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in group)
        files.append(folder / f"{name}.jsonl.xz")
        files[-1].write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    return files
