"""Settings compared: the mean final loss over the seeds, and the difference to the best setting, paired by seed.

A setting is what the runs of one row have in common; they differ in the seed, and in whatever else is not named. If
their learning rates differ, the row is that of the best rate. A run that broke is counted and enters no mean.

The difference to the best setting is taken between runs that agree in everything else, so that what seed and data do
alike to both falls out. Its 95 % interval is Student's t over these pairs. A setting whose interval holds 0, or that
has fewer than two pairs, is not told apart from the best one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from stabletrain.beside.comparison.groups import NOT_OVER, SEED, is_lost_loss
from stabletrain.beside.comparison.intervals import Interval, of_independent
from stabletrain.beside.comparison.reading.settings import setting_text
from stabletrain.beside.comparison.sensitivity import RATE
from stabletrain.errors import ConfigError, closest
from stabletrain.printable import one_line

PREFIX = "settings."


class Setting(NamedTuple):
    """A setting, and how its runs ended.

    Attributes:
        name: such as `precision=bf16 stability=none`; `all` if nothing tells the runs apart.
        values: by key.
        rate: the best learning rate; None if it does not differ.
        losses: final validation losses, by the values of what else differs, the seed among them.
        runs: number of runs at this rate.
        broke: how many of them were halted, failed, or ended with a lost loss; see `groups.is_lost_loss`.
        not_over: how many are not over.
        difference: to the best setting; of the best setting to itself, NaN.
    """

    name: str
    values: Mapping[str, Any]
    rate: float | None
    losses: Mapping[tuple, float]
    runs: int
    broke: int
    not_over: int
    difference: Interval = Interval(math.nan, -math.inf, math.inf, 0)

    @property
    def mean(self) -> float:
        """Mean loss; NaN if no run has finished."""
        return sum(self.losses.values()) / len(self.losses) if self.losses else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation of the losses; NaN for fewer than two."""
        return float(pd.Series([*self.losses.values()], dtype=float).std())

    @property
    def loss(self) -> str:
        """Mean and standard deviation as text, to the same decimal: `2.484 ± 0.005`, `3.130 ± 0.015`."""
        if not self.losses:
            return "-"
        deviation = "" if len(self.losses) < 2 else f"{self.deviation:.2g}"
        _, point, decimals = deviation.partition(".")
        same = f".{len(decimals)}f" if point and decimals.isdigit() else ".4g"  # 1e-05 has no decimals
        return f"{self.mean:{same}} ± {deviation}" if deviation else f"{self.mean:.4g}"

    @property
    def ended(self) -> str:
        """How many runs the mean is of, and how the others ended: `2 of 3, 1 broke`."""
        counts = [f"{count} {what}" for count, what in ((self.broke, "broke"), (self.not_over, "not over")) if count]
        return ", ".join([f"{len(self.losses)} of {self.runs}" if counts else f"{self.runs}", *counts])


def settings_of(runs: pd.DataFrame, by: Sequence[str] = ()) -> list[Setting]:
    """Returns the settings, the best first: those without broken runs, by mean loss, then the others.

    Args:
        runs: from `frame`.
        by: the keys that tell the settings apart, such as `precision`; by default all but seed and learning rate.

    Raises:
        ConfigError: a key is the same in all runs.
    """
    varied = [name.removeprefix(PREFIX) for name in runs.columns if name.startswith(PREFIX)]
    for key in by:
        if key not in varied:
            near = closest(key, varied)
            hint = f"did you mean {near}?" if near else f"these differ: {', '.join(varied) or 'none'}"
            raise ConfigError(f"--by {key}: no two runs differ in it; {hint}")
    telling = [key for key in runs.attrs["telling"] if key != RATE]
    keys = list(by) or [
        *telling,
        *(name for name in ("card", "precision") if name not in telling and differs(runs, name)),
    ]
    else_ = [key for key in telling if key not in keys]
    found: dict[str, dict[float | None, list[tuple[tuple, Any]]]] = {}
    values_of: dict[str, dict[str, Any]] = {}
    for run in runs.to_dict("records"):  # rows as dicts: several times faster than as Series
        values = {key: value_in(run, key) for key in keys}
        name = " ".join(f"{key}={setting_text(value)}" for key, value in values.items()) or "all"
        rate = value_in(run, RATE) if RATE in varied and RATE not in keys else None
        pair = (*(repr(value_in(run, key)) for key in else_), repr(run[SEED]))
        found.setdefault(name, {}).setdefault(rate, []).append((pair, run))
        values_of[name] = values
    settings = [
        min((setting(name, values_of[name], rate, each) for rate, each in rates.items()), key=order)
        for name, rates in found.items()
    ]
    settings.sort(key=order)
    best = settings[0]
    return [best, *(each._replace(difference=difference(each, best)) for each in settings[1:])]


