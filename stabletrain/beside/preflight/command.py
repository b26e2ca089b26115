"""The command `stabletrain check [group=option] [key=value]`: checks the run that `stabletrain train` would start.

The run is built several times in a temporary folder and takes a few steps there; nothing is kept. Under torchrun the
first process checks alone, with the batches of every rank.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stabletrain.errors import StabletrainError
from stabletrain.printable import say
from stabletrain.stored import trusted
from stabletrain.tracking.metrics import print_json

if TYPE_CHECKING:
    from stabletrain.beside.preflight.report import Report

DESCRIPTION = """Checks the run that 'stabletrain train' would start with the same words, before its first step: is the
gradient that of the loss, do micro-batches add up, does a resume restore everything, are the data what they should be?
Exits with 1 if something is wrong."""

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""Variables of a process that torchrun started; without them it trains alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `check`. All other words are those of `stabletrain train`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.usage = "stabletrain check [-h] [--json] [--only CHECKS] [group=option ...] [key=value ...]"
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--only", default="", metavar="CHECKS", help="names of checks, separated by commas")


def run(typed: Sequence[str]) -> int:
    """Runs the command with the words after `stabletrain check`; returns the exit code: 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="stabletrain check", allow_abbrev=False)
    add_arguments(parser)
    chosen, chosen.words = parser.parse_known_args([*typed])
    return check(chosen)


def check(chosen: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if int(os.environ.get("RANK", 0)) > 0:
        return 0
    for name in LAUNCHED:
        os.environ.pop(name, None)
    words = [word for word in chosen.words if word != trusted.OPTION]
    try:
        with trusted.accepting(trusted.OPTION in chosen.words):
            found = check_run(words, [name for name in chosen.only.split(",") if name], ranks)
    except StabletrainError as error:
        say(f"stabletrain: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    print_json(found.as_json()) if chosen.json else say(found)
    return 1 if found.faults else 0


def check_run(words: Sequence[str], only: Sequence[str] = (), ranks: int = 1) -> "Report":
    """Checks the run of a command line.

    Args:
        words: as after `stabletrain train`.
        only: names of checks; empty for all.
        ranks: number of ranks that divide a batch among them.

    Raises:
        ConfigError: the configuration cannot work, or there is no such check.
    """
    from stabletrain.beside.preflight.checks import check_loop
    from stabletrain.beside.preflight.own_run import QUIET, maker
    from stabletrain.config.arguments import parse_arguments
    from stabletrain.config.checks import check as check_configuration
    from stabletrain.config.jobs import composed
    from stabletrain.program import called, conf_folder

    arguments = parse_arguments([*words, *QUIET])
    with (
        called(words, words),
        composed(arguments, conf_folder()) as (cfg, _),
        tempfile.TemporaryDirectory(prefix="stabletrain-check-") as folder,
    ):
        check_configuration(cfg)
        return check_loop(maker(cfg, Path(folder), ranks), only)
