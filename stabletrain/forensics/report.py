"""Writes report.md, the page of an incident: what happened, how to fix it, and then the evidence."""

import html
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stabletrain.forensics.diagnosis.cause_table import CAUSES
from stabletrain.forensics.diagnosis.evidence import Evidence
from stabletrain.forensics.diagnosis.wording import loss_and_norm
from stabletrain.forensics.investigate import Findings
from stabletrain.forensics.trace.origin import Link, Origin
from stabletrain.printable import one_line
from stabletrain.records import RankPart
from stabletrain.tracking.metrics import plain

BAR_WIDTH = 30
"""Longest bar in the chart of magnitudes, in columns."""

REPLAY_TITLES = {
    "same": "unchanged",
    "fp32": "in fp32",
    "fresh_batch": "another batch, same weights",
    "older_state": "same batch, older weights",
}
"""The replays in words."""

ONE_STEP_GROUPS = ("model", "precision", "zloss", "qknorm", "softcap", "softmax", "attention_gate")
"""Config groups whose effect one replayed step can show."""

SLOW_OVERRIDE = "precision.growth_interval="
"""An override of these groups whose effect takes many steps to show."""


def markdown(text: str) -> str:
    """Escapes text for Markdown, in one line: a file's name or a module's may hold HTML, links or a heading.

    Code between single backticks stays as it is.
    """
    pieces = re.split(r"((?<!`)`[^`]+`(?!`))", one_line(text))
    return "".join(piece if number % 2 else escape(piece) for number, piece in enumerate(pieces))


def escape(text: str) -> str:
    """Escapes text without code: HTML, and what makes links and code."""
    return re.sub(r"[\\`|]|\](?=[(\[:]|$)", r"\\\g<0>", html.escape(text, quote=False))


def code(text: str) -> str:
    """Returns text as code, in one line."""
    return f"`{re.sub('[`|]', ' ', one_line(text))}`"


def report(record: Mapping[str, Any], found: Findings, folder: Path | None = None) -> str:
    """Returns the page in Markdown. `record` is from `as_json`; `folder` is used in the commands on the page."""
    evidence = found.evidence
    name = "<this folder>" if folder is None else one_line(shlex.quote(str(folder)))
    cause = record["cause"]
    samples, lines = record["samples"], record["evidence"]
    return "\n".join(
        [
            f"# Step {record['step']}: {CAUSES[cause].title}",
            "",
            f"**{markdown(full_sentence(record['verdict']))}**",
            "",
            f"`{cause}`, {record['confidence']:.0%} sure. The step measured "
            f"{measured(evidence)}{'' if evidence.part is None else ' over all ranks'}. "
            f"{update_result(evidence)}",
            *section("Fix", [*numbered_fixes(record["fix"]), *command_to_try_fix(record["fix"], name)]),
            *section("What contributed", contributing_causes(record["also"])),
            *section("Where it began", origin_table(evidence.origin)),
            *section("Gradients lost to underflow", underflow_table(evidence)),
            *section("Magnitudes leading up to it", magnitude_chart(evidence.origin)),
            *section("Samples", [f"- {markdown(json.dumps(plain(sample)))}" for sample in samples]),
            *section("Replays of the step", replay_table(evidence)),
            *section("More evidence", [f"- {markdown(line)}" for line in lines]),
            *section("What could not be checked", [f"- {markdown(line)}" for line in found.failures]),
            *section("Replay it yourself", replay_command(record, name)),
            "",
        ]
    )


def measured(evidence: Evidence) -> str:
    """The loss of the step, if it is known, and its gradient norm."""
    reading = evidence.reading
    if not evidence.loss_known:
        return f"gradient norm {reading.grad_norm:.6g}; its loss is not known"
    return loss_and_norm(reading.loss, reading.grad_norm)


def update_result(evidence: Evidence) -> str:
    """Says whether the step's update was applied."""
    if evidence.kind == "state":
        return "Its update was withheld. The numbers were computed from the changed state, and tell nothing of the run."
    if evidence.kind == "recheck" and evidence.reading.applied:
        return "Its update was applied, so the run went on from a state before it, or halted."
    if evidence.kind == "update":
        return "Its update was undone: weights and moments are as they were before it, and nothing is lost."
    if not evidence.reading.applied:
        return "Its update was skipped: the weights are unchanged, and nothing is lost."
    return (
        "Its numbers were finite, so its update was applied. The numbers below are of the same batch with the weights "
        "after that update."
    )


def section(title: str, lines: Sequence[str]) -> list[str]:
    """A heading and its lines; nothing if there are no lines."""
    return ["", f"## {title}", "", *lines] if lines else []


def full_sentence(words: str) -> str:
    """Capitalises `markdown` and adds a full stop; a leading identifier keeps its case."""
    first = words.partition(" ")[0]
    return (words if "." in first or "_" in first else words[:1].upper() + words[1:]).rstrip(".") + "."


def numbered_fixes(fixes: Sequence[str]) -> list[str]:
    """The fixes as a numbered list, best first."""
    return [f"{number}. {code(fix) if is_override(fix) else markdown(fix)}" for number, fix in enumerate(fixes, 1)]


