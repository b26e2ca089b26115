"""Finds what the user names, and where that run was in trouble, from its events.

Trouble is skipped steps, rollbacks, a halt, a slow spike, or a forecast.

Events that follow each other closely are one trouble. "Closely" is measured in executed steps (`tick`), because a
rollback turns the step number back. fp16's routine overflows are no trouble.

The user names a run, one of its incidents, or one of its checkpoints.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stabletrain.beside.comparison.reading.columns import read_columns
from stabletrain.checkpoint.folder import NAME
from stabletrain.checkpoint.reader import MANIFEST
from stabletrain.data.order import position
from stabletrain.errors import ConfigError
from stabletrain.stored.run_files import DIAGNOSIS, RUN, read_diagnosis
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.after_halt import OVERRIDE


@dataclass(frozen=True)
class Target:
    """What to try fixes for.

    Attributes:
        run: the run folder.
        incident: folder of the named incident; None if none was named.
        checkpoint: step of the named checkpoint; None if none was named.
    """

    run: Path
    incident: Path | None = None
    checkpoint: int | None = None


def find_target(path: Path) -> Target:
    """Returns what a path names.

    Raises:
        ConfigError: it names neither a run folder, nor an incident or a checkpoint inside one.
    """
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {what}; fix: name a run folder, such as outputs/<date>/<time>, or an incident in it")
    named = NAME.fullmatch(path.name)
    if (path / DIAGNOSIS).exists() or (named and path.parent.name == "incidents"):
        return Target(inside_run(path, "incident"), incident=path)
    if (path / MANIFEST).exists() or (named and path.parent.name == "checkpoints"):
        if not named:
            raise ConfigError(f"{path}: a checkpoint's folder is named step-<number>; fix: give it its name back")
        return Target(inside_run(path, "checkpoint"), checkpoint=int(named[1]))
    if (path / RUN).exists():
        return Target(path)
    raise ConfigError(
        f"{path} is neither a run folder, an incident nor a checkpoint: it has no {RUN}, {DIAGNOSIS} or {MANIFEST}; "
        "fix: name a run folder, such as outputs/<date>/<time> or multirun/<date>/<time>/<number>"
    )


def inside_run(path: Path, what: str) -> Path:
    """Returns the run folder of an incident or a checkpoint; raises ConfigError if it does not lie in one."""
    run = path.absolute().parent.parent
    if not (run / RUN).exists():
        raise ConfigError(
            f"{path}: this {what} does not lie in a run folder ({run} has no {RUN}), so the run cannot be repeated; "
            f"fix: name the {what} where the run wrote it"
        )
    return path.parent.parent if len(path.parts) > 2 else run


MAX_GAP = 100
"""Executed steps without trouble after which the next trouble is another one."""

TROUBLE_EVENTS, HINT_EVENTS = ("skip", "rollback", "halt"), ("forecast", "alarm")
"""Events of trouble, and the events that count if a run has none of these. Only slow spikes count as alarms."""


@dataclass(frozen=True)
class Event:
    """An event of trouble.

    Attributes:
        kind: skip, rollback, halt, forecast, alarm, nonfinite.
        step: its step. For a trouble that is found late: the step at which it began.
        tick: number of steps executed by then.
        text: what happened.
        last: the step at which it was found.
        read: end of the data positions that the run had read by then.
        undone: the rollbacks and repeated steps before it, oldest first: the step that each went back to, and the
            difference between tick and step from there on.
    """

    kind: str
    step: int
    tick: int
    text: str = ""
    last: int = 0
    read: int = 0
    undone: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Trouble:
    """One trouble of a run.

    Attributes:
        first, last: the step at which it began, and the highest step of its events.
        tick: steps executed when it began.
        text: what happened, for the user.
        fixes: overrides that the diagnosis or the forecast names, best first; a fix may be several with blanks between.
        read: end of the data positions that the run had read by its end; 0 if not known.
        undone: see `Event`, of its first event.
    """

    first: int
    last: int
    tick: int
    text: str
    fixes: tuple[str, ...] = ()
    read: int = 0
    undone: tuple[tuple[int, int], ...] = ()

    def tick_of(self, step: int) -> int:
        """Returns the number of steps that the run had executed after a step before the trouble."""
        return step + (lost_at(step, self.undone) if self.undone else self.tick - self.first)


def lost_at(step: int, undone: Sequence[tuple[int, int]]) -> int:
    """Returns tick minus step after a step, among the steps that rollbacks have undone; see `Event`."""
    return next((lost for to, lost in reversed(undone) if step > to), 0)


def events_of(lines: Sequence[Mapping[str, Any]]) -> list[Event]:
    """Returns the events of trouble in the order in which the run executed them.

    Args:
        lines: of `events.jsonl`. A resumed run may have executed, and logged, an event twice.
    """
    found: dict[tuple[str, int], Event] = {}
    undone: list[tuple[int, int]] = []
    skipped: list[Sequence[int]] = []
    for line in lines:
        kind, step = line.get("event"), int(line["step"])
        tick = int(line.get("tick", step + lost_at(step, undone)))
        if kind == "skip" and line.get("kind") == "overflow":
            continue
        if kind in (*TROUBLE_EVENTS, *HINT_EVENTS) and (kind != "alarm" or "since" in line):
            since = int(line.get("since") or step)  # a slow spike is found after it began
            began = tick if since == step else since + lost_at(since, undone)
            text = str(line.get("reason") or line.get("text") or "")
            read = position(step - 1, skipped) + 1
            found[str(kind), tick] = Event(str(kind), since, began, text, step, read, tuple(undone))
        if kind == "restore":  # that step was taken again, so it was not skipped
            found.pop(("skip", tick), None)
        if kind in ("rollback", "heal", "restore"):
            undone.append((int(line["to"]), tick - int(line["to"])))
            spans = line.get("skipped") or []  # a heal has all of its state's, a rollback its own one
            skipped = [*spans] if kind == "heal" else [*skipped, *([spans] if spans else [])]
    return sorted(found.values(), key=lambda event: (event.tick, event.kind != "skip"))


def clusters(events: Sequence[Event]) -> list[list[Event]]:
    """Groups events that follow each other within `MAX_GAP` executed steps."""
    found: list[list[Event]] = []
    for event in events:
        if found and event.tick - found[-1][-1].tick <= MAX_GAP:
            found[-1].append(event)
        else:
            found.append([event])
    return found


def trouble_of(events: Sequence[Event], fixes: Sequence[str] = ()) -> Trouble:
    """Returns the trouble that a cluster of events is."""
    counts = Counter(event.kind for event in events)
    names = {"skip": "skipped step", "rollback": "rollback", "nonfinite": "non-finite loss"}
    parts = [
        f"{count} {names.get(kind, kind)}{'s' if count > 1 else ''}" if kind != "halt" else "halted"
        for kind, count in counts.items()
    ]
    reason = next((event.text for event in events if event.text), "")
    text = ", ".join(parts) + (f": {reason}" if reason else "")
    last, read = max(max(event.step, event.last) for event in events), max(event.read for event in events)
    first = events[0]
    return Trouble(first.step, last, first.tick, text, tuple(dict.fromkeys(fixes)), read, first.undone)


def find_trouble(target: Target, after: int | None = None) -> Trouble:
    """Returns the trouble of a target: the incident's, the first one after a step, or the run's last one.

    Args:
        target: what the user named.
        after: the step of the state to start from, if the user named one.

    Raises:
        ConfigError: the run was in no trouble, and no step is named.
    """
    lines = read_jsonl(target.run / "events.jsonl")
    found = events_of(lines)
    groups = clusters([event for event in found if event.kind in TROUBLE_EVENTS])
    if not groups and (bad := first_nonfinite(target.run)) is not None:
        groups = [[Event("nonfinite", bad, bad, "the loss is not finite", bad)]]
    if not groups:
        groups = clusters([event for event in found if event.kind in HINT_EVENTS])
    if target.incident is not None:
        step, named = incident_of(target.incident)
        tick = next(
            (line.get("tick", step) for line in lines if (line.get("event"), line["step"]) == ("incident", step)), step
        )
        group = next(
            (group for group in groups if group[0].tick - MAX_GAP <= tick <= group[-1].tick + MAX_GAP),
            [Event("incident", step, tick, last=step)],
        )
        return trouble_of(group, [*named, *fixes_in(lines, group)])
    later = [group for group in groups if after is None or max(event.last for event in group) > after]
    if later:
        group = later[0] if after is not None else later[-1]
        return trouble_of(group, fixes_in(lines, group))
    if after is not None:
        return Trouble(after, after, after, "none after this step")
    raise ConfigError(
        f"{target.run} has no skipped step, no rollback, no halt and no alarm: there is no trouble to start before; "
        "fix: name the step of the state to start from, such as --from step-500"
    )


def first_nonfinite(run: Path) -> int | None:
    """Returns the first step whose logged training loss is not finite; None if there is none."""
    steps, losses = read_columns(run / "metrics.jsonl").curve("train/loss")
    bad = steps[~np.isfinite(losses)]
    return int(bad[0]) if len(bad) else None


def incident_of(folder: Path) -> tuple[int, list[str]]:
    """Returns the step of an incident, and the fixes that its diagnosis names: its own, then those of other causes."""
    record = read_diagnosis(folder)
    if not isinstance(record.get("step"), int):
        raise ConfigError(f"{folder}/diagnosis.json has no step; fix: name another incident, or the run")
    named = [*record.get("fix", []), *(fix for each in record.get("also", []) for fix in each["fix"])]
    return record["step"], [fix for fix in named if OVERRIDE.fullmatch(fix)]


def fixes_in(lines: Sequence[Mapping[str, Any]], group: Sequence[Event]) -> list[str]:
    """Returns the fixes of the incidents of a cluster, and then of the forecasts up to its end, best first."""
    start, end = group[0].tick, group[-1].tick
    incidents = [line for line in lines if line.get("event") == "incident"]
    here = [line for line in incidents if start <= line.get("tick", line["step"]) <= end]
    foretold = [line for line in lines if line.get("event") == "forecast" and line["step"] <= group[-1].step]
    named = [fix for line in (*here, *reversed(foretold)) for fix in line.get("fix") or ()]
    return [fix for fix in named if all(OVERRIDE.fullmatch(word) for word in fix.split())]
