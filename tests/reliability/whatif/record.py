"""Records a case: the run that halts, the same run that heals itself, the grid from step 0, and the arms once more.

The arms once more: the best arm of the what-if, the one after it, the fixes that are known to be right, half of the
learning rate, leaving out the data and a random arm run from the same state with a seed that did not choose the winner.
"""

import contextlib
import dataclasses
import io
import json
import math
import random
import re
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stabletrain.beside.whatif.arms import NOTHING
from stabletrain.beside.whatif.base import read_base
from stabletrain.beside.whatif.budget import FROM_0
from stabletrain.beside.whatif.driver import WhatIf, ranked
from stabletrain.beside.whatif.judging import usual_lr
from stabletrain.beside.whatif.outcome import Outcome, start_facts
from stabletrain.beside.whatif.plan import WhatIfOptions, plan
from stabletrain.beside.whatif.ranking import RankedArm
from stabletrain.beside.whatif.seeds import with_other_seeds
from stabletrain.beside.whatif.statistics import paired
from stabletrain.cli.train import build_and_train
from stabletrain.config.arguments import parse_arguments
from stabletrain.config.checks import check
from stabletrain.config.jobs import run_as_job
from stabletrain.data.order import position
from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.program import called
from stabletrain.stored.run_json import read_run_record
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.tracking.progress import InSweep
from tests.reliability.whatif.cases import Case
from tests.runs import CONF


def record(case: Case) -> dict[str, Any]:
    """Runs everything of a case; returns what was found, as JSON."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        halted = trained(case.overrides, folder / "halted")
        found: dict[str, Any] = {"case": case.name, "halted": halted}
        if not halted["halts"] and not halted["diverged"]:
            return found
        began = time.time()
        found["healed"] = trained((*case.overrides, "guard.escalate=whatif"), folder / "healed")
        found["healed"]["wall"] = time.time() - began
        found["grid"] = grid(case, halted, folder)
        if found["healed"]["halts"]:
            first = sorted((folder / "healed" / "whatif").glob("halt-*"))[0]
            found["ranking"] = ranking_of(first)
            if halted["halts"] and found["ranking"]["winner"]:
                found["again"] = again(case, folder / "halted", found["ranking"])
        return found


def record_clean(case: Case) -> dict[str, Any]:
    """Runs an ordinary run that would heal itself."""
    with tempfile.TemporaryDirectory() as place:
        return {"case": case.name, "run": trained((*case.overrides, "guard.escalate=whatif"), Path(place) / "run")}


def trained(overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Trains a run.

    Returns:
        `status`, `reason`, `steps`; `val`, the final validation loss; `train`, the mean of the last training losses;
        `diverged`, whether it ends with less than half of what it had learnt; `halts`, the steps of its halts; `heals`,
        how it went on after them; `fixes`, which the diagnoses of its incidents name.
    """
    words = [*dict.fromkeys(last_of_each(overrides))]

    def job(cfg: Any, place: Path) -> None:
        check(cfg)
        build_and_train(cfg, place, InSweep(1000, place, "run", False))

    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with called(words, words):
            try:
                run_as_job(parse_arguments([*words, f"hydra.run.dir='{folder}'"]), CONF, job)
            except TrainingHalted:
                pass
            except ConfigError as error:
                return {"status": "refused", "reason": str(error)[:300], "halts": [], "diverged": False}
    run, events = read_run_record(folder), read_jsonl(folder / "events.jsonl")
    final = run.get("final", {})
    losses = [line["train/loss"] for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line]
    kept = ("event", "step", "to", "arm", "settings", "steps")
    return {
        "status": run["status"],
        "reason": short(run.get("reason")),
        "steps": final.get("steps"),
        "val": final.get("val/loss"),
        "train": mean(losses[-5:]),
        "diverged": diverged(losses),
        "halts": [event["step"] for event in events if event["event"] == "halt"],
        "rollbacks": sum(event["event"] == "rollback" for event in events),
        "heals": [
            {**{key: event[key] for key in kept if key in event}, "why": short(event["why"])}
            for event in events
            if event["event"] in ("heal", "unhealed")
        ],
        "fixes": fixes_of(folder),
    }


def short(text: str | None) -> str:
    """Returns the beginning of a message, without the folder of the run."""
    return re.sub(r" \(/[^)]*\)", "", text or "")[:120]


def last_of_each(overrides: Sequence[str]) -> list[str]:
    """Returns overrides with only the last of each key; groups come first.

    Options of `precision` and `faults` have keys of their own: those of an option that is not the last are left out.
    """
    left = [*overrides]
    for group in ("precision", "faults"):
        last = max((at for at, each in enumerate(left) if each.startswith(f"{group}=")), default=0)
        left = [each for at, each in enumerate(left) if at > last or not each.startswith(f"{group}.")]
    found = {each.partition("=")[0].lstrip("+"): each for each in left}
    return sorted(found.values(), key=lambda each: "." in each.partition("=")[0])


def mean(values: Sequence[float]) -> float | None:
    """Returns the mean; None if it is not finite."""
    total = sum(values) / len(values) if values else math.nan
    return total if math.isfinite(total) else None


