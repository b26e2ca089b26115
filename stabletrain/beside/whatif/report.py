"""What a what-if found: the table on the terminal, `whatif.json`, and the command that goes on with the winner."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stabletrain.beside.comparison.intervals import Interval
from stabletrain.beside.whatif.arms import Arm
from stabletrain.beside.whatif.base import BaseRun
from stabletrain.beside.whatif.outcome import Outcome
from stabletrain.beside.whatif.ranking import HELD, RankedArm, Ranking
from stabletrain.beside.whatif.trouble import Trouble
from stabletrain.printable import one_line
from stabletrain.program import program_in
from stabletrain.tracking.metrics import plain, replace

HEAD = ("", "arm", "how it ended", "loss", "95 % interval", "val loss", "s/step", "forecast")
TEXT_COLUMNS = (1, 2, 7)
"""Columns of text; the others are numbers."""

MAX_CELL = 40
"""Longest text in a cell of the terminal's table."""


@dataclass(frozen=True)
class WhatIfResult:
    """The result of a what-if.

    Attributes:
        base, trouble: the run and its trouble.
        step: of the state from which the arms start.
        folder: of the what-if.
        rounds: the last step of each round that was run.
        ranking: of the last round.
        first_round_only: the arms that ended with the first round, in its order; their differences are to the same
            reference, on the batches of that round.
        starts: by arm, the checkpoint that it resumed.
        refused: the arms that do not apply.
        compared: the step after which batches are compared.
        seeds: with which the arms of the ranking were run, the run's own first; empty if only with that one.
    """

    base: BaseRun
    trouble: Trouble
    step: int
    folder: Path
    rounds: Sequence[int]
    ranking: Ranking
    first_round_only: Sequence[RankedArm]
    starts: Mapping[str, Path]
    refused: Sequence[Arm]
    compared: int
    seeds: Sequence[int] = ()


def rows(found: WhatIfResult) -> list[tuple[str, ...]]:
    """Returns the cells of the table, without the head: the ranking, and then the arms of the first round only."""
    mark = "=" if len(found.ranking.tied) > 1 else ""
    numbers = [f"{number}{mark if each.tied else ''}" for number, each in enumerate(found.ranking.places, 1)]
    first = [row(number, each, found) for number, each in zip(numbers, found.ranking.places, strict=True)]
    return [*first, *(row("", each, found) for each in found.first_round_only)]


def row(number: str, each: RankedArm, found: WhatIfResult) -> tuple[str, ...]:
    """Returns the cells of an arm."""
    outcome = each.outcome
    is_reference = outcome.arm.name == found.ranking.reference
    return (
        number,
        outcome.arm.name,
        ended(each),
        "0" if is_reference else signed(each.difference.mean),
        "reference" if is_reference else between(each.difference),
        decimals(each.val_loss),
        "-" if math.isnan(outcome.seconds) else f"{outcome.seconds:.3g}",
        ", ".join(each.forecasts) or "-",
    )


def ended(each: RankedArm) -> str:
    """Returns how an arm ended, in a few words."""
    seeds = f" with {len(each.repeats)} seeds" if each.repeats else ""
    return each.broke or each.trouble or f"held to step {each.outcome.step:,}{seeds}"


def ending(outcome: Outcome) -> str:
    """Returns how a run of an arm ended, in a line."""
    if outcome.broke:
        return one_line(cut(f"broke at step {outcome.step:,}: {outcome.reason}", 100))
    came_back = f", the trouble came back: {outcome.came_back}" if outcome.came_back else ""
    return f"step {outcome.step:,}, validation loss {outcome.val_loss:.4f}{came_back}"


def signed(value: float) -> str:
    """Formats a difference of losses."""
    return "-" if math.isnan(value) else f"{value:+.4f}"


def between(found: Interval) -> str:
    """Formats an interval."""
    return f"{found.low:+.4f} to {found.high:+.4f}" if math.isfinite(found.low) else "-"


def decimals(value: float) -> str:
    """Formats a loss."""
    return "-" if math.isnan(value) else f"{value:.4f}"


