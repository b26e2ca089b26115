"""From a configuration to the objects of a run; what cannot work is refused here, before a step is taken.

Every group's option is one object, made by Hydra from its `_target_`. The groups meet in three ways only, all visible
in the YAML or below: a model takes `${qknorm}` and `${softcap}` into its own YAML; a model's nulls are filled from the
data (`vocab_size`, `block_size`, `num_classes`, `in_channels`); and a precision is told the device.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from torch import nn

from stabletrain.checkpoint.capture import Snapshots, Stateful, restore, sharded_tensors
from stabletrain.checkpoint.checkpoints import NoCheckpoints
from stabletrain.checkpoint.folder import run_of
from stabletrain.compare.pages.one_run import NoPage, PageAtEnd
from stabletrain.config.arguments import SWEEP, key_of, take_apart
from stabletrain.config.make import leaves, make, plain
from stabletrain.data.order import position
from stabletrain.data.prefetch import Prefetch
from stabletrain.errors import ConfigError
from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.handler import DistributedIncidentHandler
from stabletrain.machine import compiling, hardware
from stabletrain.machine.determinism import mix
from stabletrain.machine.usage import Usage, forget_peak, peak_flops
from stabletrain.monitors.rolling import RollingStats
from stabletrain.parallel.checkpoints import SharedCheckpoints
from stabletrain.parallel.ranks import Ranks, current_ranks, join, run_on_main
from stabletrain.protocols import Tools
from stabletrain.records import Batch, TrainState
from stabletrain.stability.chunked_loss import in_chunks
from stabletrain.stability.objective import Objective
from stabletrain.stability.sanitize import Sanitizer
from stabletrain.stability.schedule import LearningRate
from stabletrain.tracking.metrics import Metrics
from stabletrain.tracking.progress import Progress
from stabletrain.tracking.run_folder import NoRunFolder, RunFolder, versions
from stabletrain.tracking.tracker import NoTracker, Tracker
from stabletrain.tracking.wandb import NoWandb
from stabletrain.trainer.banner import closing, opening, sample_text, suggestion
from stabletrain.trainer.compile_warmup import compiled
from stabletrain.trainer.contract import checked, cost, make_model, units, validation, vocabulary
from stabletrain.trainer.run import UNITS, History, Plan, TrainingRun

FAR_OFF = 1 << 40
"""Beyond every step's number: where the seeds of the other ranks are drawn from."""


