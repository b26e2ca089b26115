"""The command `stabletrain`.

stabletrain train [group=option] [key=value]    train a model, or sweep with -m: what `python train.py` does
stabletrain prepare <text or data set> <out>    tokenize text into shards for data=tokens
stabletrain sample <run>                        generate text with a trained model
stabletrain export <run> --to hf                write a model for transformers, torchvision, ONNX or safetensors
stabletrain compare <runs or sweeps>            compare runs in a table and on an HTML page
stabletrain losses <runs> <file>                plot the runs' training losses, rollbacks included
stabletrain diagnose <run>                      list a run's incidents: where, why, and how to fix them
stabletrain forecast <run>                      foretell from a run's monitors what breaks, when, and the fix
stabletrain replay <incident> [key=value ...]   replay an incident's step, unchanged or with a fix
stabletrain whatif <run>                        try fixes from the state before a run's trouble, and rank them
stabletrain sync [<runs>]                       upload offline runs to Weights & Biases
stabletrain wandb-report <entity/project>       write a W&B report that compares a project's runs
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import stabletrain
from stabletrain.errors import ConfigError, StabletrainError, did_you_mean, own_traceback
from stabletrain.parallel.ranks import drop_unread_output, exit_process
from stabletrain.printable import printable, say
from stabletrain.stored.trusted import OPTION, accepting

MAX_TOKENS = 1_000_000
"""Largest `--tokens` of `sample`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the process's exit code."""
    typed = [*(sys.argv[1:] if arguments is None else arguments)]
    if typed[:1] == ["train"]:  # Hydra parses the rest; nothing else is imported, so that a refusal takes no second
        from stabletrain.cli.train import train_command

        exit_process(train_command(typed[1:]))
    from stabletrain.data import prepare
    from stabletrain.tracking import wandb_report as report
    from stabletrain.tracking import wandb_sync as sync

    parser = argparse.ArgumentParser(
        prog="stabletrain",
        description="Trains, and works on data and runs. All options of training: stabletrain train --help",
    )
    parser.add_argument("--version", action="version", version=f"stabletrain {stabletrain.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("train", help="train a model, or sweep with -m: what python train.py does", add_help=False)
    for name, (help, add_arguments, do) in {
        "prepare": ("tokenize text into shards for data=tokens", prepare.add_arguments, prepare.run),
        "sample": ("generate text with a trained model", add_sample_arguments, sample),
        "export": ("write a model for transformers, torchvision, ONNX or safetensors", add_export_arguments, export),
        "compare": ("compare runs in a table and on an HTML page", add_compare_arguments, compare),
        "losses": ("plot the training losses of runs", add_losses_arguments, losses),
        "diagnose": ("list a run's incidents: where, why, and how to fix them", add_diagnose_arguments, diagnose),
        "forecast": ("foretell from a run's monitors what breaks, when, and the fix", add_forecast_arguments, forecast),
        "replay": ("replay an incident's step, unchanged or with a fix", add_replay_arguments, replay),
        "whatif": ("try fixes from before a run's trouble, and rank them", add_whatif_arguments, whatif),
        "sync": ("upload offline runs to Weights & Biases", sync.add_arguments, sync.run),
        "wandb-report": ("write a W&B report that compares a project's runs", report.add_arguments, report.run),
    }.items():
        command = commands.add_parser(name, help=help)
        command.register("type", Path, typed_path)
        add_arguments(command)
        if do in (sample, export, replay, whatif):  # they build what a run's record names
            command.add_argument(OPTION, action="store_true", help="run the code that a folder from elsewhere names")
        command.set_defaults(do=do)

    first = next(iter(typed), "")
    if not first.startswith("-") and first not in commands.choices:
        known = f"commands: {', '.join(commands.choices)}"
        wrong = f"{first}: there is no such command{did_you_mean(first, commands.choices)}"
        parser.error(printable(f"{wrong if first else 'a command is missing'}\n{known}"))
    chosen, more = parser.parse_known_args(typed)
    if more and not (chosen.command == "whatif" and all("=" in word and word[0] != "-" for word in more)):
        parser.error(printable(f"unrecognized arguments: {' '.join(more)}"))
    chosen.more = more  # argparse takes no arms of the user's own after an option
    try:
        with accepting(getattr(chosen, "trust", False)):
            chosen.do(chosen)
    except StabletrainError as error:
        say(f"stabletrain: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe has closed it
        pass
    except OSError as error:
        say(f"stabletrain: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    drop_unread_output()
    return 0


def typed_path(word: str) -> Path:
    """Returns a path that was typed.

    An empty one, as from an unset variable, would be the working folder; one that is no UTF-8 cannot be opened by the
    libraries that read weights and draw pictures.
    """
    if not word:
        raise argparse.ArgumentTypeError("empty, perhaps from a variable that is not set: name a file or a folder")
    try:
        word.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("the name is no UTF-8, so libraries cannot open it: rename it") from None
    return Path(word)


def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `sample`."""
    parser.add_argument("run", type=Path, help="a run folder, or one of its checkpoints")
    parser.add_argument("--prompt", help="start of the text (default: the data set's prompt)")
    parser.add_argument("--tokens", type=int, default=500, help="number of tokens to generate (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy decoding (default: %(default)s)")
    parser.add_argument(
        "--top-k", type=int, default=50, help="sample from the k likeliest tokens (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: %(default)s)")
    parser.add_argument("--best", action="store_true", help="use the checkpoint with the lowest validation loss")


def sample(chosen: argparse.Namespace) -> None:
    """Generates text with the run's model, and prints it."""
    import torch

    from stabletrain.checkpoint.folder import find
    from stabletrain.config.make import Choice
    from stabletrain.models.sampling import generate
    from stabletrain.trainer.contract import context_length, make_model
    from stabletrain.trainer.options import ForwardOptions, read
    from stabletrain.trainer.saved import config_of

    if not -(2**63) <= chosen.seed < 2**64:
        raise ConfigError(f"--seed {chosen.seed} is not a number of 64 bits: use one from 0 to {2**63 - 1}")
    if chosen.tokens > MAX_TOKENS:
        raise ConfigError(f"--tokens {chosen.tokens} is above {MAX_TOKENS:,}: they are printed at the end; use fewer")
    checkpoint = find(chosen.run, best=chosen.best)
    config = config_of(checkpoint)
    choice = Choice.of(config, "data")
    data = choice.build()
    if not hasattr(data, "encode"):
        raise ConfigError(f"{chosen.run}: its model was trained on {choice.target}, which is not text")
    options = read(ForwardOptions, config)
    model = make_model(options.model, data, options.objective)
    model.load_state_dict(checkpoint.load_model())
    prompt = torch.tensor([data.encode(data.prompt if chosen.prompt is None else chosen.prompt)])
    generator = torch.Generator().manual_seed(chosen.seed)
    length = context_length(model, data)
    try:
        tokens = generate(model, prompt, chosen.tokens, chosen.temperature, chosen.top_k, generator, length)
    except StabletrainError:
        raise
    except Exception as error:  # a user's model may raise anything
        if (own := own_traceback(error)) is None:
            raise
        hint = "" if length else "; if it reads at most N tokens, give it or the data an attribute block_size=N"
        raise StabletrainError(f"{chosen.run}: the model cannot generate text{hint}\n{own.strip()}") from error
    say(data.decode(tokens[0].tolist()))


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
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in that folder")


def export(chosen: argparse.Namespace) -> None:
    """Writes the run's model for other programs, and prints how to load it."""
    from stabletrain.cli.export import export as write

    write(chosen.run, chosen.to, chosen.out, best=chosen.best, overwrite=chosen.overwrite)


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `compare`."""
    parser.add_argument("runs", type=Path, nargs="+", help="a sweep's folder, or folders of runs")
    parser.add_argument("--each", action="store_true", help="one row per run, even if only the seed differs")
    parser.add_argument("--sort", metavar="COLUMN", help="a column of --csv, such as units_per_s or optimizer.lr")
    parser.add_argument(
        "--rows", type=int, default=50, help="number of rows to print, 0 for all (default: %(default)s)"
    )
    parser.add_argument("--wide", action="store_true", help="print every column, even if the terminal is too narrow")
    parser.add_argument("--csv", type=Path, help="write all rows and columns to this file")
    parser.add_argument("--png", "--picture", type=Path, help="plot the curves to this file (.png, .svg, .pdf)")
    parser.add_argument(
        "--html", type=Path, help="the page (default: report.html in a sweep's folder, else compare.html here)"
    )


def compare(chosen: argparse.Namespace) -> None:
    """Prints a table of runs and their sensitivity to the learning rate; writes the requested files."""
    from stabletrain.comparison.command import compare as show

    names = ("each", "sort", "rows", "wide", "csv", "html")
    show(chosen.runs, picture=chosen.png, **{name: getattr(chosen, name) for name in names})


def add_losses_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `losses`."""
    parser.add_argument("runs", type=Path, nargs="+", help="a sweep's folder, or folders of runs")
    parser.add_argument("file", type=Path, help="the image to write (.svg, .png)")


def losses(chosen: argparse.Namespace) -> None:
    """Plots the training losses of runs."""
    from stabletrain.comparison.pictures import draw_losses
    from stabletrain.comparison.reading.runs import read_runs

    draw_losses(read_runs(chosen.runs), chosen.file)


def add_diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `diagnose`."""
    parser.add_argument("run", type=Path, help="a run folder, or one of its incidents")
    parser.add_argument("--json", action="store_true", help="print every diagnosis.json, as one JSON list")


def diagnose(chosen: argparse.Namespace) -> None:
    """Prints a run's incidents."""
    from stabletrain.forensics.incident_list import block, incidents

    found = incidents(chosen.run)
    if chosen.json:
        say(json.dumps([{**record, "folder": str(path)} for path, record in found], indent=2))
    elif not found:
        say(f"no incidents in {chosen.run}")
    else:
        say("\n\n".join(block(path, record) for path, record in found))


def add_forecast_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `forecast`."""
    parser.add_argument("run", type=Path, help="a run folder; the run may still be training")
    parser.add_argument("--json", action="store_true", help="print the forecasts and the signals as JSON")


def forecast(chosen: argparse.Namespace) -> None:
    """Prints what the forecast says of a run, and the signals at its last look."""
    from stabletrain.cli.forecast import replay_forecast

    found = replay_forecast(chosen.run)
    say(json.dumps(found.as_json(), indent=2) if chosen.json else found)


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `replay`."""
    parser.add_argument("incident", type=Path, help="the incident's folder, <run>/incidents/step-...")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="a fix to try, such as precision=bf16")
    parser.add_argument("--config-dir", type=Path, help="your own config groups, if an override uses one")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def replay(chosen: argparse.Namespace) -> None:
    """Replays an incident's step, and prints the result."""
    from stabletrain.cli.replay import replay_incident

    found = replay_incident(chosen.incident, chosen.overrides, chosen.config_dir)
    say(json.dumps(found.as_json(), indent=2) if chosen.json else found)


def add_whatif_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `whatif`."""
    from stabletrain.cli.slurm.arms import add_array_options

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
    from stabletrain.cli.slurm.arms import read_array
    from stabletrain.whatif.command import whatif as run
    from stabletrain.whatif.opening import listing
    from stabletrain.whatif.plan import WhatIfOptions

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
    say(listing(asked)) if chosen.list else run(asked)


if __name__ == "__main__":
    sys.exit(main())
