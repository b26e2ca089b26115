"""`stabletrain replay`: replays an incident's step from its folder alone, unchanged or with a fix.

The model and tools are built from the configuration in the folder. No data is needed: weights and batch are in the
folder, and its saved shapes give the model sizes that the run took from the data. Only overrides that forward and
backward depend on are accepted, because one step cannot show the effect of others.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from stabletrain.checkpoint.tree import Tree, unflatten
from stabletrain.cli.replay_report import ReplayReport
from stabletrain.config import trust
from stabletrain.config.arguments import Arguments, key_of
from stabletrain.config.checks import check_keys
from stabletrain.config.jobs import explained
from stabletrain.config.make import Choice, leaves, plain
from stabletrain.config.moved import updated
from stabletrain.config.recorded import Group
from stabletrain.config.resuming import ADDED_GROUPS
from stabletrain.config.rules import CHOSEN_PARTS
from stabletrain.errors import ConfigError, StabletrainError, did_you_mean
from stabletrain.forensics import saved_step as files
from stabletrain.forensics.facts import Outcome
from stabletrain.forensics.incident_list import read
from stabletrain.forensics.repro import load_repro
from stabletrain.forensics.subject import StepSubject
from stabletrain.forensics.user_code import compare
from stabletrain.guard import NoGuard
from stabletrain.guard.saved_step import replay_loop_step
from stabletrain.machine import hardware
from stabletrain.models.gpt import GPT
from stabletrain.parallel.single import SingleProcess
from stabletrain.program import conf_folder
from stabletrain.records import TrainState
from stabletrain.stored.json_files import Count, DamagedFile, check_type
from stabletrain.tools import Tools
from stabletrain.trainer.contract import TakeLogits, vocabulary
from stabletrain.trainer.init_from import ADDED
from stabletrain.trainer.options import StepOptions
from stabletrain.trainer.options import read as read_options
from stabletrain.trainer.saved import open_sizes, sizes_in
from stabletrain.trainer.stages import tools_from_options

PARTS = ("qknorm", "softcap", "softmax", "attention_gate")
ACTING = ("model", "precision", "zloss", *PARTS, "determinism", "label_smoothing", "grad_accum_steps")
"""Settings that forward and backward depend on, besides weights and batch; these may be overridden."""

OF_WEIGHTS = ("model", "norm_placement")
"""Groups with whose option the recorded weights were trained, and without which they mean nothing."""

PRESETS = ("stability",)
"""Config groups that only choose options of other groups."""


def overridden_config(
    recorded: DictConfig, choices: Mapping[str, str], overrides: Sequence[str], config_dir: Path | None
) -> DictConfig:
    """Applies overrides to the recorded configuration.

    The option of an overridden group is read from the configuration folders. Everything else stays as recorded,
    even if the user's own YAML has changed since.

    Raises:
        ConfigError: an override cannot be parsed, is unknown, or does not affect a step's forward and backward.
    """
    choices = {**ADDED_GROUPS, **choices}
    everything = parsed(overrides, config_dir)
    groups = [override for override in overrides if key_of(override) in choices]
    for override in overrides:
        if (group := key_of(override)) in OF_WEIGHTS:
            fix = "override its keys" if group == "model" else "omit it"
            raise ConfigError(f"{override}: the incident's weights are of {group}={choices[group]}; {fix}")
        root = key_of(override).partition(".")[0]
        if root not in (*ACTING, *PRESETS, "device") and root in [*choices, *recorded]:
            raise ConfigError(
                f"{override} does not affect one step's forward and backward, so a replay cannot try it; train with "
                f"it, or try one of {', '.join((*ACTING, *PRESETS))}"
            )
    cfg = DictConfig(OmegaConf.to_container(recorded))
    taken = chosen_options(groups, config_dir) if groups else {}
    for group, node in taken.items():
        if group in CHOSEN_PARTS and group not in cfg.model and group != "qkclip":
            raise ConfigError(f"{group} does nothing with model={choices['model']}, which takes no {group}: omit it")
        cfg[group] = node
        if group in CHOSEN_PARTS and group in cfg.model:
            cfg.model[group] = node
    before = dict(leaves(plain(cfg)))
    for key, value in ((key, value) for key, value in everything if key not in choices):
        if key not in before:
            group = f"{key.partition('.')[0]}."
            inside = [name for name in before if name.startswith(group) and not name.endswith("_")]
            hint = did_you_mean(key, inside if "." in key else [*before, *choices])
            raise ConfigError(f"{key}={value}: there is no such key{hint}")
        OmegaConf.update(cfg, key, value, merge=False)
        part, _, rest = key.partition(".")
        if part in CHOSEN_PARTS and part in cfg.model:
            OmegaConf.update(cfg.model, f"{part}.{rest}", value, merge=False)
    check_keys(dict(leaves(plain(cfg))), before)
    if plain(cfg) == plain(recorded):
        raise ConfigError(f"{' '.join(overrides)} changes nothing: the run used the same values; fix: another value")
    return cfg


def chosen_options(groups: Sequence[str], config_dir: Path | None) -> dict[str, Any]:
    """The options that the overrides choose, directly or through a preset, for groups that act in a step."""
    search = [] if config_dir is None else [f"hydra.searchpath=[file://{os.path.realpath(config_dir)}]"]
    GlobalHydra.instance().clear()
    with hydra_errors_explained(groups, config_dir), initialize_config_dir(str(conf_folder()), version_base="1.3"):
        first, then = (compose("config", [*search, *more], return_hydra_config=True) for more in ([], groups))
        old, new = first.hydra.runtime.choices, then.hydra.runtime.choices
        typed = {key_of(override) for override in groups}
        chosen = [group for group in ACTING if group in new and (group in typed or new[group] != old.get(group))]
        return {group: OmegaConf.to_container(then[group], resolve=False) for group in chosen}


def parsed(values: Sequence[str], config_dir: Path | None) -> list[tuple[str, Any]]:
    """Parses `key=value` as Hydra does."""
    with hydra_errors_explained(values, config_dir):
        found = OverridesParser.create().parse_overrides([*values])
        for override in found:
            if override.is_sweep_override() or override.is_delete():
                raise ConfigError(f"{override.input_line}: a replay tries one value: use key=value")
        return [(override.key_or_group, override.value()) for override in found]


def hydra_errors_explained(
    overrides: Sequence[str], config_dir: Path | None
) -> contextlib.AbstractContextManager[None]:
    """Returns a context that turns Hydra's errors into `ConfigError`, and restores Hydra's global state."""
    options = [] if config_dir is None else ["--config-dir", str(config_dir)]
    return explained(Arguments(options, list(overrides)), conf_folder())


def replay_incident(folder: Path, overrides: Sequence[str] = (), config_dir: Path | None = None) -> ReplayReport:
    """Replays an incident's step, on the run's device unless the overrides name another.

    `overrides` have the syntax of `train.py`; `config_dir` is the user's config folder, if an override uses it.

    Raises:
        ConfigError: the folder holds no incident that can be replayed, or an override cannot be tried.
        StabletrainError: the step could not be run.
    """
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir {config_dir} is not a folder: name the one that holds your config groups")
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder: use one of <run>/incidents/; `stabletrain diagnose <run>` lists them"
        )
    if not (folder / files.STEP).exists():
        raise ConfigError(f"{folder}: {why_not(folder)}")
    saved = files.read(folder)
    if "closures" in saved:  # recorded by `Guard`
        return replay_of_loop(folder, overrides)
    about = unflatten(saved.get("about") or {}, {})
    if not {"config", "choices"} <= set(about):
        raise ConfigError(f"{folder / files.STEP} holds no configuration: only incidents of train.py can be replayed")
    # The order of sums, and so the bits, depends on the number of threads.
    torch.set_num_threads(saved.get("threads") or torch.get_num_threads())
    recorded = recorded_config(folder, about["config"])
    cfg = overridden_config(recorded, about["choices"], overrides, config_dir) if overrides else recorded
    options = read_options(StepOptions, cfg)
    choice = replace(options.model, node={**options.model.node, **null_sizes(options.model, folder, saved)})
    model, tools = model_and_tools(replace(options, model=choice))
    other = bool(overrides) and choice.node != plain(recorded.model)
    repro = load_repro(folder, model, tools, strict=not other)
    if options.grad_accum_steps != recorded.grad_accum_steps:
        repro = replace(repro, micro_batches=options.grad_accum_steps)
    # otherwise keep the step's own scale
    if options.precision.node.get("init_scale") != recorded.precision.get("init_scale"):
        repro = replace(repro, loss_scale=float(tools.precision.loss_scale()))
    outcome = StepSubject(repro).replay("same")
    require_run(folder, outcome)
    fresh = [name for name, _ in model.named_parameters() if name not in saved[files.STATE]["parameters"]]
    diagnosis = diagnosis_of(folder)
    changed, unsure = compare(saved.get("code") or {}, model, tools)
    return ReplayReport(
        repro.reading, outcome, tuple(overrides), fresh, repro.applied, diagnosis, changed, unsure, repro.part
    )


def require_run(folder: Path, outcome: Outcome) -> None:
    """Raises StabletrainError if a step was not run."""
    if outcome.not_run:
        raise StabletrainError(f"{folder}: the step cannot be replayed: {outcome.not_run}")


class Recorded(TypedDict):
    """What a replay needs of an incident's configuration."""

    steps: Count
    seed: int
    device: str
    grad_accum_steps: Count
    model: Group
    precision: Group
    determinism: Group
    clipping: Group
    warmup: Group
    schedule: Group
    qkclip: Group


