"""Writes an incident's folder: `diagnosis.json`, `report.md`, and the repro to replay the step from.

incidents/step-00000123/    diagnosis.json  report.md  scene.json  batch.safetensors  state.safetensors
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stabletrain.forensics.investigate import Findings
from stabletrain.forensics.replay import VARIANTS, Outcome
from stabletrain.forensics.report import report
from stabletrain.forensics.repro import BATCH, SCENE, STATE
from stabletrain.forensics.subject import Subject
from stabletrain.printable import printable
from stabletrain.tracking.metrics import now, plain, replace

UNNEEDED = Outcome(not_run="not needed: the cause was already known")
"""Outcome of a replay that was not needed."""


def place_for(folder: Path, step: int) -> Path:
    """The folder for an incident, in the folder of all; with a number if the step had one before a rollback."""
    path, number = folder / f"step-{step:08d}", 2
    while path.exists():
        path, number = folder / f"step-{step:08d}-{number}", number + 1
    return path


def write(path: Path, subject: Subject, found: Findings, *, rank: int | None, keep_state: bool) -> None:
    """Writes an incident into `path`, from `place_for`.

    `keep_state` also saves weights and batch, so that the step can be replayed from the folder. `rank` is the rank
    at fault; None for one process.

    Raises:
        OSError: the disk is full or gone.
    """
    path.mkdir(parents=True, exist_ok=True)
    record = as_json(subject, found, rank)
    (path / "report.md").write_text(printable(report(record, found, path)), encoding="utf-8")
    replace(path / "diagnosis.json", json.dumps(plain(record), allow_nan=False, indent=2) + "\n")
    if keep_state:  # last, because it is the largest: on a nearly full disk the diagnosis still fits
        try:
            subject.save(path)
        except OSError:
            for file in (SCENE, BATCH, STATE):
                (path / file).unlink(missing_ok=True)
            raise


def as_json(subject: Subject, found: Findings, rank: int | None) -> dict[str, Any]:
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
        "samples": samples,
        "rank": rank,
        "replays": {name: asdict(evidence.outcomes.get(name, UNNEEDED)) for name in VARIANTS},
        "reading": evidence.reading._asdict(),
        "part": None if evidence.part is None else evidence.part._asdict(),
        "limits": {"loss": evidence.setting.loss_limit, "grad_norm": evidence.setting.norm_limit},
        "damage": [asdict(damage) for damage in evidence.damage],
        "evidence": diagnosis.evidence,
        "time": now(),
        "seconds": round(found.seconds, 3),
        "not_looked_at": found.failures,
        "not_replayable": subject.why_not_replayable(),
    }
