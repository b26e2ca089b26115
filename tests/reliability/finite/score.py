"""Tables from recordings: what was seen, after how many steps, what it cost, and the false alarms.

A run's cost is its final validation loss minus that of its clean partner; a run that ends with NaN or Inf costs inf.
A fault is seen if an event follows its first step. Events before it, and every event of a clean run, are false alarms.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tests.reliability.finite.cases import Case
from tests.reliability.finite.kinds import KINDS

BOUND = 0.05
"""Nats above the clean partner from which a fault is costly."""

EXACT = 0.001
"""Nats within which a state that was put back bit for bit must end."""

ADVICE = ("clipping",)
"""Alarms about a setting, such as a bound that clips nearly every step: clean runs have them, so they see no fault."""

GROUPS = ("memory", "arithmetic", "training")


@dataclass
class Scored:
    """A faulty run beside its clean partner.

    Attributes:
        cost: nats, with every detector as an alarm only.
        back: nats, with the guard's ways back; equal to `cost` if nothing was seen; None if not recorded, or halted.
        halted: whether the run with ways back halted: a fault that comes again and again. Its last healthy state is
            there, but its loss is that of an earlier step.
        seen: the kind of each detector that saw the fault, with the steps until then.
        false: events before the fault.
    """

    kind: str
    group: str
    setting: str
    cost: float
    back: float | None
    seen: dict[str, int] = field(default_factory=dict)
    false: int = 0
    halted: bool = False

    @property
    def costly(self) -> bool:
        """Whether the fault costs more than `BOUND`."""
        return not self.cost <= BOUND


def told(one: Mapping[str, Any]) -> list[tuple[int, str, str]]:
    """Returns a run's events but the advice."""
    return [(tick, event, kind) for tick, event, kind in one["events"] if kind not in ADVICE]


def partner_name(one: Mapping[str, Any]) -> str:
    """Returns the name of the clean run that a faulty one is compared with."""
    return Case("faulty", one["model"], one["precision"], one["seed"], one["kind"]).partner.name


def setting(one: Mapping[str, Any]) -> str:
    """Names model, precision and seed of a run."""
    return f"{one['model']} {one['precision']} {one['seed']}"


def difference(final: float, clean: float) -> float:
    """Returns the cost; inf if the run ended with NaN or Inf."""
    return final - clean if math.isfinite(final) else math.inf


def scored(found: Iterable[Mapping[str, Any]]) -> list[Scored]:
    """Returns the faulty runs whose partner is recorded, too."""
    by_name = {one["name"]: one for one in found}
    results = []
    for one in by_name.values():
        clean = by_name.get(partner_name(one)) if one["part"] == "faulty" and one["mode"] == "alarm" else None
        if clean is None or one["status"] == "crashed":
            continue
        cost = back = difference(one["final"], clean["final"])
        halted = False
        if told(one):
            act = by_name.get(one["name"].replace("/alarm", "/act"))
            halted = act is not None and act["status"] == "halted"
            back = None if act is None or halted else difference(act["final"], clean["final"])
        known = set(told(clean))
        seen: dict[str, int] = {}
        for tick, event, kind in told(one):
            if tick > one["at"] and (tick, event, kind) not in known:
                seen.setdefault(kind or event, tick - one["at"])
        false = sum(tick <= one["at"] for tick, _, _ in told(one))
        results.append(Scored(one["kind"], one["group"], setting(one), cost, back, seen, false, halted))
    return results


def by_kind(runs: Sequence[Scored]) -> list[list[str]]:
    """Returns a row for each kind of fault."""
    rows = []
    for group in GROUPS:
        of_group = [run for run in runs if run.group == group]
        present = {run.kind for run in of_group}
        for kind in (name for name in KINDS if name in present):
            rows.append([group, kind, *summary([run for run in of_group if run.kind == kind])])
        if of_group:
            rows.append([group, "**all**", *summary(of_group)])
    return rows


