"""Writes `catalogue.md` and `which_knobs.md` from runs: each stability knob alone, and some in pairs.

    python docs/catalogue.py --run                    trains what is missing in multirun/catalogue, and writes the pages
    python docs/catalogue.py multirun/catalogue       writes the pages again

Two stages (the protocol of arXiv 2309.14322, as `experiment=catalogue` has it):

- screen: every knob at four learning rates with two seeds.
- full: the knobs that the screen tells apart beyond the chance of its many intervals, at seven rates, with three
  seeds, at two depths.

Each number is computed from the runs' files, but time and memory of a step, which are those of
`python benchmarks/catalogue.py multirun/catalogue/cost.json`.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # `docs` is not installed
from docs.results import as_table, effort, paragraph
from stabletrain.beside.comparison.intervals import Interval, of_independent, student
from stabletrain.beside.comparison.pictures import canvas
from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.runs import read_runs
from stabletrain.beside.comparison.reading.settings import value_of
from stabletrain.beside.comparison.sensitivity import rate_of, sensitivity
from stabletrain.errors import ConfigError

ROOT = Path(__file__).parents[1]

HERE = Path(__file__).parent


class Kind(NamedTuple):
    """A row of the catalogue.

    Attributes:
        name: of the row, and of its folder.
        settings: what is typed.
        beside: the row that it is compared with.
        loss: the metric that is compared.
    """

    name: str
    settings: str
    beside: str = "default"
    loss: str = "val/loss"


KINDS = [
    Kind("default", ""),
    # attention
    Kind("QK-LayerNorm", "qknorm=layernorm"),
    Kind("QK-RMSNorm", "qknorm=rmsnorm"),
    Kind("QK-clip", "qkclip=kimi"),
    Kind("softcap", "softcap=gemma2"),
    Kind("sink", "softmax=sink"),
    Kind("gate per head", "attention_gate=sigmoid"),
    Kind("gate per element", "attention_gate=sigmoid attention_gate.per=element"),
    # the output
    Kind("z-loss 1e-4", "zloss=palm"),
    Kind("z-loss 1e-5", "zloss=olmo"),
    Kind("mu-loss", "zloss=mu"),
    Kind("mu-centering", "zloss=mu_centering"),
    # the residual stream
    Kind("RMSNorm", "model.norm=rmsnorm"),
    Kind("SwiGLU", "model.mlp=swiglu"),
    Kind("SwiGLU limit 7", "model.mlp=swiglu model.swiglu_limit=7.0", beside="SwiGLU"),
    Kind("sandwich norms", "norm_placement=sandwich"),
    Kind("post norms", "norm_placement=post"),
    Kind("reordered norms", "norm_placement=reordered"),
    Kind("embedding gradient 0.1", "model.embedding_gradient=0.1"),
    Kind("init gpt2", "init=gpt2"),
    Kind("init small", "init=small"),
    Kind("init zero_residual", "init=zero_residual"),
    # gradients and updates
    Kind("clipping none", "clipping=none"),
    Kind("clipping value", "clipping=value"),
    Kind("clipping per_module", "clipping=per_module"),
    Kind("clipping agc", "clipping=agc"),
    Kind("clipping zclip", "clipping=zclip"),
    Kind("clipping adagc", "clipping=adagc"),
    Kind("own AdamW", "optimizer.fused=false"),
    Kind("clipping update_norm", "clipping=update_norm optimizer.fused=false", beside="clipping none"),
    Kind("StableAdamW", "optimizer=stable_adamw"),
    Kind("SPAM", "optimizer=spam optimizer.reset_interval=100 optimizer.warmup_steps=30"),
    Kind("Muon", "optimizer=muon"),
    Kind("Muon per head", "optimizer=muon optimizer.per_head=true", beside="Muon"),
    Kind("Muon momentum warmup", "optimizer=muon optimizer.momentum_warmup=100", beside="Muon"),
    Kind("Muon original scale", "optimizer=muon optimizer.scale=original", beside="Muon"),
    # rate and decay
    Kind("warmup none", "warmup=none"),
    Kind("warmup cosine", "warmup=cosine"),
    Kind("schedule wsd", "schedule=wsd"),
    Kind("decay coupled", "optimizer.decay=coupled optimizer.weight_decay=0.1"),
    Kind("decay corrected", "optimizer.decay=corrected optimizer.weight_decay=0.1", beside="decay coupled"),
    Kind("cautious decay", "optimizer.cautious_decay=true"),
    Kind("decay everywhere", "optimizer.no_decay=[]"),
    Kind("decay by cosine", "schedule.weight_decay=cosine"),
    # weights averaged over time; compared by the loss of the average
    Kind("EMA", "averaging=ema averaging.decay=0.98", loss="averaging/val_loss"),
    Kind("mean of snapshots", "averaging=snapshots", loss="averaging/val_loss"),
    # number formats
    Kind("fp32", "precision=fp32"),
    Kind("bf16_params", "precision=bf16_params"),
    # pairs
    Kind("QK-LayerNorm and z-loss", "qknorm=layernorm zloss=palm"),
    Kind("QK-LayerNorm and Muon", "qknorm=layernorm optimizer=muon"),
    Kind("QK-LayerNorm and gate", "qknorm=layernorm attention_gate=sigmoid"),
    Kind("QK-LayerNorm and sandwich norms", "qknorm=layernorm norm_placement=sandwich"),
    Kind("gate and sandwich norms", "attention_gate=sigmoid norm_placement=sandwich"),
]
"""The rows, the defaults first."""


class Stage(NamedTuple):
    """One of the two grids.

    Attributes:
        settings: what is typed beside a knob's own settings.
        runs: number of runs of a knob.
    """

    settings: str
    runs: int


STAGES = {
    "screen": Stage("optimizer.lr=3e-3,1e-2,3e-2,1e-1 seed=0,1", 8),
    "full": Stage("optimizer.lr=3e-4,1e-3,3e-3,1e-2,3e-2,1e-1,3e-1 seed=0,1,2 model.n_layer=2,4", 42),
}

Place = tuple[float, str]
"""A learning rate, and what else tells two runs of a grid apart: depth and seed."""


class Row(NamedTuple):
    """The runs of a knob in one stage.

    Attributes:
        kind: the knob.
        losses: the final validation loss of each run, or its loss at init if it diverged or ended above it.
        logit, log_z: the largest attention logit and the largest |log Z| that the monitors measured in each run.
        headroom: the least headroom of fp16 in each run, in bits.
        diverged: number of runs that ended in NaN, or were halted.
        runs: the runs.
    """

    kind: Kind
    losses: Mapping[Place, float]
    logit: Mapping[Place, float]
    log_z: Mapping[Place, float]
    headroom: Mapping[Place, float]
    diverged: int
    runs: Sequence[Run]

    @property
    def rates(self) -> list[float]:
        """The learning rates, rising."""
        return sorted({rate for rate, _ in self.losses})

    @property
    def best_rate(self) -> float:
        """The learning rate with the lowest mean loss."""
        return min(self.rates, key=lambda rate: statistics.fmean(self.at(rate).values()))

    def at(self, rate: float) -> dict[str, float]:
        """Returns the losses at a learning rate."""
        return {pair: loss for (other, pair), loss in self.losses.items() if other == rate}

    def sensitivities(self) -> dict[str, float]:
        """Returns the sensitivity of each complete grid of learning rates."""
        rates = self.rates
        pairs = {pair for _, pair in self.losses}
        whole = {pair: [self.losses.get((rate, pair), math.nan) for rate in rates] for pair in pairs}
        return {pair: sensitivity(losses) for pair, losses in whole.items() if not any(map(math.isnan, losses))}


def row_of(kind: Kind, runs: Sequence[Run]) -> Row:
    """Reads the runs of a knob."""
    losses, logit, log_z, headroom, diverged = {}, {}, {}, {}, 0
    for run in runs:
        place = rate_of(run), f"{value_of(run, 'model.n_layer')} {value_of(run, 'seed')}"
        start, final = run.initial_loss, run.last(kind.loss)
        lost = run.diverged or math.isnan(final)
        diverged += lost
        losses[place] = start if lost else min(final, start)
        logit[place] = run.highest("monitors/attn_logit_max")
        log_z[place] = max(abs(run.highest("monitors/log_z_mean")), abs(run.lowest("monitors/log_z_mean")))
        headroom[place] = run.lowest("monitors/headroom_min")
    return Row(kind, losses, logit, log_z, headroom, diverged, runs)


# ---- what is told apart


class Effect(NamedTuple):
    """How a knob differs from what it is compared with; each interval is over pairs of runs that share all else.

    Attributes:
        grid: of the mean loss over the grid of learning rates.
        best: of the loss at the better rate of each.
        sensitivity: of the sensitivity.
        diverged: how many more of its runs diverged.
        chance: how probable the less probable of the two differences in loss is where there is none.
    """

    grid: Interval
    best: Interval
    sensitivity: Interval
    diverged: int
    chance: float

    @property
    def told_apart(self) -> bool:
        """Whether other runs diverged, or the interval of the loss over the grid or at the best rate leaves out 0."""
        return self.grid.excludes_zero or self.best.excludes_zero or self.diverged != 0


def effect(row: Row, other: Row) -> Effect:
    """Returns the differences of a knob's runs from those that it is compared with."""
    own, others = row.sensitivities(), other.sensitivities()
    pairs = sorted(own.keys() & others.keys())
    shared = sorted(row.losses.keys() & other.losses.keys())
    differences = {place: row.losses[place] - other.losses[place] for place in shared}
    first, second = row.at(row.best_rate), other.at(other.best_rate)
    best = [first[pair] - second[pair] for pair in sorted(first.keys() & second.keys())]
    diverged = row.diverged - other.diverged
    sensitivities = of_independent([own[pair] - others[pair] for pair in pairs])
    if len(pairs) >= 4:  # enough pairs for the spread of each number itself
        means = [statistics.fmean(differences[rate, pair] for rate in row.rates) for pair in pairs]
        intervals = of_independent(means), of_independent(best)
        return Effect(*intervals, sensitivities, diverged, min(chance(each, each.count - 1) for each in intervals))
    spread, degrees = pooled(differences)
    intervals = around([*differences.values()], spread, degrees), around(best, spread, degrees)
    return Effect(*intervals, sensitivities, diverged, min(chance(each, degrees) for each in intervals))