def build(cfg: DictConfig, folder: Path, shown: Progress | None = None) -> TrainingRun:
    """The run that `cfg` describes, resumed where it asks for that, ready for `loop.run`.

    Args:
        cfg: checked by `config.check`; must be called inside a Hydra job, for the choice of options.
        folder: the run folder.
        shown: how its progress is shown; None on the terminal, as that of a run by itself.

    Raises:
        ConfigError: a bound passed, a combination that cannot work, or a folder that already holds a run.
    """
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
    guard, clipping, monitors, rolling = (
        make(cfg, "guard"),
        make(cfg, "clipping"),
        make(cfg, "monitors"),
        RollingStats(),
    )
    faults = make(cfg, "faults")
    data = make(cfg, "data")
    if not callable(getattr(data, "batch", None)):
        raise ConfigError(f"data: {cfg.data._target_} has no batch(step, size, split)")
    if callable(getattr(data, "to", None)):  # data that can make its batches where they are needed
        data.to(device)
    data = faults.data(data)
    unit, per = units(cfg, data)
    determinism.seed_run(cfg.seed)
    model = make_model(cfg, data)
    size = sum(p.numel() for p in model.parameters())
    peak = peak_flops(hardware.name(device), precision.name)
    usage = Usage(device) if peak is None else Usage(device, cost(model, data), peak * ranks.world_size)
    forget_peak(device)
    make(cfg, "init")(model)  # on the CPU, so that every device starts from the same weights
    model.to(device)
    fp32_modules = precision.wrap_fp32_modules(model)
    parallel.shard(model)
    state = TrainState(model, make(cfg, "optimizer", **parallel.optimizer_overrides(choices["optimizer"]))(model))
    precision.attach(model, state.optimizer)
    faults.state(state, precision)
    parallel.wrap(model)
    learning_rate = LearningRate(make(cfg, "warmup"), make(cfg, "schedule"), cfg.steps)
    tools = Tools(
        sanitizer=Sanitizer(vocabulary(model, data)),
        precision=precision,
        objective=in_chunks(
            Objective(make(cfg, "zloss"), cfg.label_smoothing), cfg.loss_chunk, model, parallel.head_apart
        ),
        clipping=clipping,
        after_update=make(cfg, "qkclip"),
        guard=guard,
        learning_rate=learning_rate,
        determinism=determinism,
        seed=seed_of(cfg.seed, ranks),
        parallel=parallel,
    )
    history = History()
    parts: dict[str, Stateful] = {
        "guard": guard,
        "precision": precision,
        "clipping": clipping,
        "history": history,
        "recent": rolling,
        "monitors": monitors,
    }

    def load(step: int) -> Batch:
        batch = checked(data.batch(position(step, state.skipped), cfg.batch_size, "train"))
        if len(batch) % (cfg.grad_accum_steps * ranks.world_size):
            among = "" if not ranks.distributed else f" on {ranks.world_size} ranks"
            raise ConfigError(
                f"data: batch {step} has {len(batch)} samples, which grad_accum_steps={cfg.grad_accum_steps}{among} "
                f"does not divide: return batch_size={cfg.batch_size} samples, or use grad_accum_steps=1"
            )
        return parallel.shard_batch(batch, cfg.batch_size)

    checkpoints = faults.checkpoints(make(cfg, "checkpoint"))
    if ranks.distributed:
        checkpoints = SharedCheckpoints(checkpoints, ranks)
    wandb = faults.wandb(make(cfg, "wandb")) if ranks.is_main else NoWandb()

    run = RunFolder(folder) if ranks.is_main else NoRunFolder(folder)
    typed = take_apart([*sys.argv[1:]])
    chosen = {"precision": precision.name, "fp32_modules": fp32_modules, "determinism": switches}
    machine = hardware.describe(device) | chosen
    fingerprint = data.fingerprint() if hasattr(data, "fingerprint") else {"name": choices["data"]}
    resuming = cfg.resume == "auto"
    start = partial(
        run.start,
        resuming=resuming,
        choices=choices,
        hardware=machine,
        data=fingerprint,
        model={"parameters": size, **usage.facts(UNITS[unit])},
        run_id=run_of(folder) if resuming else None,
        options=[option for option in typed.options if option not in SWEEP],
        overrides=[each for each in HydraConfig.get().overrides.task if key_of(each) != "resume"],
    )
    run.id = run_on_main(ranks, start)
    config = plain(cfg)
    try:
        tracker = run_on_main(
            ranks, lambda: Tracker(Metrics(folder), wandb, shown or Progress(cfg.log_every)), NoTracker
        )
    except ConfigError as error:
        run.abandon(str(error))
        raise
    try:
        about = {**config, "groups": choices, "hardware": machine, "versions": versions()}
        hydra = HydraConfig.get()
        wandb.start(folder, run.id, about, hydra.overrides.task, sweeping=hydra.mode == RunMode.MULTIRUN)
        checkpoints.open(folder, lambda kind, step, fields: tracker.event(kind, step, **fields), run.id)
        continue_from(cfg.resume, checkpoints, tracker, state, parts)
        if cfg.resume != "auto":
            guard.forget()  # the states it knows are in another folder
        if state.step > cfg.steps:
            raise ConfigError(f"steps={cfg.steps} is below the {state.step} steps that are done: raise steps")
        tracker.rewind(state.executed_steps)
        about_machine = f"{hardware.name(device)}, {hardware.threads()}"
        tracker.note(opening(choices, config, model, data, tools, about_machine, str(folder)))
        if compiling.wanted(cfg.compile, device):
            batch = load(cfg.steps - 1).to(device).split(cfg.grad_accum_steps)[0]  # of full length by then
            facts, told = compiled(state, batch, tools, must=cfg.compile is True, any_rank=parallel.any_rank)
            run.learn(facts)
            tracker.note(told)
    except BaseException as error:
        tracker.close(1)
        run.abandon(str(error))
        raise

    def model_factory() -> nn.Module:
        model_copy = make_model(cfg, data).to(device)
        precision.wrap_fp32_modules(model_copy)
        return model_copy

    forensics = make(cfg, "forensics")
    if ranks.distributed:
        forensics = DistributedIncidentHandler(forensics, ranks)
    forensics.open(
        folder,
        RunSettings(
            choices=choices,
            values=dict(leaves(config)),
            has_attention="qknorm" in cfg.model,
            warmup=learning_rate.warmup.length(cfg.steps),
            deterministic=choices["determinism"] == "strict"
            or (device.type == "cpu" and compiling.shape_of(model) is None),
        ),
    )
    report = PageAtEnd(folder) if cfg.report and ranks.is_main else NoPage()

    def last_words() -> str:
        sample = sample_text(model, data, device)  # by all ranks, where each has a part of the model
        report.write(sample)
        return closing(
            state=state,
            history=history,
            guard=tools.guard,
            unit=unit,
            per=per,
            folder=str(folder),
            sample=sample,
            again=suggestion(typed, "qknorm" in cfg.model, per),
        )

    tracker.start(cfg.steps, state.step)
    return TrainingRun(
        plan=Plan(cfg.steps, cfg.grad_accum_steps, cfg.eval_every, cfg.log_every),
        state=state,
        tools=tools,
        parallel=parallel,
        batches=Prefetch(load, pin=device.type == "cuda"),
        validation=lambda: validation(data, cfg.batch_size, cfg.eval_batches, ranks),
        device=device,
        monitors=monitors,
        rolling=rolling,
        snapshots=Snapshots(),
        checkpoints=checkpoints,
        tracker=tracker,
        folder=run,
        parts=parts,
        history=history,
        unit=unit,
        hardware_usage=usage,
        forensics=forensics,
        model_factory=model_factory,
        load=load,
        metadata={"config": config, "choices": choices},
        page=report,
        closing=last_words,
    )