def setting(name: str, values: Mapping[str, Any], rate: float | None, runs: Sequence[tuple[tuple, Any]]) -> Setting:
    """Returns a setting at one learning rate. Of runs that agree in everything, the last one that is over counts."""
    last = {pair: run for pair, run in runs if any(word in run["status"] for word in NOT_OVER)}
    last |= {pair: run for pair, run in runs if not any(word in run["status"] for word in NOT_OVER)}
    well = {pair: run for pair, run in last.items() if run["status"] == "finished" and not run["diverged"]}
    losses = {pair: float(run["val_loss"]) for pair, run in well.items()}
    losses = {pair: loss for pair, loss in losses.items() if not is_lost_loss(loss, well[pair]["loss_at_init"])}
    not_over = sum(any(word in run["status"] for word in NOT_OVER) for run in last.values())
    return Setting(name, values, rate, losses, len(last), len(last) - len(losses) - not_over, not_over)


def order(found: Setting) -> tuple[bool, float, float]:
    """Sorts settings: without a finished run last, then by the share of broken runs, then by mean loss."""
    return not found.losses, found.broke / found.runs, found.mean if found.losses else 0.0


def difference(found: Setting, best: Setting) -> Interval:
    """Returns how far a setting's losses are above the best one's, over the runs that agree in everything else."""
    return of_independent([found.losses[pair] - best.losses[pair] for pair in found.losses if pair in best.losses])


def value_in(run: Any, key: str) -> Any:
    """Returns a run's value of a key; None if it has none."""
    value = run.get(f"{PREFIX}{key}", run.get(key))
    return None if value is None or value is pd.NA or value != value else value


def differs(runs: pd.DataFrame, name: str) -> bool:
    """Returns whether a column has several values."""
    return runs[name].nunique(dropna=False) > 1


