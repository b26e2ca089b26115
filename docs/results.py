"""Writes the sections of `results.md` from runs: `python docs/results.py multirun/<date>/<time>`.

The runs' experiment says which section. `python docs/results.py --run spiky` trains the runs first. `--run` alone
trains and measures all that the page shows, and `--list` prints the commands of that, and how long they take. Each
number of a section is computed from the runs' files. Each sentence that compares follows from a 95 % interval, or gives
single runs as what they are. Writing a section twice changes nothing.

`--card gpu-results` writes the section "On a card" from the folder of `benchmarks/gpu.sh`, which calls it at its end.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from stabletrain.beside.comparison.by_setting import markdown, settings_of
from stabletrain.beside.comparison.frames import frame_of
from stabletrain.beside.comparison.groups import NOT_OVER
from stabletrain.beside.comparison.intervals import Interval, of_independent
from stabletrain.beside.comparison.pictures import draw, draw_losses
from stabletrain.beside.comparison.reading.run import Run
from stabletrain.beside.comparison.reading.runs import read_runs
from stabletrain.beside.comparison.sensitivity import RATE, Arm, Point, arms
from stabletrain.beside.comparison.sensitivity import markdown as by_rate
from stabletrain.errors import ConfigError
from stabletrain.tracking.metrics import read_jsonl

ROOT = Path(__file__).parents[1]

PAGE = ROOT / "docs" / "evidence" / "results.md"

WIDTH = 120

HIGH_LOGIT = 1e4
"""Every run whose largest attention logit passed this one diverged (arXiv 2309.14322, section 3.1.1)."""

HALTED = 3
"""The exit code of a run that the guard has halted: one of the runs of `healed`."""

EFFECTS = (
    ("QK-norm", "qknorm", "none"),
    ("QK-norm beside z-loss", "zloss_qknorm", "zloss"),
    ("z-loss", "zloss", "none"),
    ("z-loss beside QK-norm", "zloss_qknorm", "qknorm"),
)
"""What is compared at each learning rate: a name, the preset with it, and the preset without it."""


class Section(NamedTuple):
    """A section of the page.

    Attributes:
        heading: of the section, which is replaced up to the next heading.
        commands: what trains the runs, in folders below `multirun/<experiment>`.
        write: yields the paragraphs from the runs, and draws the picture into a folder.
    """

    heading: str
    commands: Sequence[str]
    write: Callable[[Sequence[Run], Path], Iterator[str]]


def lr_sensitivity(runs: Sequence[Run], folder: Path) -> Iterator[str]:
    """Yields the paragraphs on sensitivity to the learning rate, and draws `lr_sensitivity.svg`."""
    there = {run.settings.get("stability") for run in runs}
    if missing := {preset for _, *presets in EFFECTS for preset in presets} - there:
        raise ConfigError(f"there are no runs with stability={','.join(sorted(missing))}; fix: run the whole sweep")
    found = arms(runs)
    by_name = {arm.name.removeprefix("stability="): arm for arm in found}
    effects = {name: effect(by_name[on], by_name[off]) for name, on, off in EFFECTS}
    draw(found, folder / "lr_sensitivity.svg")
    one, rates = runs[0].settings, found[0].grid
    seeds = sorted({seed for arm in found for seed in arm.curves}, key=int)
    yield paragraph(
        "This is the protocol of Wortsman et al. (arXiv 2309.14322) at a size for a laptop: "
        f"{one['model']} on blocks of {one['data.block_size']} bytes, {one['steps']} steps of {one['batch_size']} "
        "samples, with the paper's init, optimizer, clipping, independent weight decay, warmup and grid of learning "
        f"rates, and `guard={one['guard']}`. The learning rate falls to 0; the paper's falls to 1e-5. Seeds "
        f"{', '.join(seeds)} differ in initial weights and in the order of the data, and share the validation text."
    )
    yield paragraph(
        f"Final validation loss in nats/byte by peak learning rate: mean ± standard deviation over the seeds, and "
        "below it the largest attention logit that the monitors measured, at every "
        f"{one['monitors.every']}th step. **Sensitivity** is the mean over the grid of the distance to the lowest loss "
        "in the grid. A run that diverges counts as its loss at init."
    )
    yield by_rate(found)
    yield "![Final loss and largest attention logit by learning rate](lr_sensitivity.svg)"
    yield paragraph(how_they_ended(found))
    yield "Each preset at its best learning rate, chosen by these same losses:"
    yield markdown(settings_of(frame_of(runs), ["stability"]))
    yield paragraph(
        "What each measure changes, in nats: the mean over the seeds of the difference to the run of the same seed "
        "without it, with its 95 % interval (Student's t). Bold: the interval does not hold 0. If nothing had an "
        f"effect, one in twenty of the {len(EFFECTS) * (len(rates) + 1)} intervals would leave out 0 by chance."
    )
    rows = [[RATE, *effects], ["---"] * (len(effects) + 1)]
    for place, rate in enumerate([*(f"{rate:g}" for rate in rates), "sensitivity"]):
        rows.append([rate, *(as_cell(differences[place]) for differences in effects.values())])
    yield "\n".join(f"| {' | '.join(row)} |" for row in rows)
    yield "\n".join(bullet(f"**{name}**: {in_words(each, rates)}") for name, each in effects.items())
    yield paragraph(effort(runs))


def effect(with_it: Arm, without: Arm) -> list[Interval]:
    """Returns the differences of two arms, paired by seed: of the loss at each rate, then of the sensitivity."""
    by_seed = [(losses_at(with_it, rate), losses_at(without, rate)) for rate in with_it.grid]
    return [
        of_independent([ours[seed] - others[seed] for seed in ours if seed in others])
        for ours, others in [*by_seed, (with_it.by_seed(), without.by_seed())]
    ]


def losses_at(arm: Arm, rate: float) -> dict[str, float]:
    """Returns an arm's losses at a learning rate by seed."""
    return {seed: point.loss for seed, curve in arm.curves.items() for point in curve if point.rate == rate}


