"""A run's own page, `report.html` in its folder.

The page says how the run ended and what the guard did. It shows the incidents, what was tried after a halt, the
forecasts, curves, generated sample, settings, machine and package versions.
"""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stabletrain.beside.comparison.pages import charts
from stabletrain.beside.comparison.pages.headline import is_number, plural
from stabletrain.beside.comparison.pages.rendering import page, write
from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.runs import read_run
from stabletrain.beside.comparison.reading.settings import Value
from stabletrain.program import program_in

SCRIPTS = ["uplot.min.js", "numbers.js", "colors.js", "chart.js", "save.js", "pictures.js", "run.js"]
STYLES = ["uplot.min.css", "page.css"]

POINTS = 500
"""Maximum number of points of a curve."""

UNITS = ("tokens", "images", "samples")


def write_run_page(folder: Path) -> None:
    """Writes the page of a run, whatever its state, into its folder; raises OSError if that fails."""
    write(run_page(read_run(folder.absolute())), folder / "report.html")


def run_page(run: Run) -> str:
    """Returns the HTML of a run's page."""
    lines = charts.chart_data(run, POINTS)
    told = charts.incident_rows(run, run.folder)
    data = {"panels": charts.panels([lines]), "run": {**lines, "name": run.name, "incidents": told}}
    own, command = commands(run)
    overrides = {
        key: run.settings.get(key, value) for key, value in run.overrides.items() if not key.startswith("hydra.")
    }
    return page(
        "comparison/pages/templates/run.html",
        scripts=SCRIPTS,
        styles=STYLES,
        data=data,
        title=f"{run.sweep}/{run.name}",
        name=run.name,
        outcome=outcome(run),
        figures=figures(run),
        incidents=[(None, one) for one in told],
        whatifs=[{**one, "link": charts.link(run.folder / one["path"], run.folder)} for one in run.whatifs],
        forecasts=run.forecasts,
        has_curves=bool(lines["curves"]),
        sample=charts.sample(run),
        own_command=own,
        command=command,
        overrides=overrides,
        settings={
            key: referred_setting(value, run.settings) for key, value in run.settings.items() if key not in overrides
        },
        machine=machine(run.record),
    )


def outcome(run: Run) -> list[str]:
    """Returns sentences on how the run ended, why, what the guard did, and the number of incidents."""
    final = run.record.get("final", {})
    loss, steps = final.get("val/loss"), final.get("steps", run.steps)
    first = f"{run.status.capitalize()} after {plural(steps, 'step')}"
    if is_number(loss):
        first += f", validation loss {loss:.4g}{run.loss_unit}"
        if is_number(final.get("val/accuracy")):
            first += f", accuracy {100 * final['val/accuracy']:.2f} %"
    elif loss is not None:
        first += ", but the validation loss is not finite: the run diverged"
    reason = run.problem or run.record.get("reason")
    remarks = run.record.get("remarks")
    said = [f"Note: {remark}." for remark in remarks] if isinstance(remarks, list) else []
    incidents = f"{plural(len(run.incidents), 'incident')}, listed below." if run.incidents else "No incidents."
    found = [f"{first}.", str(reason) if reason else "", *said, guard(final), *healings(run), incidents]
    return [sentence for sentence in found if sentence]


def guard(final: Mapping[str, Any]) -> str:
    """Returns a sentence on what the guard did; empty if that was not recorded."""
    if "guard/updates" not in final:
        return ""
    said = [f"{plural(final['guard/updates'], 'update')} in {plural(final.get('steps', 0), 'step')}"]
    for name, count in final.items():
        if name.startswith("guard/skipped_") and count:
            said.append(f"{count:,} skipped ({name.removeprefix('guard/skipped_').replace('_', ' ')})")
    if kept := final.get("guard/kept_steps"):
        said.append(f"{kept:,} kept without {plural(final.get('guard/samples_left_out', 0), 'sample')}")
    if final.get("guard/rollbacks"):
        said.append(plural(final["guard/rollbacks"], "rollback"))
    if faults := final.get("guard/machine_faults"):
        said.append(f"{plural(faults, 'step')} taken again after a fault of the machine")
    if final.get("guard/healings"):
        said.append(plural(final["guard/healings"], "healing"))
    if final.get("guard/rollbacks") or final.get("guard/healings"):
        said.append(
            f"{plural(final.get('guard/lost_steps', 0), 'step')} ({final.get('guard/lost_seconds', 0):.0f} s) lost"
        )
    return f"Guard: {', '.join(said) if len(said) > 1 else f'{said[0]}, no step skipped'}."


def healings(run: Run) -> list[str]:
    """Returns a sentence for each halt after which the run went on with a fix."""
    return [
        f"Halted at step {each['step']:,}, and went on from step {each['to']:,} with {each['arm']}, the best of "
        f"{plural(len(each['arms']), 'arm')} that were tried in {plural(each['steps'], 'step')}."
        for each in run.healings
    ]


def figures(run: Run) -> list[tuple[str, str]]:
    """Returns the key numbers of the run, without those that were not measured."""
    final = run.record.get("final", {})
    unit = next((unit for unit in UNITS if f"{unit}_per_s" in final), "units")
    best, step = final.get("best/val_loss", run.best[0]), final.get("best/step", run.best[1])
    found = [
        ("best validation loss", f"{best:.4g} at step {step:,}" if is_number(best) else None),
        (f"{unit} per second", figure(final.get(f"{unit}_per_s"), ",.0f")),
        ("of the card's peak FLOP/s", figure(run.last("throughput/mfu"), ".1%")),
        ("GB of peak memory", figure(run.highest("memory/peak_gb"), ".3g")),
        ("spike score", figure(run.spike_score, ".2g")),
        ("seconds of training", figure(final.get("seconds"), ",.0f")),
    ]
    return [(name, value) for name, value in found if value is not None]


def figure(value: Any, form: str) -> str | None:
    """Formats a number; None if it is missing or not finite."""
    return format(value, form) if is_number(value) and math.isfinite(value) else None


def referred_setting(value: Value, settings: Mapping[str, Value]) -> Value:
    """Returns the setting that an interpolation such as `${seed}` refers to; any other value unchanged."""
    refers = isinstance(value, str) and value.startswith("${") and value.endswith("}")
    return settings.get(str(value)[2:-1], value) if refers else value


def commands(run: Run) -> tuple[str, str]:
    """Returns the command of this run alone, and the recorded one: for a run of a sweep, that of the sweep."""
    command = run.record.get("command")
    if not isinstance(command, str) or not command:
        return "", ""
    above = run.folder.parent
    if not ((above / "sweep.json").exists() or (above / "multirun.yaml").exists()):
        return command, command
    arguments = [*(run.record.get("options") or []), *(run.record.get("overrides") or [])]
    return " ".join([program_in(command), shlex.join(map(str, arguments))]), command


def machine(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the run's machine, versions and commit as one flat mapping, without empty values."""
    hardware, versions, git = (record.get(name) or {} for name in ("hardware", "versions", "git"))
    found: dict[str, Any] = {name: record.get(name) for name in ("id", "started", "ended")}
    for name, value in hardware.items():
        found |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
    found |= dict(versions)
    if git.get("commit"):
        found["commit"] = f"{git['commit'][:12]}{', with uncommitted changes' if git.get('dirty') else ''}"
    return {name: value for name, value in found.items() if value not in (None, [], "", {})}
