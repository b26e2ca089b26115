"""The law of advice: who follows the first fix that a troubled run names ends about as well as with a right setting.

    python -m tests.reliability.advice --number 2 --processes 2 --json advice.json

The cases are the settings of `whatif/cases.py` whose trouble is a setting, each with its known right ones. A case runs
with `guard=skip` and with `guard=rollback`. If it halts, ends with less than half of what it had learnt, or files an
incident, it runs again from step 0 with the fix that it names first: of its newest incident, or, if it halts without
one, a lower learning rate. This goes on until nothing is wrong, at most `FOLLOWED` times.

- **right**: with the first fix, the validation loss is at most 5 % above that of the best right setting.
- **none**: no fix that can be typed, or cause `unknown`.
- **loop**: a fix that was followed before is named again.

A case that has no trouble is left out.
"""

import argparse
import contextlib
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from stabletrain.trainer.after_halt import incident_fixes, usual_fixes
from tests.reliability.whatif import cases as whatif
from tests.reliability.whatif.cases import GPT, Case, Drawn, log_uniform
from tests.reliability.whatif.record import trained


def init(draw: random.Random) -> Drawn:
    """Weights that start too large, at the usual learning rate."""
    settings = ("init=normal", f"init.std={draw.choice([0.5, 1.0, 2.0, 4.0])}", "optimizer.lr=0.003")
    return Drawn((*GPT, *settings), ("init",), (("init=gpt2",),))


def some_rate(draw: random.Random) -> Drawn:
    """A learning rate that is too high, but not by far."""
    lr = log_uniform(draw, 0.02, 0.3)
    return Drawn(
        (*GPT, f"optimizer.lr={lr}", "warmup=none", "clipping=none"), ("rate",), ((f"optimizer.lr={lr / 10:.2g}",),)
    )


def slow_moments(draw: random.Random) -> Drawn:
    """A very slow second moment at a high, but not far too high learning rate."""
    settings = (f"optimizer.lr={log_uniform(draw, 0.01, 0.03)}", "optimizer.betas=[0.9,0.9999]", "warmup.steps=300")
    return Drawn((*GPT, *settings), ("beta2",), (("optimizer.betas=[0.9,0.95]",),))


FAMILIES: dict[str, Callable[[random.Random], Drawn]] = {
    **{name: whatif.FAMILIES[name] for name in ("rate", "attention", "logits", "stale", "deep", "muon")},
    **{name: whatif.FAMILIES[name] for name in ("rate_and_stale", "nf_resnet", "resnet_rate")},
    **{each.__name__: each for each in (init, some_rate, slow_moments)},
}
"""Families whose trouble is a setting: of `whatif/cases.py`, and some here. fp16 takes minutes on a CPU."""

GUARDS = ("skip", "rollback")

FOLLOWED = 3

CLOSE = 1.05


def value_of(case: Case, key: str) -> float:
    """Returns the number that a case sets a key to."""
    return float(next(each for each in case.overrides if each.startswith(f"{key}=")).partition("=")[2])


def usual_lr(case: Case) -> float:
    """Returns the learning rate that the case's model usually has."""
    experiment = any(each.startswith("experiment=") for each in case.overrides)
    return 0.1 if experiment else 3e-3


def first_fix(run: dict[str, Any], folder: Path, case: Case) -> str:
    """Returns the fix that a troubled run names first; empty if there is none that can be typed."""
    if known := incident_fixes(folder):
        return known[0]
    if run["status"] != "halted":
        return ""
    return usual_fixes("spike", {"optimizer.lr": value_of(case, "optimizer.lr")}, usual_lr(case))[0]


def causes(folder: Path) -> list[str]:
    """Returns the causes of a run's incidents."""
    return [json.loads(file.read_text())["cause"] for file in sorted(folder.glob("incidents/*/diagnosis.json"))]


