"""Hand-written sweeps and run folders."""

import json

from omegaconf import OmegaConf

from stabletrain.beside.sweep.plan import Grid, Sweep

RUNS = [["steps=5", f"seed={number}"] for number in range(4)]
"""Overrides of each run of the sweep."""


def sweep_of(folder, runs=RUNS, count=4, **fields):
    """Returns a sweep over `seed`."""
    return Sweep(folder, "python train.py -m seed=0,1,2,3", runs, ["seed"], count, "basic", 0.0)._replace(**fields)


def ran(folder, overrides, status="finished", loss=2.0, **fields):
    """Writes the folder and `run.json` of a run that ended with this status."""
    folder.mkdir(parents=True)
    final = {"val/loss": loss, "steps": 5} if status == "finished" else {}
    record = {"id": "abcdefgh", "status": status, "reason": None, "options": [], "overrides": overrides, "final": final}
    (folder / "run.json").write_text(json.dumps(record | fields))
    return record | fields


def grid_of(runs, **launcher):
    """Returns what `grid` returns, with these launcher settings."""
    hydra = {"runtime": {"choices": {"hydra/launcher": "joblib"}}, "launcher": launcher}
    return Grid(OmegaConf.create({"hydra": hydra}), "basic", runs, ["seed"], len(runs))
