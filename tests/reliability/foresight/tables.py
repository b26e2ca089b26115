"""The tables of docs/evidence/foresight.md, from the committed recordings."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stabletrain.beside.forecast.model import Model, fitted
from tests.reliability.foresight.baselines import SIMPLE, configuration_scores, simple_scores
from tests.reliability.foresight.cases import FITTED, HELD_OUT
from tests.reliability.foresight.fit import fit, probabilities, statements
from tests.reliability.foresight.looks import HORIZON, Watched, watched
from tests.reliability.foresight.others import OTHERS
from tests.reliability.foresight.score import (
    EARLIEST,
    LATEST,
    Scores,
    Verdict,
    interval,
    judge,
    share,
    summary,
    threshold_at,
)

RATES = (0.1, 1.0)
"""False alarms in 1,000 steps."""


@dataclass(frozen=True)
class Sets:
    """The runs, by their use.

    Attributes:
        fitting: what the forecast is fitted on.
        choosing: runs without an event on which thresholds are chosen; all of them are used in the fit as well.
        test: the other runs of the fitted families.
        held_out: runs of the held-out families.
        clean: clean and hot runs that nothing was fitted on.
        sudden: what nothing foretells.
    """

    fitting: list[Watched]
    choosing: list[Watched]
    test: list[Watched]
    held_out: list[Watched]
    clean: list[Watched]
    sudden: list[Watched]


def fitting_runs(runs: Sequence[Watched]) -> tuple[list[Watched], list[Watched]]:
    """Returns the runs of families to fit on, and further runs for healthy values and thresholds."""
    own = [each for each in runs if each.run.family in FITTED and each.run.number % 2 == 0]
    more = [
        each for each in runs if each.run.family == "tame" or (each.run.family == "hot" and not each.run.number % 2)
    ]
    return own, more


def sets(runs: Sequence[Watched]) -> Sets:
    """Sorts the runs by their use."""
    own, more = fitting_runs(runs)
    return Sets(
        fitting=own,
        choosing=[each for each in [*own, *more] if not each.run.trouble],
        test=[each for each in runs if each.run.family in FITTED and each.run.number % 2],
        held_out=[each for each in runs if each.run.family in HELD_OUT],
        clean=[
            each for each in runs if each.run.family == "clean" or (each.run.family == "hot" and each.run.number % 2)
        ],
        sudden=[each for each in runs if each.run.family == "sudden"],
    )


def detectors(all_runs: Sequence[Watched], given: Sets, model: Model) -> dict[str, Scores]:
    """Returns the numbers of the forecast, of other ways to compute it, and of the baselines."""
    found: dict[str, Scores] = {"forecast": {each.run.name: probabilities(each, model) for each in all_runs}}
    for name, other in OTHERS.items():
        found[name] = other(given.fitting, all_runs, model)
    found["learning rate and knobs"] = configuration_scores([*given.fitting, *given.choosing], all_runs)
    return found | {name: simple_scores(all_runs, name) for name in SIMPLE}


def verdicts(runs: Sequence[Watched], scores: Scores, threshold: float) -> list[Verdict]:
    """Returns how a detector did on each run."""
    return [judge(each, scores[each.run.name], threshold) for each in runs]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def percent(value: float) -> str:
    """Returns a share in percent, or a dash."""
    return "-" if math.isnan(value) else f"{100 * value:.0f} %"


def number(value: float, form: str = ".0f") -> str:
    """Returns a number, or a dash."""
    return "-" if math.isnan(value) else f"{value:{form}}"


def comparison(found: Mapping[str, Scores], given: Sets, rate: float) -> str:
    """Returns recall on the fitted and held-out families and false alarms of every detector, at one rate."""
    rows = []
    for name, scores in found.items():
        threshold = threshold_at(rate, given.choosing, scores)
        test, held, clean = (
            summary(verdicts(runs, scores, threshold)) for runs in (given.test, given.held_out, given.clean)
        )
        rows.append(
            [
                name,
                percent(test["recall_breaks"]),
                percent(test["recall_worse"]),
                percent(held["recall_breaks"]),
                percent(held["recall_worse"]),
                number(test["lead"]),
                number(held["lead"]),
                number(clean["false_alarms"], ".2f"),
                percent(clean["in_alarm"]),
            ]
        )
    head = ["detector", "breaks", "worse", "held out: breaks", "worse", "lead", "held out: lead"]
    return table([*head, "false alarms in 1,000 clean steps", "clean looks in alarm"], rows)


def by_family(scores: Scores, given: Sets, threshold: float) -> str:
    """Returns the forecast's results by family."""
    rows = []
    everything = [*given.test, *given.held_out, *given.clean, *given.sudden]
    for family in (*FITTED, *HELD_OUT, "hot", "clean", "sudden"):
        own = [each for each in everything if each.run.family == family]
        found = summary(verdicts([each for each in own if not each.run.partner], scores, threshold))
        partners = summary(verdicts([each for each in own if each.run.partner], scores, threshold))
        rows.append(
            [
                family,
                f"{found['breaks']}",
                percent(found["recall_breaks"]),
                number(found["lead"]),
                f"{found['worse']}",
                percent(found["recall_worse"]),
                number(found["false_alarms"], ".2f") if found["quiet_steps"] else "-",
                number(partners["false_alarms"], ".2f") if partners["quiet_steps"] else "-",
            ]
        )
    head = ["family", "breaks", "recall", "lead", "ends worse", "recall", "false alarms in 1,000 steps"]
    return table([*head, "partners' false alarms"], rows)