def follow(case: Case, guard: str, place: Path) -> list[dict[str, Any]]:
    """Returns the run, and those that followed advice."""
    words, told = [*case.overrides, f"guard={guard}"], []
    for number in range(1 + FOLLOWED):
        folder = place / f"{guard}-{number}"
        run = trained(words, folder)
        fix, found = (first_fix(run, folder, case), causes(folder)) if folder.is_dir() else ("", [])
        told.append({**{key: run.get(key) for key in ("status", "val", "diverged", "reason")}, "causes": found})
        if run["status"] != "halted" and not run["diverged"] and not found:
            break
        told[-1]["fix"] = fix
        if not fix or any(each.get("fix") == fix for each in told[:-1]):
            break
        words = [*words, fix]
    return told


def record(name: tuple[str, int]) -> dict[str, Any]:
    """Runs a case with its right settings and with each guard."""
    torch.set_num_threads(1)
    case = Case(f"{name[0]}/{name[1]}", FAMILIES[name[0]](random.Random(f"{name[0]}/{name[1]}")))
    rate = value_of(case, "optimizer.lr")
    right = [*case.drawn.grid, *((f"optimizer.lr={each:.3g}",) for each in (rate / 5, usual_lr(case)))]
    with tempfile.TemporaryDirectory() as place, contextlib.suppress(KeyboardInterrupt):
        found = {guard: follow(case, guard, Path(place)) for guard in GUARDS}
        ends = {}
        for number, fix in enumerate(right if any(troubled(runs) for runs in found.values()) else []):
            run = trained((*case.overrides, *fix), Path(place) / f"right-{number}")
            healthy = run["status"] == "finished" and not run["diverged"]
            ends[" ".join(fix)] = run["val"] if healthy else None
        return {"case": case.name, "overrides": list(case.overrides), "right": ends, "runs": found}
    return {}


def troubled(runs: Sequence[dict[str, Any]]) -> bool:
    """Whether the first of a case's runs had trouble."""
    return "fix" in runs[0]


def verdict(runs: Sequence[dict[str, Any]], right: dict[str, float | None]) -> str:
    """Returns how following the advice ended; empty without trouble."""
    if not troubled(runs):
        return ""
    fixes = [each["fix"] for each in runs if each.get("fix")]
    if len(fixes) > len({*fixes}):
        return "loop"
    if len(runs) == 1 or set(runs[0]["causes"]) == {"unknown"}:
        return "none"
    best, then = min((each for each in right.values() if each is not None), default=None), runs[1]
    good = best is not None and then["status"] == "finished" and then["val"] is not None
    return "right" if good and then["val"] <= CLOSE * best else "worse"


def table(found: Sequence[dict[str, Any]]) -> str:
    """Returns the counts by family and guard."""
    lines = ["| family | guard | troubled | right | worse | none | loop |", "|---|---|---|---|---|---|---|"]
    counts = []
    for family in [*dict.fromkeys(each["case"].partition("/")[0] for each in found), "all"]:
        for guard in GUARDS:
            mine = [each for each in found if family in ("all", each["case"].partition("/")[0])]
            ends = [verdict(each["runs"][guard], each["right"]) for each in mine]
            counts = [sum(end == kind for end in ends) for kind in ("right", "worse", "none", "loop")]
            lines.append(f"| {family} | {guard} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the cases, prints the table, and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=2, help="cases of each family")
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, separated by commas")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--json", type=Path, help="results, a line for each case; cases that are there are not run again"
    )
    given = parser.parse_args()
    file = given.json
    found = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    known = {each["case"] for each in found}
    names = [(family, number) for number in range(given.number) for family in given.only.split(",")]
    with ProcessPoolExecutor(given.processes) as pool:
        for each in pool.map(record, [name for name in names if f"{name[0]}/{name[1]}" not in known]):
            found.append(each)
            print(each["case"], {guard: verdict(each["runs"][guard], each["right"]) for guard in GUARDS}, flush=True)
            if file:
                with file.open("a") as out:
                    out.write(json.dumps(each) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