def diverged(losses: Sequence[float]) -> bool:
    """Whether a run ends with less than half of what it had learnt at its best, in means of five logged losses."""
    smooth = [sum(losses[at : at + 5]) / 5 for at in range(max(0, len(losses) - 4))]
    if not smooth:
        return False
    if not math.isfinite(smooth[-1]):
        return True
    best = min(each for each in smooth if math.isfinite(each))
    return smooth[-1] > best + 0.5 * (losses[0] - best)


def fixes_of(folder: Path) -> list[str]:
    """Returns the fixes that a run's diagnoses name, the first of each incident."""
    found = []
    for file in sorted(folder.glob("incidents/*/diagnosis.json")):
        fixes = json.loads(file.read_text()).get("fix") or []
        found += [fixes[0]] if isinstance(fixes, list) and fixes else []
    return [*dict.fromkeys(found)]


def grid(case: Case, halted: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Trains from step 0 with each right fix, and with half, a fifth, and the usual value of the learning rate."""
    fixes = [(f"optimizer.lr={rate_of(case) * factor:.4g}",) for factor in (0.5, 0.2)]
    if usual := usual_lr(read_base(folder / "halted", 0)):
        fixes.append((f"optimizer.lr={usual:g}",))
    fixes += case.drawn.grid
    settings = [tuple(each.split()) for each in halted["fixes"] if all("=" in word for word in each.split())]
    fixes += settings[:1]  # others, such as to look at a batch, are not settings
    found = []
    for number, fix in enumerate(dict.fromkeys(fixes)):
        run = trained((*case.overrides, *fix), folder / f"grid-{number}")
        found.append({"fix": " ".join(fix), **{key: run.get(key) for key in ("status", "val", "train", "diverged")}})
    return found


def ranking_of(place: Path) -> dict[str, Any]:
    """Returns the ranking of a what-if: its winner, the arms not told apart from it, and all places."""
    if not (place / "whatif.json").exists():
        return {"winner": "", "arms": []}
    text = json.loads((place / "whatif.json").read_text())
    keys = ("rank", "arm", "held", "came_back", "behind_best", "tied", "val_loss", "overrides")
    arms = [
        {**{key: each[key] for key in keys}, "broke": short(each["broke"]), "behind": each["behind_first"]}
        for each in (*text["arms"], *text["first_round_only"])
    ]
    return {**{key: text[key] for key in ("winner", "tied", "verdict", "start", "rounds")}, "arms": arms}


def again(case: Case, run: Path, ranking: dict[str, Any]) -> dict[str, Any]:
    """Runs the chosen arms with another seed from the same state, and compares them with the winner."""
    planned = plan(WhatIfOptions(run))
    winner = ranking["winner"].removeprefix(f"{FROM_0}:")  # here all arms start from one state
    ranked_names = [each["arm"] for each in ranking["arms"] if each["rank"] is not None]
    second = [name for name in ranked_names if name not in (winner, ranking["winner"])][:1]
    right = [arm.name for arm in planned.arms if is_right(arm.name, arm.overrides, case) and arm.name != winner][:2]
    draw = random.Random(f"{case.name} arm").choice([arm.name for arm in planned.arms if arm.name != NOTHING])
    wanted = {winner, *second, *right, "lr_half", "skip", draw}
    chosen = dataclasses.replace(planned, arms=[arm for arm in planned.arms if arm.name in wanted])
    seed = planned.seed + 1000
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        what_if = WhatIf(dataclasses.replace(chosen, seeds=[seed]))
        start = what_if.prepare_start()
        stop = min(planned.base.total, planned.rounds[-1] + 100)
        arms = [each.arm for each in what_if.startable(start, stop)]
        others = with_other_seeds(what_if.plan, start, what_if.starts, arms, stop)[seed]
    facts, after = start_facts(start), planned.rounds[0]
    places = {each.outcome.arm.name: each for each in ranked(others, facts, after).places}
    first = places[winner].outcome.after(position(after, facts.skipped))
    return {
        "winner": winner,
        "second": next(iter(second), ""),
        "right": [arm.name for arm in planned.arms if is_right(arm.name, arm.overrides, case)],
        "random": draw,
        "arms": {
            name: told(each, each.outcome, first, position(after, facts.skipped)) for name, each in places.items()
        },
    }


def told(each: RankedArm, outcome: Outcome, first: dict[int, float], place: int) -> dict[str, Any]:
    """Returns how an arm ended with the other seed, and its difference to the winner."""
    low_high = paired(outcome.after(place), first)
    return {
        "tier": each.tier,
        "why": short(each.broke or each.trouble),
        "val": outcome.val_loss if math.isfinite(outcome.val_loss) else None,
        "difference": [low_high.mean, low_high.low, low_high.high] if math.isfinite(low_high.low) else None,
    }


def is_right(name: str, overrides: Sequence[str], case: Case) -> bool:
    """Whether an arm is one of the fixes that are known to be right."""
    if name in case.drawn.right or tuple(overrides) in {fix for fix in case.drawn.grid if len(fix) == 1}:
        return True
    key, _, value = (overrides[0] if len(overrides) == 1 else "").partition("=")
    return "rate" in case.drawn.right and key == "optimizer.lr" and float(value) < rate_of(case)


def rate_of(case: Case) -> float:
    """Returns the learning rate of a case."""
    return float(next(each for each in case.overrides if each.startswith("optimizer.lr=")).partition("=")[2])
