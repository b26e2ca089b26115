"""The first stages of building a run: process, data, model and optimizer, and the tools of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer

from stabletrain.buffers import note_masks
from stabletrain.config.arguments import job_overrides, key_of
from stabletrain.config.make import make, plain, target_of
from stabletrain.config.resuming import kept_precision
from stabletrain.data.order import position
from stabletrain.errors import ConfigError
from stabletrain.machine import hardware
from stabletrain.machine.determinism import mix
from stabletrain.machine.hardware import Usage, peak_flops, reset_peak
from stabletrain.parallel.ranks import Ranks, current_ranks, join_process_group, run_on_main
from stabletrain.printable import say
from stabletrain.protocols import Objective, Tools
from stabletrain.records import IGNORE_INDEX, Batch, TrainState, reads_rows
from stabletrain.stability.guard.state_check import default_every
from stabletrain.stability.optimizers.sgd import zero_momentum_
from stabletrain.trainer import option_roles
from stabletrain.trainer.banner import busy_note, opening, split_note, text_note, update_note
from stabletrain.trainer.contract import (
    checked,
    cost,
    make_model,
    output_note,
    sizes_from_data,
    units,
    val_batches,
    vocabulary,
)
from stabletrain.trainer.init_from import Loaded, OwnInit, StartingWeights
from stabletrain.trainer.memory import check_memory
from stabletrain.trainer.same_data import on_all_ranks
from stabletrain.trainer.tools import tools_from_config

RANK_SEEDS = 1 << 40
"""Added to a rank before `mix`. Larger than any step number, so a rank and a step are never mixed into one seed."""

OWN_INIT = OwnInit()


@dataclass(frozen=True)
class Process:
    """This process: its rank, its device, and how it computes.

    Attributes:
        choices: the chosen option of each config group.
        switches: the determinism settings in force, recorded in `run.json`.
    """

    ranks: Ranks
    choices: Mapping[str, str]
    parallel: Any
    determinism: Any
    precision: Any
    switches: Mapping[str, Any]
    device: torch.device


@dataclass(frozen=True)
class Source:
    """The run's data.

    Attributes:
        unit: unit of throughput: `tok`, `img` or `sample`.
        per: unit of the loss, such as `byte`.
        fingerprint: the data set's; None if it has none, or if it was not needed yet.
    """

    data: Any
    unit: str
    per: str
    fingerprint: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Trained:
    """The model and the optimizer, before the first step.

    Attributes:
        fp32_modules: names of the modules kept in fp32.
        parameters: number of parameters of the whole model.
        sample_flops: FLOPs of training on one sample; None if they cannot be counted.
        loaded: the weights that `init_from` names.
        notes: what the user should know about model and optimizer, one line each; some may be empty.
    """

    state: TrainState
    usage: Usage
    fp32_modules: list[str]
    parameters: int
    sample_flops: float | None = None
    loaded: Loaded = field(default_factory=Loaded)
    notes: Sequence[str] = ()


# ---- process


def start_process(cfg: DictConfig, folder: Path) -> Process:
    """Joins the other ranks, and prepares determinism, device and precision. `folder` is the run folder."""
    ranks = current_ranks()
    if ranks.launched:
        join_process_group(ranks)
    parallel = make(cfg, "parallel", option_roles.ParallelOption)
    choices = {group: option for group, option in HydraConfig.get().runtime.choices.items() if "hydra" not in group}
    parallel.check(choices)
    parallel.set_timeout(started=False)
    determinism = make(cfg, "determinism", option_roles.DeterminismOption)
    switches = determinism.prepare()  # before `choose_device`, which starts CUDA
    device = hardware.choose_device(cfg.device, ranks.local_rank, ranks.local_world_size)
    # `precision=auto` of a resumed run stays what it was, on whichever card the run continues.
    kept, target = "", cfg.precision.get("_target_")
    if cfg.resume != "none":
        kept = run_on_main(ranks, lambda: kept_precision(cfg.resume, target, choices, folder))
    given = {"kept": kept} if kept else {}
    precision = make(cfg, "precision", option_roles.PrecisionOption, device=device, **given)
    precision.prepare()
    return Process(ranks, choices, parallel, determinism, precision, switches, device)


def rank_seed(seed: int, ranks: Ranks) -> int:
    """Returns the seed of a rank's randomness, in [0, 2^63): each rank has a different one."""
    # the main process keeps `seed` itself, so it draws the same numbers as a run of one process
    return seed if ranks.is_main else mix(seed, RANK_SEEDS + ranks.rank) >> 1


# ---- data and model


def load_data(cfg: DictConfig, process: Process, faults: Any) -> Source:
    """Builds the data set, with the faults that the `faults` group injects.

    Raises:
        ConfigError: the data set has no method `batch`, or the ranks read different data.
    """

    def load() -> Any:
        data = make(cfg, "data", option_roles.DataOption)
        if callable(getattr(data, "to", None)):  # this data can build its batches on the training device
            data.to(process.device)
        return data

    data, fingerprint = on_all_ranks(process.ranks, load, cfg.batch_size)
    data = faults.data(data)
    return Source(data, *units(cfg, data), fingerprint)


