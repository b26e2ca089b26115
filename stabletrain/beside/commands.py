"""The commands of `stabletrain` that work beside a run.

stabletrain check [group=option] [key=value]    check a run before its first step: gradient, resume, data, order
stabletrain run script.py [args]                guard whatever a training script trains, without a changed line
stabletrain export <run> --to hf                write a model for transformers, torchvision, ONNX or safetensors
stabletrain status <sweep>                      where each run of a sweep stands, on one screen
stabletrain compare <runs or sweeps>            compare runs in a table and on an HTML page
stabletrain losses <runs> <file>                plot the runs' training losses, rollbacks included
stabletrain forecast <run>                      foretell from a run's monitors what breaks, when, and the fix
stabletrain whatif <run>                        try fixes from the state before a run's trouble, and rank them
stabletrain lr [key=value ...]                  propose a peak learning rate from short runs at several rates
stabletrain sync [<runs>]                       upload offline runs to Weights & Biases
stabletrain wandb-report <entity/project>       write a W&B report that compares a project's runs
"""

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path

from stabletrain.beside import wandb_report, wandb_sync
from stabletrain.beside.preflight import command as preflight
from stabletrain.beside.script import command as script
from stabletrain.errors import ConfigError
from stabletrain.extension import Command
from stabletrain.printable import say
from stabletrain.tracking.metrics import print_json


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `export`."""
    parser.add_argument("run", type=Path, help="a run folder, or one of its checkpoints")
    parser.add_argument(
        "--to",
        choices=("hf", "safetensors", "onnx"),
        required=True,
        help="hf: transformers' GPT2LMHeadModel or torchvision's ResNet; safetensors: with what rebuilds the model",
    )
    parser.add_argument("--out", type=Path, help="the folder to write (default: <run>/export/<to>-<checkpoint>)")
    parser.add_argument("--best", action="store_true", help="use the checkpoint with the lowest validation loss")
    parser.add_argument("--averaged", action="store_true", help="use the averaged weights of a run with averaging")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in that folder")


def export(chosen: argparse.Namespace) -> None:
    """Writes the run's model for other programs, and prints how to load it."""
    from stabletrain.beside.export.command import export as write

    which = {"best": chosen.best, "averaged": chosen.averaged}
    write(chosen.run, chosen.to, chosen.out, overwrite=chosen.overwrite, **which)


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `status`."""
    parser.add_argument("folder", type=Path, help="a sweep's folder, a run folder, or a folder of runs")
    parser.add_argument("--rows", type=int, default=50, help="number of runs to list, 0 for all (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print counts and runs as JSON")


def status(chosen: argparse.Namespace) -> None:
    """Prints where the runs of a sweep stand."""
    from stabletrain.beside.status import status as show

    show(chosen.folder, rows=chosen.rows, json_wanted=chosen.json)


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `compare`."""
    parser.add_argument("runs", type=Path, nargs="+", help="a sweep's folder, or folders of runs")
    parser.add_argument("--each", action="store_true", help="one row per run, even if only the seed differs")
    parser.add_argument(
        "--by",
        metavar="KEYS",
        default="",
        help="one row per setting, such as precision,stability: mean and deviation over the other runs, and the "
        "difference to the best one with its 95%% interval",
    )
    parser.add_argument("--sort", metavar="COLUMN", help="a column of --csv, such as units_per_s or optimizer.lr")
    parser.add_argument(
        "--rows", type=int, default=50, help="number of rows to print, 0 for all (default: %(default)s)"
    )
    parser.add_argument("--wide", action="store_true", help="print every column, even if the terminal is too narrow")
    parser.add_argument("--csv", type=Path, help="write all rows and columns to this file; with --by, the settings")
    parser.add_argument("--json", action="store_true", help="print runs and settings as JSON, in place of tables")
    parser.add_argument("--tex", type=Path, help="write the table of settings to this file, in LaTeX (booktabs)")
    parser.add_argument("--png", "--picture", type=Path, help="plot the curves to this file (.png, .svg, .pdf)")
    parser.add_argument(
        "--html", type=Path, help="the page (default: report.html in a sweep's folder, else compare.html here)"
    )


def compare(chosen: argparse.Namespace) -> None:
    """Prints a table of runs and their sensitivity to the learning rate; writes the requested files."""
    from stabletrain.beside.comparison.command import compare as show

    names = ("each", "sort", "rows", "wide", "csv", "html", "tex")
    by = [key for key in chosen.by.split(",") if key]
    show(chosen.runs, picture=chosen.png, by=by, as_json=chosen.json, **{name: getattr(chosen, name) for name in names})


def add_losses_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `losses`."""
    parser.add_argument("runs", type=Path, nargs="+", help="a sweep's folder, or folders of runs")
    parser.add_argument("file", type=Path, help="the image to write (.svg, .png)")
    parser.add_argument(
        "--smooth", type=int, default=0, metavar="STEPS", help="draw running means over so many steps, too (default: 0)"
    )
    parser.add_argument("--each", action="store_true", help="draw every run, and no means over seeds")
    parser.add_argument(
        "--label", action="append", default=[], metavar="RUN=TEXT", help="name of a run in the legend; can be repeated"
    )


def losses(chosen: argparse.Namespace) -> None:
    """Plots the training losses of runs."""
    from stabletrain.beside.comparison.pictures import draw_losses
    from stabletrain.beside.comparison.reading.runs import read_runs

    labels = {}
    for label in chosen.label:
        run, equals, text = label.partition("=")
        if not (run and equals and text):
            raise ConfigError(f"--label {label!r} is not RUN=TEXT: name a run and its text, such as 0='no guard'")
        labels[run] = text
    draw_losses(read_runs(chosen.runs), chosen.file, chosen.smooth, chosen.each, labels)


def add_forecast_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `forecast`."""
    parser.add_argument("run", type=Path, help="a run folder; the run may still be training")
    parser.add_argument("--json", action="store_true", help="print the forecasts and the signals as JSON")


