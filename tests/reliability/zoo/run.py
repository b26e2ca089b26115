"""Runs the zoo: trains with every fault in this process, and compares the diagnosis with the table.

    python -m tests.reliability.zoo.run [--json F] [--only part-of-a-name]

`--only` leaves out the clean runs.
"""

import argparse
import contextlib
import inspect
import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.records import Batch
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.reliability.zoo.faults import CLEAN, GPT, RESNET, Fault
from tests.reliability.zoo.table import ALL
from tests.runs import composed

MODELS = {"gpt": GPT, "resnet": RESNET}

QUICK = [
    *("guard.window=20", "guard.patience=3", "guard.snapshot_every=5", "guard.healthy_after=4"),
    *("guard.skip_batches=2", "guard.lr_steps=6", "guard.max_consecutive=12", "guard.max_rollbacks=2"),
    *("schedule=constant", "warmup.steps=3", "checkpoint=off", "monitors=none", "eval_every=100000", "log_every=50"),
    "forensics.keep_state=false",
]

PLAIN = [item for item in QUICK if not item.startswith("guard")]
"""The same with the guard's default settings: with a window of 20 steps it would take noise for a spike."""


@dataclass
class Result:
    """How one fault was diagnosed.

    Attributes:
        fault: the row of the table.
        found: whether there was an incident; `cause`, `origin`, `fix` and `verdict` are those of the first one.
        right: whether the cause is right.
        placed: whether module, operation and direction are right; None if they are not checked.
        fixed: whether the proposed fix worked.
        ended: how the run ended.
    """

    fault: Fault
    found: bool
    cause: str
    verdict: str
    origin: dict[str, Any] | None
    fix: list[str]
    right: bool
    placed: bool | None
    fixed: bool
    ended: str
    seconds: float


def trained(
    model: str, overrides: Sequence[str], install: Any, mended: bool, steps: int, given: Sequence[str] = QUICK
) -> tuple[list[dict], str]:
    """Returns the incidents of a run in order, and how it ended."""
    quick = [item for item in given if not (item.startswith("warmup") and "warmup=none" in overrides)]
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        composed(*MODELS[model], *quick, f"steps={steps}", *overrides) as cfg,
    ):
        job = build(cfg, Path(folder))
        if install is not None:
            install(job, mended)
        try:
            train(job)
            ended = "trouble" if job.tools.guard.trouble_at_end() else "well"
        except TrainingHalted:
            ended = "halted"
        paths = sorted(Path(folder).glob("incidents/*/diagnosis.json"))
        return [json.loads(path.read_text()) for path in paths], ended


def tell(fault: Fault) -> Result:
    """Trains with one fault and checks its diagnosis."""
    began = time.monotonic()
    found, ended = trained(fault.model, fault.overrides, fault.install, False, fault.steps)
    if not found:
        return Result(fault, False, "", "", None, [], False, None, False, ended, time.monotonic() - began)
    first = found[0]
    origin = first["origin"]
    placed = None
    if fault.module is not None and fault.direction is not None:
        placed = origin is not None and origin["module"] == fault.module
        placed = placed and fault.op in (None, origin["op"]) and fault.direction in (None, origin["direction"])
    fixed = fixes(fault, first, ended)
    right = first["cause"] == fault.cause
    return Result(
        fault, True, first["cause"], first["verdict"], origin, first["fix"], right, placed, fixed, ended,
        time.monotonic() - began,
    )  # fmt: skip


def fixes(fault: Fault, incident: dict, ended: str) -> bool:
    """Whether the proposed fix works, by the test that the fault's `fix` names."""
    fix = incident["fix"]
    if not fix:
        return False
    if fault.fix == "samples":
        return names_the_spoilt(fault, incident)
    if fault.fix == "run":
        return ended == "well"
    if fault.fix == "override":
        best = next((each for each in fix if is_override(each)), None)
        if best is None:
            return False
        try:
            kept = [each for each in fault.overrides if each.split("=")[0] != best.split("=")[0]]
            if best.startswith("precision="):
                kept = [each for each in kept if not each.startswith("precision.")]
            if best.startswith("init="):
                kept = [each for each in kept if not each.startswith("init.")]
            found, then = trained(fault.model, [*kept, best], fault.install, False, fault.steps)
        except ConfigError:
            return False
        return then == "well" and not any(each["cause"] == incident["cause"] for each in found)
    found, then = trained(fault.model, fault.overrides, fault.install, True, fault.steps)
    return marked(fault) in fix[0] and not found and then == "well"


