"""Summarizes a comparison in sentences: the best runs, divergence, incidents, sensitivity and throughput."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from stabletrain.beside.comparison.by_setting import Setting, sentence
from stabletrain.beside.comparison.intervals import of_independent
from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.settings import setting_text, value_of

Row = Mapping[str, Any]
"""A run's row of the table, column name to value; None if the cell is empty."""

NAMED = 3
"""Maximum number of names in a sentence; the others are only counted."""

FEW = 5
"""If more settings than this differ, a run is named by its folder and not by its settings."""


def headline(
    runs: Sequence[Run],
    rows: Sequence[Row],
    arms: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
    settings: Sequence[Setting] = (),
) -> list[str]:
    """Returns the sentences, the most important one first.

    Args:
        rows: the rows of `runs`, in the same order.
        arms: learning-rate sensitivity, as returned by `comparison.arm_values`.
        keys: the settings that tell the runs apart.
        settings: compared over the seeds. If one has several runs, the best setting is named, and not the best run.
    """
    several = any(each.runs > 1 for each in settings) and len(settings) > 1
    first = sentence(settings, runs[0].loss_unit) if several else ""
    sentences = [first or best(runs, rows, keys), status_counts(rows), copies(runs)]
    sentences += [diverged(runs, rows, keys), incidents(runs)]
    return [sentence for sentence in (*sentences, sensitivities(arms), fastest(rows)) if sentence]


def name_of(run: Run, keys: Sequence[str]) -> str:
    """Names a run by its settings, `qknorm=none optimizer.lr=0.1`, or by its folder if none or too many differ."""
    if not run.settings or not keys:
        return run.name
    if len(keys) > FEW:
        return run.label or f"{run.sweep}/{run.name}"
    return " ".join(f"{key}={setting_text(value_of(run, key))}" for key in keys)


def best(runs: Sequence[Run], rows: Sequence[Row], keys: Sequence[str]) -> str:
    """Names the finished run with the lowest loss."""
    ended = [i for i, row in enumerate(rows) if is_number(row.get("val_loss")) and row.get("status") == "finished"]
    if not ended:
        return "No run has finished with a validation loss yet." if rows else "There are no runs."
    first = min(ended, key=lambda i: rows[i]["val_loss"])
    accuracy = rows[first].get("val_accuracy")
    accurate = f", accuracy {100 * accuracy:.2f} %" if is_number(accuracy) else ""
    loss = f"validation loss {rows[first]['val_loss']:.4g}{runs[first].loss_unit}{accurate}"
    if len(runs) == 1:
        return f"{loss[0].upper()}{loss[1:]} after {rows[first].get('steps') or 0:,} steps."
    return f"Best: {name_of(runs[first], keys)}, {loss}."


def status_counts(rows: Sequence[Row]) -> str:
    """Counts the runs by status."""
    states = Counter(str(row.get("status")) for row in rows)
    if not rows or (len(rows) == 1 and states.get("finished")):
        return ""
    words = ", ".join(f"{count:,} {state}" for state, count in states.most_common())
    return f"{plural(len(rows), 'run')}: {words}."


def copies(runs: Sequence[Run]) -> str:
    """Names the folders that hold a copy of another run, with the same id."""
    found = [f"{folder} (a copy of {run.folder})" for run in runs for folder in run.copies]
    return f"Not counted, because the run id is the same: {joined_names(found)}." if found else ""


def diverged(runs: Sequence[Run], rows: Sequence[Row], keys: Sequence[str]) -> str:
    """Names the runs that diverged."""
    gone = [run for run, row in zip(runs, rows, strict=True) if row.get("diverged")]
    if not gone:
        return ""
    if len(runs) == 1:
        return "The run diverged."
    return f"{len(gone):,} diverged: {joined_names([name_of(run, keys) for run in gone[: NAMED + 1]], len(gone))}."


