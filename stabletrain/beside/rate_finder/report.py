"""The result of a rate search, for the terminal and as JSON."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stabletrain.beside.rate_finder.peak import Point, Trial, two_digits
from stabletrain.beside.rate_finder.search import Search

BAR = 24
"""Width of the longest bar, in columns."""


def line_of(trial: Trial) -> str:
    """Returns a line for the user about a trial that has ended."""
    ended = f"loss {trial.loss:.4f}" if math.isfinite(trial.loss) else f"not finite at step {trial.done}"
    return f"lr {trial.rate:<9.3g} seed {trial.seed}  {trial.steps} steps  {ended}  {trial.seconds:.1f} s"


def text(found: Search, command: str) -> str:
    """Returns the table of the second round, the proposed rate, and why.

    Args:
        found: the result.
        command: that trains with the proposed rate.
    """
    lines = [f"{'lr':<9}  {'loss':<17}  {'above the lowest':<19}"]
    lines += [row(point, found.points) for point in found.points]
    lines += [f"peak     {two_digits(found.peak):g}: {why(found)}"]
    lines += [f"note     {note}" for note in notes(found)]
    trials = [*found.coarse, *found.fine]
    seconds, done = sum(trial.seconds for trial in trials), sum(trial.done for trial in trials)
    lines += [f"cost     {done} steps in {len(trials)} trials, {seconds:.0f} s", f"next     {command}"]
    return "\n".join(line.rstrip() for line in lines)


def row(point: Point, points: Sequence[Point]) -> str:
    """Returns a rate's line of the table; the bar shows the loss above the lowest one."""
    if math.isinf(point.loss):
        return f"{point.rate:<9.3g}  not finite"
    loss = f"{point.loss:.4f}" + ("" if math.isnan(point.error) else f" ± {point.error:.4f}")
    above = f"{point.above:+.4f}" + ("" if math.isnan(point.margin) or not point.above else f" ± {point.margin:.4f}")
    most = max((each.above for each in points if math.isfinite(each.above)), default=0.0)
    bar = "━" * max(1, round(BAR * point.above / most)) if most else "━"
    said = "lowest" if not point.above else "not told apart" if point.on_plateau else ""
    return f"{point.rate:<9.3g}  {loss:<17}  {above:<19}  {bar:<{BAR}}  {said}"


def why(found: Search) -> str:
    """Returns why this rate is proposed."""
    lowest, plateau = found.lowest, [point for point in found.points if point.on_plateau]
    loss = f"{lowest.loss:.3f}" + ("" if math.isnan(lowest.error) else f" ± {lowest.error:.3f}")
    reasons = [f"the lowest loss is {loss} at {lowest.rate:.3g}"]
    if len(plateau) > 1:
        others = ", ".join(f"{point.rate:.3g}" for point in plateau if point is not lowest)
        reasons.append(f"{others} {'are' if len(plateau) > 2 else 'is'} not told apart")
        reasons.append(f"the peak is the centre of {plateau[0].rate:.3g} to {plateau[-1].rate:.3g}")
    else:
        reasons.append("all other rates are told apart from it")
    if broken := [trial.rate for trial in (*found.coarse, *found.fine) if math.isinf(trial.loss)]:
        reasons.append(f"at {min(broken):.3g} and above the loss is not finite")
    return "; ".join(reasons)


def notes(found: Search) -> list[str]:
    """Returns what the user should know besides the rate."""
    said = []
    ends = [("lower", found.open_below), ("higher", found.open_above)]
    if beyond := " or ".join(name for name, is_open in ends if is_open):
        said.append(f"the loss is as low at an end of the rates that were tried: the best rate may be {beyond}")
    if math.isnan(found.lowest.margin):
        said.append("the noise is not known, so rates may be as good that are not named here; fix: --seeds 2 or more")
    steps, coarse = found.fine[0].steps, found.coarse[0].steps
    said.append(
        f"runs of {coarse} steps are best at {found.first_round_best:.3g}, of {steps} steps at "
        f"{found.lowest.rate:.3g}; a much longer run often needs a lower rate, which is not corrected for"
    )
    return said


def as_json(found: Search, command: str) -> dict[str, Any]:
    """Returns the result in the shape of `docs/reference/json.md`."""

    def trials(each: Sequence[Trial]) -> list[Mapping[str, Any]]:
        return [
            {
                "lr": t.rate,
                "seed": t.seed,
                "steps": t.steps,
                "done": t.done,
                "loss": t.loss,
                "seconds": round(t.seconds, 2),
            }
            for t in each
        ]

    plateau = [point.rate for point in found.points if point.on_plateau]
    return {
        "lr": two_digits(found.peak),
        "lowest": found.lowest.rate,
        "plateau": [plateau[0], plateau[-1]],
        "why": why(found),
        "notes": notes(found),
        "points": [
            {
                "lr": point.rate,
                "loss": point.loss,
                "error": None if math.isnan(point.error) else point.error,
                "above": point.above,
                "margin": None if math.isnan(point.margin) else point.margin,
                "on_plateau": point.on_plateau,
            }
            for point in found.points
        ],
        "first_round": trials(found.coarse),
        "second_round": trials(found.fine),
        "steps": sum(trial.done for trial in (*found.coarse, *found.fine)),
        "seconds": round(sum(trial.seconds for trial in (*found.coarse, *found.fine)), 2),
        "command": command,
    }