def with_intervals(scores: Scores, given: Sets, threshold: float) -> str:
    """Returns the forecast's main numbers with 90 % bootstrap intervals over runs."""
    rows = []
    for text, runs, of in (
        ("fitted families: breaks", given.test, "recall_breaks"),
        ("the same without `shift`", [each for each in given.test if each.run.family != "shift"], "recall_breaks"),
        ("fitted families: ends worse", given.test, "recall_worse"),
        ("held-out families: breaks", given.held_out, "recall_breaks"),
        ("held-out families: ends worse", given.held_out, "recall_worse"),
        ("false alarms in 1,000 clean and hot steps", given.clean, "false_alarms"),
    ):
        found = verdicts(runs, scores, threshold)
        value, (low, high) = summary(found)[of], interval(found, of)
        form: Callable[[float], str] = (lambda v: number(v, ".2f")) if of == "false_alarms" else percent
        rows.append([text, form(value), f"{form(low)} - {form(high)}"])
    return table(["", "value", "90 % interval"], rows)


def misses(scores: Scores, runs: Sequence[Watched], threshold: float) -> str:
    """Returns the names of runs whose event was not foretold."""
    breaks = [v.name for v in verdicts(runs, scores, threshold) if v.broke and not v.hit]
    worse = [v.name for v in verdicts(runs, scores, threshold) if v.worse and not v.early]
    return f"Breaks not foretold: {', '.join(breaks) or 'none'}.\n\nEnds worse, no alarm in the first half: " + (
        f"{', '.join(worse) or 'none'}."
    )


def calibration(scores: Scores, runs: Sequence[Watched]) -> str:
    """Returns stated probability against what happened: a break within the horizon, or an end that is worse."""
    stated, came = [], []
    for each in runs:
        broke = math.inf if each.run.broke is None else each.run.broke
        for step, score in zip(each.steps, scores[each.run.name], strict=True):
            if step < broke:
                stated.append(score)
                came.append(each.run.worse or broke - step <= HORIZON)
    edges, rows = [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0001], []
    values, happened = np.array(stated), np.array(came)
    for low, high in itertools.pairwise(edges):
        inside = (values >= low) & (values < high)
        if inside.any():
            mean = percent(float(values[inside].mean()))
            rows.append([f"{low:.1f} - {min(high, 1):.1f}", f"{inside.sum()}", mean, percent(share(happened[inside]))])
    return table(["probability", "looks", "stated", "came"], rows)


