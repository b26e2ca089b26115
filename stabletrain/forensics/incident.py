"""Writes an incident's folder: `diagnosis.json`, `report.md`, and the repro to replay the step from.

A folder appears complete, by a rename. What a killed process has left is hidden, and the next process removes it.

incidents/step-00000123/    diagnosis.json  report.md  step.json  batch.safetensors  state.safetensors
"""

import errno
import json
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from stabletrain.forensics.facts import Outcome
from stabletrain.forensics.investigate import Findings
from stabletrain.forensics.report import markdown, report, section
from stabletrain.forensics.rerun import VARIANTS
from stabletrain.forensics.saved_step import BATCH, STATE, STEP
from stabletrain.forensics.subject import Subject
from stabletrain.printable import printable
from stabletrain.tracking.metrics import now, plain, replace


class Execution(NamedTuple):
    """Which execution of a step an incident is about.

    A run that was killed and resumed executes the same step again, at the same tick. After a rollback it is another
    tick.

    Attributes:
        tick: number of steps that the run has executed with this one; None if unknown.
        settings: hash of the settings that the step was executed with.
    """

    tick: int | None = None
    settings: str = ""


UNKNOWN = Execution()

NOT_NEEDED = Outcome(not_run="not needed: the cause was already known")
"""Outcome of a replay that was not needed."""


HIDDEN_FOLDERS = ".step-*"
"""Matches the folders of incidents that are being written, or whose writing was killed."""


def folder_for(folder: Path, step: int) -> Path:
    """The folder for an incident, in the folder of all; with a number if the step had one before a rollback."""
    path, number = folder / f"step-{step:08d}", 2
    while path.exists():
        path, number = folder / f"step-{step:08d}-{number}", number + 1
    return path


def file_incident(
    folder: Path, subject: Subject, found: Findings, *, rank: int | None, keep_state: bool, execution: Execution
) -> Path:
    """Writes an incident into a hidden folder and renames it, so that it is complete or absent; returns its folder.

    Args:
        folder: the folder of all incidents.
        subject, found, rank, keep_state, execution: see `write`.

    Raises:
        OSError: the disk is full or gone. If the diagnosis could still be written, it is there.
    """
    assert subject.reading is not None
    step = subject.reading.step
    hidden = folder / f".step-{step:08d}.{secrets.token_hex(4)}"
    try:
        try:
            place = folder_for(folder, step)
            write(hidden, subject, found, rank=rank, keep_state=keep_state, execution=execution, place=place)
        except OSError:
            if (hidden / "diagnosis.json").exists():
                publish(hidden, folder, step)
            raise
        return publish(hidden, folder, step)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)  # gone already if it was renamed


def publish(hidden: Path, folder: Path, step: int) -> Path:
    """Makes everything in a hidden folder durable, and makes the incident appear with one rename; returns its folder.

    Raises:
        OSError: the disk is gone.
    """
    for path in (*hidden.iterdir(), hidden):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    while True:
        place = folder_for(folder, step)
        try:
            hidden.rename(place)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:  # another process has not taken this name in the meantime
            return place


def add_to_report(folder: Path, text: str) -> None:
    """Adds what became of the step to an incident's page, once. If the page cannot be written, it stays as it is."""
    added = "\n".join([*section("What became of the step", [markdown(text)]), ""])
    with suppress(OSError), open(folder / "report.md", "r+", encoding="utf-8") as page:
        if not page.read().endswith(added):  # a run that was killed and resumed takes the same step again
            page.write(added)


def remove_unfinished(folder: Path) -> None:
    """Removes the hidden folders of incidents whose writing was killed. No other process may be writing incidents."""
    for path in folder.glob(HIDDEN_FOLDERS):
        shutil.rmtree(path, ignore_errors=True)


def write(
    path: Path,
    subject: Subject,
    found: Findings,
    *,
    rank: int | None,
    keep_state: bool,
    execution: Execution = UNKNOWN,
    place: Path | None = None,
) -> None:
    """Writes an incident into `path`.

    Args:
        path: is created if necessary.
        subject: the step.
        found: the findings.
        rank: the rank at fault; None for one process.
        keep_state: also saves weights and batch, so that the step can be replayed from the folder.
        execution: which execution of the step this is.
        place: the folder's name in the report, if `path` is to be renamed.

    Raises:
        OSError: the disk is full or gone.
    """
    path.mkdir(parents=True, exist_ok=True)
    record = as_json(subject, found, rank, execution)
    (path / "report.md").write_text(printable(report(record, found, place or path)), encoding="utf-8")
    replace(path / "diagnosis.json", json.dumps(plain(record), allow_nan=False, indent=2) + "\n")
    if keep_state:  # last, because it is the largest: on a nearly full disk the diagnosis still fits
        try:
            subject.save(path)
        except OSError:
            for file in (STEP, BATCH, STATE):
                (path / file).unlink(missing_ok=True)
            raise


def as_json(subject: Subject, found: Findings, rank: int | None, execution: Execution = UNKNOWN) -> dict[str, Any]:
    """The content of `diagnosis.json`; the keys are a contract."""
    evidence, diagnosis = found.evidence, found.diagnosis
    culprits = evidence.culprits
    places = culprits.samples if culprits and not culprits.others_too else []
    samples = [dict(sample) for sample in evidence.samples] or [
        {"index": index, **subject.identify(index)} for index in places[:8]
    ]
    return {
        "step": evidence.reading.step,
        "kind": evidence.kind,
        "cause": diagnosis.cause,
        "confidence": diagnosis.confidence,
        "verdict": diagnosis.verdict,
        "fix": diagnosis.fix,
        "also": [
            {"cause": one.cause, "confidence": one.confidence, "verdict": one.verdict, "fix": one.fix}
            for one in diagnosis.also
        ],
        "origin": None if evidence.origin is None else evidence.origin.as_dict(),
        "update": None if evidence.update is None else evidence.update.as_dict(),
        "samples": samples,
        "rank": rank,
        "replays": {name: asdict(evidence.outcomes.get(name, NOT_NEEDED)) for name in VARIANTS},
        "reading": evidence.reading._asdict(),
        "part": None if evidence.part is None else evidence.part._asdict(),
        "limits": {"loss": evidence.setting.loss_limit, "grad_norm": evidence.setting.norm_limit},
        "damage": [asdict(damage) for damage in evidence.damage],
        "evidence": diagnosis.evidence,
        "time": now(),
        "seconds": round(found.seconds, 3),
        "not_looked_at": found.failures,
        "not_replayable": subject.why_not_replayable(),
        **execution._asdict(),
    }
