"""Reads the incidents of a run back from its folder, without torch, and formats each for the terminal."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from stabletrain.errors import ConfigError
from stabletrain.printable import one_line
from stabletrain.stored.json_files import DamagedFile
from stabletrain.stored.run_files import read_diagnosis

KEY_TYPES = {"step": int, "rank": int | None, "cause": str, "confidence": float | int, "verdict": str, "fix": list}
"""Keys of a `diagnosis.json` and their types."""

ORIGIN_KEYS = ("module", "op", "direction", "source")
"""Keys of an incident's origin that name the operation."""

WIDTH = 11
"""Width of the name column of a block."""


def incidents(run: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Returns the incidents of a run with the content of their `diagnosis.json`, newest last.

    `run` is a run folder, a folder of incidents, or the folder of one incident.

    Raises:
        ConfigError: `run` is none of these, or a diagnosis cannot be read.
    """
    if (run / "diagnosis.json").exists():
        return [(run, read(run))]
    holds = run.name == "incidents" or any(run.glob("step-*/diagnosis.json"))
    within = run if holds else run / "incidents"
    if not within.is_dir() and not (run / "run.json").exists():
        what = "is not a run folder" if run.is_dir() else "is not a folder"
        raise ConfigError(f"{run} {what}: use a run folder that train.py made, such as outputs/<date>/<time>")
    found = [(path, read(path)) for path in within.glob("step-*") if (path / "diagnosis.json").exists()]
    return sorted(found, key=lambda one: (one[1].get("time", ""), one[1].get("step", 0), one[0].name))


def read(path: Path) -> dict[str, Any]:
    """Reads an incident's `diagnosis.json`; non-finite numbers stay strings.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return read_diagnosis(path)
    except DamagedFile as error:
        raise DamagedFile(f"{error}; move {path.name} away to see the others") from error


def filed_incidents(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Returns the incidents in a folder of incidents with their content, except damaged ones."""
    found = []
    for path in sorted(folder.glob("step-*")):
        with suppress(ConfigError):
            record = read(path)
            if is_complete(record):
                found.append((path, record))
    return found


def is_complete(record: dict[str, Any]) -> bool:
    """Whether a `diagnosis.json` holds everything by which a resumed run recognizes an incident."""
    known = all(isinstance(record.get(key), kind) for key, kind in KEY_TYPES.items())
    origin = record.get("origin")
    return known and (origin is None or (isinstance(origin, dict) and origin.keys() >= {*ORIGIN_KEYS}))


def block(path: Path, record: dict[str, Any]) -> str:
    """Formats one incident as several lines."""
    fixes = record.get("fix") or ["none known"]
    sure = record.get("confidence") or 0
    lines = [
        one_line(f"step {record.get('step')}: {record.get('cause')} ({sure:.0%} sure), {record.get('kind')}"),
        block_line("what", record.get("verdict")),
        block_line("fix", fixes[0]),
        *(block_line("or", fix) for fix in fixes[1:3]),
    ]
    for one in record.get("also") or []:
        lines.append(block_line("also", f"{one['cause']} ({one['confidence']:.0%} sure): {one['verdict']}"))
        lines += [block_line("its fix", fix) for fix in one["fix"][:1]]
    if samples := record.get("samples"):
        more = f" and {len(samples) - 3} more" if len(samples) > 3 else ""
        lines.append(block_line("samples", ", ".join(map(sample_name, samples[:3])) + more))
    if record.get("rank") is not None:
        lines.append(block_line("rank", record["rank"]))
    return "\n".join([*lines, block_line("folder", path)])


def block_line(name: str, value: object) -> str:
    """One line of a block."""
    return f"  {name:<{WIDTH}}{one_line(str(value))}"


def sample_name(one: dict[str, Any]) -> str:
    """Names a sample by its id and source."""
    whole = one.get("index") is None
    name = f"id {one['id']}" if "id" in one else "the batch" if whole else f"sample {one['index']} of the batch"
    return f"{name} ({one['source']})" if one.get("source") else name