def crossings_table(given: Sets, model: Model) -> str:
    """Returns how well the times of crossings were stated."""
    rows = []
    for text, runs in (("fitted families", given.test), ("held-out families", given.held_out), ("clean", given.clean)):
        came, stated, inside, never = 0, 0, 0, 0
        for each in runs:
            said = statements(each)
            for key, at in each.crossed.items():
                came += 1
                if key in said and LATEST <= at - said[key][0] <= EARLIEST:
                    stated += 1
                    step, left = said[key]
                    inside += model.earliest * left <= at - step <= model.latest * left
            never += sum(key not in each.crossed for key in said)
        rows.append([text, f"{came}", f"{stated}", percent(inside / stated if stated else math.nan), f"{never}"])
    head = ["", "crossings", "stated 20 to 500 steps before", "of these in the 80 % interval"]
    return table([*head, "stated but did not come"], rows)


def leave_one_out(runs: Sequence[Watched]) -> str:
    """Returns the results on each fitted family of a model that was fitted without it."""
    rows = []
    own, more = fitting_runs(runs)
    for family in FITTED:
        model = fit([each for each in own if each.run.family != family], more)
        test = [each for each in runs if each.run.family == family]
        found = summary(verdicts(test, {each.run.name: probabilities(each, model) for each in test}, model.alarm))
        rows.append(
            [
                family,
                f"{found['breaks']}",
                percent(found["recall_breaks"]),
                number(found["lead"]),
                f"{found['worse']}",
                percent(found["recall_worse"]),
                number(found["false_alarms"], ".2f"),
            ]
        )
    return table(["left out", "breaks", "recall", "lead", "ends worse", "recall", "partners' false alarms"], rows)


def at_default_looks(given: Sets, model: Model) -> str:
    """Returns the forecast's main numbers with looks every 100 steps, as in the default monitors."""
    rows = []
    for text, chosen in (
        ("fitted families", given.test),
        ("held-out families", given.held_out),
        ("clean and hot", given.clean),
    ):
        picked = [watched(each.run, every=4, crossed=each.crossed) for each in chosen]
        found = summary(verdicts(picked, {e.run.name: probabilities(e, model) for e in picked}, model.alarm))
        rows.append(
            [
                text,
                percent(found["recall_breaks"]),
                percent(found["recall_worse"]),
                number(found["lead"]),
                number(found["false_alarms"], ".2f"),
            ]
        )
    return table(["looks every 100 steps", "breaks", "ends worse", "lead", "false alarms in 1,000 steps"], rows)


def everything(runs: Sequence[Watched]) -> str:
    """Returns all tables, for the model that comes with the package."""
    given, model = sets(runs), fitted()
    found = detectors(runs, given, model)
    scores = found["forecast"]
    quiet = sum(each.steps[-1] for each in given.clean if not each.run.trouble)
    parts = [
        f"{len(runs)} runs; {quiet:,} clean and hot steps that nothing was fitted on.",
        "### Main numbers\n\n" + with_intervals(scores, given, model.alarm),
        *(
            f"### Detectors at {rate:g} false alarms in 1,000 steps\n\n" + comparison(found, given, rate)
            for rate in RATES
        ),
        "### By family\n\n" + by_family(scores, given, model.alarm),
        "### Leave one family out\n\n" + leave_one_out(runs),
        "### Misses\n\n" + misses(scores, [*given.test, *given.held_out], model.alarm),
        "### Crossings\n\n" + crossings_table(given, model),
        "### Calibration\n\n" + calibration(scores, [*given.test, *given.held_out, *given.clean]),
        "### Default looks\n\n" + at_default_looks(given, model),
    ]
    return "\n\n".join(parts) + "\n"