def as_cell(difference: Interval) -> str:
    """Formats a difference for the table; bold if its interval does not hold 0."""
    mean, space, interval = difference.text.partition(" ")
    return f"**{mean}**{space}{interval}" if difference.excludes_zero else difference.text


def in_words(differences: Sequence[Interval], rates: Sequence[float]) -> str:
    """Says what an effect's intervals carry, and no more.

    Args:
        differences: one per learning rate, then that of the sensitivity.
        rates: the learning rates.
    """
    *by_rate, sensitivity = differences
    verb = "lowers" if sensitivity.mean < 0 else "raises"
    first = f"{verb} the sensitivity: {sensitivity.text}"
    if not sensitivity.excludes_zero:
        first = f"the sensitivities with and without it are not told apart: {sensitivity.text}"
    kinds: dict[str, list[str]] = {"lower": [], "higher": [], "not told apart": []}
    for rate, each in zip(rates, by_rate, strict=True):
        kind = "not told apart" if not each.excludes_zero else "lower" if each.mean < 0 else "higher"
        kinds[kind].append(f"{rate:g}")
    if len(kinds["not told apart"]) == len(rates):
        return f"{first}. At no learning rate are the losses told apart."
    losses = [f"{kind} at {', '.join(at)}" for kind, at in kinds.items() if at]
    return f"{first}. The losses are {'; '.join(losses)}."


def how_they_ended(found: Sequence[Arm]) -> str:
    """Says how many runs broke, and how those with large attention logits ended."""
    points = [(arm, point) for arm in found for curve in arm.curves.values() for point in curve]
    missing = sum(len(arm.missing) for arm in found)
    diverged, above = sum(point.diverged for _, point in points), sum(ended_above(point) for _, point in points)
    text = f"Of {len(points)} runs, {diverged} ended in NaN or were halted, and {above} ended above their loss at init."
    text += f" {missing} more are missing or not over." if missing else ""
    high = [(arm, point) for arm, point in points if point.logit > HIGH_LOGIT]
    if not high:
        return f"{text} No attention logit passed {HIGH_LOGIT:.0e}."
    places: dict[tuple[str, float], int] = {}
    for arm, point in high:
        places[arm.name, point.rate] = places.get((arm.name, point.rate), 0) + 1
    where = ", ".join(f"`{name}` at {rate:g} ({count})" for (name, rate), count in places.items())
    losses = [[point.loss for _, point in points if (point.logit > HIGH_LOGIT) is is_high] for is_high in (True, False)]
    spans = [f"{min(each):.3f} to {max(each):.3f}" for each in losses if each]
    lost = sum(point.diverged or ended_above(point) for _, point in high)
    return (
        f"{text} An attention logit passed {HIGH_LOGIT:.0e} in {len(high)} of them: {where}. In the paper all such "
        f"runs diverged; here {lost} of {len(high)} did, or ended above their loss at init. Their losses are {spans[0]}"
        + (f", those of the other runs {spans[1]}." if len(spans) > 1 else ".")
    )


def ended_above(point: Point) -> bool:
    """Returns whether a run ended above its loss at init."""
    return point.ended > point.loss


