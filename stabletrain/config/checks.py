"""Checks a configuration before anything is built, without importing torch.

`config/rules.py` has the table of what is refused. The bounds of a single option are checked in that option's class.
Values that cannot be resolved are refused here: `${...}` with an unknown key or resolver, in a circle, or without a
value.
"""

from collections.abc import Mapping
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException, UnsupportedInterpolationType

from stabletrain.config.arguments import job_overrides, key_of
from stabletrain.config.composed import Composed, composed_job
from stabletrain.config.make import Choice, leaves, plain
from stabletrain.config.rules import RANKS, REMOVED, RULES, TYPES
from stabletrain.errors import ConfigError, closest
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


def check_resolves(cfg: DictConfig) -> None:
    """Checks that every value of a configuration can be resolved.

    Also that no key of the top level was removed (`~steps`), which the code reads first.

    Raises:
        ConfigError: names the key whose value cannot be, and why; a typed key before the keys that refer to it.
    """
    overrides = job_overrides() if HydraConfig.initialized() else []
    typed = [key_of(override) for override in overrides]
    for override in overrides:
        if override.startswith("~") and "." not in (key := key_of(override)):
            raise REMOVED.refusal(Composed({}), key)
    try:
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        return
    except (OmegaConfBaseException, RecursionError):
        pass  # the loop below finds the key
    raw = dict(leaves(OmegaConf.to_container(cfg, resolve=False)))
    for key in sorted(raw, key=lambda key: not key.startswith(tuple(typed))):
        try:
            value = OmegaConf.select(cfg, key, throw_on_missing=True)
            if OmegaConf.is_config(value):
                OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except (OmegaConfBaseException, RecursionError) as error:
            raise ConfigError(f"{key}={raw[key]}: {explained(error, raw)}") from None
    raise ConfigError("a value of the configuration cannot be resolved: write the values themselves, without ${...}")


def explained(error: Exception, raw: dict[str, Any]) -> str:
    """Returns why a value cannot be resolved, and what to write.

    Args:
        error: OmegaConf's.
        raw: the values of all keys as they are written.
    """
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, RecursionError) or "ecursion" in text:
        return "it refers to itself, directly or through other keys: write the value itself"
    if "Missing mandatory value" in text:
        return "??? stands for a value that must be given; fix: write the value itself"
    if isinstance(error, UnsupportedInterpolationType):
        name = text.rsplit(" ", 1)[-1]
        return f"there is no resolver {name}: use ${{key}}, ${{oc.env:NAME}} or ${{hydra:key}}, or the value itself"
    if isinstance(error, GrammarParseError):
        return f"this is no interpolation ({text}): write ${{key}}, or the value itself"
    name = text.split("'")[1] if text.startswith("Interpolation key '") else ""
    if name.startswith("hydra."):
        return f"Hydra's own keys are not part of the configuration: write ${{hydra:{name.removeprefix('hydra.')}}}"
    if name:
        near = closest(name, raw, cutoff=0.75)
        return f"there is no key {name}; fix: {f'${{{near}}}, or ' if near else ''}write the value itself"
    return f"it cannot be resolved ({text}): write the value itself"