def table(cells: Sequence[Sequence[str]]) -> str:
    """Returns the head and the cells as lines of aligned columns."""
    lines = [[cut(one_line(cell)) for cell in line] for line in (HEAD, *cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = (
        [
            cell.ljust(width) if column in TEXT_COLUMNS else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def cut(text: str, most: int = MAX_CELL) -> str:
    """Shortens a long text; the JSON and the page have the whole one."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def about_table(found: WhatIfResult) -> list[str]:
    """Returns the lines that say what the numbers are."""
    reference = found.ranking.reference
    if not reference:
        return []
    lines = [
        f"loss: mean difference to {reference} on the same batches, those that follow step {found.compared:,}, in nats "
        "per target; below 0 is better"
    ]
    if found.seeds:
        lines.append(f"loss and val loss: means over the seeds {', '.join(map(str, found.seeds))}")
    if found.first_round_only and len(found.rounds) > 1:
        lines.append(f"arms without a number ended with the first round, at step {found.rounds[0]:,}")
    elif found.first_round_only:
        lines.append(f"arms without a number ran with the seed {found.seeds[0]} only")
    if len(found.ranking.tied) > 1:
        lines.append("arms with = are not told apart from the first")
    return lines


def command(found: WhatIfResult) -> str:
    """Returns the command that continues the run with the winner in a new folder; empty without a winner."""
    if not found.ranking.winner:
        return ""
    winner = next(each.outcome.arm for each in found.ranking.places if each.outcome.arm.name == found.ranking.winner)
    program = program_in(str(found.base.record.get("command", "")))
    words = [f"resume={found.starts[winner.name]}", *found.base.saving(winner.overrides), *winner.overrides]
    return f"{program} {shlex.join(words)}"


def as_json(found: WhatIfResult) -> dict[str, Any]:
    """Returns the result as JSON values; non-finite numbers are words."""
    return plain(
        {
            "run": str(found.base.run),
            "run_id": found.base.record.get("id"),
            "trouble": {"first": found.trouble.first, "last": found.trouble.last, "text": found.trouble.text},
            "start": found.step,
            "rounds": list(found.rounds),
            "compared_after": found.compared,
            "seeds": list(found.seeds) or None,
            "reference": found.ranking.reference or None,
            "winner": found.ranking.winner or None,
            "tied": found.ranking.tied,
            "verdict": found.ranking.verdict,
            "command": command(found) or None,
            "arms": [arm_json(number, each) for number, each in enumerate(found.ranking.places, 1)],
            "first_round_only": [arm_json(None, each) for each in found.first_round_only],
            "refused": [{"arm": arm.name, "reason": arm.refused} for arm in found.refused],
        }
    )


def arm_json(number: int | None, each: RankedArm) -> dict[str, Any]:
    """Returns an arm as JSON values."""
    outcome = each.outcome
    return {
        "rank": number,
        "arm": outcome.arm.name,
        "overrides": list(outcome.arm.overrides),
        "edit": outcome.arm.edit or None,
        "named": outcome.arm.named or None,
        "folder": str(outcome.folder),
        "step": outcome.step,
        "broke": outcome.broke or each.broke or None,
        "held": each.tier == HELD,
        "came_back": outcome.came_back or None,
        "behind_best": each.behind_best or None,
        "skips": outcome.skips,
        "rollbacks": outcome.rollbacks,
        "forecasts": list(each.forecasts),
        "difference": each.difference._asdict(),
        "behind_first": each.behind._asdict(),
        "tied": each.tied,
        "val_loss": None if math.isnan(each.val_loss) else each.val_loss,
        "seconds_per_step": None if math.isnan(outcome.seconds) else outcome.seconds,
        "seeds": [seed_json(seed, repeat) for seed, repeat in each.repeats.items()] or None,
    }


def seed_json(seed: int, repeat: RankedArm) -> dict[str, Any]:
    """Returns an arm with one of several seeds as JSON values."""
    outcome = repeat.outcome
    return {
        "seed": seed,
        "folder": str(outcome.folder),
        "step": outcome.step,
        "broke": outcome.broke or None,
        "came_back": outcome.came_back or None,
        "behind_best": repeat.behind_best or None,
        "skips": outcome.skips,
        "rollbacks": outcome.rollbacks,
        "forecasts": list(outcome.forecasts),
        "difference": repeat.difference._asdict(),
        "val_loss": None if math.isnan(outcome.val_loss) else outcome.val_loss,
    }


def write_json(found: WhatIfResult) -> Path:
    """Writes `whatif.json` into the folder of the what-if, and returns its path."""
    file = found.folder / "whatif.json"
    replace(file, json.dumps(as_json(found), indent=2) + "\n")
    return file
