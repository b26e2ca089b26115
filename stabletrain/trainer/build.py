"""Builds a training run from a configuration, in stages. Refuses what cannot work before the first step.

    process -> data -> model and optimizer -> tools -> output -> restored state -> the run

Hydra builds one object for each config group. Groups depend on each other in only three ways: a model's YAML takes
`${qknorm}`, `${softcap}` and `${qkclip}`; null sizes of a model are taken from the data; a precision gets the device.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from torch import nn

from stabletrain.buffers import note_masks
from stabletrain.checkpoint.capture import Stateful, sharded_tensors
from stabletrain.checkpoint.folder import run_of
from stabletrain.checkpoint.snapshots import choose_memory
from stabletrain.comparison.pages.at_end import NoPage, PageAtEnd
from stabletrain.config import trust
from stabletrain.config.arguments import SWEEP, job_overrides, key_of, parse_arguments
from stabletrain.config.make import leaves, make, plain
from stabletrain.config.resuming import acting, check_resume, settings
from stabletrain.data.prefetch import Prefetch
from stabletrain.data.to_device import ToDevice
from stabletrain.errors import ConfigError
from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.distributed_handler import for_all_ranks
from stabletrain.machine import compiling, hardware
from stabletrain.machine.memory import free_host_memory
from stabletrain.monitors.rolling import RollingStats
from stabletrain.parallel.checkpoints import for_all_ranks as checkpoints_for_all_ranks
from stabletrain.parallel.ranks import Ranks, run_on_main
from stabletrain.printable import say
from stabletrain.program import started
from stabletrain.protocols import GuardPolicy, Tools
from stabletrain.records import Batch, TrainState, reads_rows
from stabletrain.tracking.metrics import Metrics
from stabletrain.tracking.progress import Progress
from stabletrain.tracking.run_folder import NoRunFolder, RunFolder, versions
from stabletrain.tracking.tracker import NoTracker, Tracker
from stabletrain.tracking.wandb import NoWandb
from stabletrain.trainer import option_roles, roles
from stabletrain.trainer.after_halt import after_halt
from stabletrain.trainer.banner import closing, sample_text, suggestion
from stabletrain.trainer.changes import Resumption, check_data_of_checkpoint, option_fingerprint
from stabletrain.trainer.compile_warmup import warm_up_compiled
from stabletrain.trainer.contract import make_model, validation
from stabletrain.trainer.history import UNITS, History
from stabletrain.trainer.init_from import starting_weights
from stabletrain.trainer.rollback import Rollback
from stabletrain.trainer.run import Forensics, Monitoring, Output, Plan, TrainingData, TrainingRun
from stabletrain.trainer.saved_states import SavedStates
from stabletrain.trainer.stages import (
    Process,
    Source,
    Trained,
    batch_loader,
    build_model,
    choose_checksums,
    chooses_checksums,
    load_data,
    make_tools,
    opening_lines,
    start_process,
)


@dataclass(frozen=True)
class Opened:
    """The run's outputs.

    Attributes:
        run_folder: writes `run.json`; the file already exists.
        wandb, checkpoints: not started and not opened yet.
    """

    folder: Path
    run_folder: roles.RunFolder
    tracker: roles.Tracker
    wandb: roles.WandbRun
    checkpoints: roles.Checkpoints

    def open_checkpoints(self) -> None:
        """Opens the checkpoint folder, and records what happens there as events."""
        tracker = self.tracker
        self.checkpoints.open(
            self.folder, lambda kind, step, fields: tracker.event(kind, step, **fields), self.run_folder.id
        )


def build(cfg: DictConfig, folder: Path, shown: Progress | None = None) -> TrainingRun:
    """Builds the run that `cfg` describes, restored from a checkpoint if `resume` names one.

    Must be called inside a Hydra job, which knows the chosen options.

    Args:
        cfg: checked by `config.checks.check`.
        shown: shows the progress; None for the terminal.

    Raises:
        ConfigError: a value is out of bounds, a combination cannot work, the folder already holds a run, or a resume
            changes what it cannot.
    """
    # the process comes first: determinism must be set up before CUDA starts
    process = start_process(cfg, folder)
    run_on_main(process.ranks, lambda: check_resume(cfg.resume, settings(cfg, process.choices), folder))
    guard, clipping = make(cfg, "guard", option_roles.GuardOption), make(cfg, "clipping", option_roles.ClippingOption)
    monitors, faults = (
        make(cfg, "monitors", option_roles.MonitorsOption),
        make(cfg, "faults", option_roles.FaultsOption),
    )
    forecast = make(cfg, "forecast", option_roles.ForecastOption)
    precise = {**process.choices, "precision": process.precision.name}  # auto has chosen one
    forecast.set_run(precise, plain(cfg.optimizer))
    source = load_data(cfg, process, faults)
    weights = starting_weights(cfg, process.choices, source.data, process.ranks, folder)
    trained = build_model(cfg, process, source, faults, weights, chooses_checksums(guard))
    choose_checksums(cfg, process, trained, guard)
    tools = make_tools(cfg, process, source, trained.state.model, clipping, guard)
    load = batch_loader(cfg, process, source, trained.state, tools.objective)
    opened = open_output(cfg, folder, process, source, trained, faults, shown)
    data = TrainingData(
        batches=Prefetch(load, pin=process.device.type == "cuda", threads=2 if reads_rows(source.data) else 1),
        validation=lambda: validation(
            source.data, cfg.batch_size, cfg.eval_batches, process.ranks, opened.tracker.evaluating
        ),
        load=load,
        unit=source.unit,
        to_device=ToDevice(process.device),
    )
    monitoring, history = Monitoring(monitors, RollingStats(), trained.usage, forecast), History()
    resumption = Resumption(
        cfg, process.choices, folder, trained.state, source.data, process.precision, tools.sanitizer, process.ranks
    )
    any_rank = process.parallel.any_rank
    rollback = saved_states(trained.state, tools, monitoring, history, data, opened, resumption, any_rank)
    # From here on the run folder belongs to this run, so an error must be recorded in its run.json.
    try:
        start_wandb(cfg, process, trained, opened)
        opened.open_checkpoints()
        choose_host_memory(process, trained.state, guard, opened.checkpoints)
        restore_state(cfg, rollback.saved, guard, opened.tracker)
        if (changed := resumption.announce(opened.run_folder, opened.tracker)) is not None and acting(changed.keys):
            guard.reset_for_new_settings(None if changed.loss is None else changed.loss[1])
            # More steps are no setting that could have ruined the run: its last state may have been bad already.
            rollback.saved.keep_before_new_settings(pin={*acting(changed.keys)} != {"steps"})
        opened.tracker.note(opening_lines(cfg, process, source, trained, tools, folder))
        if compiling.should_compile(cfg.compile, process.device):
            compile_model(cfg, process, trained.state, tools, load, opened)
    except BaseException as error:
        opened.tracker.close(1)
        opened.run_folder.abandon(str(error))
        raise
    return assemble(cfg, process, source, trained, tools, data, monitoring, history, rollback, opened)


# ---- output


def open_output(
    cfg: DictConfig,
    folder: Path,
    process: Process,
    source: Source,
    trained: Trained,
    faults: Any,
    shown: Progress | None,
) -> Opened:
    """Claims the run folder and opens everything that writes to it."""
    ranks = process.ranks
    checkpoints = checkpoints_for_all_ranks(faults.checkpoints(make(cfg, "checkpoint", roles.Checkpoints)), ranks)
    wandb = faults.wandb(make(cfg, "wandb", option_roles.WandbOption)) if ranks.is_main else NoWandb()
    run_folder = start_run_folder(cfg, folder, process, source, trained)
    tracker = start_tracker(cfg, folder, ranks, wandb, run_folder, shown)
    return Opened(folder, run_folder, tracker, wandb, checkpoints)


def start_run_folder(
    cfg: DictConfig, folder: Path, process: Process, source: Source, trained: Trained
) -> roles.RunFolder:
    """Claims the run folder and writes `run.json`, on the main process only.

    Raises:
        ConfigError: the folder already holds a run, or is not writable.
    """
    run_folder = RunFolder(folder) if process.ranks.is_main else NoRunFolder(folder)
    typed, data = parse_arguments(started().resolved), source.data
    fingerprint = source.fingerprint
    if fingerprint is None:
        own = hasattr(data, "fingerprint")
        fingerprint = data.fingerprint() if own else option_fingerprint(cfg, process.choices)
    resuming = cfg.resume == "auto"
    check_data_of_checkpoint(cfg.resume, fingerprint)
    options = [option for option in typed.options if option not in SWEEP]
    overrides = [each for each in job_overrides() if key_of(each) != "resume"]
    trust.remember_config(cfg)  # by every rank: a node may have a home of its own
    trust.remember_arguments(options, overrides)
    start = partial(
        run_folder.start,
        resuming=resuming,
        choices=process.choices,
        hardware=machine_record(process, trained),
        data=fingerprint,
        model={"parameters": trained.parameters, **trained.usage.facts(UNITS[source.unit])},
        init_from=trained.loaded.record,
        run_id=run_of(folder) if resuming else None,
        options=options,
        overrides=overrides,
    )
    run_folder.id = run_on_main(process.ranks, start)
    return run_folder


def machine_record(process: Process, trained: Trained) -> dict[str, Any]:
    """Describes the machine, its precision and its determinism, for `run.json` and W&B."""
    return hardware.describe(process.device) | {
        "precision": process.precision.name,
        "fp32_modules": trained.fp32_modules,
        "determinism": process.switches,
    }


def start_tracker(
    cfg: DictConfig, folder: Path, ranks: Ranks, wandb: NoWandb, run_folder: roles.RunFolder, shown: Progress | None
) -> roles.Tracker:
    """Opens metrics, events and the progress line, on the main process only."""
    try:
        return run_on_main(ranks, lambda: Tracker(Metrics(folder), wandb, shown or Progress(cfg.log_every)), NoTracker)
    except ConfigError as error:
        run_folder.abandon(str(error))
        raise


def start_wandb(cfg: DictConfig, process: Process, trained: Trained, opened: Opened) -> None:
    """Starts the W&B run with the configuration and the description of the machine."""
    hydra = HydraConfig.get()
    about = {
        **plain(cfg),
        "groups": process.choices,
        "hardware": machine_record(process, trained),
        "versions": versions(),
    } | ({"init_from_source": dict(source)} if (source := opened.run_folder.init_from) else {})
    sweeping = hydra.mode == RunMode.MULTIRUN
    opened.wandb.start(opened.folder, opened.run_folder.id, about, job_overrides(), sweeping=sweeping)


# ---- saved and restored states


def choose_host_memory(process: Process, state: TrainState, guard: GuardPolicy, checkpoints: roles.Checkpoints) -> None:
    """Compares the memory for copies of the state with what the host has free; says so on each machine with too little.

    All ranks must call it.
    """
    ranks = process.ranks
    writers = ranks.local_world_size if sharded_tensors(state) else int(ranks.rank == ranks.local_rank)
    line = choose_memory(
        state,
        snapshots=guard.states.most_retained,
        checkpoints=writers if checkpoints.keeps else 0,
        ranks=ranks.local_world_size,
        free=free_host_memory(),
        fix="lower guard.snapshots, or use guard=skip",
        any_rank=process.parallel.any_rank,
    )
    if line and ranks.local_rank == 0:
        say(line, flush=True)


def restore_state(cfg: DictConfig, saved: SavedStates, guard: GuardPolicy, tracker: roles.Tracker) -> None:
    """Restores the checkpoint that `resume` names, if any.

    Raises:
        ConfigError: the checkpoint is already past `steps`.
    """
    saved.resume(cfg.resume)
    if cfg.resume != "auto":
        guard.states.forget()  # the states that it retained are in another run folder
    if saved.state.step > cfg.steps:
        raise ConfigError(f"steps={cfg.steps} is below the {saved.state.step} steps already done: raise steps")
    tracker.rewind(saved.state.executed_steps)


def compile_model(
    cfg: DictConfig,
    process: Process,
    state: TrainState,
    tools: Tools,
    load: Callable[[int], Batch],
    opened: Opened,
) -> None:
    """Compiles the model in place and tries it on one micro-batch.

    Raises:
        ConfigError: `compile=true`, but the model cannot be compiled.
    """
    # Use the last step's batch: with data.length_warmup, earlier batches may be shorter than the final shape.
    batch = load(cfg.steps - 1).to(process.device).split(cfg.grad_accum_steps)[0]
    facts, told = warm_up_compiled(state, batch, tools, must=cfg.compile is True, any_rank=process.parallel.any_rank)
    opened.run_folder.learn(facts)
    opened.tracker.note(told)


# ---- the run


def saved_states(
    state: TrainState,
    tools: Tools,
    monitoring: Monitoring,
    history: History,
    data: TrainingData,
    opened: Opened,
    resumption: roles.Resumption | None = None,
    any_rank: Callable[[bool], bool] = bool,
) -> Rollback:
    """Creates the run's `Rollback`, which has no saved state yet."""
    parts = {  # everything stateful besides model and optimizer, by its name in checkpoints
        "guard": tools.guard,
        "precision": tools.precision,
        "clipping": tools.clipping,
        "history": history,
        "recent": monitoring.rolling,
        "monitors": monitoring.monitors,
        "forecast": monitoring.forecast,
    }
    saved = SavedStates(
        state,
        cast("dict[str, Stateful]", parts),
        guard=tools.guard,
        checkpoints=opened.checkpoints,
        tracker=opened.tracker,
        run_id=opened.run_folder.id,
        resumption=resumption,
        any_rank=any_rank,
    )
    return Rollback(saved, history=history, guard=tools.guard, batches=data.batches, tracker=opened.tracker)


