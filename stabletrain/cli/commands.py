"""The command `stabletrain`.

stabletrain train [group=option] [key=value]    train a model, or sweep with -m: what `python train.py` does
stabletrain prepare <text or data set> <out>    tokenize text into shards for data=tokens
stabletrain sample <run>                        generate text with a trained model
stabletrain diagnose <run>                      list a run's incidents: where, why, and how to fix them
stabletrain replay <incident> [key=value ...]   replay an incident's step, unchanged or with a fix

The others work beside a run: `stabletrain/beside/commands.py`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import stabletrain
from stabletrain.errors import ConfigError, StabletrainError, did_you_mean, own_traceback
from stabletrain.extension import COMMANDS, Command, extension, needs_beside
from stabletrain.parallel.ranks import drop_unread_output, exit_process
from stabletrain.printable import printable, say
from stabletrain.stored.trusted import OPTION, accepting
from stabletrain.tracking.metrics import print_json

MAX_TOKENS = 1_000_000
"""Largest `--tokens` of `sample`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the process's exit code."""
    typed = [*(sys.argv[1:] if arguments is None else arguments)]
    if typed[:1] == ["train"]:  # Hydra parses the rest; nothing else is imported, so that a refusal takes no second
        from stabletrain.cli.train import train_command

        exit_process(train_command(typed[1:]))
    beside = extension().commands()
    if typed and (known := beside.get(typed[0])) is not None and known.take_over is not None:
        return known.take_over(typed[1:])
    from stabletrain.data import prepare

    own = {
        "prepare": Command("tokenize text into shards for data=tokens", prepare.add_arguments, prepare.run),
        "sample": Command("generate text with a trained model", add_sample_arguments, sample, builds=True),
        "diagnose": Command(
            "list a run's incidents: where, why, and how to fix them", add_diagnose_arguments, diagnose
        ),
        "replay": Command(
            "replay an incident's step, unchanged or with a fix", add_replay_arguments, replay, builds=True
        ),
    }
    parser = argparse.ArgumentParser(
        prog="stabletrain",
        description="Trains, and works on data and runs. All options of training: stabletrain train --help",
    )
    parser.add_argument("--version", action="version", version=f"stabletrain {stabletrain.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("train", help="train a model, or sweep with -m: what python train.py does", add_help=False)
    for name, each in {**own, **beside}.items():
        command = commands.add_parser(name, help=each.help)
        command.register("type", Path, typed_path)
        each.add_arguments(command)
        if each.builds:
            command.add_argument(OPTION, action="store_true", help="run the code that a folder from elsewhere names")
        command.set_defaults(do=each.do)

    first = next(iter(typed), "")
    if first in COMMANDS and first not in commands.choices:
        refusal = needs_beside(f"stabletrain {first}")
        say(f"stabletrain: {refusal}", file=sys.stderr)
        return refusal.exit_code
    if not first.startswith("-") and first not in commands.choices:
        known = f"commands: {', '.join(commands.choices)}"
        wrong = f"{first}: there is no such command{did_you_mean(first, commands.choices) or ';'}"
        parser.error(printable(f"{wrong if first else 'a command is missing;'} {known}"))
    chosen, more = parser.parse_known_args(typed)
    if more and not (
        chosen.command in ("check", "whatif", "lr") and all("=" in word and word[0] != "-" for word in more)
    ):
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
    parser.add_argument("--averaged", action="store_true", help="use the averaged weights of a run with averaging")


def sample(chosen: argparse.Namespace) -> None:
    """Generates text with the run's model, and prints it."""
    import torch

    from stabletrain.checkpoint.folder import find
    from stabletrain.config.make import Choice
    from stabletrain.models.sampling import generate
    from stabletrain.trainer.contract import context_length, make_model
    from stabletrain.trainer.options import ForwardOptions, read
    from stabletrain.trainer.saved import config_of, put_average_

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
    if chosen.averaged:
        put_average_(model, checkpoint)
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


def add_diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `diagnose`."""
    parser.add_argument("run", type=Path, help="a run folder, or one of its incidents")
    parser.add_argument("--json", action="store_true", help="print every diagnosis.json, as one JSON list")


def diagnose(chosen: argparse.Namespace) -> None:
    """Prints a run's incidents."""
    from stabletrain.forensics.incident_list import block, incidents

    found = incidents(chosen.run)
    if chosen.json:
        print_json([{**record, "folder": str(path)} for path, record in found])
    elif not found:
        say(f"no incidents in {chosen.run}")
    else:
        say("\n\n".join(block(path, record) for path, record in found))


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
    print_json(found.as_json()) if chosen.json else say(found)


if __name__ == "__main__":
    sys.exit(main())