def build_model(
    cfg: DictConfig,
    process: Process,
    source: Source,
    faults: Any,
    weights: StartingWeights = OWN_INIT,
    count_flops: bool = False,
) -> Trained:
    """Builds the model and the optimizer on their device, sharded or replicated over the ranks.

    Args:
        count_flops: whether to count the FLOPs of a sample even if the device's peak is unknown.
        weights: puts other weights into the model than its `init`.
    """
    device, precision, parallel = process.device, process.precision, process.parallel
    long = check_memory(cfg, process, source.data, sizes_from_data(cfg, source.data))
    if long and process.ranks.is_main:
        say(long, flush=True)
    process.determinism.seed_run(cfg.seed)
    model = make_model(cfg, source.data)
    parameters = sum(p.numel() for p in model.parameters())
    # counting FLOPs reads a sample of the data: only do it if something depends on it
    peak, usage, measured = peak_flops(hardware.name(device), precision.name), Usage(device), None
    if peak is not None or count_flops:
        measured = cost(model, source.data)
    if peak is not None:
        usage = Usage(device, measured and measured[0] / measured[1], peak * process.ranks.world_size)
    reset_peak(device)
    make(cfg, "init", option_roles.InitOption)(model)  # on the CPU, so every device starts from the same weights
    loaded = weights.load_(model)
    note_masks(model)  # here, because it reads values: after this, nothing waits for the device
    model.to(device)
    fp32_modules = precision.wrap_fp32_modules(model)
    parallel.shard(model)  # before the optimizer is built: it must hold the sharded parameters
    overrides = parallel.optimizer_overrides(process.choices["optimizer"])
    optimizer, note = make_optimizer(cfg, model, overrides)
    state = TrainState(model, optimizer)
    precision.attach(model, state.optimizer)
    faults.state(state, precision)
    parallel.wrap(model)  # last, because it broadcasts the main process's weights to all ranks
    flops = None if measured is None else measured[0]
    return Trained(state, usage, fp32_modules, parameters, flops, loaded, [output_note(model), note, *loaded.notes])


def make_optimizer(cfg: DictConfig, model: nn.Module, overrides: Mapping[str, Any]) -> tuple[Optimizer, str]:
    """Builds the optimizer of the model's trainable parameters.

    There are two kinds of `optimizer._target_`. A subclass of `torch.optim.Optimizer` gets all trainable parameters
    in one group. Any other class is a factory, as in stabletrain's own options: its object is called with
    the model and returns the optimizer.

    Returns:
        the optimizer, and a line with its arguments if the user typed `optimizer._target_`, else an empty string.

    Raises:
        ConfigError: the target gives no optimizer, does not accept its arguments, or needs a closure.
    """
    target, kind, note = cfg.optimizer.get("_target_"), target_of(cfg, "optimizer"), ""
    if isinstance(kind, type) and issubclass(kind, Optimizer):
        given, note = optimizer_arguments(cfg, kind, overrides)
        build = make(DictConfig({"optimizer": given}), "optimizer", _partial_=True)
        parameters: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    else:
        build, parameters = make(cfg, "optimizer", option_roles.OptimizerOption, **overrides), model
    try:
        optimizer = build(parameters)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer: {target} cannot be built: {error}") from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer: {target} gives a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(f"optimizer: {target} calls the loss several times in a step (a closure): use another")
    if isinstance(optimizer, torch.optim.SGD):
        zero_momentum_(optimizer)
    return optimizer, note


