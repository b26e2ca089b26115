"""The command `stabletrain check [group=option] [key=value]`: checks the run that `stabletrain train` would start.

The run is built several times in a temporary folder and takes a few steps there; nothing is kept. Under torchrun the
first process checks alone, with the batches of every rank.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stabletrain.errors import StabletrainError
from stabletrain.printable import say
from stabletrain.tracking.metrics import print_json

if TYPE_CHECKING:
    from stabletrain.beside.preflight.finding import Finding
    from stabletrain.beside.preflight.report import Report

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""Variables of a process that torchrun started; without them it trains alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `check`."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train")
    parser.add_argument("--config-dir", type=Path, help="your own config groups, as for train")
    parser.add_argument("--only", default="", metavar="CHECKS", help="names of checks, separated by commas")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def check(chosen: argparse.Namespace) -> None:
    """Runs the command, and prints the report.

    Raises:
        ConfigError: the configuration cannot work, or there is no such check.
        StabletrainError: something is wrong.
    """
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if int(os.environ.get("RANK", 0)) > 0:
        return
    for name in LAUNCHED:
        os.environ.pop(name, None)
    words = [*chosen.overrides, *chosen.more]
    words += [] if chosen.config_dir is None else ["--config-dir", str(chosen.config_dir)]
    from stabletrain.beside.preflight.report import lines_of

    tell = (lambda finding: None) if chosen.json else (lambda finding: say(lines_of(finding), flush=True))
    found = check_run(words, [name for name in chosen.only.split(",") if name], ranks, tell)
    print_json(found.as_json()) if chosen.json else say(found.summary)
    if found.faults:
        raise StabletrainError(f"check: {found.summary}")


def check_run(
    words: Sequence[str],
    only: Sequence[str] = (),
    ranks: int = 1,
    tell: Callable[["Finding"], object] = lambda finding: None,
) -> "Report":
    """Checks the run of a command line.

    Args:
        words: as after `stabletrain train`.
        only: names of checks; empty for all.
        ranks: number of ranks that divide a batch among them.
        tell: is called with each finding as soon as it is known.

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
        return check_loop(maker(cfg, Path(folder), ranks), only, tell)
