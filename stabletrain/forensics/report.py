"""The page of an incident: what it was, what to do, and only then how that is known; `report.md`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stabletrain.forensics.diagnosis.cause_table import CAUSES
from stabletrain.forensics.diagnosis.evidence import Evidence
from stabletrain.forensics.investigate import Findings
from stabletrain.forensics.probes.underflow import Underflow
from stabletrain.forensics.trace.origin import Link, Origin
from stabletrain.tracking.metrics import plain

BAR = 30
"""Columns of the longest bar of the chain's picture."""

RUNS = {
    "same": "as it was",
    "fp32": "in fp32",
    "fresh_batch": "another batch, same weights",
    "older_state": "same batch, older weights",
}
"""The replays in words."""

TRIED = ("model", "precision", "zloss", "qknorm", "softcap")
"""What one step can try of a fix."""

SLOW = "precision.growth_interval="
"""What of it takes many steps."""


def report(record: Mapping[str, Any], found: Findings, folder: Path | None = None) -> str:
    """One page for people, in Markdown: what it was, what to do, and only then how that is known.

    Args:
        record: as `as_json` gives it.
        found: what it was made from.
        folder: where the page goes, for the commands on it.
    """
    evidence = found.evidence
    reading, name = evidence.reading, "<this folder>" if folder is None else str(folder)
    cause = record["cause"]
    samples, lines = record["samples"], record["evidence"]
    return "\n".join(
        [
            f"# Step {record['step']}: {CAUSES[cause].title}",
            "",
            f"**{sentence(record['verdict'])}**",
            "",
            f"`{cause}`, {record['confidence']:.0%} sure. The step measured loss {reading.loss:.6g} and gradient norm "
            f"{reading.grad_norm:.6g}. {what_became(evidence)}",
            *section("Do this", [*numbered(record["fix"]), *trying(record["fix"], name)]),
            *section("Where it began", where(evidence.origin)),
            *section("Gradients that are lost", lost(evidence.underflow)),
            *section("Sizes on the way there", chain(evidence.origin)),
            *section("Samples", [f"- {json.dumps(plain(sample))}" for sample in samples]),
            *section("The step run again", runs(evidence)),
            *section("What else is known", [f"- {line}" for line in lines]),
            *section("What could not be looked at", [f"- {line}" for line in found.failures]),
            *section("Look again", [f"    stabletrain replay {name}"]),
            "",
        ]
    )


def what_became(evidence: Evidence) -> str:
    """What became of the step's update."""
    if not evidence.reading.applied:
        return "Its update was withheld: the weights are as they were before, nothing is lost."
    return (
        "Nothing in it was not finite, and its update was applied. What is shown here is the same batch on the weights "
        "that it has made."
    )


def section(title: str, lines: Sequence[str]) -> list[str]:
    """A heading and what is under it; nothing where there is nothing."""
    return ["", f"## {title}", "", *lines] if lines else []


def sentence(words: str) -> str:
    """`words` with a capital at the start, unless that is somebody's name, and a full stop."""
    first = words.partition(" ")[0]
    return (words if "." in first or "_" in first else words[:1].upper() + words[1:]).rstrip(".") + "."


def numbered(fixes: Sequence[str]) -> list[str]:
    """The fixes, best first."""
    return [f"{number}. {f'`{fix}`' if is_override(fix) else fix}" for number, fix in enumerate(fixes, 1)]


def is_override(fix: str) -> bool:
    """Whether a fix is one for the command line, and not something to do by hand."""
    return "=" in fix and " " not in fix


def trying(fixes: Sequence[str], name: str) -> list[str]:
    """The command that tries the best fix that one step can try."""
    able = [fix for fix in fixes if is_override(fix) and fix.partition("=")[0].partition(".")[0] in TRIED]
    able = [fix for fix in able if not fix.startswith(SLOW)]
    return ["", "Try it on this very step:", "", f"    stabletrain replay {name} '{able[0]}'"] if able else []


def where(origin: Origin | None) -> list[str]:
    """The operation to blame, with what went in and came out."""
    if origin is None:
        return []
    lines = [
        f"`{origin.op}` in {f'`{origin.module}`' if origin.module else 'the model'}, {origin.direction}, "
        f"{origin.dtype}, at `{origin.source or 'a line that nobody knows'}`:",
        "",
        f"> {origin.reason}",
        "",
        "| | dtype | shape | largest | |",
        "|---|---|---|---|---|",
    ]
    for what, values in (("in", origin.inputs), ("out", origin.outputs)):
        for value in values:
            size = "" if value.absmax is None else f"{value.absmax:.6g}"
            finite = "finite" if value.finite else "**not finite**"
            lines.append(f"| {what} | {value.dtype} | {list(value.shape)} | {size} | {finite} |")
    return lines


def lost(small: Underflow | None) -> list[str]:
    """The parameters whose gradients fp16 makes 0, the worst hit first."""
    if small is None or not small.worst:
        return []
    lines = [f"| | elements | 0 at loss scale {small.loss_scale:g} | 0 in fp32 |", "|---|---|---|---|"]
    lines += [f"| `{one.name}` | {one.numel} | {one.zeros:.1%} | {one.in_fp32:.1%} |" for one in small.worst]
    return [*lines, f"| the whole model | | {small.zeros:.1%} | {small.in_fp32:.1%} |"]


def runs(evidence: Evidence) -> list[str]:
    """The table of replays."""
    if not evidence.outcomes:
        return []
    lines = ["| | finite | loss | gradient norm | |", "|---|---|---|---|---|"]
    for name, outcome in evidence.outcomes.items():
        title = RUNS.get(name, name)
        if outcome.not_run or outcome.loss is None or outcome.grad_norm is None:
            lines.append(f"| {title} | | | | not run: {outcome.not_run} |")
            continue
        bits = {True: "the same bits", False: "other bits than the first time", None: ""}
        finite = "yes" if outcome.finite else "**no**"
        equal = bits[outcome.bitwise_equal_to_reading]
        if name == "same" and evidence.reading.applied:
            equal = "on the weights after it, so there is nothing to compare bits with"
        lines.append(f"| {title} | {finite} | {outcome.loss:.6g} | {outcome.grad_norm:.6g} | {equal} |")
    return lines


def chain(origin: Origin | None) -> list[str]:
    """The picture of the magnitudes that led to the origin."""
    if origin is None or not origin.chain:
        return []
    return ["Each bar is one part of the model, in the order of computing.", "", "```", *picture(origin.chain), "```"]


def picture(links: Sequence[Link]) -> list[str]:
    """Magnitudes as bars, a column for each equal step of their logarithm; `!` is what is not finite."""
    sizes = [math.log10(link.absmax) if 0 < link.absmax < math.inf else None for link in links]
    known = [size for size in sizes if size is not None] or [0.0]
    low = min(known) - 1
    high = max(known) + any(not math.isfinite(link.absmax) for link in links)
    wide = max(len(link.module) for link in links)
    lines = []
    for link, size in zip(links, sizes, strict=True):
        if size is None:
            bar = "" if link.absmax == 0 else "!" * BAR
        else:
            bar = "#" * max(1, round(BAR * (size - low) / (high - low)))
        lines.append(f"{link.module:<{wide}}  {link.direction:<8}  {link.absmax:>8.3g}  {bar}".rstrip())
    return lines
