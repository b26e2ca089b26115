"""From a configuration to a run, in stages; what cannot work is refused here, before a step is taken.

    process -> data -> model and optimizer -> tools -> output -> restored state -> the run

Every group's option is one object, made by Hydra from its `_target_`. The groups meet in three ways only, all visible
in the YAML or below: a model takes `${qknorm}` and `${softcap}` into its own YAML; a model's nulls are filled from the
data (`vocab_size`, `block_size`, `num_classes`, `in_channels`); and a precision is told the device.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from torch import nn

from stabletrain.checkpoint.capture import Stateful
from stabletrain.checkpoint.folder import run_of
from stabletrain.compare.pages.at_end import NoPage, PageAtEnd
from stabletrain.config.arguments import SWEEP, key_of, take_apart
from stabletrain.config.make import leaves, make, plain
from stabletrain.data.order import position
from stabletrain.data.prefetch import Prefetch
from stabletrain.errors import ConfigError
from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.handler import for_all_ranks
from stabletrain.machine import compiling, hardware
from stabletrain.machine.determinism import mix
from stabletrain.machine.usage import Usage, forget_peak, peak_flops
from stabletrain.monitors.rolling import RollingStats
from stabletrain.parallel.checkpoints import for_all_ranks as checkpoints_for_all_ranks
from stabletrain.parallel.ranks import Ranks, current_ranks, join, run_on_main
from stabletrain.protocols import Tools
from stabletrain.records import Batch, TrainState
from stabletrain.tracking.metrics import Metrics
from stabletrain.tracking.progress import Progress
from stabletrain.tracking.run_folder import NoRunFolder, RunFolder, versions
from stabletrain.tracking.tracker import NoTracker, Tracker
from stabletrain.tracking.wandb import NoWandb
from stabletrain.trainer.banner import closing, opening, sample_text, suggestion
from stabletrain.trainer.compile_warmup import compiled
from stabletrain.trainer.contract import checked, cost, make_model, units, validation, vocabulary
from stabletrain.trainer.history import UNITS, History
from stabletrain.trainer.rollback import Rollback
from stabletrain.trainer.run import Forensics, Monitoring, Output, Plan, TrainingData, TrainingRun
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


def build(cfg: DictConfig, folder: Path, shown: Progress | None = None) -> TrainingRun:
    """The run that `cfg` describes, resumed if it asks for that, ready for `loop.train`.

    Args:
        cfg: checked by `config.checks.check`. Call this inside a Hydra job, which knows the choice of options.
        folder: the run folder.
        shown: how progress is shown; None for the terminal.

    Raises:
        ConfigError: a bound is passed, a combination cannot work, or the folder already holds a run.
    """
    process = start_process(cfg)
    guard, clipping, monitors, faults = (make(cfg, group) for group in ("guard", "clipping", "monitors", "faults"))
    source = load_data(cfg, process, faults)
    trained = build_model(cfg, process, source, faults)
    tools = make_tools(cfg, process, source, trained.state.model, clipping, guard)
    load = batch_loader(cfg, process, source, trained.state)
    checkpoints = checkpoints_for_all_ranks(faults.checkpoints(make(cfg, "checkpoint")), process.ranks)
    wandb = faults.wandb(make(cfg, "wandb")) if process.ranks.is_main else NoWandb()
    run_folder = start_run_folder(cfg, folder, process, source, trained)
    tracker = start_tracker(cfg, folder, process.ranks, wandb, run_folder, shown)
    history, rolling = History(), RollingStats()
    batches = Prefetch(load, pin=process.device.type == "cuda")
    rollback = Rollback(
        trained.state,
        stateful_parts(tools, history, rolling, monitors),
        history=history,
        guard=guard,
        checkpoints=checkpoints,
        batches=batches,
        tracker=tracker,
        run_id=run_folder.id,
    )
    try:
        start_wandb(cfg, folder, process, wandb, run_folder, trained)
        checkpoints.open(folder, lambda kind, step, fields: tracker.event(kind, step, **fields), run_folder.id)
        restore_state(cfg, rollback, guard, tracker)
        tracker.note(
            opening(process.choices, plain(cfg), trained.state.model, source.data, tools, *where(process, folder))
        )
        if compiling.wanted(cfg.compile, process.device):
            compile_model(cfg, process, trained.state, tools, load, run_folder, tracker)
    except BaseException as error:
        tracker.close(1)
        run_folder.abandon(str(error))
        raise
    page = PageAtEnd(folder) if cfg.report and process.ranks.is_main else NoPage()
    run = TrainingRun(
        plan=Plan(cfg.steps, cfg.grad_accum_steps, cfg.eval_every, cfg.log_every),
        state=trained.state,
        tools=tools,
        device=process.device,
        parallel=process.parallel,
        data=TrainingData(
            batches=batches,
            validation=lambda: validation(source.data, cfg.batch_size, cfg.eval_batches, process.ranks),
            load=load,
            unit=source.unit,
        ),
        monitoring=Monitoring(monitors, rolling, trained.usage),
        forensics=start_forensics(cfg, folder, process, source, trained.state.model, tools),
        output=Output(tracker, run_folder, page, closing=str),
        rollback=rollback,
        history=history,
    )
    run.output.closing = partial(closing_lines, cfg, run, source, folder)
    tracker.start(cfg.steps, trained.state.step)
    return run


# ---- process


def start_process(cfg: DictConfig) -> Process:
    """Joins the other ranks, and prepares the device and how it computes."""
    ranks = current_ranks()
    if ranks.launched:
        join(ranks)
    parallel = make(cfg, "parallel")
    choices = {group: option for group, option in HydraConfig.get().runtime.choices.items() if "hydra" not in group}
    parallel.check(choices)
    determinism = make(cfg, "determinism")
    switches = determinism.prepare()  # before CUDA starts
    device = hardware.pick(cfg.device)
    precision = make(cfg, "precision", device=device)
    precision.prepare()
    return Process(ranks, choices, parallel, determinism, precision, switches, device)


def where(process: Process, folder: Path) -> tuple[str, str]:
    """The machine and the run folder, for the opening lines."""
    return f"{hardware.name(process.device)}, {hardware.threads()}", str(folder)


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


def stateful_parts(tools: Any, history: History, rolling: RollingStats, monitors: Any) -> dict[str, Stateful]:
    """Everything stateful beside model and optimizer, under its name in checkpoints."""
    return {
        "guard": tools.guard,
        "precision": tools.precision,
        "clipping": tools.clipping,
        "history": history,
        "recent": rolling,
        "monitors": monitors,
    }


# ---- output


def start_run_folder(cfg: DictConfig, folder: Path, process: Process, source: Source, trained: Trained) -> NoRunFolder:
    """Claims the run folder, and writes `run.json`; the main process only.

    Raises:
        ConfigError: the folder already holds a run, or cannot be written.
    """
    run_folder = RunFolder(folder) if process.ranks.is_main else NoRunFolder(folder)
    typed, data = take_apart([*sys.argv[1:]]), source.data
    fingerprint = data.fingerprint() if hasattr(data, "fingerprint") else {"name": process.choices["data"]}
    resuming = cfg.resume == "auto"
    start = partial(
        run_folder.start,
        resuming=resuming,
        choices=process.choices,
        hardware=machine_record(process, trained),
        data=fingerprint,
        model={"parameters": trained.parameters, **trained.usage.facts(UNITS[source.unit])},
        run_id=run_of(folder) if resuming else None,
        options=[option for option in typed.options if option not in SWEEP],
        overrides=[each for each in HydraConfig.get().overrides.task if key_of(each) != "resume"],
    )
    run_folder.id = run_on_main(process.ranks, start)
    return run_folder


def machine_record(process: Process, trained: Trained) -> dict[str, Any]:
    """The machine, and how it computes, for `run.json` and W&B."""
    return hardware.describe(process.device) | {
        "precision": process.precision.name,
        "fp32_modules": trained.fp32_modules,
        "determinism": process.switches,
    }


def start_tracker(
    cfg: DictConfig, folder: Path, ranks: Ranks, wandb: NoWandb, run_folder: NoRunFolder, shown: Progress | None
) -> NoTracker:
    """Opens metrics, events and the progress line; the main process only."""
    try:
        return run_on_main(ranks, lambda: Tracker(Metrics(folder), wandb, shown or Progress(cfg.log_every)), NoTracker)
    except ConfigError as error:
        run_folder.abandon(str(error))
        raise


def start_wandb(
    cfg: DictConfig, folder: Path, process: Process, wandb: NoWandb, run_folder: NoRunFolder, trained: Trained
) -> None:
    """Starts the W&B run, with the configuration and the machine."""
    hydra = HydraConfig.get()
    about = {
        **plain(cfg),
        "groups": process.choices,
        "hardware": machine_record(process, trained),
        "versions": versions(),
    }
    wandb.start(folder, run_folder.id, about, hydra.overrides.task, sweeping=hydra.mode == RunMode.MULTIRUN)


# ---- restored state


def restore_state(cfg: DictConfig, rollback: Rollback, guard: Any, tracker: NoTracker) -> None:
    """Restores the checkpoint that `resume` asks for.

    Raises:
        ConfigError: the run has passed `steps` already.
    """
    rollback.resume(cfg.resume)
    if cfg.resume != "auto":
        guard.forget()  # the states it knows are in another folder
    if rollback.state.step > cfg.steps:
        raise ConfigError(f"steps={cfg.steps} is below the {rollback.state.step} steps that are done: raise steps")
    tracker.rewind(rollback.state.executed_steps)


def compile_model(
    cfg: DictConfig,
    process: Process,
    state: TrainState,
    tools: Tools,
    load: Callable[[int], Batch],
    run_folder: NoRunFolder,
    tracker: NoTracker,
) -> None:
    """Compiles the model in place and tries it on one micro-batch.

    Raises:
        ConfigError: `compile=true`, and the model cannot be compiled.
    """
    batch = load(cfg.steps - 1).to(process.device).split(cfg.grad_accum_steps)[0]  # of full length by then
    facts, told = compiled(state, batch, tools, must=cfg.compile is True, any_rank=process.parallel.any_rank)
    run_folder.learn(facts)
    tracker.note(told)


# ---- the run


def start_forensics(
    cfg: DictConfig, folder: Path, process: Process, source: Source, model: nn.Module, tools: Any
) -> Forensics:
    """The incident handler, with what it must know of the run."""
    config, choices = plain(cfg), process.choices

    def model_factory() -> nn.Module:
        copy = make_model(cfg, source.data).to(process.device)
        process.precision.wrap_fp32_modules(copy)
        return copy

    handler = for_all_ranks(make(cfg, "forensics"), process.ranks)
    uncompiled_cpu = process.device.type == "cpu" and compiling.shape_of(model) is None
    settings = RunSettings(
        choices=choices,
        values=dict(leaves(config)),
        has_attention="qknorm" in cfg.model,
        warmup=tools.learning_rate.warmup.length(cfg.steps),
        deterministic=choices["determinism"] == "strict" or uncompiled_cpu,
    )
    handler.open(folder, settings)
    return Forensics(handler, model_factory, metadata={"config": config, "choices": choices})


def closing_lines(cfg: DictConfig, run: TrainingRun, source: Source, folder: Path) -> str:
    """The last lines on the terminal; writes the run's page too. All ranks must call it: the model may be sharded."""
    sample = sample_text(run.state.model, source.data, run.device)
    run.output.page.write(sample)
    return closing(
        state=run.state,
        history=run.history,
        guard=run.tools.guard,
        unit=source.unit,
        per=source.per,
        folder=str(folder),
        sample=sample,
        again=suggestion(take_apart([*sys.argv[1:]]), "qknorm" in cfg.model, source.per),
    )