def names_the_spoilt(fault: Fault, incident: dict) -> bool:
    """Whether the incident and the fix name exactly the samples that differ from the unspoilt data."""
    position = incident["step"] - 1
    good = batch_of(fault.model, [each for each in fault.overrides if not each.startswith("faults")], position)
    bad = batch_of(fault.model, fault.overrides, position)
    named = [sample["index"] for sample in incident["samples"]]
    if len(bad) != len(good):
        return named == [None]
    wrong = good.targets != bad.targets
    differs = (good.inputs != bad.inputs).flatten(1).any(1) | wrong.reshape(len(good), -1).any(1)
    spoilt = differs.nonzero().flatten().tolist()
    if named == [None]:
        return spoilt == [*range(len(good))]
    assert good.sources is not None
    return named == spoilt and all(good.sources[place] in incident["fix"][n] for n, place in enumerate(spoilt))


def batch_of(model: str, overrides: Sequence[str], position: int) -> Batch:
    """Returns the training batch at a data position."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        composed(*MODELS[model], *QUICK, *overrides) as cfg,
    ):
        return build(cfg, Path(folder)).data.load(position)


def is_override(fix: str) -> bool:
    """Whether a fix can be typed after `python train.py`."""
    key, equals, _ = fix.partition("=")
    return bool(equals) and " " not in key and " " not in fix


def marked(fault: Fault) -> str:
    """Returns `file:line` of the marked line in a fault's part."""
    kind = fault.install.args[1]
    for each in kind.__mro__:  # the line may be in the class that the part inherits from
        lines, first = inspect.getsourcelines(each)
        offsets = [number for number, text in enumerate(lines) if text.rstrip().endswith("# here")]
        if offsets:
            break
    (offset,) = offsets
    return f"{Path(inspect.getfile(kind)).name}:{first + offset}"


def clean() -> list[tuple[str, int]]:
    """Returns the number of incidents in each run without a fault."""
    return [(name, len(trained(model, given, None, False, 100, PLAIN)[0])) for name, model, given in CLEAN]


def shares(results: Sequence[Result]) -> dict[str, float]:
    """Returns the shares of faults that were found, named, located and fixed."""
    placed = [result.placed for result in results if result.placed is not None]
    return {
        "faults": len(results),
        "found": mean([result.found for result in results]),
        "cause": mean([result.right for result in results]),
        "module and op": mean(placed),
        "fix": mean([result.fixed for result in results]),
    }


def mean(values: Sequence[bool]) -> float:
    """Returns the share of true values; 1 if there are none."""
    return sum(values) / len(values) if values else 1.0


def line(result: Result) -> str:
    """Formats one row of the table."""
    where = (
        "" if result.origin is None else f"{result.origin['module']} {result.origin['op']} {result.origin['direction']}"
    )
    marks = "".join(
        "." if mark is None else "+" if mark else "-" for mark in (result.right, result.placed, result.fixed)
    )
    text = f"{marks}  {result.fault.name:<44} {result.fault.cause:<23} {result.cause or '(none)':<23} {where}"
    if "-" in marks:
        text += f"\n     {result.verdict} | {result.fix} | ended {result.ended}"
    return text


def main() -> None:
    """Prints the table and the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-clean", action="store_true")
    chosen = parser.parse_args()
    results = []
    for fault in ALL:
        if chosen.only in fault.name or chosen.only == fault.cause:
            try:
                results.append(tell(fault))
            except Exception as error:
                print(f"!!! {fault.name}: {type(error).__name__}: {error}")
                continue
            print(line(results[-1]), f"{results[-1].seconds:.1f} s", flush=True)
    without = [] if chosen.no_clean or chosen.only else clean()
    print(without)
    summary = shares(results) | {"incidents in clean runs": sum(count for _, count in without)}
    print(json.dumps(summary))
    if chosen.json:
        rows = [
            {"name": r.fault.name, "model": r.fault.model, "cause": r.fault.cause, "called": r.cause,
             "placed": r.placed, "fix": r.fix[:1], "fixed": r.fixed, "seconds": round(r.seconds, 2)}
            for r in results
        ]  # fmt: skip
        chosen.json.write_text(json.dumps({"summary": summary, "clean": without, "faults": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