class RecordedConfig(Recorded, total=False):
    """What an incident of an older version lacks."""

    objective: Group
    zloss: Group
    qknorm: Group
    softcap: Group
    softmax: Group
    attention_gate: Group
    norm_placement: Group
    activation_checkpointing: Group
    label_smoothing: float
    loss_chunk: int | str


def recorded_config(folder: Path, found: dict[str, Any]) -> DictConfig:
    """Returns an incident's configuration, with today's paths and keys.

    Raises:
        DamagedFile: it is not the configuration of a run.
        ConfigError: it names unknown code.
    """
    try:
        check_type(found, RecordedConfig)
        cfg = DictConfig(updated(found))
        plain(cfg)
    except (ValueError, OmegaConfBaseException) as error:
        reason = str(error).partition("\n")[0]
        raise DamagedFile(f"{folder / files.STEP} is damaged: its configuration: {reason}") from error
    trust.check_config(found, folder / files.STEP)
    if cfg.model.get("_target_") == f"{GPT.__module__}.{GPT.__qualname__}":
        for key in ADDED.keys() - cfg.model.keys():
            cfg.model[key] = ADDED[key]
    return cfg


def replay_of_loop(folder: Path, overrides: Sequence[str]) -> ReplayReport:
    """Replays a step of a user's own loop, which `Guard` has recorded.

    Raises:
        ConfigError: there are overrides, or the loop's code is not there any more.
    """
    if overrides:
        raise ConfigError(
            f"{' '.join(overrides)}: this step ran in a loop of your own, which has no such options; change the code "
            "and replay it again"
        )
    found = replay_loop_step(folder)
    require_run(folder, found.outcome)
    return ReplayReport(found.reading, found.outcome, (), (), False, diagnosis_of(folder), found.changed)


