"""Checks a configuration before anything is built, without importing torch.

The checks cover unknown keys, types, and combinations of options that cannot work. The bounds of a single option are
checked in that option's class.

The type of a key is the type of its default in the YAML, so a plug-in's YAML needs no schema. pydantic (2.14) was
tried: it imports fast enough (0.08 s), but every key would have to be declared a second time. Its errors know neither
the default nor the fix (`steps=1e3 is not a whole number: write steps=1000`), so the messages would still be written
here.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from stabletrain.config.arguments import job_overrides, key_of
from stabletrain.config.interpolation import check_resolves, removed
from stabletrain.config.make import Choice, leaves
from stabletrain.errors import ConfigError, did_you_mean
from stabletrain.parallel.ranks import Ranks, current_ranks
from stabletrain.stability.schedule import LearningRate, ScheduleKind, WarmupKind
from stabletrain.weights.place import there

LOWEST = {
    "steps": 1,
    "batch_size": 1,
    "grad_accum_steps": 1,
    "eval_every": 1,
    "eval_batches": 1,
    "log_every": 1,
    "data.length_warmup": 0,
    "parallel.start_timeout": 1,
    "parallel.timeout": 1,
}
"""Numbers and their lowest allowed values."""

HIGHEST = {"parallel.start_timeout": 10**6, "parallel.timeout": 10**6}
"""Numbers and their highest allowed values: PyTorch's clocks overflow far above a million seconds, which is 11 days."""

NULLS = {
    "eval_batches": 1,
    "warmup.steps": 1,
    "model.vocab_size": 1,
    "model.block_size": 1,
    "model.num_classes": 1,
    "model.in_channels": 1,
    "data.path": "",
    "faults.rank": 0,
    "faults.module": "",
    "faults.parameter": "",
    "data.workers": 1,
    "guard.checksum_every": 1,
    "wandb.entity": "",
    "wandb.group": "",
    "wandb.name": "",
}
"""Keys whose default is null, each with an example of the type it takes otherwise."""

LISTS = {"wandb.tags": [""], "precision.fp32_modules": [""], "precision.bf16_modules": [""]}
"""Keys whose default is an empty list, each with an example of what it takes otherwise."""

MIXED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "compile": (lambda value: value == "auto" or isinstance(value, bool), "auto, true or false"),
    "loss_chunk": (
        lambda value: value in ("auto", "none") or (type(value) is int and value >= 1),
        "auto, none, or a number of tokens of at least 1",
    ),
}
"""Keys that accept values of several types: a test of a value, and the allowed values in words."""

FP32 = (2.0**-126, (2 - 2.0**-23) * 2.0**127)
"""The smallest and the largest normal number of fp32. Numbers nearer to 0 lose digits there, and most become 0."""

LARGEST_INT = 2**63 - 1
"""The largest whole number that PyTorch takes."""

ANY_NUMBER = frozenset({"faults.value", "faults.faults"})
"""Keys whose numbers are wrong on purpose."""

CROSS_ENTROPY = "stabletrain.stability.objective.CrossEntropy"
"""The objective to which z-loss, label smoothing and chunks of logits belong."""

CHOSEN_PARTS = ("qknorm", "softcap", "qkclip")
"""Groups that have an effect only if the model's YAML refers to them (`qknorm: ${qknorm}`)."""


