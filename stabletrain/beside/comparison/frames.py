"""Runs as a pandas data frame, one row per run: the data of `stabletrain compare`, for your own analysis.

from stabletrain.beside.comparison import by_seed, frame

runs = frame("multirun/2026-11-21/16-45-39")
runs.sort_values("val_loss")[["run", "settings.optimizer.lr", "val_loss", "cause"]]
by_seed(runs)                                         # one row for runs that differ only in their seed
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stabletrain.beside.comparison.groups import SEED
from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.runs import read_runs
from stabletrain.beside.comparison.reading.settings import (
    distinguishing_keys,
    overridden_keys,
    shared_settings,
    value_of,
    varying_keys,
)
from stabletrain.beside.comparison.sensitivity import arms, grouped
from stabletrain.tracking.columns import COLUMNS, IN_FRAME

UNITS = ("tokens", "images", "samples")
"""Units that throughput may be logged in."""

DTYPES = {name: COLUMNS[name].dtype for name in IN_FRAME}
"""The columns that always exist, in order, with their dtypes."""


def frame(*folders: str | Path, processes: int | None = None) -> pd.DataFrame:
    """Reads runs into a data frame with one row per run, indexed by the run folder. Copies of a run count once.

    | column | |
    |---|---|
    | run, sweep | names of the run folder (with the folders above it, if names clash) and of its parent folder |
    | status | finished, halted, preempted, failed, running; `empty`, `broken` |
    | problem | one sentence on what the reader should know about the run |
    | steps | last logged step |
    | val_loss, val_accuracy | last evaluation: nats per target, and a fraction |
    | best_val_loss, best_step | lowest validation loss, and its step |
    | loss_at_init | loss of the first step: the cross-entropy, in nats, or that of another objective |
    | diverged | the run was halted, or finished with a loss that is not finite |
    | sensitivity | learning-rate sensitivity in nats, over runs that differ only in learning rate and seed |
    | spike_score | fraction of steps whose loss was a spike, or that were skipped as one |
    | skips, rollbacks, incidents | their numbers; skips without fp16's routine overflows |
    | cause | cause of the first incident |
    | healings | halts after which the run went on with a fix that it had tried; NA for none |
    | forecasts | how often trouble was foretold; NA for never |
    | units_per_s, unit | training throughput, in tokens, images or samples |
    | mfu | model FLOPs utilization, a fraction of the card's peak; missing if the peak is unknown, as on a CPU |
    | peak_memory_gb | in 1e9 bytes: allocated GPU memory, or the resident memory of the process on a CPU |
    | card, precision | GPU (or `cpu`) and precision that the run used |
    | seed, parameters | seed, and number of model parameters |
    | seconds | training time |
    | gpu_hours, utilization, energy_kwh | of the GPUs, over all starts; see docs/reference/sweeps.md |
    | host, job | machine and Slurm job of the last start |
    | settings.<key> | one column per setting that differs between the runs |

    The frame's `attrs["shared"]` holds the settings that all runs have in common, `attrs["typed"]` the overridden keys,
    and `attrs["telling"]` the keys that are enough to tell the runs apart.

    Args:
        folders: run folders, sweep folders, or folders that contain them.
        processes: number of worker processes; by default one per available core.

    Raises:
        ConfigError: a folder does not exist, or contains no runs.
    """
    return frame_of(read_runs([Path(folder) for folder in folders], processes))


def frame_of(runs: Sequence[Run]) -> pd.DataFrame:
    """Returns the data frame of runs that are already read; see `frame`."""
    found = pd.DataFrame([row(run) for run in runs], columns=list(DTYPES))
    index = sensitivities(runs)
    found["sensitivity"] = [index.get(id(run), math.nan) for run in runs]
    found = found.astype(DTYPES)
    settings = {f"settings.{key}": [value_of(run, key) for run in runs] for key in varying_keys(runs) if key != SEED}
    found = pd.concat([found, pd.DataFrame(settings, index=found.index)], axis=1)
    found.index = pd.Index([str(run.folder) for run in runs], name="folder")
    found.attrs = {
        "shared": shared_settings(runs),
        "telling": distinguishing_keys(runs),
        "typed": overridden_keys(runs),
    }
    return found


def row(run: Run) -> dict[str, Any]:
    """Returns the columns that depend on one run only, without settings."""
    final, seed = run.record.get("final", {}), run.settings.get(SEED)
    unit = next((unit for unit in UNITS if f"{unit}_per_s" in run.ranges or f"{unit}_per_s" in final), None)

    def ended(name: str, otherwise: float) -> float:  # run.json has the value only after the end of the run
        value = final.get(name)
        return value if isinstance(value, int | float) else otherwise

    return {
        "run": run.name,
        "sweep": run.sweep,
        "status": run.status,
        "problem": run.problem,
        "steps": run.steps,
        "val_loss": run.last("val/loss"),
        "best_val_loss": run.best[0],
        "best_step": run.best[1] or None,
        "val_accuracy": run.last("val/accuracy"),
        "loss_at_init": run.initial_loss,
        "diverged": run.diverged,
        "spike_score": run.spike_score,
        "skips": len(run.skips),
        "rollbacks": run.rollbacks,
        "incidents": len(run.incidents),
        "cause": run.incidents[0]["cause"] if run.incidents else None,
        "healings": len(run.healings) or None,
        "forecasts": len(run.forecasts) or None,
        "units_per_s": math.nan if unit is None else ended(f"{unit}_per_s", run.last(f"{unit}_per_s")),
        "unit": unit,
        "mfu": ended("throughput/mfu", run.last("throughput/mfu")),
        "peak_memory_gb": ended("memory/peak_gb", run.highest("memory/peak_gb")),
        "card": run.card,
        "precision": run.precision,
        "seed": seed if isinstance(seed, int) else None,
        "parameters": run.parameters,
        "seconds": ended("seconds", run.seconds),
        "gpu_hours": run.gpu_hours,
        "utilization": run.utilization,
        "energy_kwh": run.energy_kwh,
        "host": run.host,
        "job": run.job,
    }


def sensitivities(runs: Sequence[Run]) -> dict[int, float]:
    """Returns the mean sensitivity of each run's arm by the run's `id()`, without runs of incomplete arms."""
    values = {arm.name: arm.sensitivities() for arm in arms(runs)}
    members = grouped(runs) if values else {}
    return {
        id(run): statistics.fmean(values[name])
        for name, seeds in members.items()
        if values.get(name)
        for curve in seeds.values()
        for run in curve.values()
    }


MEASURED = ("val_loss", "best_val_loss", "val_accuracy", "loss_at_init", "sensitivity", "spike_score")
PACE = ("units_per_s", "mfu", "peak_memory_gb", "seconds", "utilization")
SPENT = ("gpu_hours", "energy_kwh")


def by_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """Merges runs that differ only in their seed into one row, in the order of their first runs.

    The columns are those of `frame`, with these differences:

    | column | |
    |---|---|
    | measured numbers | mean over the group, with the extremes in `<name>_min` and `<name>_max` |
    | n | number of runs in the group |
    | finished | number of runs that finished and did not diverge; losses are means over these runs, if there are any |
    | diverged, skips, rollbacks, healings, incidents, forecasts | sums over the group |
    | gpu_hours, energy_kwh | sums over the group; missing if that of a run is |
    | cause | first cause in the group |
    | status | such as `2 finished, 1 halted` |
    | run, seed, host, job | all values, separated by commas |

    The index is the folder of the group's first run.
    """
    keys = [*(name for name in runs.columns if name.startswith("settings.")), "card", "precision"]
    label = runs[keys].map(repr).agg("\n".join, axis=1) if len(runs) else pd.Series(dtype=str)
    rows, index = [], []
    for _, group in runs.groupby(label, sort=False):
        rows.append(summary(group, keys))
        index.append(group.index[0])
    found = pd.DataFrame(rows, index=pd.Index(index, name="folder"))
    found = found.astype({name: "Int64" for name in ("healings", "forecasts") if name in found})  # they may be missing
    found.attrs = dict(runs.attrs)
    return found


def summary(group: pd.DataFrame, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the row of one group of `by_seed`."""
    well = group[(group["status"] == "finished") & ~group["diverged"]]
    first = group.iloc[0]
    statuses = group["status"].value_counts(sort=False)
    found: dict[str, Any] = {
        "run": ", ".join(group["run"]),
        "sweep": first["sweep"],
        "status": statuses.index[0] if len(statuses) == 1 else ", ".join(f"{n} {name}" for name, n in statuses.items()),
        "problem": "; ".join(group["problem"].dropna()) or None,
        "n": len(group),
        "finished": len(well),
        "diverged": int(group["diverged"].sum()),
        "steps": int(group["steps"].max()),
    }
    for among, names in ((well if len(well) else group, MEASURED), (group, PACE)):
        for name in names:
            found |= {name: among[name].mean(), f"{name}_min": among[name].min(), f"{name}_max": among[name].max()}
    found |= {name: int(group[name].sum()) for name in ("skips", "rollbacks", "incidents")}
    found |= {name: int(group[name].sum()) or None for name in ("healings", "forecasts")}
    found |= {name: group[name].sum(skipna=False) for name in SPENT}
    found |= {name: ", ".join(group[name].dropna().unique()) or None for name in ("host", "job")}
    causes, seeds = group["cause"].dropna(), group["seed"].dropna()
    found |= {"cause": causes.iloc[0] if len(causes) else None, "seed": ", ".join(str(seed) for seed in seeds)}
    return found | {name: first[name] for name in ("unit", "parameters", *keys)}
