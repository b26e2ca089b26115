"""`stabletrain`: what one does with runs and data beside training them.

stabletrain prepare <text or data set> <out>    token shards for data=tokens
stabletrain sample <run>                        text from a trained model
stabletrain compare <runs or sweeps>            runs side by side: a table, and a page of pictures
stabletrain losses <runs> <file>                a picture of runs' training losses, rollbacks included
stabletrain diagnose <run>                      a run's incidents: where, why, and what to do
stabletrain replay <incident> [key=value ...]   an incident's step again, as it was or with a fix to try
stabletrain sync [<runs>]                       what offline runs have kept, uploaded to Weights & Biases
stabletrain wandb-report <entity/project>       a comparison of its runs, as a report there
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from stabletrain.errors import ConfigError, StabletrainError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="stabletrain", description="Beside `python train.py`: data and runs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    from stabletrain.data import prepare

    preparing = commands.add_parser("prepare", help="turn text into token shards for data=tokens")
    prepare.add_arguments(preparing)
    preparing.set_defaults(do=prepare.run)

    sampling = commands.add_parser("sample", help="write text with a trained model")
    sampling.add_argument("run", type=Path, help="a run folder, or one of its checkpoints")
    sampling.add_argument("--prompt", help="what the text begins with (default: the data's own)")
    sampling.add_argument("--tokens", type=int, default=500, help="how many to add (default: %(default)s)")
    sampling.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest (default: %(default)s)")
    sampling.add_argument("--top-k", type=int, default=50, help="draw from so many likeliest (default: %(default)s)")
    sampling.add_argument("--seed", type=int, default=0, help="of the drawing (default: %(default)s)")
    sampling.add_argument("--best", action="store_true", help="the checkpoint with the lowest validation loss")
    sampling.set_defaults(do=sample)

    comparing = commands.add_parser("compare", help="runs side by side: a table, and a page with their curves")
    comparing.add_argument("runs", type=Path, nargs="+", help="a sweep's folder, or folders of runs")
    comparing.add_argument("--each", action="store_true", help="a row for each run, also where only the seed differs")
    comparing.add_argument("--sort", metavar="COLUMN", help="a column of --csv, such as units_per_s or optimizer.lr")
    comparing.add_argument(
        "--rows", type=int, default=50, help="how many are printed, 0 for all (default: %(default)s)"
    )
    comparing.add_argument("--wide", action="store_true", help="every column, whatever the width of the terminal")
    comparing.add_argument("--csv", type=Path, help="write all rows and columns into this file")
    comparing.add_argument("--png", "--picture", type=Path, help="draw the curves into this file (.png, .svg, .pdf)")
    comparing.add_argument("--html", type=Path, help="where the page goes (default: report.html in the first folder)")
    comparing.set_defaults(do=compare)

    drawing = commands.add_parser("losses", help="draw the training losses of some runs")
    drawing.add_argument("runs", type=Path, nargs="+", help="a sweep's folder, or folders of runs")
    drawing.add_argument("file", type=Path, help="the picture to write (.svg, .png)")
    drawing.set_defaults(do=losses)

    diagnosing = commands.add_parser("diagnose", help="list a run's incidents: where, why, and what to do")
    diagnosing.add_argument("run", type=Path, help="a run folder, or one of its incidents")
    diagnosing.add_argument("--json", action="store_true", help="every diagnosis.json, as one list")
    diagnosing.set_defaults(do=diagnose)

    replaying = commands.add_parser("replay", help="run an incident's step again, to see it or to try a fix")
    replaying.add_argument("incident", type=Path, help="its folder, <run>/incidents/step-...")
    replaying.add_argument("overrides", nargs="*", metavar="key=value", help="a fix to try, such as precision=bf16")
    replaying.add_argument("--config-dir", type=Path, help="your own groups, if an override names an option of theirs")
    replaying.add_argument("--json", action="store_true", help="the result for programs")
    replaying.set_defaults(do=replay)

    from stabletrain.tracking import wandb_report, wandb_sync

    syncing = commands.add_parser("sync", help="upload what offline runs have kept to Weights & Biases")
    wandb_sync.add_arguments(syncing)
    syncing.set_defaults(do=wandb_sync.run)

    reporting = commands.add_parser("wandb-report", help="compare a project's runs in a report of Weights & Biases")
    wandb_report.add_arguments(reporting)
    reporting.set_defaults(do=wandb_report.run)

    chosen = parser.parse_args(arguments)
    try:
        chosen.do(chosen)
    except StabletrainError as error:
        print(f"stabletrain: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever read has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"stabletrain: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def sample(chosen: argparse.Namespace) -> None:
    """Prints text that the run's model continues from the prompt."""
    import torch
    from omegaconf import DictConfig, OmegaConf

    from stabletrain.checkpoint.folder import find
    from stabletrain.config.make import make
    from stabletrain.models.sampling import generate
    from stabletrain.trainer.contract import make_model

    checkpoint = find(chosen.run, best=chosen.best)
    file = checkpoint.path.parent.parent / ".hydra" / "config.yaml"
    if not file.exists():
        raise ConfigError(
            f"{chosen.run}: the run's configuration, {file}, is missing: name a run folder that train.py made"
        )
    cfg = cast("DictConfig", OmegaConf.load(file))
    data = make(cfg, "data")
    if not hasattr(data, "encode"):
        raise ConfigError(f"{chosen.run}: its model was trained on {cfg.data._target_}, which is no text to continue")
    model = make_model(cfg, data)
    model.load_state_dict(checkpoint.load_model())
    prompt = torch.tensor([data.encode(data.prompt if chosen.prompt is None else chosen.prompt)])
    generator = torch.Generator().manual_seed(chosen.seed)
    tokens = generate(model, prompt, chosen.tokens, chosen.temperature, chosen.top_k, generator)
    print(data.decode(tokens[0].tolist()))


def compare(chosen: argparse.Namespace) -> None:
    """Prints the table of some runs and what it says of the learning rate; writes what else is asked for."""
    from stabletrain.compare.command import compare as show

    show(
        chosen.runs,
        each=chosen.each,
        sort=chosen.sort,
        rows=chosen.rows,
        wide=chosen.wide,
        csv=chosen.csv,
        picture=chosen.png,
        html=chosen.html,
    )


def losses(chosen: argparse.Namespace) -> None:
    """Draws the training losses of some runs."""
    from stabletrain.compare.pictures import draw_losses
    from stabletrain.compare.reading.runs import read_runs

    draw_losses(read_runs(chosen.runs), chosen.file)


def diagnose(chosen: argparse.Namespace) -> None:
    """Prints a run's incidents."""
    from stabletrain.forensics.incident_list import block, incidents

    found = incidents(chosen.run)
    if chosen.json:
        print(json.dumps([{**record, "folder": str(path)} for path, record in found], indent=2))
    elif not found:
        print(f"no incidents in {chosen.run}")
    else:
        print("\n\n".join(block(path, record) for path, record in found))


def replay(chosen: argparse.Namespace) -> None:
    """Runs an incident's step again, and prints what came of it."""
    from stabletrain.cli.replay import replay_incident

    found = replay_incident(chosen.incident, chosen.overrides, chosen.config_dir)
    print(json.dumps(found.as_json(), indent=2) if chosen.json else found)


if __name__ == "__main__":
    sys.exit(main())