def check(cfg: DictConfig) -> None:
    """Checks a whole configuration. Must be called inside a Hydra job.

    Raises:
        ConfigError: names the key, its value, the bound and the fix.
    """
    check_resolves(cfg)
    choices = HydraConfig.get().runtime.choices
    values = dict(leaves(OmegaConf.to_container(cfg, resolve=True)))
    defaults = reference()
    check_keys(values, defaults)
    check_groups(choices, defaults)
    check_numbers(values, defaults)
    for key, lowest in LOWEST.items():
        if (value := values.get(key)) is not None and value < lowest:
            raise ConfigError(f"{key}={value} is below {lowest}")
    for key, highest in HIGHEST.items():
        if (value := values.get(key)) is not None and value > highest:
            raise ConfigError(f"{key}={value} is above {highest}")
    if not 0 <= cfg.seed < 2**63:
        raise ConfigError(f"seed={cfg.seed} is outside [0, 2^63)")
    if cfg.batch_size % cfg.grad_accum_steps:
        raise ConfigError(
            f"batch_size={cfg.batch_size} does not divide into grad_accum_steps={cfg.grad_accum_steps} micro-batches: "
            f"use batch_size={multiples_near(cfg.batch_size, cfg.grad_accum_steps)}"
        )
    if (growing := values.get("data.length_warmup")) and growing >= cfg.steps:
        raise ConfigError(
            f"data.length_warmup={growing} >= steps={cfg.steps}: samples never reach their full length; lower "
            "data.length_warmup or raise steps"
        )
    check_ranks(cfg, current_ranks())
    check_init_from(cfg)
    check_parts(cfg, choices)
    check_forecast(cfg, choices)
    if cfg.guard.get("escalate") == "whatif" and choices["checkpoint"] == "off":
        raise ConfigError(
            "guard.escalate=whatif goes on from a checkpoint, and checkpoint=off writes none; fix: checkpoint=default, "
            "or guard.escalate=halt"
        )
    warmup = Choice.of(cfg, "warmup", WarmupKind, choices).build()
    schedule = Choice.of(cfg, "schedule", ScheduleKind, choices).build()
    LearningRate(warmup, schedule, cfg.steps)  # checks its own bounds, without torch


def check_init_from(cfg: DictConfig) -> None:
    """Checks that `init_from` names a folder. A resumed run does not read it, so there it need not exist.

    Raises:
        ConfigError: there is no such folder, or `init_strict` has nothing to act on.
    """
    if cfg.init_from == "none":
        if not cfg.init_strict:
            raise ConfigError("init_strict=false does nothing without init_from: name weights, or leave it out")
    elif cfg.resume == "none":
        there(cfg.init_from)


def check_ranks(cfg: DictConfig, ranks: Ranks) -> None:
    """Checks that several ranks use different GPUs, and that the batch divides evenly among their micro-batches.

    Raises:
        ConfigError: `device` names one GPU for all ranks, or the batch does not divide; names the nearest sizes that
            do.
    """
    if ranks.distributed and cfg.device.startswith("cuda:"):
        raise ConfigError(
            f"device={cfg.device} with {ranks.world_size} ranks: all ranks of a machine would use the same GPU; use "
            "device=cuda, with which each rank uses its own (CUDA_VISIBLE_DEVICES selects them)"
        )
    parts = ranks.world_size * cfg.grad_accum_steps
    if cfg.batch_size % parts:
        raise ConfigError(
            f"batch_size={cfg.batch_size} does not divide among {ranks.world_size} ranks x grad_accum_steps="
            f"{cfg.grad_accum_steps}: use batch_size={multiples_near(cfg.batch_size, parts)}, or another number of "
            "ranks"
        )


def multiples_near(size: int, parts: int) -> str:
    """Returns the multiples of `parts` on both sides of a batch size, the nearest first: `8 or 4`."""
    below = size // parts * parts
    found = sorted((below, below + parts), key=lambda multiple: abs(multiple - size))
    return " or ".join(str(multiple) for multiple in found if multiple)


def reference() -> dict[str, Any]:
    """Composes the chosen options without the user's values: the default of every key."""
    hydra = HydraConfig.get()
    chosen = [o for o in job_overrides() if o.lstrip("+").partition("=")[0] in hydra.runtime.choices]
    chosen += [o for o in job_overrides("hydra") if o.startswith("hydra.searchpath=")]  # where own options lie
    name = hydra.job.config_name
    return dict(leaves(OmegaConf.to_container(compose(name, chosen), resolve=True)))