def contributing_causes(also: Sequence[Mapping[str, Any]]) -> list[str]:
    """The contributing causes, each with its fixes, best first."""
    lines = []
    for one in also:
        lines.append(f"- `{one['cause']}`, {one['confidence']:.0%} sure: {markdown(one['verdict'])}.")
        lines += [f"   {fix}" for fix in numbered_fixes(one["fix"])]
    return lines


def is_override(fix: str) -> bool:
    """Whether a fix can be typed on the command line."""
    return "=" in fix and " " not in fix


def command_to_try_fix(fixes: Sequence[str], name: str) -> list[str]:
    """The command that tries the best fix whose effect one step can show."""
    able = [fix for fix in fixes if is_override(fix) and fix.partition("=")[0].partition(".")[0] in ONE_STEP_GROUPS]
    able = [fix for fix in able if not fix.startswith(SLOW_OVERRIDE)]
    if not able:
        return []
    typed = one_line(able[0].replace("'", "'\"'\"'"))
    return ["", "To try it on this step:", "", f"    stabletrain replay {name} '{typed}'"]


def replay_command(record: Mapping[str, Any], name: str) -> list[str]:
    """The command that replays the step, or why there is none."""
    reason = record.get("not_replayable")
    return [f"Not possible: {markdown(reason)}."] if reason else [f"    stabletrain replay {name}"]


def origin_table(origin: Origin | None) -> list[str]:
    """The operation to blame, with its inputs and outputs."""
    if origin is None:
        return []
    lines = [
        f"{code(origin.op)} in {code(origin.module) if origin.module else 'the model'}, {origin.direction}, "
        f"{origin.dtype}, at {code(origin.source or 'an unknown line')}"
        f"{f', called from {code(origin.called_from)}' if origin.called_from else ''}:",
        "",
        f"> {markdown(origin.reason)}",
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


def underflow_table(evidence: Evidence) -> list[str]:
    """A table of the parameters whose gradients underflow in fp16 or fp8, worst first."""
    small = evidence.underflow
    if small is None or not small.worst:
        return []
    eight = evidence.setting.choices.get("precision") == "fp8"
    lines = [f"| | elements | 0 {'in fp8' if eight else f'at loss scale {small.loss_scale:g}'} | 0 in fp32 |"]
    lines.append("|---|---|---|---|")
    lines += [f"| {code(one.name)} | {one.numel} | {one.zeros:.1%} | {one.in_fp32:.1%} |" for one in small.worst]
    return [*lines, f"| the whole model | | {small.zeros:.1%} | {small.in_fp32:.1%} |"]


def replay_table(evidence: Evidence) -> list[str]:
    """The table of replays."""
    if not evidence.outcomes:
        return []
    lines = ["| | finite | loss | gradient norm | |", "|---|---|---|---|---|"]
    if evidence.part is not None:
        lines.append(own_part_row(evidence.part))
    for name, outcome in evidence.outcomes.items():
        title = REPLAY_TITLES.get(name, name)
        if outcome.not_run or outcome.loss is None or outcome.grad_norm is None:
            lines.append(f"| {title} | | | | not run: {markdown(outcome.not_run)} |")
            continue
        differs = "not bitwise equal to the step" if evidence.part is None else "differs from the step"
        bits = {True: "bitwise equal to the step", False: differs, None: ""}
        finite = "yes" if outcome.finite else "**no**"
        equal = bits[outcome.bitwise_equal_to_reading]
        if name == "same" and evidence.reading.applied:
            equal = "with the weights after the update, so not comparable bitwise"
        lines.append(f"| {title} | {finite} | {outcome.loss:.6g} | {outcome.grad_norm:.6g} | {equal} |")
    return lines


def own_part_row(part: RankPart) -> str:
    """The row with the numbers of the rank's own part in the step, which the replays repeat."""
    known = [part.loss] if part.grad_norm is None else [part.loss, part.grad_norm]
    finite = "yes" if all(map(math.isfinite, known)) else "**no**"
    norm = "unknown" if part.grad_norm is None else f"{part.grad_norm:.6g}"
    return f"| the step, rank {part.rank}'s part | {finite} | {part.loss:.6g} | {norm} | |"


def magnitude_chart(origin: Origin | None) -> list[str]:
    """The chart of the magnitudes that lead to the origin."""
    if origin is None or not origin.chain:
        return []
    return [
        "Each bar is one part of the model, in order of computation, on a log scale.",
        "",
        "```",
        *bars(origin.chain),
        "```",
    ]


def bars(links: Sequence[Link]) -> list[str]:
    """Magnitudes as bars on a logarithmic scale; `!` marks non-finite values."""
    sizes = [math.log10(link.absmax) if 0 < link.absmax < math.inf else None for link in links]
    known = [size for size in sizes if size is not None] or [0.0]
    low = min(known) - 1
    high = max(known) + any(not math.isfinite(link.absmax) for link in links)
    wide = max(len(link.module) for link in links)
    lines = []
    for link, size in zip(links, sizes, strict=True):
        if size is None:
            bar = "" if link.absmax == 0 else "!" * BAR_WIDTH
        else:
            bar = "#" * max(1, round(BAR_WIDTH * (size - low) / (high - low)))
        module = one_line(link.module).replace("`", " ")
        lines.append(f"{module:<{wide}}  {link.direction:<8}  {link.absmax:>8.3g}  {bar}".rstrip())
    return lines