def pooled(differences: Mapping[Place, float]) -> tuple[float, int]:
    """Returns the standard deviation of differences around their mean at each rate, and its degrees of freedom."""
    by_rate: dict[float, list[float]] = {}
    for (rate, _), value in differences.items():
        by_rate.setdefault(rate, []).append(value)
    degrees = sum(len(values) - 1 for values in by_rate.values())
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in by_rate.values() if len(values) > 1)
    return (math.sqrt(squares / degrees), degrees) if degrees else (math.inf, 1)


def around(values: Sequence[float], spread: float, degrees: int) -> Interval:
    """Returns the mean of values with the 95 % interval of a known spread (Student's t)."""
    if not values:
        return of_independent(values)
    mean, half = statistics.fmean(values), student(degrees) * spread / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, len(values))


def chance(found: Interval, degrees: int) -> float:
    """Returns how probable a difference as far from 0 is where there is none (Student's t, both sides).

    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    half = (found.high - found.low) / 2
    if not math.isfinite(half) or not half:
        return 1.0 if half or not found.mean else 0.0
    angle = math.atan(abs(found.mean) / half * student(degrees) / math.sqrt(degrees))
    odd, term, total = degrees % 2, 1.0, 0.0
    for number in range(1, degrees // 2 + 1):
        total += term
        term *= (2 * number - 1 + odd) / (2 * number + odd) * math.cos(angle) ** 2
    if odd:
        return 1 - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
    return 1 - math.sin(angle) * total


def factor(own: Mapping[Place, float], others: Mapping[Place, float], bits: bool = False) -> Interval:
    """Returns the interval of the base-2 logarithm of a quantity's ratio, over all pairs of runs.

    Args:
        bits: whether the quantity is a logarithm already.
    """
    shared = [place for place in own if place in others and all(math.isfinite(each[place]) for each in (own, others))]
    if bits:
        return of_independent([own[place] - others[place] for place in shared])
    positive = [place for place in shared if own[place] > 0 and others[place] > 0]
    return of_independent([math.log2(own[place] / others[place]) for place in positive])


# ---- the runs


def folder_of(name: str) -> str:
    """Returns the folder name of a row."""
    return name.replace(" ", "_").replace("+", "and").replace(",", "")


def rows_of(folder: Path, stage: str) -> dict[str, Row]:
    """Returns the rows of a stage by name; only those whose runs are all over.

    Raises:
        ConfigError: there are no runs of the defaults.
    """
    found = {}
    for kind in KINDS:
        place = folder / stage / folder_of(kind.name)
        runs = read_runs([place]) if place.is_dir() else []
        if len(runs) == STAGES[stage].runs and all(run.status in ("finished", "halted") for run in runs):
            found[kind.name] = row_of(kind, runs)
    if "default" not in found:
        raise ConfigError(f"{folder / stage} has no complete runs of the defaults; fix: python docs/catalogue.py --run")
    return found


def effects_of(rows: Mapping[str, Row]) -> dict[str, Effect]:
    """Returns the effect of each row but the defaults, against the row that it is compared with."""
    return {
        name: effect(row, rows[row.kind.beside])
        for name, row in rows.items()
        if name != "default" and row.kind.beside in rows
    }


def command(kind: Kind, stage: str, folder: Path) -> list[str]:
    """Returns the command that trains a row's runs; started again, it trains those that are missing."""
    words = shlex.split(f"-m experiment=catalogue {kind.settings} {STAGES[stage].settings}")
    return ["train.py", *words, f"hydra.sweep.dir={folder / stage / folder_of(kind.name)}"]