def check_keys(values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuses unknown keys (`+typo=1`), removed keys (`~guard`), and values of another type than the default.

    Accepts any key in a group whose `_target_` was changed: the new target checks its own arguments.
    """
    retargeted = tuple(
        key.removesuffix("_target_") for key in values if key.endswith("._target_") and values[key] != defaults.get(key)
    )
    for key, value in values.items():
        if key not in defaults and key.startswith(retargeted):
            continue
        if key not in defaults:
            raise ConfigError(f"{key}={value}: there is no such key{did_you_mean(key, defaults, cutoff=0.75)}")
        if key in MIXED:
            may_be, words = MIXED[key]
            if not may_be(value):
                raise ConfigError(f"{key}={show(value)} is not {words}: the default is {defaults[key]}")
            continue
        default = LISTS.get(key, defaults[key] if defaults[key] is not None else NULLS.get(key))
        if default is None or (value is None and defaults[key] is None) or fits(value, default):
            continue
        hint = f"the default is {show(defaults[key])}"
        if whole(value):
            hint = f"write {key}={int(value)}"
        elif defaults[key] == [] and not isinstance(value, list):
            hint = f"write {key}=[{show(value)}]"
        raise ConfigError(f"{key}={show(value)} is not {kind_of(default)}: {hint}")
    if missing := sorted(key for key in set(defaults) - set(values) if not key.startswith(retargeted)):
        raise ConfigError(removed(missing[0]))


def check_groups(groups: Iterable[str], defaults: Iterable[str]) -> None:
    """Refuses an empty mapping for a group (`model={}`), which changes nothing, and a list of options."""
    for override in job_overrides():
        key, _, value = override.partition("=")
        if value.startswith("[") and key not in groups and any(name.startswith(f"{key}.") for name in defaults):
            raise ConfigError(f"{override}: a run has one option of {key}: write {key}={value.strip('[ ]')}")
        if override.partition("=")[2].replace(" ", "") == "{}" and key_of(override) in groups:
            raise ConfigError(
                f"{override} changes nothing: name an option of {key_of(override)}, or set its keys one by one"
            )


def check_numbers(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuses numbers that no option can use: NaN, too near to 0 or too large for fp32, or too large for 64 bits.

    An option of the user's own takes any number.
    """
    for key, value in values.items():
        target = values.get(f"{key.partition('.')[0]}._target_")
        own = "." in key and not str(target or "stabletrain.").startswith("stabletrain.")
        if own or key in ANY_NUMBER:
            continue
        for number in value if isinstance(value, list) else [value]:
            if wrong := wrong_number(number):
                raise ConfigError(f"{key}={show(value)} {wrong}: the default is {show(defaults.get(key))}")


def wrong_number(number: Any) -> str:
    """Returns why no option can use a number; empty if one can, or if it is none."""
    if isinstance(number, int) and abs(number) > LARGEST_INT:
        return f"is outside of [-{LARGEST_INT}, {LARGEST_INT}], the whole numbers of 64 bits"
    if not isinstance(number, float) or number == 0 or math.isinf(number):
        return ""
    if math.isnan(number):
        return "is not a number"
    if abs(number) < FP32[0]:
        return f"is nearer to 0 than {FP32[0]:.3g}, the smallest normal number of fp32"
    return f"is beyond {FP32[1]:.3g}, the largest number of fp32" if abs(number) > FP32[1] else ""


def fits(value: Any, default: Any) -> bool:
    """Returns whether `value` has the type of `default`. An int is accepted as a float; a bool is never a number."""
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, list) and isinstance(value, list):
        return not default or all(fits(each, default[0]) for each in value)
    return isinstance(value, type(default))


def whole(value: Any) -> bool:
    """Returns whether `value` is a float that can be written as an int, such as 1e3."""
    return isinstance(value, float) and value.is_integer()


def kind_of(default: Any) -> str:
    """Names the type of a default."""
    if isinstance(default, list):
        return f"a list of {'strings' if not default or isinstance(default[0], str) else 'numbers'}"
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a string",
    }
    return words.get(type(default), f"of type {type(default).__name__}")