def assemble(
    cfg: DictConfig,
    process: Process,
    source: Source,
    trained: Trained,
    tools: Tools,
    data: TrainingData,
    monitoring: Monitoring,
    history: History,
    rollback: Rollback,
    opened: Opened,
) -> TrainingRun:
    """Assembles the run from its parts."""
    page = PageAtEnd(opened.folder) if cfg.report and process.ranks.is_main else NoPage()
    closing_text = partial(
        closing_lines, cfg, process.ranks, source, trained.state, history, tools, page, opened.folder, rollback
    )
    halted_text = partial(halt_lines, cfg, process, tools.guard, opened)
    opened.tracker.start(cfg.steps, trained.state.step)
    return TrainingRun(
        plan=Plan(cfg.steps, cfg.grad_accum_steps, cfg.eval_every, cfg.log_every),
        state=trained.state,
        tools=tools,
        device=process.device,
        parallel=process.parallel,
        data=data,
        monitoring=monitoring,
        forensics=start_forensics(cfg, opened.folder, process, source, trained.state.model, tools),
        output=Output(opened.tracker, opened.run_folder, page, closing_text, halted_text),
        rollback=rollback,
        history=history,
    )


def start_forensics(
    cfg: DictConfig, folder: Path, process: Process, source: Source, model: nn.Module, tools: Any
) -> Forensics:
    """Opens the incident handler and gives it the run's settings."""
    config, choices = plain(cfg), process.choices

    def model_factory() -> nn.Module:
        copy = make_model(cfg, source.data).to(process.device)
        note_masks(copy)
        process.precision.wrap_fp32_modules(copy)
        return copy

    handler = for_all_ranks(make(cfg, "forensics", option_roles.ForensicsOption), process.ranks)
    # plain PyTorch on a CPU is deterministic even without determinism=strict
    uncompiled_cpu = process.device.type == "cpu" and compiling.compiled_shape(model) is None
    settings = RunSettings(
        choices=choices,
        values=dict(leaves(config)),
        has_attention="qknorm" in cfg.model,
        warmup=tools.learning_rate.warmup.length(cfg.steps),
        deterministic=choices["determinism"] == "strict" or uncompiled_cpu,
    )
    handler.open(folder / "incidents", settings)
    trust.remember_config(config)  # an incident has it with its interpolations resolved
    return Forensics(handler, model_factory, metadata={"config": config, "choices": choices, "started": time.time()})


def halt_lines(cfg: DictConfig, process: Process, guard: GuardPolicy, opened: Opened) -> str:
    """Returns the lines that follow the message of a halt; all ranks must call it."""
    found, typed = opened.checkpoints.newest(healthy_only=True), parse_arguments(started().typed)
    path = None if found is None else found.path
    return after_halt(typed, opened.folder, path, guard.kind, process.choices, dict(leaves(plain(cfg))))


def closing_lines(
    cfg: DictConfig,
    ranks: Ranks,
    source: Source,
    state: TrainState,
    history: History,
    tools: Tools,
    page: roles.Page,
    folder: Path,
    rollback: Rollback,
) -> str:
    """Writes the run's page, and returns the last lines on the terminal."""
    # all ranks must call this, because the model that generates the sample may be sharded
    sample = sample_text(state.model, source.data, next(state.model.parameters()).device, ranks=ranks)
    page.write(sample)
    return closing(
        state=state,
        history=history,
        guard=tools.guard,
        unit=source.unit,
        loss_unit=tools.objective.unit,
        per=source.per,
        folder=str(folder),
        sample=sample,
        again=suggestion(parse_arguments(started().resolved), "qknorm" in cfg.model, source.per),
        healed_by=rollback.saved.healing.healed_by,
    )