def by_setting(runs: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Returns a data frame with one row per setting, the best first; see `settings_of`.

    | column | |
    |---|---|
    | settings.<key> | of each key that tells the settings apart |
    | best_lr | the learning rate of the row, if the rates differ |
    | val_loss, val_loss_sd | mean and standard deviation, in nats per target |
    | finished, runs, broke, not_over | numbers of runs: those in the mean, all, and how the others ended |
    | difference, low, high, pairs | to the best setting: mean, 95 % interval, number of pairs |
    | told_apart | whether the interval does not hold 0 |
    """
    rows = [
        {f"{PREFIX}{key}": value for key, value in each.values.items()}
        | ({} if each.rate is None else {"best_lr": each.rate})
        | {"val_loss": each.mean, "val_loss_sd": each.deviation, "finished": len(each.losses), "runs": each.runs}
        | {"broke": each.broke, "not_over": each.not_over}
        | {"difference": each.difference.mean, "low": each.difference.low, "high": each.difference.high}
        | {"pairs": each.difference.count, "told_apart": each.difference.excludes_zero}
        for each in settings_of(runs, by)
    ]
    return pd.DataFrame(rows, index=pd.Index([each.name for each in settings_of(runs, by)], name="setting"))


def cells(settings: Sequence[Setting]) -> list[list[str]]:
    """Returns the rows of a table as text, the heading first."""
    rated = any(each.rate is not None for each in settings)
    head = ["setting", *(["best lr"] if rated else []), "val loss", "runs", "above the best, 95 % interval"]
    rows = [
        [each.name, *([rate_text(each)] if rated else []), each.loss, each.ended, above(each) if number else "best"]
        for number, each in enumerate(settings)
    ]
    return [head, *rows]


def rate_text(found: Setting) -> str:
    """Formats the best learning rate; empty if the setting's runs have none, as beside those of another sweep."""
    return "" if found.rate is None else f"{found.rate:g}"


def above(found: Setting) -> str:
    """Formats the difference of a setting to the best one."""
    near = found.difference.count > 1 and not found.difference.excludes_zero
    return f"{found.difference.text}{', not told apart' if near else ''}"


def markdown(settings: Sequence[Setting]) -> str:
    """Returns a Markdown table."""
    head, *rows = cells(settings)
    return "\n".join("| " + " | ".join(map(one_line, row)) + " |" for row in [head, ["---"] * len(head), *rows])


def latex(settings: Sequence[Setting]) -> str:
    """Returns a LaTeX table for the package booktabs, with a column for each key. What is not told apart is `n.s.`."""
    escapes = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    escapes |= {character: f"\\{character}" for character in "&%$#_{}"}
    rated = any(each.rate is not None for each in settings)
    keys = [*settings[0].values]

    def line(row: Sequence[str]) -> str:
        return " & ".join(row) + r" \\"

    def text(word: str) -> str:
        return "".join(escapes.get(each, each) for each in one_line(word))

    def signed(value: float) -> str:
        digits, exponent, power = f"{value:+.2g}".partition("e")
        return rf"{digits} \cdot 10^{{{int(power)}}}" if exponent else digits

    def difference(each: Setting) -> str:
        mean, low, high, count = each.difference
        if not count:
            return "no pair"
        interval = f" $[{signed(low)}, {signed(high)}]$" if count > 1 else ", one pair"
        return f"${signed(mean)}${interval}{'' if each.difference.excludes_zero else ' n.s.'}"

    head = [*map(text, keys or ["setting"]), *(["best lr"] if rated else []), "val loss", "runs"]
    rows = [
        [
            *(text(setting_text(each.values[key])) for key in keys),
            *([] if keys else [text(each.name)]),
            *([rate_text(each)] if rated else []),
            text(each.loss),
            f"{len(each.losses)}/{each.runs}",
            difference(each) if number else "best",
        ]
        for number, each in enumerate(settings)
    ]
    body = [r"\toprule", line([*head, r"to the best, 95\,\%"]), r"\midrule", *map(line, rows), r"\bottomrule"]
    about = [
        "% runs: those in the mean, of all; the others broke or are not over",
        "% to the best: difference, paired over what else differs, with its 95 % interval; n.s.: not told apart from 0",
    ]
    align = "l" * len(keys or [0]) + "r" * (len(head) - len(keys or [0])) + "l"
    size = [r"\footnotesize\setlength{\tabcolsep}{4pt}"] if len(keys) > 1 else []  # for the width of an article
    table = [rf"\begin{{tabular}}{{@{{}}{align}@{{}}}}", *body, r"\end{tabular}"]
    return "\n".join([*about, r"\begingroup", *size, *table, r"\endgroup", ""])


def sentence(settings: Sequence[Setting], unit: str = "", most: int = 3) -> str:
    """Returns the best setting in words, and those that are not told apart from it; empty if no run has finished."""
    best, *others = settings
    if not best.losses or not others:
        return ""
    said = f"Best setting: {best.name}{'' if best.rate is None else f' {RATE}={best.rate:g}'}, {best.loss}{unit} "
    count, *others_ended = best.ended.split(", ")
    said += f"({', '.join([f'{count} run' + 's' * (best.runs > 1), *others_ended])})."
    near = [each for each in others if each.losses and not each.difference.excludes_zero]
    if not near:
        return f"{said} All others are worse, the next one by {above(others[0])}." if others[0].losses else said
    named = "; ".join(f"{each.name}, {above(each).partition(', not')[0]}" for each in near[:most])
    more = f" and {len(near) - most} more" if len(near) > most else ""
    return f"{said} Not told apart from it: {named}{more}."