def effort(runs: Sequence[Run]) -> str:
    """Says where and how long the runs trained."""
    one, seconds = runs[0].record, sum(run.record["final"]["seconds"] for run in runs)
    moments = [datetime.fromisoformat(run.record[name]) for run in runs for name in ("started", "ended")]
    wall = (max(moments) - min(moments)).total_seconds()
    threads = one["hardware"]["threads"]
    return (
        f"({len(runs)} runs on {runs[0].card} in {runs[0].precision}, {threads} thread{'s' if threads > 1 else ''} "
        f"each, torch {one['versions']['torch']}: {seconds / 60:.0f} minutes of training, {wall / 60:.0f} minutes from "
        "the first start to the last end.)"
    )


def spiky(runs: Sequence[Run], folder: Path) -> Iterator[str]:
    """Yields the paragraph on a run with faults, and draws `spiky.svg`."""
    three = {
        "faults, no guard": pick(runs, guard="off", faults="spiky"),
        "faults, default guard": pick(runs, guard="rollback", faults="spiky"),
        "no faults": pick(runs, guard="rollback", faults="none"),
    }
    draw_losses(runs, folder / "spiky.svg", labels={run.name: text for text, run in three.items()})
    off, guarded, clean = (run.last("val/loss") for run in three.values())
    more = f"{abs(guarded / clean - 1):.1%}".replace("%", " %")
    yield paragraph(
        "A small GPT is trained at three times the default learning rate. It reads twenty batches of wrong data at "
        f"step 250, and at step 400 its update is 300 times too large. Without a guard it ends at {off:.3f} nats/byte. "
        f"With `guard=rollback` and the same seed it ends at {guarded:.3f}. A run without these faults ends at "
        f"{clean:.3f}, so the loss with the guard is {more} {'higher' if guarded > clean else 'lower'}. (One run each, "
        "so nothing is known about other seeds. The axis is logarithmic if a loss is far above the others.)"
    )
    yield "![Training losses of the three runs](spiky.svg)"


def foretold(runs: Sequence[Run], folder: Path) -> Iterator[str]:
    """Yields the paragraph on a run that was warned, and draws `foretold.svg`."""
    first, fixed = pick(runs, qknorm="none"), pick(runs, qknorm="layernorm")
    told = next(line for line in events(first, "forecast") if line["at"] is not None)
    names = [name for name in first.ranges if name.startswith("monitors/attn_entropy_min/")]
    curves = [first.curve(name, -1) for name in names]
    low = min(int(step) for steps, values in curves for step in steps[values < told["threshold"]])
    labels = {
        first.name: f"no QK-norm, learning rate {first.settings[RATE]}",
        fixed.name: f"from step {told['step']}: QK-norm, learning rate {fixed.settings[RATE]}",
    }
    draw_losses(runs, folder / "foretold.svg", labels=labels)
    yield paragraph(
        f"At a learning rate of {first.settings[RATE]} without QK-norm, the smallest attention entropies fall during "
        f"the warmup. At step {told['step']} the forecast says that they reach {told['threshold']} near step "
        f"{told['at']:.0f}, between {told['low']:.0f} and {told['high']:.0f}; they are below it at step {low}. The run "
        f"ends at {first.last('val/loss'):.3f} nats/byte. The state of step {told['step']} was kept. From it, with "
        f"QK-norm and a learning rate of {fixed.settings[RATE]}, the run ends at {fixed.last('val/loss'):.3f}. (One "
        "run each; triangles are forecasts.)"
    )
    yield "![Training losses of both runs](foretold.svg)"


def healed(runs: Sequence[Run], folder: Path) -> Iterator[str]:
    """Yields the paragraph on a run that heals itself, and draws `healed.svg`."""
    halted, well = pick(runs, **{"guard.escalate": "halt"}), pick(runs, **{"guard.escalate": "whatif"})
    (heal,) = events(well, "heal")
    labels = {
        run.name: f"learning rate {halted.settings[RATE]:g}, guard.escalate={run.settings['guard.escalate']}"
        for run in (halted, well)
    }
    draw_losses(runs, folder / "healed.svg", labels=labels)
    yield paragraph(
        f"A small GPT with a learning rate of {halted.settings[RATE]:g} in place of 0.003. The guard skips "
        f"{len(halted.skips)} steps, rolls back {halted.rollbacks} times, and halts at step {halted.steps}, after "
        f"{halted.record['final']['ticks']} executed steps. With `guard.escalate=halt` that is the end. With `whatif` "
        f"{len(heal['arms'])} arms take {heal['steps']:,} steps, most of them from the state of step {heal['origin']}. "
        "`lr_usual` takes the optimizer's usual learning rate from that state, and `from_step_0:` is the same from the "
        f"beginning. The verdict: *{heal['why']}* The run goes on from step {heal['to']} with "
        f"`{' '.join(heal['settings'])}`, and ends at {well.last('val/loss'):.3f} nats/byte. (One run each; the "
        "interval is over batches.)"
    )
    yield "![Training losses of both runs](healed.svg)"