def train(folder: Path, stage: str, kinds: Iterable[Kind], jobs: int) -> None:
    """Trains the runs of a stage that are missing, `jobs` knobs at a time with one thread each."""

    def one(kind: Kind) -> None:
        done = subprocess.run(
            [sys.executable, *command(kind, stage, folder)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        print(f"{stage}  {kind.name}: {'done' if not done.returncode else f'exit code {done.returncode}'}", flush=True)

    there = optional(folder, stage)
    with ThreadPoolExecutor(jobs) as pool:
        [*pool.map(one, [kind for kind in kinds if kind.name not in there])]


def run(folder: Path, jobs: int) -> None:
    """Trains both stages."""
    train(folder, "screen", KINDS, jobs)
    wanted = of_full_grid(rows_of(folder, "screen"))
    train(folder, "full", [kind for kind in KINDS if kind.name in wanted], jobs)


FAMILY = 0.05
"""How probable it may be that the full grid has any row for a difference in loss that is chance."""


def of_full_grid(screen: Mapping[str, Row]) -> set[str]:
    """Returns the names of the rows that the screen tells apart, and of those that they are compared with.

    Of a hundred 95 % intervals five leave out 0 by chance. So a difference counts here if its probability is below
    `FAMILY` over the number of intervals (Bonferroni), or if other runs diverged.
    """
    found = effects_of(screen)
    wanted = {name for name, each in found.items() if each.diverged or each.chance < FAMILY / (2 * len(found))}
    wanted |= {"default"}
    return wanted | {screen[name].kind.beside for name in wanted}


# ---- the pages

COSTS = "cost.json"
"""The file of `benchmarks/catalogue.py` in the folder of the runs."""


def catalogue(folder: Path) -> Iterator[str]:
    """Yields the paragraphs of `catalogue.md`."""
    screen, full, costs = rows_of(folder, "screen"), optional(folder, "full"), costs_of(folder)
    one = screen["default"].runs[0].settings
    yield "# The catalogue: each stability knob alone"
    yield "```\npython docs/catalogue.py --run\npython benchmarks/catalogue.py multirun/catalogue/cost.json\n```"
    yield paragraph(
        f"Every knob is trained alone, on the defaults of `experiment=catalogue`: {one['model']} with "
        f"{one['model.n_layer']} blocks of width {one['model.n_embd']}, {one['steps']} steps of {one['batch_size']} "
        f"samples of {one['data.block_size']} bytes, in {screen['default'].runs[0].precision}, with `guard=off` and "
        "the init, clipping, warmup and independent weight decay of arXiv 2309.14322. These models are small and these "
        "runs are short: what a knob does over 100,000 steps, or at a width of 4,096, they cannot show. A knob against "
        "troubles that do not occur here (fp16's range, spikes of the data, thousands of steps at the peak) has "
        "nothing to do."
    )
    yield "## The screen"
    yield paragraph(
        f"Learning rates {', '.join(f'{rate:g}' for rate in screen['default'].rates)}, two seeds. A difference is to "
        "the row named in *beside*, between runs that share rate and seed; in nats per byte, with its 95 % interval "
        "from the spread within the rates. **Bold**: the interval leaves out 0. Of "
        f"{2 * (len(screen) - 1)} intervals of knobs that do nothing, one in twenty would leave it out by chance. "
        "The largest attention logit, the largest |log Z| and the least fp16 headroom are those that the monitors "
        f"measured, medians over the runs at {screen['default'].rates[-1]:g}. Time and memory of a step are those of "
        "`benchmarks/catalogue.py`, relative to the same row."
    )
    yield table(screen, costs)
    yield paragraph(apart(screen))
    missing = not_run(screen, full)
    picture = "![Loss over the grid of learning rates, relative to the defaults](catalogue.svg)"
    if missing:
        yield picture
    if full:
        yield "## The full grid"
        one = full["default"]
        also = [kind.name for kind in KINDS if kind.name in full.keys() - of_full_grid(screen)]
        yield paragraph(
            f"The knobs that the screen tells apart beyond the chance of its {2 * (len(screen) - 1)} intervals "
            f"(Bonferroni at {FAMILY}){'; trained as well: ' if also else ''}{', '.join(also)}. "
            f"{len(one.rates)} rates from {one.rates[0]:g} to {one.rates[-1]:g}, three seeds, two depths. The pairs of "
            "a difference are the six grids of the same depth and seed. **Sensitivity** is the mean over the rates of "
            "the distance to the lowest loss."
        )
        yield paragraph(f"Not run yet: {', '.join(missing)}.") if missing else picture
        yield full_table(full)
        yield paragraph(apart(full))
    else:
        yield paragraph("The second stage has not been run.")
    yield effort([run for row in [*screen.values(), *full.values()] for run in row.runs])


def not_run(screen: Mapping[str, Row], full: Mapping[str, Row]) -> list[str]:
    """Returns the names of the rows that the full grid still lacks."""
    wanted = of_full_grid(screen)
    return [kind.name for kind in KINDS if kind.name in wanted - full.keys()]


def optional(folder: Path, stage: str) -> dict[str, Row]:
    """Returns the rows of a stage; none if its defaults have not been run."""
    with suppress(ConfigError):
        return rows_of(folder, stage)
    return {}


def costs_of(folder: Path) -> dict[str, dict[str, float]]:
    """Returns what `benchmarks/catalogue.py` measured, by row; empty if it was not run."""
    file = folder / COSTS
    return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else {}


def table(rows: Mapping[str, Row], costs: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the table of the screen, by the loss over the grid."""
    head = ["knob", "settings", "loss over the grid", "best loss", "at", "diverged", "logit", "log Z", "headroom"]
    head += ["time", "memory"] if costs else []
    found = effects_of(rows)
    ranked = sorted(rows, key=lambda name: found[name].grid.mean if name in found else 0.0)
    lines = []
    for name in ranked:
        row, kind = rows[name], rows[name].kind
        if name in found:
            losses = [as_cell(found[name].grid), as_cell(found[name].best)]
        else:
            losses = [f"{statistics.fmean(row.losses.values()):.3f}", f"{best_loss(row):.3f}"]
        beside = "" if kind.beside == "default" else f", beside {kind.beside}"
        cells = [name, f"`{kind.settings}`{beside}" if kind.settings else "", *losses, f"{row.best_rate:g}"]
        cells += [f"{row.diverged}" if row.diverged else "", *(number(middle(row, each)) for each in MEASURED)]
        if costs:
            cells += [f"{costs[name][each]:.2f}" if name in costs else "-" for each in ("time", "memory")]
        lines.append(cells)
    return as_table(head, lines)


MEASURED = ("logit", "log_z", "headroom")
"""The measured quantities of a row."""


def middle(row: Row, what: str) -> float:
    """Returns the median of a measured quantity over the runs at the highest learning rate."""
    values = [value for (rate, _), value in getattr(row, what).items() if rate == row.rates[-1]]
    return statistics.median(values)


def best_loss(row: Row) -> float:
    """Returns the mean loss at the best learning rate."""
    return statistics.fmean(row.at(row.best_rate).values())


def full_table(rows: Mapping[str, Row]) -> str:
    """Returns the table of the full grid, by sensitivity."""
    found = effects_of(rows)
    ranked = sorted(rows, key=lambda name: found[name].sensitivity.mean if name in found else 0.0)
    lines = []
    for name in ranked:
        row = rows[name]
        mean = statistics.fmean(row.sensitivities().values())
        cells = [name, f"{mean:.3f}", *(["", "", f"{best_loss(row):.3f}"] if name not in found else [])]
        if name in found:
            cells += [*map(as_cell, (found[name].sensitivity, found[name].grid, found[name].best))]
        lines.append([*cells, f"{row.best_rate:g}", *(number(middle(row, each)) for each in MEASURED)])
    head = ["knob", "sensitivity", "difference", "loss over the grid", "best loss", "at", "logit", "log Z", "headroom"]
    return as_table(head, lines)


def as_cell(difference: Interval) -> str:
    """Formats a difference; bold if its interval leaves out 0."""
    mean, space, interval = difference.text.partition(" ")
    return f"**{mean}**{space}{interval}" if difference.excludes_zero else difference.text


def number(value: float) -> str:
    """Formats a number to three digits."""
    return f"{value:.3g}" if math.isfinite(value) else "-"


def apart(rows: Mapping[str, Row]) -> str:
    """Says which knobs no interval separates from the defaults."""
    found = effects_of(rows)
    same = [name for name, each in found.items() if not each.told_apart]
    if not same:
        return "Every knob is told apart from what it is compared with."
    return f"Not told apart from what they are compared with: {', '.join(same)}."


TROUBLES: Sequence[tuple[str, str, Callable[[Row, Row], Interval], bool]] = (
    (
        "The learning rate is too high, or not known",
        "loss over the grid of learning rates, in nats per byte",
        lambda row, other: effect(row, other).grid,
        False,
    ),
    (
        "Attention logits grow",
        "largest attention logit, log2",
        lambda row, other: factor(row.logit, other.logit),
        False,
    ),
    ("Output logits drift", "largest abs(log Z), log2", lambda row, other: factor(row.log_z, other.log_z), False),
    (
        "Activations come near fp16's largest number",
        "least headroom, bits",
        lambda row, other: factor(row.headroom, other.headroom, bits=True),
        True,
    ),
    (
        "The final loss itself, each at its best rate",
        "loss, in nats per byte",
        lambda row, other: effect(row, other).best,
        False,
    ),
)
"""Trouble, what measures it, how a knob changes that, and whether more of it is better."""

NOTES = {
    "Output logits drift": "mu-centering keeps the mean logit at 0, so log Z is at least the logarithm of the number "
    "of classes: 5.5 for bytes. It bounds the drift, and not log Z itself.",
}
"""What is to be said of a trouble beside its table."""


def which_knobs(folder: Path) -> Iterator[str]:
    """Yields the paragraphs of `which_knobs.md`."""
    rows, costs = rows_of(folder, "screen"), costs_of(folder)
    yield "# Which knobs for which trouble"
    yield paragraph(
        "Made from the runs of the [catalogue](catalogue.md) by `python docs/catalogue.py`: for each trouble the knobs "
        "that changed what measures it, beyond the 95 % interval over all runs of the screen that share rate and seed, "
        "the strongest first. *Costs*: by how much it raises the loss at the best rate, where the interval leaves out "
        "0, and the time of a step. Small models, short runs: see the catalogue for what they cannot show."
    )
    for trouble, what, measure, more in TROUBLES:
        found = {}
        for name, row in rows.items():
            if name != "default" and row.kind.beside in rows:
                found[name] = measure(row, rows[row.kind.beside])
        helps = [name for name, each in found.items() if each.excludes_zero and (each.mean > 0) == more]
        harms = [name for name, each in found.items() if each.excludes_zero and (each.mean > 0) != more]
        helps.sort(key=lambda name: found[name].mean, reverse=more)
        harms.sort(key=lambda name: found[name].mean, reverse=not more)
        yield f"## {trouble}"
        if trouble in NOTES:
            yield paragraph(NOTES[trouble])
        if helps:
            yield as_table(
                ["knob", "settings", what, "costs"],
                [
                    [name, f"`{rows[name].kind.settings}`", found[name].text, costs_in_words(name, rows, costs)]
                    for name in helps
                ],
            )
        else:
            yield "No knob of the screen changes this for the better."
        if harms:
            yield paragraph(f"For the worse: {', '.join(f'{name} ({found[name].text})' for name in harms)}.")
    lost = {name: each.diverged for name, each in effects_of(rows).items() if each.diverged > 0}
    if lost:
        yield "## Knobs with which more runs diverged"
        yield paragraph(", ".join(f"{name} ({count} more)" for name, count in lost.items()) + ".")


def costs_in_words(name: str, rows: Mapping[str, Row], costs: Mapping[str, Mapping[str, float]]) -> str:
    """Returns what a knob costs: in loss at its best rate, and in time."""
    best = effect(rows[name], rows[rows[name].kind.beside]).best
    words = [f"loss {best.text}"] if best.excludes_zero and best.mean > 0 else []
    if name in costs:
        words.append(f"time x {costs[name]['time']:.2f}")
    return "; ".join(words)


def draw(rows: Mapping[str, Row], file: Path) -> None:
    """Draws the loss over the grid and the best loss of each knob, relative to what it is compared with."""
    found = effects_of(rows)
    names = sorted(found, key=lambda name: found[name].grid.mean, reverse=True)
    with canvas(file, width=9, panels=2, height=1.2 + 0.2 * len(names)) as axes:
        parts: list[tuple[str, Callable[[Effect], Interval]]] = [
            ("mean loss over the learning rates", lambda each: each.grid),
            ("loss at the best learning rate", lambda each: each.best),
        ]
        for axis, (label, part) in zip(axes, parts, strict=True):
            for place, name in enumerate(names):
                each = part(found[name])
                colour = "grey" if not each.excludes_zero else "tab:green" if each.mean < 0 else "tab:red"
                axis.plot([each.low, each.high], [place, place], color=colour, lw=1.5)
                axis.plot([each.mean], [place], "o", ms=4, color=colour)
            axis.axvline(0, color="black", lw=0.8)
            axis.set(xlabel=f"{label},\nnats per byte beyond the defaults")
            axis.grid(alpha=0.3)
            axis.set_yticks(range(len(names)), names if axis is axes[0] else [""] * len(names), fontsize=8)
        axes[0].set_title("line: 95 % interval; grey: not told apart", fontsize=8, loc="left")


def write(folder: Path, docs: Path) -> None:
    """Writes both pages, and the picture: of the full grid, or of the screen as long as that is incomplete."""
    pages: Mapping[str, Any] = {"catalogue.md": catalogue, "which_knobs.md": which_knobs}
    for name, page in pages.items():
        (docs / name).write_text("\n\n".join(page(folder)) + "\n", encoding="utf-8")
    screen, full = rows_of(folder, "screen"), optional(folder, "full")
    draw(screen if not_run(screen, full) else full, docs / "catalogue.svg")


def main(typed: Sequence[str] | None = None) -> None:
    """Trains what is missing if asked to, and writes the pages."""
    parser = argparse.ArgumentParser(prog="python docs/catalogue.py", description=__doc__.split("\n")[0])
    parser.add_argument(
        "runs", type=Path, nargs="?", default=ROOT / "multirun" / "catalogue", help="default: %(default)s"
    )
    parser.add_argument("--run", action="store_true", help="first train the runs that are missing there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="knobs trained at once; default: %(default)s")
    parser.add_argument(
        "--docs", type=Path, default=HERE / "evidence", help="where the pages are written; default: %(default)s"
    )
    chosen = parser.parse_args(typed)
    try:
        if chosen.run:
            run(chosen.runs, chosen.jobs)
        write(chosen.runs, chosen.docs)
    except ConfigError as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