def forecast(chosen: argparse.Namespace) -> None:
    """Prints what the forecast says of a run, and the signals at its last look."""
    from stabletrain.beside.forecast.command import replay_forecast

    found = replay_forecast(chosen.run)
    print_json(found.as_json()) if chosen.json else say(found)


def add_whatif_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `whatif`."""
    from stabletrain.beside.slurm.arms import add_array_options

    parser.description = (
        "Resumes the state before a trouble with several changes, on the same batches, and ranks them. The "
        "same command goes on with an interrupted what-if."
    )
    parser.add_argument("run", type=Path, help="a run folder, one of its incidents, or one of its checkpoints")
    parser.add_argument(
        "own", nargs="*", metavar="key=value[,key=value...]", help="an arm of your own: overrides that go together"
    )
    parser.add_argument("--arms", metavar="NAME,NAME...", help="the arms to run (default: all that apply)")
    parser.add_argument("--list", action="store_true", help="print every arm, and why it applies or does not")
    parser.add_argument("--json", action="store_true", help="print the ranking, or the list of arms, as JSON")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="STEP",
        help="step-500 or 500: the state to start from (default: the newest "
        "healthy one before the trouble; computed again if it was not kept)",
    )
    parser.add_argument(
        "--past", type=int, default=100, help="steps after the trouble to which all arms run (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=300, help="steps that the best go on, 0 for none (default: %(default)s)"
    )
    parser.add_argument("--best", type=int, default=3, help="number of arms that go on (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, help="number of arms that run at once (default: 1; with --slurm as many as Slurm allows)"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="repeat the arms of the last round, so that each has run with so many seeds (default: %(default)s)",
    )
    add_array_options(parser)


def whatif(chosen: argparse.Namespace) -> None:
    """Tries fixes for a run's trouble, and prints their ranking."""
    from stabletrain.beside.slurm.arms import read_array
    from stabletrain.beside.whatif.driver import whatif as run
    from stabletrain.beside.whatif.opening import listing, listing_json
    from stabletrain.beside.whatif.plan import WhatIfOptions
    from stabletrain.beside.whatif.report import as_json

    start = None
    if chosen.start is not None:
        number = chosen.start.removeprefix("step-")
        if not number.isdecimal():
            raise ConfigError(f"--from {chosen.start} is not a step; fix: write --from step-500, or --from 500")
        start = int(number)
    asked = WhatIfOptions(
        path=chosen.run,
        start=start,
        arms=None if chosen.arms is None else [name for name in chosen.arms.split(",") if name],
        own=[*chosen.own, *chosen.more],
        past=chosen.past,
        steps=chosen.steps,
        best=chosen.best,
        jobs=1 if chosen.jobs is None else chosen.jobs,
        seeds=chosen.seeds,
        slurm=read_array(chosen),
    )
    if chosen.list:
        print_json(listing_json(asked)) if chosen.json else say(listing(asked))
        return
    with redirect_stdout(sys.stderr if chosen.json else sys.stdout):
        found = run(asked)
    if chosen.json:
        print_json(as_json(found))


def add_lr_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `lr`."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="as for train; the search starts around optimizer.lr",
    )
    parser.add_argument("--config-dir", type=Path, help="your own config groups, as for train")
    parser.add_argument("--steps", type=int, default=40, help="length of a short run (default: %(default)s)")
    parser.add_argument(
        "--seeds", type=int, default=2, help="runs at each rate, from which the noise follows (default: %(default)s)"
    )
    parser.add_argument("--low", type=float, metavar="LR", help="try no lower rate (default: as low as needed)")
    parser.add_argument("--high", type=float, metavar="LR", help="try no higher rate (default: as high as needed)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def lr(chosen: argparse.Namespace) -> None:
    """Prints the losses of short runs at several learning rates, and the proposed rate."""
    from stabletrain.beside.rate_finder.command import find_rate

    find_rate(chosen)


COMMANDS = {
    "check": Command("check a run before its first step", preflight.add_arguments, preflight.check, builds=True),
    "run": Command(
        "guard whatever a training script trains", script.add_arguments, script.run_script, take_over=script.run
    ),
    "export": Command(
        "write a model for transformers, torchvision, ONNX or safetensors", add_export_arguments, export, builds=True
    ),
    "status": Command("show where each run of a sweep stands", add_status_arguments, status),
    "compare": Command("compare runs in a table and on an HTML page", add_compare_arguments, compare),
    "losses": Command("plot the training losses of runs", add_losses_arguments, losses),
    "forecast": Command(
        "foretell from a run's monitors what breaks, when, and the fix", add_forecast_arguments, forecast
    ),
    "whatif": Command(
        "try fixes from before a run's trouble, and rank them", add_whatif_arguments, whatif, builds=True
    ),
    "lr": Command("propose a peak learning rate from short runs at several rates", add_lr_arguments, lr, builds=True),
    "sync": Command("upload offline runs to Weights & Biases", wandb_sync.add_arguments, wandb_sync.run),
    "wandb-report": Command(
        "write a W&B report that compares a project's runs", wandb_report.add_arguments, wandb_report.run
    ),
}
