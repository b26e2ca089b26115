"""The incident's folder: `diagnosis.json` for programs, `report.md` for people, and the scene to replay it from.

incidents/step-00000123/    diagnosis.json  report.md  scene.json  batch.safetensors  state.safetensors

Incidents found: those of a run read back from its folder, each as a block of lines for a person.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stabletrain.errors import ConfigError
from stabletrain.forensics.investigate import Findings
from stabletrain.forensics.replay import VARIANTS, Outcome
from stabletrain.forensics.report import report
from stabletrain.forensics.repro import Repro
from stabletrain.forensics.repro_files import BATCH, SCENE, STATE, save_repro
from stabletrain.tracking.metrics import now, plain, replace

UNNEEDED = Outcome(not_run="what was found before explains it")
"""A replay that nobody needed."""


def place_for(folder: Path, step: int) -> Path:
    """Where the incident of a step goes: of one that happens again after a rollback, beside the first."""
    path, number = folder / "incidents" / f"step-{step:08d}", 2
    while path.exists():
        path, number = folder / "incidents" / f"step-{step:08d}-{number}", number + 1
    return path


def write(path: Path, repro: Repro, found: Findings, *, rank: int | None, keep_state: bool) -> None:
    """Writes an incident.

    Args:
        path: its folder, from `place_for`.
        scene: the step.
        found: what came of looking into it.
        rank: the guilty rank; None for one process.
        keep_state: whether weights and batch are kept too, so that it can be replayed from the folder alone.

    Raises:
        OSError: the disk is full or gone.
    """
    path.mkdir(parents=True, exist_ok=True)
    record = as_json(repro, found, rank)
    (path / "report.md").write_text(report(record, found, path), encoding="utf-8")
    replace(path / "diagnosis.json", json.dumps(plain(record), allow_nan=False, indent=2) + "\n")
    if keep_state:  # the largest, so the last: on a disk that is nearly full the cause is written
        try:
            save_repro(path, repro)
        except OSError:
            for file in (SCENE, BATCH, STATE):
                (path / file).unlink(missing_ok=True)
            raise


def as_json(repro: Repro, found: Findings, rank: int | None) -> dict[str, Any]:
    """The incident as a mapping; the keys are a contract."""
    evidence, diagnosis = found.evidence, found.diagnosis
    culprits = evidence.culprits
    places = culprits.samples if culprits and not culprits.others_too else []
    batch = repro.batch
    samples = [dict(sample) for sample in evidence.samples] or [
        {
            "index": index,
            **({} if batch.ids is None else {"id": int(batch.ids[index])}),
            **({} if batch.sources is None else {"source": batch.sources[index]}),
        }
        for index in places[:8]
    ]
    return {
        "step": evidence.reading.step,
        "kind": evidence.kind,
        "cause": diagnosis.cause,
        "confidence": diagnosis.confidence,
        "verdict": diagnosis.verdict,
        "fix": diagnosis.fix,
        "origin": None if evidence.origin is None else evidence.origin.as_dict(),
        "samples": samples,
        "rank": rank,
        "replays": {name: asdict(evidence.outcomes.get(name, UNNEEDED)) for name in VARIANTS},
        "reading": evidence.reading._asdict(),
        "damage": [asdict(damage) for damage in evidence.damage],
        "evidence": diagnosis.evidence,
        "time": now(),
        "seconds": round(found.seconds, 3),
        "not_looked_at": found.failures,
    }


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
