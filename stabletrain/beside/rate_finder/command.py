"""The command `stabletrain lr`: composes the configuration, runs the search, prints its result."""

import argparse
import math
import shlex
import sys
from contextlib import redirect_stdout
from typing import Any

from stabletrain.beside.rate_finder import report
from stabletrain.beside.rate_finder.search import Search, search
from stabletrain.beside.rate_finder.trials import Trials
from stabletrain.config.arguments import Arguments, check_folders, parse_arguments, with_overrides
from stabletrain.config.checks import check
from stabletrain.config.jobs import composed
from stabletrain.config.make import plain
from stabletrain.errors import ConfigError, StabletrainError
from stabletrain.extension import extension
from stabletrain.parallel.ranks import current_ranks
from stabletrain.printable import say
from stabletrain.program import COMMAND, called, conf_folder
from stabletrain.tracking.metrics import print_json

RATE = "optimizer.lr"

LEAST_STEPS = 4
"""Smallest `--steps`: the first round has half of them."""


def find_rate(chosen: argparse.Namespace) -> None:
    """Runs the command.

    Raises:
        ConfigError: the configuration cannot work, or a bound of the command is not kept.
        StabletrainError: no rate lowers the loss.
    """
    typed = [*chosen.overrides, *chosen.more]
    typed += [] if chosen.config_dir is None else ["--config-dir", str(chosen.config_dir)]
    arguments = parse_arguments(typed)
    check_numbers(chosen)
    with redirect_stdout(sys.stderr):  # standard output has the result, and nothing else
        found = found_by(arguments, chosen.steps, chosen.seeds, chosen.low, chosen.high)
    words = with_overrides(arguments, f"{RATE}={report.two_digits(found.peak):g}")
    command = shlex.join([*COMMAND.split(), *words.options, *words.overrides])
    print_json(report.as_json(found, command)) if chosen.json else say(report.text(found, command))


def check_numbers(chosen: argparse.Namespace) -> None:
    """Refuses numbers that are out of bounds."""
    if chosen.steps < LEAST_STEPS:
        raise ConfigError(f"--steps {chosen.steps} is below {LEAST_STEPS}; fix: --steps {LEAST_STEPS} or more")
    if chosen.seeds < 1:
        raise ConfigError(f"--seeds {chosen.seeds} is below 1; fix: --seeds 1 or more")
    for name in ("low", "high"):
        rate = getattr(chosen, name)
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(f"--{name} {rate:g} is not above 0 and finite; fix: name a rate, such as --{name} 1e-3")
    if chosen.low is not None and chosen.high is not None and chosen.low >= chosen.high:
        raise ConfigError(f"--low {chosen.low:g} is not below --high {chosen.high:g}; fix: exchange them")


def check_between(middle: float, low: float | None, high: float | None) -> None:
    """Refuses bounds that the first rate is outside of."""
    for name, bound, side in (("low", low, "below"), ("high", high, "above")):
        if bound is not None and (middle < bound if side == "below" else middle > bound):
            raise ConfigError(
                f"{RATE}={middle:g} is {side} --{name} {bound:g}, and the search starts there; fix: {RATE}={bound:g}"
            )


def found_by(arguments: Arguments, steps: int, seeds: int, low: float | None, high: float | None) -> Search:
    """Returns the result of a search.

    Args:
        arguments: the command line of the run.
        steps, seeds: length of a trial, and number of seeds.
        low, high: the lowest and the highest rate to try; None for no limit.

    Raises:
        ConfigError, StabletrainError: see `find_rate`.
    """
    if current_ranks().launched:
        raise ConfigError("stabletrain lr runs in one process: start it without torchrun")
    check_folders(arguments)
    if (resume := arguments.value("resume")) not in (None, "none"):
        raise ConfigError(
            f"resume={resume}: the short runs begin at step 0; fix: leave it out, or take its weights with init_from"
        )
    configs: dict[int, Any] = {}
    words = [*arguments.options, *arguments.overrides]
    with called(words, words):
        for number in range(seeds):
            # Composed anew, because data and other options refer to the seed.
            seeded = with_overrides(arguments, f"seed={min(configs) + number}") if configs else arguments
            with composed(seeded, conf_folder()) as (config, choices):
                check(config)
                extension().check(config, choices)
                configs[config.seed] = plain(config)
        config = configs[min(configs)]
        if config["steps"] < LEAST_STEPS:
            raise ConfigError(
                f"steps={config['steps']} is below {LEAST_STEPS}, too few to compare; fix: the run's steps"
            )
        middle, steps = rate_in(config, choices["optimizer"]), min(steps, config["steps"])
        check_between(middle, low, high)
        with composed(arguments, conf_folder()):
            trials = Trials(
                configs, choices, tell=lambda trial: say(report.line_of(trial), file=sys.stderr, flush=True)
            )
            found = search(trials, middle, low or 0.0, high or math.inf, steps, [*configs])
    if not found.learns:
        raise StabletrainError(
            f"the loss falls at none of the rates from {min(t.rate for t in trials.run):.3g} to "
            f"{max(t.rate for t in trials.run):.3g} within {steps} steps, from {found.fine[0].first:.3g} at the first; "
            "fix: more --steps, or look for the cause elsewhere: data, initial weights, precision"
        )
    return found


def rate_in(config: dict[str, Any], optimizer: str) -> float:
    """Returns the configuration's peak learning rate, the first one to try."""
    rate = config["optimizer"].get("lr")
    if not isinstance(rate, int | float) or isinstance(rate, bool):
        raise ConfigError(f"optimizer={optimizer} has no key lr, so there is no rate to find")
    if not 0 < rate < math.inf:
        raise ConfigError(f"{RATE}={rate:g}: the search starts there, and cannot start at 0; fix: {RATE}=1e-3")
    return float(rate)
