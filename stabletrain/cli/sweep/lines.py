"""What a person sees of a sweep: a line when it starts, one as each run ends, and what came of all of them.

3/24  precision=fp32 stability=qknorm seed=0  finished  val loss 2.311  14 s  4:51 left
"""

import math
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stabletrain.cli.sweep.plan import FINISHED, Sweep
from stabletrain.errors import TrainingHalted
from stabletrain.tracking.progress import elapsed

STOPPED = 75
"""Exit code of a sweep that was interrupted: try again later."""

WIDEST = 60
"""Columns for what varies; what is longer pushes the rest to the right."""


def opening(sweep: Sweep) -> str:
    """How many runs, where, and how many of them are over already."""
    over = sum(record.get("status") in FINISHED for _, record in sweep.records())
    count = "" if sweep.count is None else f"{sweep.count} runs "
    return f"sweep    {count}in {sweep.folder}{f', {over} of them over already' if over else ''}"


def label(sweep: Sweep | None, number: int, overrides: Sequence[str]) -> str:
    """Which run of how many, and what is its own."""
    if sweep is None:
        return f"{number + 1}  {' '.join(overrides)}"
    count = sweep.count or 0
    wide = max((len(sweep.varied(run)) for run in sweep.runs or []), default=0)
    of = f"{number + 1:>{len(str(count))}}/{count}" if count else f"{number + 1}"
    return f"{of}  {sweep.varied(overrides):<{min(wide, WIDEST)}}"


def ending(
    sweep: Sweep | None, number: int, overrides: Sequence[str], record: Mapping[str, Any], seconds: float | None
) -> str:
    """The line of a run that is over.

    Args:
        sweep: it belongs to; None where there is no record of it.
        number: of the run, from 0.
        overrides: of the run.
        record: its `run.json`.
        seconds: that it took; None for a run that was over before.
    """
    words = [label(sweep, number, overrides), f"{record.get('status', 'failed'):<9}", result(record)]
    if seconds is None:
        return "  ".join([*words, "(before)"])
    words.append(f"{elapsed(seconds) if seconds >= 60 else f'{seconds:.0f} s'}")
    if record.get("status") != "finished":
        words.append(" ".join(str(record.get("reason")).split())[:100])
    elif sweep is not None and (left := seconds_left(sweep)) is not None:
        words.append(f"{elapsed(left)} left")
    return "  ".join(words)


def result(record: Mapping[str, Any]) -> str:
    """`val loss 2.311`, with the accuracy where there is one, and what the guard did where it did anything."""
    final = record.get("final", {})
    loss = final.get("val/loss")
    words = [f"val loss {loss:.3f}" if isinstance(loss, float) else "val loss -"]
    if "val/accuracy" in final:
        words.append(f"accuracy {100 * final['val/accuracy']:.2f} %")
    skipped = sum(final.get(f"guard/skipped_{kind}", 0) for kind in ("bad_data", "nonfinite", "spike"))
    words += [f"{skipped} skipped"] if skipped else []
    words += [f"{back} rollback{'s' if back > 1 else ''}"] if (back := final.get("guard/rollbacks", 0)) else []
    return ", ".join(words)


def seconds_left(sweep: Sweep) -> float | None:
    """Until all runs are over, at the pace of this start; None while it is not known."""
    over = [file for file in sweep.folder.rglob("run.json") if file.stat().st_mtime >= sweep.began]
    records = [record for _, record in sweep.records()]
    left = (sweep.count or 0) - sum(record.get("status") in (*FINISHED, "failed") for record in records)
    done = len(over) - sum(record.get("status") == "running" for record in records)
    return (time.time() - sweep.began) / done * left if done > 0 and left > 0 else None


def closing(sweep: Sweep) -> str:
    """How many ended how, which was best, which did not finish, and what to do next."""
    records = sweep.records()
    ends = Counter(str(record.get("status")) for _, record in records)
    missing = (sweep.count or 0) - len(records)
    ended = ", ".join(f"{count} {status}" for status, count in ends.most_common())
    begun = [ended] if ended else []
    count = sweep.count or len(records)
    lines = [f"sweep    {count} runs, {', '.join(begun + ([f'{missing} not begun'] if missing > 0 else []))}"]
    lines[0] += f", in {sweep.folder}"
    best = min(records, key=lambda named: loss_of(named[1]), default=("", {}))
    if len(records) > 1 and math.isfinite(loss_of(best[1])):
        varied = sweep.varied(best[1]["overrides"])
        lines.append(f"best     val loss {loss_of(best[1]):.3f}  {varied}  {sweep.folder / best[0]}")
    for name, record in records:
        if record.get("status") not in ("finished", "running"):
            reason = " ".join(str(record.get("reason")).split())[:100]
            varied = sweep.varied(record.get("overrides", []))
            lines.append(f"{record.get('status'):<9}{varied}  {sweep.folder / name}  {reason}")
    folder = shlex.quote(str(sweep.folder))
    if missing > 0 or ends["failed"] or ends["preempted"] or ends["running"]:
        lines.append(f"then     python train.py resume={folder} runs what is missing or failed")
    if len(records) > 1:
        lines.append(f"next     stabletrain compare {folder}")
    return "\n".join(lines)


def loss_of(record: Mapping[str, Any]) -> float:
    """The validation loss that a run finished with; infinite where it has none."""
    loss = record.get("final", {}).get("val/loss", math.inf) if record.get("status") == "finished" else math.inf
    return loss if isinstance(loss, float) and not math.isnan(loss) else math.inf


def code(sweep: Sweep) -> int:
    """The exit code of a sweep that is over: that of the first run that did not finish."""
    codes = {"halted": TrainingHalted.exit_code, "failed": 1, "preempted": STOPPED}
    for _, record in sweep.records():
        if (status := record.get("status")) in codes:
            return int(record.get("exit_code", codes[status]))
    return STOPPED if sweep.runs is not None and len(sweep.records()) < len(sweep.runs) else 0