def continue_from(
    resume: str, checkpoints: NoCheckpoints, tracker: NoTracker, state: TrainState, parts: Mapping[str, Stateful]
) -> None:
    """Restores the checkpoint that `resume` asks for, if there is one, and says where there is none.

    Args:
        resume: `none`; `auto` for what this run folder prefers (`Checkpoints.preferred`); a run folder, for the same of
            that; or a checkpoint, which is taken as it is.
        checkpoints: opened.
        tracker, state, parts: of the run.
    """
    if resume == "none":
        return
    found = checkpoints.preferred() if resume == "auto" else checkpoints.find(Path(resume))
    if found is not None:
        restore(found.load(sharded_tensors(state)), state, parts)
        tracker.event("resume", state.step, checkpoint=found.path.name, healthy=found.healthy)
        tracker.note(f"resumed after step {state.step}, from {found.path}")
        if not found.healthy and Path(resume).absolute() == found.path.absolute():  # elsewhere it has been said
            tracker.note(f"resume: {found.path.name} is not healthy: its weights or moments may not be finite")
    elif tracker.started():
        tracker.event("restart", 0, reason="no usable checkpoint")
        tracker.note("resume: no usable checkpoint is left here; the run starts again from step 0")


def seed_of(seed: int, ranks: Ranks) -> int:
    """What a rank's randomness in a step is seeded with: of rank 0 `seed`, of each other one of its own."""
    return seed if ranks.is_main else mix(seed, FAR_OFF + ranks.rank) >> 1
