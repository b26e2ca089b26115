"""Checks a configuration before anything is built, without importing torch.

`config/rules.py` has the table of what is refused. The bounds of a single option are checked in that option's class.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from stabletrain.config.composed import Composed, composed_job
from stabletrain.config.interpolation import check_resolves
from stabletrain.config.make import Choice, plain
from stabletrain.config.rules import RANKS, RULES, TYPES
from stabletrain.parallel.ranks import Ranks
from stabletrain.stability.schedule import Constant, LearningRate, NoWarmup
from stabletrain.weights.place import existing_folder


def check(cfg: DictConfig) -> None:
    """Checks a whole configuration. Must be called inside a Hydra job.

    Raises:
        ConfigError: names the key, its value, the bound and the fix.
    """
    check_resolves(cfg)
    run = composed_job(plain(cfg))
    for rule in RULES:
        rule.check(run)
    if run["init_from"] != "none" and run["resume"] == "none":  # a resumed run does not read it
        existing_folder(run["init_from"])
    warmup, schedule = (
        Choice.of(cfg, "warmup", NoWarmup, run.choices).build(),
        Choice.of(cfg, "schedule", Constant, run.choices).build(),
    )
    LearningRate(warmup, schedule, run["steps"])  # checks its own bounds, without torch


def check_keys(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuses unknown and removed keys, and values of another type than the default.

    Raises:
        ConfigError: as `check`.
    """
    for rule in TYPES:
        rule.check(Composed(values, defaults))


def check_ranks(values: Mapping[str, Any], ranks: Ranks) -> None:
    """Checks that several ranks use different GPUs, and that the batch divides evenly among their micro-batches.

    Raises:
        ConfigError: as `check`.
    """
    for rule in RANKS:
        rule.check(Composed(values, ranks=ranks))