class Columns(NamedTuple):
    """A table of the section on a card.

    Attributes:
        says: what the table shows.
        names: of its columns.
        cells: returns a row's cells from one of the results in the benchmark's JSON.
    """

    says: str
    names: Sequence[str]
    cells: Callable[[Mapping[str, Any]], Sequence[str]]


def share(value: float | None) -> str:
    """Formats a share; empty if it is unknown."""
    return "" if value is None else f"{100 * value:.1f} %"


CARD = {
    "throughput": Columns(
        "Training speed; `speed` is relative to a plain fp32 loop",
        ["size", "precision", "what", "rate", "speed", "MFU", "memory, GB", "compiling, s"],
        lambda each: [
            *(each["size"], each["precision"], each["what"], f"{each['rate']:,.0f} {each['unit']}/s"),
            *(f"{statistics.median(each['speed']):.2f}", share(each["mfu"])),
            "" if each["memory"] is None else f"{each['memory'] / 1e9:.1f}",
            "" if each["compile"] is None else f"{each['compile']:.0f}",
        ],
    ),
    "overhead": Columns(
        "The guard's cost: time over a bare loop's, of an ordinary step and of the whole",
        ["model", "precision", "what", "step", "whole", "a step waits for"],
        lambda each: [
            *(each["workload"], each["precision"], each["what"]),
            *(f"{each['step'][0]:.3f}", f"{each['whole'][0]:.3f}", each["waits_for"]),
        ],
    ),
    "operations": Columns(
        "Kernels that a step launches beyond a bare loop's, counted as if on a card",
        ["model", "what", "bare", "more"],
        lambda each: [
            *(each["model"], each["kind"], str(each["bare"]["launched"])),
            str(each["ours"]["launched"] - each["bare"]["launched"]),
        ],
    ),
    "fp8": Columns(
        "fp8 beside bf16; `speed` is relative to bf16",
        ["width", "what", "rate", "speed", "MFU", "loss"],
        lambda each: [
            *(str(each["width"]), each["what"], f"{each['rate']:,.0f} tokens/s", f"{each['speed'][0]:.2f}"),
            *(share(each["mfu"]), f"{each['loss']:.3f}"),
        ],
    ),
    "graphs": Columns(
        "CUDA graphs; `speed` is relative to an uncompiled run",
        ["model", "compile", "a step, ms", "speed"],
        lambda each: [
            *(each["workload"], each["what"], f"{1e3 * statistics.median(each['seconds']):.2f}"),
            f"{each['speed']:.2f}",
        ],
    ),
    "head": Columns(
        "Head and loss, over an unpadded vocabulary",
        ["precision", "what", "time over unpadded"],
        lambda each: [each["precision"], each["what"], f"{each['over']:.3f}"],
    ),
    "memory": Columns(
        "Peak memory of a step of gpt2",
        ["precision", "what", "peak, GB"],
        lambda each: [each["precision"], each["what"], f"{each['bytes'] / 1e9:.1f}"],
    ),
}
"""The tables of the section on a card by benchmark; other benchmarks give quantities (`benchmarks/quantities.py`)."""

QUANTITIES = {
    "recovery": "Snapshots, checkpoints, rollbacks and diagnoses",
    "images_per_second": "Images from JPEG files",
    "start": "Time to start",
    "growth": "Data sets of 10^6 to 10^9 tokens",
}


def on_a_card(folder: Path) -> Iterator[str]:
    """Yields the paragraphs and tables from the folder of `benchmarks/gpu.sh`.

    Raises:
        ConfigError: the folder has no measurement of a card.
    """
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    if not found or not (folder / "parts.md").exists():
        raise ConfigError(f"{folder} has no measurement of benchmarks/gpu.sh; fix: give the folder that it wrote to")
    machine = {name: each["machine"] for name, each in found.items() if name != "operations"}  # this one needs no card
    if others := [name for name, each in machine.items() if not each["device"].startswith("cuda")]:
        raise ConfigError(f"{folder}: {others[0]} was measured on {machine[others[0]]['device']}, not on a card")
    for about in [*machine.values()][:1]:
        yield paragraph(f"One run of `benchmarks/gpu.sh` on one {about['name']}, torch {about['torch']}.")
    yield (folder / "parts.md").read_text().strip()
    yield from map(paragraph, tests_of(folder))
    for name, columns in CARD.items():
        if results := found.get(name, {}).get("results"):
            yield f"**{columns.says}**:"
            yield as_table(columns.names, map(columns.cells, results))
    for name, says in QUANTITIES.items():
        if results := [each for each in found.get(name, {}).get("results", ()) if "median" in each]:
            yield f"**{says}**, medians:"
            cells = ([each["workload"], each["what"], f"{each['median']:.3g}", each["unit"]] for each in results)
            yield as_table(["measured", "quantity", "median", "unit"], cells)
    yield "**Targets** that were measured:"
    values = {target: value for each in found.values() for target, value in each["targets"].items()}
    yield as_table(["target", "measured"], ([f"`{target}`", f"{value:.4g}"] for target, value in values.items()))


