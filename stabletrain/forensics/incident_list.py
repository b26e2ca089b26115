"""The incidents of a run, read back from its folder without torch, each as a block of lines."""

import json
from pathlib import Path
from typing import Any

from stabletrain.errors import ConfigError

WIDTH = 11
"""Columns of a block's names."""


def incidents(run: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The incidents of a run, the newest last, each with what its `diagnosis.json` says.

    Args:
        run: a run folder, its `incidents`, or one incident.

    Raises:
        ConfigError: it is none of these, or a diagnosis cannot be read.
    """
    if (run / "diagnosis.json").exists():
        return [(run, read(run))]
    within = run if run.name == "incidents" else run / "incidents"
    if not within.is_dir() and not (run / "run.json").exists():
        what = "holds no run" if run.is_dir() else "is no folder"
        raise ConfigError(f"{run} {what}: name a run folder that train.py made, such as outputs/<date>/<time>")
    found = [(path, read(path)) for path in within.glob("step-*") if (path / "diagnosis.json").exists()]
    return sorted(found, key=lambda one: (one[1].get("time", ""), one[1].get("step", 0), one[0].name))


def read(path: Path) -> dict[str, Any]:
    """What an incident's `diagnosis.json` says; numbers that are not finite stay words.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        found = json.loads((path / "diagnosis.json").read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
        reason = f"holds a {type(found).__name__}"
    except (OSError, ValueError) as error:
        reason = " ".join(f"cannot be read ({error})".split())
    raise ConfigError(f"{path / 'diagnosis.json'} {reason}: it is damaged; move {path.name} away to see the others")


def block(path: Path, record: dict[str, Any]) -> str:
    """One incident in some lines."""
    fixes = record.get("fix") or ["nothing is known to help"]
    sure = record.get("confidence") or 0
    lines = [
        f"step {record.get('step')}: {record.get('cause')} ({sure:.0%} sure), {record.get('kind')}",
        named("what", record.get("verdict")),
        named("do this", fixes[0]),
        *(named("or", fix) for fix in fixes[1:3]),
    ]
    if samples := record.get("samples"):
        more = f" and {len(samples) - 3} more" if len(samples) > 3 else ""
        lines.append(named("samples", ", ".join(map(sample, samples[:3])) + more))
    if record.get("rank") is not None:
        lines.append(named("rank", record["rank"]))
    return "\n".join([*lines, named("folder", path)])


def named(name: str, value: object) -> str:
    """One line of a block."""
    return f"  {name:<{WIDTH}}{value}"


def sample(one: dict[str, Any]) -> str:
    """A sample by its id and where it comes from."""
    name = f"id {one['id']}" if "id" in one else f"number {one.get('index')} of the batch"
    return f"{name} ({one['source']})" if one.get("source") else name