def diagnosis_of(folder: Path) -> dict[str, Any]:
    """Reads an incident's `diagnosis.json`; empty if it cannot be read, because the replay also works without it."""
    with contextlib.suppress(ConfigError):
        return read(folder)
    return {}


def why_not(folder: Path) -> str:
    """Why a folder cannot be replayed."""
    if reason := diagnosis_of(folder).get("not_replayable"):
        return f"it cannot be replayed: {reason}"
    if (folder / "diagnosis.json").exists():
        return "weights and batch were not saved, so it cannot be replayed: train with forensics.keep_state=true"
    return "the folder holds no incident: use one of <run>/incidents/; `stabletrain diagnose <run>` lists them"


def model_and_tools(options: StepOptions) -> tuple[nn.Module, Tools]:
    """Builds the model with its initial weights on its device, and the tools of a step."""
    options.determinism.prepare()  # before `choose_device`, which starts CUDA
    device = hardware.choose_device(options.device)
    precision = options.precision.build(device=device)
    precision.prepare()
    options.determinism.seed_run(options.seed)
    model = options.model.build().to(device)
    if options.objective.takes_tensor:  # else the loss takes the output as it is
        model.register_forward_hook(TakeLogits())
    precision.wrap_fp32_modules(model)
    options.activation_checkpointing.attach(model)
    precision.attach(model, TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0)).optimizer)
    tools = tools_from_options(
        options,
        model,
        vocab_size=vocabulary(model, SimpleNamespace(**options.model.node)),
        precision=precision,
        guard=NoGuard(),
        seed=options.seed,
        parallel=SingleProcess(),
    )
    return model, tools


def null_sizes(choice: Choice[Any], folder: Path, saved: Tree) -> dict[str, int]:
    """Returns the model's sizes that are null in its option, read from the incident's shapes.

    `saved` is the content of `step.json`.

    Raises:
        ConfigError: no shape contains a size.
    """
    wanted = open_sizes(choice)
    if not wanted:
        return {}
    state = files.tensors_of(folder, files.STATE, saved)
    then = {name: tensor.shape for part in ("parameters", "buffers") for name, tensor in state[part].items()}
    # if no parameter depends on the block size, take the length of a sample
    sizes = {"block_size": files.tensors_of(folder, files.BATCH, saved)["inputs"].shape[-1]}
    sizes |= sizes_in(choice, then)
    for key in wanted:
        if key not in sizes:
            raise ConfigError(f"{folder}: model.{key} came from the data and is in no saved shape: add model.{key}=...")
    return {key: sizes[key] for key in wanted}