def tests_of(folder: Path) -> Iterator[str]:
    """Yields a sentence for each report of pytest."""
    for report in sorted(folder.glob("*.xml")):
        cases = [*ElementTree.parse(report).iter("testcase")]
        failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        skipped = sum(case.find("skipped") is not None for case in cases)
        names = ", ".join(f"`{case.get('name')}`" for case in failed)
        yield (
            f"**{report.stem}**: {len(cases) - len(failed) - skipped} of {len(cases)} tests passed, {skipped} were "
            f"skipped, {len(failed)} failed{': ' if names else ''}{names}."
        )


def as_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [names, ["---"] * len(names), *rows])


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    """Returns the events of a kind."""
    return [line for line in read_jsonl(run.folder / "events.jsonl") if line["event"] == kind]


def pick(runs: Sequence[Run], **choices: str) -> Run:
    """Returns the run with these options.

    Raises:
        ConfigError: there is no such run, or there are several.
    """
    found = [run for run in runs if all(run.settings.get(group) == option for group, option in choices.items())]
    if len(found) == 1:
        return found[0]
    wanted = " ".join(f"{group}={option}" for group, option in choices.items())
    raise ConfigError(
        f"{len(found)} runs with {wanted}, but one is needed; fix: python docs/results.py --run <section>"
    )


def paragraph(text: str) -> str:
    """Breaks a text into lines."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def bullet(text: str) -> str:
    """Returns an entry of a list."""
    return textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


class Line(NamedTuple):
    """A line of the table at the top of the page.

    Attributes:
        commands: each trains one run. The folder of the run is added when it is run.
        says: follows the commands in the first cell.
        of: follows the word accuracy.
        data: what has to lie in the repository, and is not part of it; empty if nothing has to.
        one_thread: whether the runs have one thread each.
    """

    commands: Sequence[str]
    says: str = ""
    of: str = ""
    data: str = ""
    one_thread: bool = False

    def first_cell(self) -> str:
        """Returns the line's first cell."""
        return ", ".join(f"`{command}`" for command in self.commands) + self.says


TABLE: Mapping[str, Line] = {
    "gpt": Line(["python train.py"]),
    "text": Line(
        [
            "python train.py data=text data.path=tinyshakespeare.txt model.n_layer=4 model.n_head=4 model.n_embd=128 "
            "data.block_size=64 batch_size=12 steps=2000"
        ],
        data="tinyshakespeare.txt",
    ),
    "resnet": Line(["python train.py experiment=resnet_digits"], of=" on the held-out fifth"),
    "nf_resnet": Line(
        [f"python train.py experiment=nf_resnet_digits seed={seed}" for seed in range(3)],
        ": no BatchNorm, AGC, one thread",
        one_thread=True,
    ),
    "cifar10": Line(
        [
            "python train.py model=resnet20 data=imagefolder data.path=cifar10-jpeg optimizer=sgd steps=1173 "
            "batch_size=128 eval_every=391"
        ],
        " (3 epochs of CIFAR-10 as JPEG files)",
        of=" on the test images",
        data="cifar10-jpeg",
    ),
}
"""The lines of the table that are runs, by the name of their folder below `multirun/table`."""

KILLS = "python -m tests.reliability.kills --kills 30 --seed 1"
"""The last line of the table."""

SCALE = "python benchmarks/scale.py"

CARD_COMMAND = "benchmarks/gpu.sh gpu-results"


def table_line(line: Line, runs: Sequence[Run]) -> str:
    """Returns a line of the table from its runs, in the order of its commands."""
    ends = [run.record["final"] for run in runs]
    if all("val/accuracy" in end for end in ends):
        result = ", ".join(f"{100 * end['val/accuracy']:.2f} %" for end in ends) + f" accuracy{line.of}"
    else:
        result = ", ".join(f"val loss {run.last('val/loss'):.3f} nats/byte" for run in runs)
    times = ", ".join(f"{end['seconds']:.0f} s" for end in ends)
    return f"| {line.first_cell()} | {result} | {times} |"


