"""Recordings on disk: one `.npz` a run while the campaign runs; one compressed file a family, to be committed.

Numbers are fp32 rounded to eleven bits of mantissa, a relative error of at most 1/4096, so that they compress.
"""

import io
import json
import lzma
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from tests.reliability.foresight.record import Recording

COMMITTED = Path(__file__).parent / "recordings"
ARRAYS = ("steps", "looks", "stepwise", "signals")


def shortened(values: np.ndarray) -> np.ndarray:
    """Rounds fp32 numbers to 11 bits of mantissa; NaN and infinity stay."""
    if values.dtype != np.float32:
        return values
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(1 << 11)) & np.uint32(0xFFFFF000)).view(np.float32)
    return np.where(np.isfinite(values) & np.isfinite(rounded), rounded, values)


def file_of(folder: Path, name: str) -> Path:
    """Returns the file of a run that has not been packed."""
    return folder / f"{name.replace('/', '_')}.npz"


def write(folder: Path, recording: Recording) -> None:
    """Writes one recording; complete or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    target = file_of(folder, recording["case"])
    partial = target.with_suffix(f".{os.getpid()}")
    with partial.open("wb") as file:
        save(file, recording)
    partial.replace(target)


def save(file: io.BufferedIOBase | io.BytesIO, recording: Recording) -> None:
    """Writes arrays, and all else as JSON."""
    text = json.dumps({name: value for name, value in recording.items() if name not in ARRAYS})
    np.savez(file, text=np.array(text), **{name: shortened(recording[name]) for name in ARRAYS})


def load(file: Path | io.BytesIO) -> Recording:
    """Returns the recording of a file."""
    with np.load(file) as found:
        return json.loads(str(found["text"])) | {name: found[name] for name in ARRAYS}


def read(folder: Path) -> Iterator[Recording]:
    """Yields the recordings of a folder, packed or not."""
    for file in sorted(folder.glob("*.npz")):
        yield load(file)
    for file in sorted(folder.glob("*.xz")):
        content = lzma.decompress(file.read_bytes())
        position = 0
        while position < len(content):
            size = int.from_bytes(content[position : position + 8], "little")
            yield load(io.BytesIO(content[position + 8 : position + 8 + size]))
            position += 8 + size


def pack(found: Iterable[Recording], folder: Path) -> list[Path]:
    """Writes one compressed file for each family; of two recordings of a case, the later one in `found`."""
    folder.mkdir(parents=True, exist_ok=True)
    families: dict[str, list[bytes]] = {}
    for recording in sorted({one["case"]: one for one in found}.values(), key=lambda one: one["case"]):
        content = io.BytesIO()
        save(content, recording)
        whole = content.getvalue()
        families.setdefault(recording["case"].partition("/")[0], []).append(len(whole).to_bytes(8, "little") + whole)
    files = []
    for family, parts in families.items():
        files.append(folder / f"{family}.xz")
        files[-1].write_bytes(lzma.compress(b"".join(parts), preset=9 | lzma.PRESET_EXTREME))
    return files
