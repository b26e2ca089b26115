"""Builds a training run from a configuration, in stages. Refuses what cannot work before the first step.

    options -> process -> data -> model and optimizer -> tools -> output -> restored state -> the run

Groups depend on each other in only three ways: a model's YAML takes `${qknorm}` and the like; null sizes of a model are
taken from the data; a precision gets the device.
"""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from stabletrain.config import trust
from stabletrain.config.make import plain
from stabletrain.config.resuming import check_resume, settings
from stabletrain.machine import compiling
from stabletrain.parallel.ranks import run_on_main
from stabletrain.tracking.progress import Progress
from stabletrain.trainer.init_from import starting_weights
from stabletrain.trainer.options import Options, read
from stabletrain.trainer.parts import RunParts, choose_host_memory
from stabletrain.trainer.resume import restore_state
from stabletrain.trainer.run import TrainingRun
from stabletrain.trainer.stages import (
    build_model,
    choose_checksums,
    chooses_checksums,
    load_data,
    make_tools,
    start_process,
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
    # Every object that the configuration names is made here. The stages below take objects and values.
    job = HydraConfig.get()
    options = read(Options, plain(cfg), job.runtime.choices)

    # The process comes before data and model: determinism must be set up before CUDA starts.
    process = start_process(options, folder)
    run_on_main(process.ranks, lambda: check_resume(options.resume, settings(options.config, options.choices), folder))
    precise = {**options.choices, "precision": process.precision.name}  # auto has chosen one
    options.forecast.set_run(precise, options.config["optimizer"], options.usual_lr)

    # Data, then model, then tools: unset model sizes come from the data, and the loss may use the model's head.
    source = load_data(options.data, options.faults, process, options.batch_size)
    weights = starting_weights(options, source.data, process.ranks, folder)
    trained = build_model(options, process, source, weights, chooses_checksums(options.guard))
    choose_checksums(options.guard, process, trained, options.batch_size)
    tools = make_tools(options, process, source, trained.state.model)

    # Nothing is written before all of this fits together, so that a refusal leaves no half-made run behind.
    trust.remember_config(cfg)  # by every rank: a node may have a home of its own
    parts = RunParts(options, folder, process, source, trained, tools, shown)

    # From here on the run folder belongs to this run, so an error must be recorded in its run.json.
    try:
        parts.start_wandb(sweeping=job.mode == RunMode.MULTIRUN)
        parts.open_checkpoints()
        # Decide this before a state is restored: the memory is for copies of the state.
        choose_host_memory(process, trained.state, options.guard, parts.checkpoints)
        restore_state(parts.saved, options.guard, parts.tracker, options.resume, options.steps)
        parts.announce_changes()
        parts.tracker.note(parts.opening_lines())
        # Compile last: it takes longest, and the user can read the opening lines meanwhile.
        if compiling.should_compile(options.compile, process.device):
            parts.compile_model()
    except BaseException as error:
        parts.tracker.close(1)
        parts.run_folder.abandon(str(error))
        raise
    return parts.assemble()