def kills_line(report: Mapping[str, Any], seconds: float) -> str:
    """Returns the line of the campaign of kills from its JSON."""
    says = f"a run is killed with SIGKILL {report['kills']} times, {report['inside_write']} of them while it writes"
    result = "every final state is bit-identical to the final state of a run without kills"  # else it ends with 1
    return f"| `{KILLS}`: {says} a checkpoint | {result} | {seconds:.0f} s |"


def with_line(page: str, line: str) -> str:
    """Returns a page with the line of the table replaced that begins with the same command.

    Raises:
        ConfigError: the table has no such line.
    """
    begins = re.match(r"\| `[^`]+`", line)
    old = begins and re.search(rf"^{re.escape(begins[0])}.*$", page, re.MULTILINE)
    if not old:
        raise ConfigError(f"the table has no line that begins {line[:60]!r}: add it where it belongs")
    return page.replace(old[0], line)


SCALES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "guard": (
        "A step's guard against parameters: GPTs, `guard=rollback`, `monitors=default`, in a step that no monitor "
        "inspects. Kernels and operations are counted without values, as if on a card. The host time is that of a GPT "
        "with as many tensors, 16 wide, whose kernels take no time",
        {
            "parameters": 0,
            "parameter tensors": 1,
            "operations of a bare step": 2,
            "kernels more": 3,
            "operations more": 4,
            "host time of a bare step, ms": 5,
            "more, ms": 6,
        },
    ),
    "compare": (
        "`stabletrain compare` against runs of 1,000 logged steps, with its page",
        {"runs": 0, "CPU, s": 2, "memory of the largest process, MB": 3, "page, MB": 4},
    ),
    "report": (
        "Pages against logged steps: a run's `report.html`, and the page of `stabletrain compare` of two such runs",
        {
            "steps": 0,
            "a run: CPU, s": 1,
            "a run: memory, MB": 2,
            "a run: page, MB": 3,
            "two runs: CPU, s": 4,
            "two runs: memory, MB": 5,
            "two runs: page, MB": 6,
        },
    ),
    "start": (
        "The start against files of data: `python train.py compile=false` until the first step is logged. Text of a "
        "glob, token shards, an image folder",
        {"files": 0, "text: CPU, s": 1, "tokens: CPU, s": 4, "images: CPU, s": 7},
    ),
}
"""Per part of `benchmarks/scale.py`: what its table shows, and the column of each heading."""


def at_scale(told: Mapping[str, Any]) -> Iterator[str]:
    """Yields the paragraphs and tables from the JSON of `benchmarks/scale.py`."""
    about = told["machine"]
    yield paragraph(
        "How four costs grow. The last row of a table is each column's exponent: the slope of log(cost) over log(size) "
        "at the three largest sizes; 1 is linear. Seconds are CPU time, user and system, of all processes together, "
        f"on {about['name']}, torch {about['torch']}, one thread each. One round each."
    )
    for part in told["results"]:
        says, columns = SCALES[part["part"]]
        yield paragraph(f"**{says}**:")
        cells = [[as_size(row[column]) for column in columns.values()] for row in part["rows"]]
        slopes = [part["exponents"][column - 1] for column in [*columns.values()][1:]]
        cells.append(["grows as", *("" if slope is None else f"^{slope:.2f}" for slope in slopes)])
        yield as_table([*columns], cells)