def show(value: Any) -> str:
    """Formats a value as it is typed on the command line."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def check_parts(cfg: DictConfig, choices: Mapping[str, str]) -> None:
    """Refuses options that have no effect with the chosen model, and data that it cannot read."""
    model, data = choices["model"], choices["data"]
    typed = {override.lstrip("+").partition("=")[0] for override in job_overrides()}

    def named(group: str) -> str:
        """Returns `qknorm=layernorm`, preceded by the preset that set it if the user did not type it."""
        preset = "" if group in typed or choices["stability"] == "none" else f"stability={choices['stability']} sets "
        return f"{preset}{group}={choices[group]}, which" if preset else f"{group}={choices[group]}"

    for group in CHOSEN_PARTS:
        if choices[group] != "none" and group not in cfg.model:
            by_preset = group not in typed and choices["stability"] != "none"
            other_loss = ["zloss"] if cfg.objective.get("_target_") != CROSS_ENTROPY else []
            fix = without_preset(choices, [*(part for part in CHOSEN_PARTS if part not in cfg.model), *other_loss])
            raise ConfigError(
                f"{named(group)} does nothing with model={model}, because the model has no attention: "
                f"use {fix if by_preset else f'{group}=none'}, or a model whose YAML has `{group}: ${{{group}}}`"
            )
    if cfg.objective.get("_target_") != CROSS_ENTROPY:
        check_no_logits(cfg, named("zloss") if choices["zloss"] != "none" else "", f"objective={choices['objective']}")
    if choices["qkclip"] != "none" and choices["qknorm"] != "none":
        raise ConfigError(
            f"{named('qknorm')} removes the scale of the projections that qkclip={choices['qkclip']} clips, so qkclip "
            "has no effect: use qkclip=none, or qknorm=none"
        )
    reads = cfg.model.get("modality")
    for group in ("data", "init"):
        gives = cfg[group].get("modality")
        if reads and gives and reads != gives:
            fix = {
                ("data", "tokens"): "data=stdlib or data=text",
                ("data", "images"): "data=digits or data=cifar10",
                ("init", "images"): "init=torch",
                ("init", "tokens"): "init=gpt2",
            }.get((group, reads), f"another {group}")
            chosen = data if group == "data" else choices["init"]
            raise ConfigError(
                f"{group}={chosen} is for {gives}, model={model} reads {reads}: use {fix}, "
                f"or a model for {gives} such as model={'gpt_nano' if gives == 'tokens' else 'resnet20'}"
            )


def check_forecast(cfg: DictConfig, choices: Mapping[str, str]) -> None:
    """Refuses a forecast that has nothing to read, if the user typed one, and one that keeps states without a disk."""
    if choices["forecast"] == "off":
        return
    typed = next((o for o in job_overrides() if key_of(o).partition(".")[0] == "forecast"), None)
    if typed and choices["monitors"] == "none":
        raise ConfigError(
            f"{typed} does nothing with monitors=none, because a forecast reads what the monitors measure; fix: "
            "monitors=default, or leave it out"
        )
    if cfg.forecast.get("action") == "checkpoint" and choices["checkpoint"] == "off":
        raise ConfigError(
            "forecast.action=checkpoint keeps no state with checkpoint=off; fix: checkpoint=default, or "
            "forecast.action=alarm"
        )


def check_no_logits(cfg: DictConfig, zloss: str, objective: str) -> None:
    """Refuses what belongs to the cross-entropy, with another objective.

    Args:
        zloss: how the z-loss was chosen; empty if it is off.
        objective: as it is typed.
    """
    for typed, off in (
        (zloss, "zloss=none"),
        (f"label_smoothing={cfg.label_smoothing}" if cfg.label_smoothing else "", "label_smoothing=0"),
        (f"loss_chunk={cfg.loss_chunk}" if isinstance(cfg.loss_chunk, int) else "", "loss_chunk=none"),
    ):
        if typed:
            raise ConfigError(
                f"{typed} does nothing with {objective}, which has no logits of a softmax: use {off}, or "
                "objective=cross_entropy"
            )


def without_preset(choices: Mapping[str, str], unfit: Sequence[str]) -> str:
    """Returns what to type instead of the chosen preset: `stability=none`, and the options that it sets.

    Args:
        choices: the chosen option of each group.
        unfit: groups to leave out, because they do nothing with the chosen model.
    """
    hydra = HydraConfig.get()
    typed = [o for o in job_overrides() if o.lstrip("+").partition("=")[0] in {*choices} - {"stability"}]
    cfg: Any = compose(hydra.job.config_name, [*typed, "stability=none"], return_hydra_config=True)
    plain = cfg.hydra.runtime.choices
    rest = [f"{group}={option}" for group, option in choices.items() if option != plain[group] and group not in unfit]
    return " ".join(["stability=none", *(each for each in rest if not each.startswith("stability="))])
