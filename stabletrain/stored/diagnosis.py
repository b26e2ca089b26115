"""Reads `diagnosis.json`, what is known about an incident."""

from pathlib import Path
from typing import Any, TypedDict

from stabletrain.stored.json_files import Count, Number, read_record

DIAGNOSIS = "diagnosis.json"


class Also(TypedDict):
    """Another cause that holds."""

    cause: str
    confidence: float
    verdict: str
    fix: list[str]


class Sample(TypedDict, total=False):
    """A guilty sample."""

    id: int
    index: int
    source: str | None
    fault: str


class Limits(TypedDict, total=False):
    """The guard's limits in that step."""

    loss: Number
    grad_norm: Number


class Replay(TypedDict, total=False):
    """The outcome of a replay during the investigation."""

    finite: bool | None


class Diagnosis(TypedDict, total=False):
    """The keys of `diagnosis.json` that are read again. One of an older version may lack some."""

    step: Count
    kind: str
    cause: str
    confidence: float | None
    verdict: str
    fix: list[str]
    also: list[Also]
    samples: list[Sample]
    rank: int | None
    replays: dict[str, Replay]
    limits: Limits
    time: str
    not_replayable: str | None


def read_diagnosis(folder: Path) -> dict[str, Any]:
    """Returns the diagnosis in an incident's folder, with the types of `Diagnosis`; NaN and infinities are words.

    Raises:
        MissingFile: there is none.
        DamagedFile: it cannot be used.
    """
    return dict(read_record(folder / DIAGNOSIS, Diagnosis))