def incidents(runs: Sequence[Run]) -> str:
    """Counts the incidents, the runs that had any, and the most common causes."""
    causes = Counter(one.get("cause") or one.get("kind") or "unknown" for run in runs for one in run.incidents)
    if not causes:
        return "No incidents."
    total, hit = sum(causes.values()), sum(bool(run.incidents) for run in runs)
    where = f" in {plural(hit, 'run')}" if len(runs) > 1 else ""
    named = joined_names([f"{cause} ({count})" for cause, count in causes.most_common()])
    return f"{plural(total, 'incident')}{where}: {named}."


def sensitivities(arms: Sequence[Mapping[str, Any]]) -> str:
    """Names the arm with the lowest losses, and the arms that are least and most sensitive to the learning rate."""
    known = [arm for arm in arms if is_number(arm["sensitivity"]) and all(map(is_number, arm["loss"]))]
    if len(known) < 2:
        return ""
    known.sort(key=lambda arm: math.fsum(arm["loss"]))
    best = known[0]
    mean = f"{math.fsum(best['loss']) / len(best['loss']):.4g} nats"
    if all(is_always_lower(best, arm) for arm in known[1:]):
        first = f"{best['name']} has the lowest final loss at every learning rate, {mean} on average."
    else:
        first = f"No setting is best at every learning rate. {best['name']} has the lowest mean final loss, {mean}."
    least, most = (pick(known, key=lambda arm: arm["sensitivity"]) for pick in (min, max))
    if least is most:
        return first
    lower, higher = least.get("by_seed", {}), most.get("by_seed", {})
    gap = of_independent([higher[seed] - lower[seed] for seed in lower if seed in higher])
    if gap.count > 1 and not gap.excludes_zero:
        return (
            f"{first} Sensitivities to the learning rate are not told apart: from {least['sensitivity']:.3f} to "
            f"{most['sensitivity']:.3f} nats; paired by seed, {gap.low:+.2g} to {gap.high:+.2g}."
        )
    # Low sensitivity alone is no recommendation: a setting may be equally bad at every rate.
    better = next((arm["name"] for arm in known if is_always_lower(arm, least)), None)
    worse = f", but {better} is better at every rate" if better else ""
    return (
        f"{first} Least sensitive to the learning rate: {least['name']} ({least['sensitivity']:.3f} nats{worse}); "
        f"most sensitive: {most['name']} ({most['sensitivity']:.3f})."
    )


def is_always_lower(arm: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether the mean loss of `arm` is lower at every learning rate; both have the same rates."""
    return all(mine < its for mine, its in zip(arm["loss"], other["loss"], strict=True))


def fastest(rows: Sequence[Row]) -> str:
    """Names the fastest card and precision, if there are several and all use the same unit."""
    groups = throughput(rows)
    if len(groups) < 2 or len({group["unit"] for group in groups}) > 1:
        return ""
    first, second = groups[0], groups[1]
    ratio = f", {first['median'] / second['median']:.2g} times as fast as {second['card']} in {second['precision']}"
    return (
        f"Fastest: {first['card']} in {first['precision']}, {first['median']:,.0f} {first['unit']} per second{ratio}."
    )


def throughput(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns units per second by card and precision: median, lowest, highest and number of runs, fastest first."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        if is_number(row.get("units_per_s")) and row["units_per_s"] > 0:
            key = tuple(str(row.get(name) or "unknown") for name in ("card", "precision", "unit"))
            groups[key].append(row["units_per_s"])  # ty: ignore[invalid-argument-type]
    found = []
    for (card, precision, unit), rates in groups.items():
        rates.sort()
        middle = (rates[(len(rates) - 1) // 2] + rates[len(rates) // 2]) / 2
        about = {"card": card, "precision": precision, "unit": unit, "runs": len(rates)}
        found.append({**about, "median": middle, "lowest": rates[0], "highest": rates[-1]})
    return sorted(found, key=lambda group: (group["unit"], -group["median"]))


def joined_names(names: Sequence[str], total: int | None = None) -> str:
    """Joins the first `NAMED` names, and adds how many of `total` (default: all names) are left out."""
    more = (len(names) if total is None else total) - NAMED
    return "; ".join(names[:NAMED]) + (f" and {more:,} more" if more > 0 else "")


def plural(count: int, word: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
