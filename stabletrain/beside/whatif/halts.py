"""The halts of a run with `guard.escalate=whatif`, and how it went on after them: read from its events.

| event | written | fields |
|---|---|---|
| `halt` | when the guard gives up | `step`, `tick`, `reason`, `counts`: what a rollback does not undo |
| `heal` | when the run goes on | `step` and `tick` of the halt, and the fields of `Healing` |
| `unhealed` | when it does not | the same, without an arm |

If neither `heal` nor `unhealed` follows a halt, the run was interrupted while fixes were tried. So nothing else
needs to be recorded: a process that resumes the run reads the events, and does what the first one would have done.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypedDict

from stabletrain.stored.json_files import Count
from stabletrain.tracking.metrics import read_jsonl


@dataclass(frozen=True)
class Halt:
    """A halt after which fixes are to be tried.

    Attributes:
        step, tick: the step after which the guard gave up, and the number of steps executed by then.
        reason: why, in one line.
        counts: of each part of the state, the values that going back does not undo.
    """

    step: int
    tick: int
    reason: str
    counts: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Healing:
    """How a run goes on after a halt, or why it does not: what `healing.json` and the events hold.

    Attributes:
        start: the checkpoint that the arm resumed; the run goes on from this state. Empty if no arm holds.
        origin: step of the state from which the arms started (but for the arm from step 0).
        skipped: data positions `[start, stop)` that are never read in the state from which the run goes on.
        why: in a sentence, why the run goes on with this arm, or with none.
        to: step of the state from which the run goes on.
        arm: the one that the run goes on with; empty if none holds.
        settings: overrides in force from then on, besides those of the run's first start.
        base: those that were in force before.
        arms: names of all arms that were tried.
        steps: number of steps that were spent on them.
    """

    start: str = ""
    origin: Count = 0
    skipped: list[list[Count]] = field(default_factory=list)
    why: str = ""
    to: Count = 0
    arm: str = ""
    settings: list[str] = field(default_factory=list)
    base: list[str] = field(default_factory=list)
    arms: list[str] = field(default_factory=list)
    steps: Count = 0


def healing_of(values: Mapping[str, Any]) -> Healing:
    """Returns the healing in an event or in `healing.json`, which may have further keys."""
    return Healing(**{each.name: values[each.name] for each in fields(Healing)})


HealingRecord = TypedDict("HealingRecord", {each.name: each.type for each in fields(Healing)})  # ty: ignore[invalid-argument-type]
"""The content of `healing.json`: the same fields, declared once."""


@dataclass(frozen=True)
class HaltHistory:
    """The halts of a run so far, and what became of them.

    Attributes:
        halt: the halt after which nothing has happened yet; None if there is none.
        healings: all of them, oldest first.
    """

    halt: Halt | None = None
    healings: tuple[Healing, ...] = ()

    @property
    def spent(self) -> int:
        """Steps spent on arms so far."""
        return sum(each.steps for each in self.healings)

    @property
    def settings(self) -> list[str]:
        """The overrides in force, besides those of the run's first start."""
        return next((each.settings for each in reversed(self.healings) if each.arm), [])

    @property
    def healed_by(self) -> list[str]:
        """The arms with which the run went on."""
        return [each.arm for each in self.healings if each.arm]

    @property
    def kept(self) -> list[int]:
        """Steps of the states from which the run went on."""
        return sorted({each.to for each in self.healings if each.arm})

    def after(self, healing: Healing) -> "HaltHistory":
        """Returns the history once the run has gone on."""
        return replace(self, halt=None, healings=(*self.healings, healing))

    def tried(self, step: int, base: Sequence[str]) -> set[str]:
        """Returns the names of the arms that were tried from the state after `step` steps with the same settings."""
        return {name for each in self.healings if (each.origin, each.base) == (step, [*base]) for name in each.arms}


def read_halt_history(run: Path) -> HaltHistory:
    """Returns what the events of a run folder say."""
    halt, healings = None, []
    for line in read_jsonl(run / "events.jsonl"):
        if line["event"] == "halt":
            # A run whose machine was at fault, or that is not to be healed, has no counts in its event.
            counts = line.get("counts") if line.get("escalate") == "whatif" else None
            halt = None if counts is None else Halt(line["step"], line["tick"], str(line["reason"]), counts)
        if line["event"] in ("heal", "unhealed"):
            healings.append(healing_of(line))
            halt = None
    return HaltHistory(halt, tuple(healings))
