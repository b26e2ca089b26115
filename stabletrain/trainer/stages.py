"""The first stages of building a run: this process, its data, what is trained, and what acts in a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import nn

from stabletrain.config.make import make
from stabletrain.data.order import position
from stabletrain.errors import ConfigError
from stabletrain.machine import hardware
from stabletrain.machine.determinism import mix
from stabletrain.machine.hardware import Usage, forget_peak, peak_flops
from stabletrain.parallel.ranks import Ranks, current_ranks, join_process_group
from stabletrain.protocols import Tools
from stabletrain.records import Batch, TrainState
from stabletrain.trainer.contract import checked, cost, make_model, units, vocabulary
from stabletrain.trainer.tools import tools_from_config

RANK_SEEDS = 1 << 40
"""Beyond every step's number: the seeds of the other ranks are drawn from here on."""


@dataclass(frozen=True)
class Process:
    """This process: its place among the ranks, its device, and how it computes.

    Attributes:
        ranks: this process among those of the run.
        choices: option by config group.
        parallel, determinism, precision: the objects of their groups, prepared.
        switches: what determinism has set, for the record.
        device: where the model lives.
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
        data: the data set, with `batch(step, size, split)`.
        unit: what throughput counts: `tok`, `img` or `sample`.
        per: what a loss is per, such as `byte`.
    """

    data: Any
    unit: str
    per: str


@dataclass(frozen=True)
class Trained:
    """What is trained.

    Attributes:
        state: model and optimizer, before the first step.
        usage: measures how much of the machine is used.
        fp32_modules: names of the modules kept in fp32.
        parameters: how many the model has.
    """

    state: TrainState
    usage: Usage
    fp32_modules: list[str]
    parameters: int


# ---- process


def start_process(cfg: DictConfig) -> Process:
    """Joins the other ranks, and prepares the device and how it computes."""
    ranks = current_ranks()
    if ranks.launched:
        join_process_group(ranks)
    parallel = make(cfg, "parallel")
    choices = {group: option for group, option in HydraConfig.get().runtime.choices.items() if "hydra" not in group}
    parallel.check(choices)
    determinism = make(cfg, "determinism")
    switches = determinism.prepare()  # before CUDA starts
    device = hardware.pick(cfg.device)
    precision = make(cfg, "precision", device=device)
    precision.prepare()
    return Process(ranks, choices, parallel, determinism, precision, switches, device)


def rank_seed(seed: int, ranks: Ranks) -> int:
    """The seed of a rank's randomness in a step: the main process has `seed`, every other rank one of its own."""
    return seed if ranks.is_main else mix(seed, RANK_SEEDS + ranks.rank) >> 1


# ---- data and model


def load_data(cfg: DictConfig, process: Process, faults: Any) -> Source:
    """The data set, with the faults that a test of the guard puts into it."""
    data = make(cfg, "data")
    if not callable(getattr(data, "batch", None)):
        raise ConfigError(f"data: {cfg.data._target_} has no batch(step, size, split)")
    if callable(getattr(data, "to", None)):  # data that can make its batches on the training device
        data.to(process.device)
    data = faults.data(data)
    return Source(data, *units(cfg, data))


def build_model(cfg: DictConfig, process: Process, source: Source, faults: Any) -> Trained:
    """Model and optimizer on their device, spread over the ranks."""
    device, precision, parallel = process.device, process.precision, process.parallel
    process.determinism.seed_run(cfg.seed)
    model = make_model(cfg, source.data)
    parameters = sum(p.numel() for p in model.parameters())
    peak = peak_flops(hardware.name(device), precision.name)
    usage = Usage(device)
    if peak is not None:
        usage = Usage(device, cost(model, source.data), peak * process.ranks.world_size)
    forget_peak(device)
    make(cfg, "init")(model)  # on the CPU, so every device starts from the same weights
    model.to(device)
    fp32_modules = precision.wrap_fp32_modules(model)
    parallel.shard(model)
    overrides = parallel.optimizer_overrides(process.choices["optimizer"])
    state = TrainState(model, make(cfg, "optimizer", **overrides)(model))
    precision.attach(model, state.optimizer)
    faults.state(state, precision)
    parallel.wrap(model)  # last, because it sends the main process's weights to all ranks
    return Trained(state, usage, fp32_modules, parameters)


def batch_loader(cfg: DictConfig, process: Process, source: Source, state: TrainState) -> Callable[[int], Batch]:
    """Loads this rank's part of the training batch of a step."""
    world_size = process.ranks.world_size

    def load(step: int) -> Batch:
        batch = checked(source.data.batch(position(step, state.skipped), cfg.batch_size, "train"))
        if len(batch) % (cfg.grad_accum_steps * world_size):
            among = f" on {world_size} ranks" if world_size > 1 else ""
            raise ConfigError(
                f"data: batch {step} has {len(batch)} samples, which grad_accum_steps={cfg.grad_accum_steps}{among} "
                f"does not divide: return batch_size={cfg.batch_size} samples, or use grad_accum_steps=1"
            )
        return process.parallel.shard_batch(batch, cfg.batch_size)

    return load


# ---- tools


def make_tools(cfg: DictConfig, process: Process, source: Source, model: nn.Module, clipping: Any, guard: Any) -> Tools:
    """Everything that acts in a step."""
    return tools_from_config(
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
