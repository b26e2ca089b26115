"""The commands suggested after a halt: one that continues the run with one change, or starts it again with it.

Only changes that `config/resuming.py` allows are suggested for a resume.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stabletrain.config.arguments import SWEEP, Arguments, key_of, program
from stabletrain.config.resuming import GROUPS, REFUSED, row_of
from stabletrain.forensics.diagnosis.wording import usual_rate
from stabletrain.parallel.ranks import current_ranks
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.banner import relative_path

OVERRIDE = re.compile(r"[a-z_][a-z_0-9]*(\.[A-Za-z_0-9]+)*=\S+")
"""A fix of an incident that can be typed; other fixes are sentences, or a change to a line of code."""

NOT_A_CHANGE = ("resume", "steps", "device")


def after_halt(
    typed: Arguments,
    folder: Path,
    checkpoint: Path | None,
    kind: str,
    choices: Mapping[str, str],
    values: Mapping[str, Any],
    usual_lr: float | None = None,
) -> str:
    """Returns the lines that follow the message of a halt.

    Args:
        typed: the command line of this start.
        folder: the run folder.
        checkpoint: the one that a resume would restore; None if there is no healthy one.
        kind: kind of the newest skipped step (`guard/policy/`).
        choices, values: the run's options, and its configuration by dotted key.
        usual_lr: learning rate that the run's option of `optimizer` has by itself; None if there is none.
    """
    known = (*incident_fixes(folder), *usual_fixes(kind, values, usual_lr))
    fixes = [fix for fix in known if changes_value(fix, choices, values)]
    if not fixes:
        return ""
    resumable = [fix for fix in fixes if kind_of(fix, choices, values) != REFUSED]
    lines = []
    if checkpoint is not None and resumable:
        command = shlex.join([*program(current_ranks()), *resumed_words(typed, folder, resumable[0])])
        lines.append(f"continue  {command}")
        lines.append(f"          from {checkpoint.name}; docs/reference/resume.md lists what else a resume may change")
    if checkpoint is None or fixes[0] not in resumable:
        words = [*(o for o in typed.options if o not in SWEEP), *own_overrides(typed, fixes[0]), fixes[0]]
        lines.append(f"anew      {shlex.join([*program(current_ranks()), *words])}")
    return "\n".join(lines)


def incident_fixes(folder: Path) -> list[str]:
    """Returns the fixes of the run's incidents that are overrides, those of the newest incident first."""
    incidents = [line for line in read_jsonl(folder / "events.jsonl") if line.get("event") == "incident"]
    return [fix for line in reversed(incidents) for fix in line.get("fix") or () if OVERRIDE.fullmatch(fix)]


def usual_fixes(kind: str, values: Mapping[str, Any], usual_lr: float | None) -> list[str]:
    """Returns the usual fixes, without an incident: more patience with bad data, else a lower learning rate."""
    most, rate = values.get("guard.max_consecutive"), values.get("optimizer.lr")
    if kind == "bad_data" and isinstance(most, int):
        return [f"guard.max_consecutive={10 * most}"]
    if kind in ("recheck", "state", "update"):  # the machine or the optimizer's code is at fault, not the settings
        return []
    if not isinstance(rate, int | float):
        return []
    return [f"optimizer.lr={usual_rate(values, usual_lr) or rate / 3:.2g}"]


def changes_value(fix: str, choices: Mapping[str, str], values: Mapping[str, Any]) -> bool:
    """Returns whether a fix is an override of a key that the run has, and changes its value."""
    key, _, value = fix.partition("=")
    return (
        key not in NOT_A_CHANGE and (key in choices or key in values) and str({**values, **choices}.get(key)) != value
    )


def kind_of(fix: str, choices: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """Returns the kind of the fix's row in the table of resumes."""
    key, _, value = fix.partition("=")
    return row_of(key, choices[key] if key in GROUPS else values.get(key), value).kind


def own_overrides(typed: Arguments, fix: str) -> list[str]:
    """Returns the typed overrides that a new run keeps beside a fix."""
    key = key_of(fix)
    left_out = ("hydra", "faults", f"{key}.")  # with another option, the keys typed for the old one go too
    return [o for o in typed.overrides if key_of(o) not in ("resume", key) and not key_of(o).startswith(left_out)]


def resumed_words(typed: Arguments, folder: Path, fix: str) -> list[str]:
    """Returns the words of a resume with a fix.

    The run's record has the words of its first start. Overrides typed with a later `resume` must be typed again.
    """
    named = typed.value("resume") not in (None, "none", "auto")
    return [f"resume={relative_path(str(folder))}", *(own_overrides(typed, fix) if named else []), fix]