HEAD = [
    "class",
    "fault",
    "runs",
    "seen",
    "by",
    "steps until seen",
    "cost",
    "largest",
    "costly",
    "of these seen",
    "largest with a way back",
    "halted",
]


def summary(runs: Sequence[Scored]) -> list[str]:
    """Returns the cells of some runs: how many, seen, by what, when, and what they cost."""
    seen = [run for run in runs if run.seen]
    costly = [run for run in runs if run.costly]
    by = Counter(min(run.seen, key=lambda kind, run=run: (run.seen[kind], kind)) for run in seen)
    backs = [run.back for run in runs if run.back is not None]
    return [
        str(len(runs)),
        str(len(seen)),
        ", ".join(f"{kind} {count}" for kind, count in sorted(by.items(), key=lambda each: (-each[1], each[0]))[:3]),
        f"{median(min(run.seen.values()) for run in seen):g}" if seen else "",
        shown(median(run.cost for run in runs)),
        shown(max(run.cost for run in runs)),
        str(len(costly)),
        str(sum(bool(run.seen) for run in costly)) if costly else "",
        shown(max(backs)) if backs else "",
        str(sum(run.halted for run in runs) or ""),
    ]


def shown(cost: float) -> str:
    """Formats nats."""
    return f"{cost:+.3f}" if abs(cost) < 99.9995 else "above +100"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def alarms(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns a row for each false alarm: runs without a fault that have an event."""
    rows = []
    for one in found:
        if one["part"] in ("clean", "partner"):
            rows += [[one["name"], str(tick), event, kind] for tick, event, kind in told(one)]
    return rows


def aims(runs: Sequence[Scored]) -> list[str]:
    """Returns a line for each aim, with what was reached."""
    memory = [run for run in runs if run.group == "memory"]
    others = [run for run in runs if run.group != "memory" and run.costly]
    seen = [run for run in others if run.seen]
    known = [run for run in seen if run.back is not None]
    near = [run for run in known if run.back is not None and run.back <= BOUND]
    put_back = [run for run in memory if run.seen and run.back is not None]
    return [
        f"memory faults seen: {share(sum(bool(run.seen) for run in memory), len(memory))}; aim: all",
        f"of these run again with the ways back, that did not halt, within 0.001 of the clean run: "
        f"{share(sum(run.back <= EXACT for run in put_back if run.back is not None), len(put_back))}; halted: "
        f"{sum(run.halted for run in memory)}",
        f"other faults that cost more than {BOUND} seen: {share(len(seen), len(others))}; aim: 90 %",
        f"of these, with the ways back, within {BOUND} of the clean run: {share(len(near), len(known))}; aim: all; "
        f"halted: {sum(run.halted for run in seen)}",
    ]


def share(part: int, whole: int) -> str:
    """Formats a share."""
    return f"{part} of {whole}" + (f" ({100 * part / whole:.0f} %)" if whole else "")


def report(found: Sequence[Mapping[str, Any]]) -> str:
    """Returns the tables: kinds of faults, aims, costly runs that nothing saw, and false alarms."""
    runs = scored(found)
    clean = [one for one in found if one["part"] == "clean"]
    crashed = [f"{one['name']}: {one['reason']}" for one in found if one["status"] == "crashed"]
    silent = sorted((run for run in runs if run.costly and not run.seen), key=lambda run: -run.cost)
    false = alarms(found)
    parts = [
        table(HEAD, by_kind(runs)),
        "\n".join(aims(runs)),
        f"events before the fault: {sum(run.false for run in runs)} in {len(runs)} faulty runs",
        f"clean runs with an event: {share(len({row[0] for row in false if row[0].startswith('clean')}), len(clean))}",
    ]
    if false:
        parts.append(table(["run", "step", "event", "kind"], false))
    if silent:
        rows = [[run.kind, run.setting, shown(run.cost)] for run in silent]
        parts.append("Costly and not seen:\n\n" + table(["fault", "setting", "cost"], rows))
    if crashed:
        parts.append("Crashed:\n\n" + "\n".join(crashed))
    return "\n\n".join(parts)
