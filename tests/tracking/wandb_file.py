"""Reads an offline run of W&B back: LevelDB log records in 32 KiB blocks, each a protobuf `Record`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK, RECORD_HEADER = 7, 1 << 15, 7


def records(path: Path) -> Iterator[Any]:
    """The protobuf records of one `run-*.wandb` file, in order."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    assert content[:4] == b":W&B"
    at, pieces = HEADER, b""
    while at + RECORD_HEADER <= len(content):
        if BLOCK - at % BLOCK < RECORD_HEADER:  # the rest of a block is padding
            at += BLOCK - at % BLOCK
            continue
        size = int.from_bytes(content[at + 4 : at + 6], "little")
        kind = content[at + 6]  # 1 full, 2 first, 3 middle, 4 last
        pieces += content[at + RECORD_HEADER : at + RECORD_HEADER + size]
        at += RECORD_HEADER + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()  # ty: ignore[missing-attribute]
            record.ParseFromString(pieces)
            pieces = b""
            yield record


def table(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of the newest table `incidents` of the only offline run below `folder`."""
    newest = read(folder)["summary"]["incidents.path"]
    [file] = folder.rglob(newest)
    content = json.loads(file.read_text())
    return [dict(zip(content["columns"], line, strict=True)) for line in content["data"]]


def items(entries: Any) -> dict[str, Any]:
    """Keys (nested ones joined by `.`) and values of a record's items; W&B writes NaN as JSON's `NaN`."""
    return {entry.key or ".".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}


def read(folder: Path) -> dict[str, Any]:
    """Reads the only offline run below `folder`: id, config, history, summary, metrics, exit_code ..."""
    [path] = folder.rglob("run-*.wandb")
    return read_file(path)


def read_file(path: Path) -> dict[str, Any]:
    """Reads one offline run; see `read`."""
    found: dict[str, Any] = {"config": {}, "history": [], "summary": {}, "axes": {}, "hidden": set(), "alerts": []}
    found["exit_code"] = None
    for record in records(path):
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
                found |= {"id": run.run_id, "project": run.project, "group": run.run_group, "tags": list(run.tags)}
                found |= {"name": run.display_name, "job_type": run.job_type}
                found["config"] |= items(run.config.update)
            case "history":
                found["history"].append(items(record.history.item))
            case "summary":
                found["summary"] |= items(record.summary.update)
            case "metric":
                name = record.metric.name or record.metric.glob_name
                found["axes"][name] = record.metric.step_metric
                found["hidden"] |= {name} if record.metric.options.hidden else set()
            case "alert":
                found["alerts"].append((record.alert.title, record.alert.text))
            case "exit":
                found["exit_code"] = record.exit.exit_code
    return found
