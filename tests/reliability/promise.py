"""Campaign of optimizer and state faults: nothing not finite stays, the cause is named, and the run is as without it.

    python -m tests.reliability.promise --runs 200 --seed 0

Half of the runs have an optimizer that makes NaN of finite gradients (`fragile.py`); it has to be named
`unsafe_optimizer` or `bad_setting`, and the weights have to be finite. The others have one fault of the machine in a
weight, a moment, an activation, a gradient or an update, at a random step; they have to end with the bits of the same
run without it, and to be named as what they are.
"""

import argparse
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from stabletrain.errors import TrainingHalted
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.reliability.fragile import FRAGILE
from tests.runs import TINY_GPT, TINY_RESNET, composed

MODELS = {"gpt": [*TINY_GPT], "resnet": [*TINY_RESNET, "model.depth=8", "batch_size=8"]}
RUN = ["steps=24", "eval_every=24", "report=false", "wandb=disabled", "monitors=none", "checkpoint=off", "warmup=none"]
GUARDS = {"rollback": ["guard=rollback", "guard.snapshot_every=7", "guard.healthy_after=3"], "skip": ["guard=skip"]}
PRECISIONS = ("fp32", "bf16")

STATE = {
    "weight NaN": ["faults=optimizer"],
    "moment NaN": ["faults=optimizer", "faults.where=moment"],
    "weight bit": ["faults=bitflip", "faults.where=weight"],
    "moment bit": ["faults=bitflip", "faults.where=moment"],
    "activation": ["faults=activation"],
    "gradient": ["faults=gradient"],
}
"""Faults of the machine; the bit flips need checksums between all updates, and snapshots to go back to."""

EXPECTED = {"weight bit": "corrupt_state", "moment bit": "corrupt_state"}
"""Causes; of all others `hardware_fault`."""


def ended(folder: Path, overrides: list[str], optimizer: Any = None) -> tuple[Any, str]:
    """Trains a run; returns it, and what halted it."""
    with composed(*overrides) as cfg:
        job = build(cfg, folder)
    if optimizer is not None:
        job.state.optimizer = job.saved.state.optimizer = optimizer(job.state.model.parameters())
    try:
        train(job)
    except TrainingHalted as halt:
        return job, str(halt)
    return job, ""


def bits(job: Any) -> dict[str, torch.Tensor]:
    """Returns weights, buffers and moments by name."""
    names = {parameter: name for name, parameter in job.state.model.named_parameters()}
    moments = {
        f"{names[parameter]}/{key}": value
        for parameter, state in job.state.optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    return {**job.state.model.state_dict(), **moments}


def causes(folder: Path) -> list[str]:
    """Returns the causes of a run's incidents."""
    return [json.loads(path.read_text())["cause"] for path in sorted(folder.glob("incidents/*/diagnosis.json"))]


def drawn(number: int, seed: int) -> dict[str, Any]:
    """Returns what run `number` of a campaign is."""
    draw = random.Random(f"{seed}/{number}")
    kind = draw.choice(sorted(FRAGILE if number % 2 else STATE))
    guard = "rollback" if kind.endswith("bit") else draw.choice(sorted(GUARDS))
    model, seed, precision = draw.choice(sorted(MODELS)), draw.randrange(99), draw.choice(PRECISIONS)
    if kind == "fp16 weights":  # PyTorch refuses normalisations with fp16 weights and bf16 inputs
        model, precision = "gpt", "fp32"
    overrides = [*MODELS[model], *RUN, *GUARDS[guard], f"seed={seed}", f"precision={precision}"]
    overrides.append("guard.checksum_every=1")
    fault = [] if number % 2 else [*STATE[kind], f"faults.at=[{draw.randrange(2, 22)}]", f"faults.seed={number}"]
    if kind.endswith("bit"):
        fault.append(f"faults.bit={draw.randrange(31)}")
    return {"kind": kind, "model": model, "guard": guard, "overrides": overrides, "fault": fault}


def outcome(run: dict[str, Any], folder: Path) -> dict[str, bool]:
    """Returns whether a run ended with something that is not finite, was named, and has the bits of the clean run."""
    kind = run["kind"]
    if not run["fault"]:
        job, _ = ended(folder / "run", [*run["overrides"], "init=zero_residual"], FRAGILE[kind])
        told = causes(folder / "run")
        named = bool(told) and {*told} <= {"unsafe_optimizer", "bad_setting"}
        return {"corrupted": not all_finite(job), "named": named, "same": True}
    clean, _ = ended(folder / "clean", run["overrides"])
    job, halt = ended(folder / "run", [*run["overrides"], *run["fault"]])
    found, expected = bits(job), bits(clean)
    same = found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    told = causes(folder / "run")
    named = told == [EXPECTED.get(kind, "hardware_fault")]
    return {"corrupted": not all_finite(job), "named": named, "same": same and not halt}


def all_finite(job: Any) -> bool:
    """Returns whether weights, buffers and moments are finite."""
    return all(bool(torch.isfinite(each).all()) for each in bits(job).values() if each.is_floating_point())


def campaign(runs: int, seed: int) -> list[tuple[dict[str, Any], dict[str, bool]]]:
    """Runs a campaign; returns each run with its outcome."""
    found = []
    for number in range(runs):
        run = drawn(number, seed)
        with tempfile.TemporaryDirectory() as folder:
            found.append((run, outcome(run, Path(folder))))
        print(number, run["kind"], run["model"], run["guard"], found[-1][1], flush=True)
    return found


def table(found: list[tuple[dict[str, Any], dict[str, bool]]]) -> str:
    """Returns a Markdown table of the outcomes by kind."""
    counts = {kind: Counter[str]() for kind in sorted({run["kind"] for run, _ in found})}
    for run, result in found:
        counts[run["kind"]].update(runs=1, **{name: int(value) for name, value in result.items()})
    lines = ["| fault | runs | corrupted | cause right | as without it |", "|---|---|---|---|---|"]
    for kind, each in counts.items():
        same = each["same"] if kind in STATE else "-"
        lines.append(f"| {kind} | {each['runs']} | {each['corrupted']} | {each['named']} | {same} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    print(table(campaign(chosen.runs, chosen.seed)))