def as_size(value: float) -> str:
    """Formats a cell of the tables of sizes."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


SECTIONS: Mapping[str, Section] = {
    "lr_sensitivity": Section(
        "Learning-rate sensitivity",
        ["python train.py -m experiment=lr_sensitivity hydra/launcher=joblib hydra.launcher.n_jobs=2"],
        lr_sensitivity,
    ),
    "spiky": Section(
        "A run that would be lost",
        [
            "python train.py -m experiment=spiky guard=off,rollback log_every=1",
            "python train.py experiment=spiky faults=none log_every=1 hydra.run.dir=multirun/spiky/clean",
        ],
        spiky,
    ),
    "foretold": Section(
        "A run that was warned",
        [
            "python train.py experiment=foretold log_every=1 hydra.run.dir=multirun/foretold/0",
            "python train.py experiment=foretold log_every=1 hydra.run.dir=multirun/foretold/1 "
            "resume=multirun/foretold/0/checkpoints/step-00000150 qknorm=layernorm optimizer.lr=0.067",
        ],
        foretold,
    ),
    "healed": Section(
        "A run that heals itself",
        ["python train.py -m experiment=healed guard.escalate=halt,whatif log_every=1"],
        healed,
    ),
}
"""The sections by experiment."""


def command_lines(experiment: str) -> list[str]:
    """Returns the commands that train the runs of a section."""
    return [
        f"{line} hydra.sweep.dir=multirun/{experiment}" if " -m " in line else line
        for line in SECTIONS[experiment].commands
    ]


def with_section(page: str, runs: Sequence[Run], folder: Path) -> str:
    """Returns a page with the section of some runs' experiment replaced, and draws its picture into a folder.

    Raises:
        ConfigError: the runs are of no experiment that has a section, or of several, or a run is not over.
    """
    names = sorted({str(run.settings.get("experiment")) for run in runs})
    if len(names) > 1 or names[0] not in SECTIONS:
        raise ConfigError(f"runs of experiment {', '.join(names)}: give those of one of {', '.join(SECTIONS)}")
    (name,) = names
    if open_ := [f"{run.folder} is {run.status}" for run in runs if run.status in NOT_OVER]:
        raise ConfigError(f"{open_[0]} ({len(open_)} of {len(runs)} are not over); fix: let them end")
    section = SECTIONS[name]
    block = "\n".join(["```", *command_lines(name), f"python docs/results.py multirun/{name}", "```"])
    return with_text(page, section.heading, [block, *section.write(runs, folder)])


def with_text(page: str, heading: str, paragraphs: Iterable[str]) -> str:
    """Returns a page with the section below a heading replaced.

    Raises:
        ConfigError: the page has no such heading.
    """
    text = "\n\n".join([f"## {heading}", *paragraphs]) + "\n"
    old = re.search(rf"^## {re.escape(heading)}\n.*?(?=\n## |\Z)", page, re.MULTILINE | re.DOTALL)
    if old is None:
        raise ConfigError(f"the page has no heading {heading!r}: add it where the section belongs")
    return page.replace(old[0], text)


def everything() -> dict[str, list[str]]:
    """Returns the commands of each part of `--run`, in the order of the page."""
    lines = [command for line in TABLE.values() for command in line.commands]
    sections = {name: command_lines(name) for name in SECTIONS}
    return {"table": [*lines, KILLS], "scale": [SCALE], **sections, "card": [CARD_COMMAND]}


def known_minutes(page: str) -> dict[str, float]:
    """Returns how many minutes the parts took, as far as the page says it."""
    cells = [line.split(" | ")[-1] for line in page.splitlines() if line.startswith("| `python ")]
    found = {"table": sum(float(seconds) for cell in cells for seconds in re.findall(r"([\d.]+) s\b", cell)) / 60}
    if sensitivity := re.search(r"(\d+)\s+minutes\s+from\s+the\s+first\s+start", page):
        found["lr_sensitivity"] = float(sensitivity[1])
    return {**found, "card": 10.0}  # the budget of benchmarks/gpu.sh


def listing(page: str) -> str:
    """Returns the commands of `--run` with the times that the page has."""
    text, known = [], known_minutes(page)
    for name, commands in everything().items():
        text += [f"# {name}: {f'about {known[name]:.0f} minutes' if name in known else 'not timed'}", *commands]
    return "\n".join(text)


def run_command(line: str, one_thread: bool = True, more: Sequence[str] = (), **options: Any) -> Any:
    """Runs one of the page's commands from the repository's folder.

    Raises:
        ConfigError: it failed.
    """
    program, *words = shlex.split(line)
    first = [sys.executable] if program == "python" else ["bash", program]
    threads = {"OMP_NUM_THREADS": "1"} if one_thread else {}
    done = subprocess.run([*first, *words, *more], cwd=ROOT, env={**os.environ, **threads}, **options)
    if done.returncode not in (0, HALTED):
        raise ConfigError(f"{line}: it ended with exit code {done.returncode}; fix: see its output above")
    return done


def new_folder(name: str) -> Path:
    """Returns a folder below `multirun/`.

    Raises:
        ConfigError: it exists.
    """
    folder = ROOT / "multirun" / name
    if folder.exists():
        again = f"python docs/results.py {folder}, or delete it" if name in SECTIONS else "delete it"
        raise ConfigError(f"{folder} exists; fix: {again} to train again")
    return folder


def train(experiment: str) -> Path:
    """Trains the runs of a section, with one thread each; returns their folder.

    Raises:
        ConfigError: the folder exists, or a command failed.
    """
    folder = new_folder(experiment)
    for line in command_lines(experiment):
        run_command(line)
    return folder


def run_table(page: Path) -> None:
    """Trains the lines of the table whose data are there, and writes each when it has ended."""
    folder = new_folder("table")
    for name, line in TABLE.items():
        if line.data and not (ROOT / line.data).exists():
            print(f"table: {line.data} is not here, so its line stays as it is", flush=True)
            continue
        places = [folder / f"{name}-{number}" for number in range(len(line.commands))]
        for command, place in zip(line.commands, places, strict=True):
            run_command(command, line.one_thread, [f"hydra.run.dir={place}"])
        runs = [run for place in places for run in read_runs([place])]
        write(page, with_line(page.read_text(encoding="utf-8"), table_line(line, runs)))
    began = time.monotonic()
    done = run_command(KILLS, stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    write(page, with_line(page.read_text(encoding="utf-8"), kills_line(report, time.monotonic() - began)))


def run_scale(page: Path) -> None:
    """Measures how costs grow, and writes the section."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "scale.json")
        run_command(SCALE, more=["--json", str(file)])
        told = json.loads(file.read_text())
    text = with_text(page.read_text(encoding="utf-8"), "Scale of work", [f"```\n{SCALE}\n```", *at_scale(told)])
    write(page, text)


