"""Runs as a data frame, one row a run: what `stabletrain compare` shows, for your own analysis.

from stabletrain.compare import by_seed, frame

runs = frame("multirun/2026-11-21/16-45-39")
runs.sort_values("val_loss")[["run", "settings.optimizer.lr", "val_loss", "cause"]]
by_seed(runs)                                         # one row for runs that differ in their seed only
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stabletrain.compare.reading.run import Run
from stabletrain.compare.reading.runs import read_runs
from stabletrain.compare.reading.settings import shared, telling, typed_keys, value_of, varied
from stabletrain.compare.sensitivity import SEED, Arm, arms, grouped
from stabletrain.tracking.columns import COLUMNS, IN_FRAME

UNITS = ("tokens", "images", "samples")
"""What a run's pace can be counted in."""

DTYPES = {name: COLUMNS[name].dtype for name in IN_FRAME}
"""The columns that are always there, in their order, and their types."""


def frame(*folders: str | Path, processes: int | None = None) -> pd.DataFrame:
    """Runs as a data frame, one row each; the index is the run's folder.

    | column | |
    |---|---|
    | run, sweep | names of its folder and of the one above |
    | status | finished, halted, preempted, failed, running; `empty`, `broken` |
    | problem | what a reader should know of it, one sentence |
    | steps | the last that was logged |
    | val_loss, val_accuracy | of the last evaluation: nats a target, and a share |
    | best_val_loss, best_step | the lowest, and its step |
    | loss_at_init | cross-entropy of the first step, nats |
    | diverged | halted, or ended in a loss that is not finite |
    | sensitivity | to the learning rate, nats: of the runs that differ from it in rate and seed only |
    | spike_score | share of steps whose loss was a spike, as the run counted them |
    | skips, rollbacks, incidents | how many; skips without fp16's routine overflows |
    | cause | of the first incident |
    | units_per_s, unit | pace of training, in tokens, images or samples |
    | mfu | model FLOPs utilisation, a share of the card's peak; missing where that is not known, as on a CPU |
    | peak_memory_gb | 1e9 bytes: a card's allocated memory, or the process's resident memory on a CPU |
    | card, precision | what it ran on, and in |
    | seed, parameters | |
    | seconds | of training |
    | settings.<key> | one for each setting that differs between the runs |

    `attrs["shared"]` of the frame holds the settings that all runs have in common, `attrs["typed"]` the keys that were
    typed for any of them, and `attrs["telling"]` those that are enough to tell the runs apart.

    Args:
        folders: run folders, sweeps', or folders above several of them.
        processes: that read at the same time; by default as many as there are cores to use.

    Raises:
        ConfigError: a folder is not there, or holds no run.
    """
    return frame_of(read_runs([Path(folder) for folder in folders], processes))


def frame_of(runs: Sequence[Run]) -> pd.DataFrame:
    """The data frame of runs that have been read."""
    found = pd.DataFrame([row(run) for run in runs], columns=list(DTYPES))
    index = sensitivities(runs)
    found["sensitivity"] = [index.get(id(run), math.nan) for run in runs]
    found = found.astype(DTYPES)
    settings = {f"settings.{key}": [value_of(run, key) for run in runs] for key in varied(runs) if key != SEED}
    found = pd.concat([found, pd.DataFrame(settings, index=found.index)], axis=1)
    found.index = pd.Index([str(run.folder) for run in runs], name="folder")
    found.attrs = {"shared": shared(runs), "telling": telling(runs), "typed": typed_keys(runs)}
    return found


def row(run: Run) -> dict[str, Any]:
    """The columns of one run, but for the settings and what needs the others."""
    final, seed = run.record.get("final", {}), run.settings.get(SEED)
    unit = next((unit for unit in UNITS if f"{unit}_per_s" in run.ranges or f"{unit}_per_s" in final), None)

    def ended(name: str, otherwise: float) -> float:
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
        "loss_at_init": run.first("train/ce"),
        "diverged": run.diverged,
        "spike_score": run.spike_score,
        "skips": len(run.skips),
        "rollbacks": run.rollbacks,
        "incidents": len(run.incidents),
        "cause": run.incidents[0]["cause"] if run.incidents else None,
        "units_per_s": math.nan if unit is None else ended(f"{unit}_per_s", run.last(f"{unit}_per_s")),
        "unit": unit,
        "mfu": ended("throughput/mfu", run.last("throughput/mfu")),
        "peak_memory_gb": ended("memory/peak_gb", run.highest("memory/peak_gb")),
        "card": run.card,
        "precision": run.precision,
        "seed": seed if isinstance(seed, int) else None,
        "parameters": run.parameters,
        "seconds": ended("seconds", run.seconds),
    }


def sensitivities(runs: Sequence[Run]) -> dict[int, float]:
    """The mean sensitivity of each run's arm, by the run's `id()`; missing where its arm is incomplete."""
    found: dict[str, Arm] = {arm.name: arm for arm in arms(runs)}
    members = grouped(runs) if found else {}
    values = {name: found[name].sensitivities() for name in members if name in found}
    return {
        id(run): statistics.fmean(values[name])
        for name, seeds in members.items()
        if values.get(name)
        for curve in seeds.values()
        for run in curve.values()
    }


MEASURED = ("val_loss", "best_val_loss", "val_accuracy", "loss_at_init", "sensitivity", "spike_score")
PACE = ("units_per_s", "mfu", "peak_memory_gb", "seconds")


def by_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """One row for the runs that differ in their seed only, in the order of their first.

    Columns: those of `frame`, with, of every measured number, the mean under its own name and the lowest and highest
    under `<name>_min` and `<name>_max`; `n`, the runs of the group; `finished`, those that finished and did not
    diverge, over which losses are taken; `diverged`, how many did; `skips`, `rollbacks` and `incidents` summed;
    `cause`, the first; `status`, such as `2 finished, 1 halted`; `run` and `seed`, all of them in words. The index is
    the first run's folder.
    """
    keys = [*(name for name in runs.columns if name.startswith("settings.")), "card", "precision"]
    label = runs[keys].map(repr).agg("\n".join, axis=1) if len(runs) else pd.Series(dtype=str)
    rows, index = [], []
    for _, group in runs.groupby(label, sort=False):
        rows.append(summary(group, keys))
        index.append(group.index[0])
    found = pd.DataFrame(rows, index=pd.Index(index, name="folder"))
    found.attrs = dict(runs.attrs)
    return found


def summary(group: pd.DataFrame, keys: Sequence[str]) -> dict[str, Any]:
    """The row of one group."""
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
    causes, seeds = group["cause"].dropna(), group["seed"].dropna()
    found |= {"cause": causes.iloc[0] if len(causes) else None, "seed": ", ".join(str(seed) for seed in seeds)}
    return found | {name: first[name] for name in ("unit", "parameters", *keys)}