def optimizer_arguments(cfg: DictConfig, kind: type, overrides: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the arguments of an optimizer class, and a line that shows them if the user typed `optimizer._target_`.

    If the user typed `optimizer._target_`, the other keys still come from the chosen option, such as `adamw`. The class
    gets only the keys that it accepts.

    Raises:
        ConfigError: the user typed a key that the class does not accept.
    """
    given, known = plain(cfg.optimizer), signature(kind).parameters
    taken = {key: value for key, value in overrides.items() if key in known}
    typed = [key_of(override) for override in job_overrides()]
    if "optimizer._target_" not in typed:
        return given | taken, ""
    unknown = [key for key in given if not key.startswith("_") and key not in known]
    for key in unknown:
        if f"optimizer.{key}" in typed:
            raise ConfigError(f"optimizer.{key}={given[key]}: {cfg.optimizer._target_} has no such argument")
    kept = {key: value for key, value in given.items() if key not in unknown} | taken
    shown = ", ".join(f"{key}={value}" for key, value in kept.items() if not key.startswith("_"))
    rest = f"; unused: {', '.join(f'optimizer.{key}' for key in unknown)}" if unknown else ""
    return kept, f"optimizer {cfg.optimizer._target_}({shown}) over all parameters{rest}"


def batch_loader(
    cfg: DictConfig, process: Process, source: Source, state: TrainState, objective: Objective
) -> Callable[[int], Batch]:
    """Returns a function that loads this rank's part of the training batch of a step."""
    world_size, size = process.ranks.world_size, cfg.batch_size
    mine = process.parallel.rows(size)

    def load(step: int) -> Batch:
        batch = read(step)
        # What has to be moved to a card stays as small as the data gave it: the card transforms it.
        return batch.transformed() if batch.inputs.device == process.device else batch

    def read(step: int) -> Batch:
        at = position(step, state.skipped)  # leaves out the data that a rollback has skipped
        if reads_rows(source.data):
            batch = checked(source.data.rows(at, size, "train", mine))
            if len(batch) not in (0, mine.stop - mine.start):
                raise ConfigError(
                    f"data: rows({at}, {size}, 'train', {mine}) has {len(batch)} samples: return one for each row"
                )
            if world_size > 1 and batch.counted is None:
                raise ConfigError(
                    "data: rows() gives no `counted`, by which the ranks divide their losses: set it to the number of "
                    f"targets in the whole batch that are not {IGNORE_INDEX}"
                )
            objective.check_targets(batch.targets)
            if len(batch):
                batch = batch.of_step(len(batch) / size)
                # In one process the step counts the valid targets itself, as they are then.
                return batch if world_size > 1 else replace(batch, counted=None)
        else:
            batch = checked(source.data.batch(at, size, "train"))
            objective.check_targets(batch.targets)
        if len(batch) % (cfg.grad_accum_steps * world_size):
            among = f" x {world_size} ranks" if world_size > 1 else ""
            raise ConfigError(
                f"data: batch {step} has {len(batch)} samples, not a multiple of grad_accum_steps="
                f"{cfg.grad_accum_steps}{among}: return batch_size={size} samples, or use grad_accum_steps=1"
            )
        return process.parallel.shard_batch(batch, size)

    return load


# ---- tools


def chooses_checksums(guard: Any) -> bool:
    """Returns whether the guard leaves it open how often it checks the state."""
    return getattr(guard, "checksum_every", 0) is None


def choose_checksums(cfg: DictConfig, process: Process, trained: Trained, guard: Any) -> None:
    """Sets how often the guard checks the state if `guard.checksum_every` is null: as often as it costs little."""
    if not chooses_checksums(guard):
        return
    weights = sum(p.numel() * p.element_size() for p in trained.state.model.parameters())
    shards = process.ranks.world_size if process.parallel.name == "fsdp" else 1
    flops = trained.sample_flops and trained.sample_flops * cfg.batch_size / process.ranks.world_size
    guard.check_state_every(default_every(3 * weights / shards, flops, process.device.type))  # weights and two moments


def make_tools(cfg: DictConfig, process: Process, source: Source, model: nn.Module, clipping: Any, guard: Any) -> Tools:
    """Builds everything that acts in a step.

    Raises:
        ConfigError: the objective couples the samples of a batch, which is split among micro-batches or ranks.
    """
    tools = tools_from_config(
        cfg,
        model,
        vocab_size=vocabulary(model, source.data),
        precision=process.precision,
        clipping=clipping,
        guard=guard,
        determinism=process.determinism,
        seed=rank_seed(cfg.seed, process.ranks),
        parallel=process.parallel,
        head_apart=process.parallel.head_apart,
    )
    name, parts = process.choices.get("objective", "cross_entropy"), cfg.grad_accum_steps
    if tools.objective.couples_samples and parts * process.ranks.world_size > 1:
        what = f"grad_accum_steps={parts}" if parts > 1 else f"{process.ranks.world_size} ranks"
        raise ConfigError(
            f"objective={name} couples the samples of a batch, and {what} would split the batch: use "
            f"{'grad_accum_steps=1' if parts > 1 else 'one process'}"
        )
    return tools


# ---- the first lines


def opening_lines(
    cfg: DictConfig, process: Process, source: Source, trained: Trained, tools: Tools, folder: Path
) -> str:
    """Returns the first lines on the terminal."""
    machine = f"{hardware.name(process.device)}, {hardware.threads()}"
    notes = [*trained.notes, *opening_notes(cfg, process, source), update_note(tools.guard, trained.state)]
    return opening(process.choices, plain(cfg), trained.state.model, source.data, tools, machine, str(folder), notes)


def opening_notes(cfg: DictConfig, process: Process, source: Source) -> list[str]:
    """Returns what else the user should know about this run, one line each; some may be empty."""
    notes = [split_note(source.data)]
    if process.ranks.is_main:  # only it prints, and loads a tokenizer
        notes.append(text_note(source.data))
    if process.device.type == "cpu":
        batches = val_batches(source.data, cfg.batch_size, cfg.eval_batches)
        notes.append(busy_note(*hardware.load_and_cores(), torch.get_num_threads(), batches))
    return notes