def run_card(page: Path) -> None:
    """Measures on a card, if there is one, and writes the section."""
    import torch  # reading runs needs no torch

    if not torch.cuda.is_available():
        print("card: PyTorch sees no CUDA device, so its section stays as it is", flush=True)
        return
    subprocess.run(["bash", *CARD_COMMAND.split()], cwd=ROOT)  # a part that failed is named in its tables
    write_card(page, ROOT / "gpu-results")


def write_card(page: Path, folder: Path) -> None:
    """Writes the section on a card from the folder of `benchmarks/gpu.sh`."""
    block = f"```\n{CARD_COMMAND}\npython docs/results.py --card gpu-results\n```"
    write(page, with_text(page.read_text(encoding="utf-8"), "On a card", [block, *on_a_card(folder)]))


def write_section(page: Path, folders: Sequence[Path]) -> None:
    """Writes the section of some runs."""
    write(page, with_section(page.read_text(encoding="utf-8"), read_runs(folders), page.parent))


def write(page: Path, text: str) -> None:
    """Writes the page."""
    page.write_text(text, encoding="utf-8")


OTHERS = {"table": run_table, "scale": run_scale, "card": run_card}
"""What trains or measures the parts of the page that are no sections of runs, and writes them."""


def run_part(name: str, page: Path) -> None:
    """Trains or measures a part of the page, and writes it."""
    if name in OTHERS:
        OTHERS[name](page)
    else:
        write_section(page, [train(name)])


def run_all(page: Path) -> None:
    """Trains and measures all that the page shows. Each part is written when it has ended.

    Raises:
        ConfigError: a folder of runs exists: nothing is trained then. Or a command failed: the parts before it are
            written.
    """
    print(listing(page.read_text(encoding="utf-8")), flush=True)
    for name in ("table", *SECTIONS):
        new_folder(name)
    began = time.monotonic()
    for name in everything():
        since = time.monotonic()
        run_part(name, page)
        print(f"{name}: {(time.monotonic() - since) / 60:.1f} minutes", flush=True)
    print(f"all: {(time.monotonic() - began) / 60:.1f} minutes", flush=True)


ALL = "all"


def main(typed: Sequence[str] | None = None) -> None:
    """Writes sections of the page."""
    parser = argparse.ArgumentParser(prog="python docs/results.py", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="*", help="the folder of a section's runs, such as multirun/spiky")
    parser.add_argument("--card", type=Path, help="write the section 'On a card' from this folder of benchmarks/gpu.sh")
    parts = [ALL, *everything()]
    parser.add_argument("--run", choices=parts, nargs="?", const=ALL, help="train this part first; alone: all parts")
    parser.add_argument("--list", action="store_true", help="print the commands of --run, and how long they take")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: %(default)s; pictures are written beside it")
    chosen = parser.parse_args(typed)
    if sum(map(bool, (chosen.runs, chosen.run, chosen.card, chosen.list))) != 1:
        parser.error("give folders of runs, or --run, or --list, or --card and a folder")
    try:
        if chosen.list:
            print(listing(chosen.page.read_text(encoding="utf-8")))
        elif chosen.card:
            write_card(chosen.page, chosen.card)
        elif chosen.run == ALL:
            run_all(chosen.page)
        elif chosen.run:
            run_part(chosen.run, chosen.page)
        else:
            write_section(chosen.page, chosen.runs)
    except ConfigError as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
