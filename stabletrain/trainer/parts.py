"""The parts of a run that write or watch: its folder, output, saved states, monitors and incident handler.

`build.py` makes what trains, and adds these.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from stabletrain.buffers import note_masks
from stabletrain.checkpoint.capture import Stateful
from stabletrain.checkpoint.folder import run_of
from stabletrain.checkpoint.off import NoCheckpoints
from stabletrain.checkpoint.snapshots import choose_memory
from stabletrain.config import trust
from stabletrain.config.arguments import SWEEP, job_overrides, key_of, parse_arguments
from stabletrain.config.make import leaves
from stabletrain.config.resuming import acting
from stabletrain.data.batches import Prefetch, ToDevice
from stabletrain.errors import ConfigError
from stabletrain.extension import NoMeter, NoPage, extension
from stabletrain.forensics.diagnosis.evidence import RunSettings
from stabletrain.forensics.distributed_handler import for_all_ranks
from stabletrain.guard.policy import NoGuard
from stabletrain.machine import compiling, hardware
from stabletrain.machine.compiling import try_compiled
from stabletrain.machine.memory import free_host_memory
from stabletrain.monitors.rolling import RollingStats
from stabletrain.parallel import collectives
from stabletrain.parallel.checkpoints import for_all_ranks as checkpoints_for_all_ranks
from stabletrain.parallel.ranks import run_on_main
from stabletrain.printable import say
from stabletrain.program import started
from stabletrain.records import Batch, TrainState, reads_rows
from stabletrain.step import count_targets
from stabletrain.tools import Tools
from stabletrain.tracking.metrics import Metrics
from stabletrain.tracking.progress import Progress
from stabletrain.tracking.run_folder import Description, NoRunFolder, RunFolder, versions
from stabletrain.tracking.tracker import NoTracker, Tracker
from stabletrain.tracking.wandb import NoWandb
from stabletrain.trainer import step_graph
from stabletrain.trainer.after_halt import after_halt
from stabletrain.trainer.banner import closing, opening, sample_text, suggestion, update_note
from stabletrain.trainer.changes import Resumption, check_data_of_checkpoint, option_fingerprint
from stabletrain.trainer.contract import make_model, validation
from stabletrain.trainer.history import UNITS, History
from stabletrain.trainer.options import Options
from stabletrain.trainer.rollback import Rollback
from stabletrain.trainer.run import Forensics, Monitoring, Output, Plan, TrainingData, TrainingRun
from stabletrain.trainer.saved_states import SavedStates
from stabletrain.trainer.stages import (
    BatchLoader,
    Process,
    Source,
    Trained,
    opening_notes,
)


class RunParts:
    """The parts of a run: those that `build` has made, and the output and saved states that this class adds.

    Claims the run folder, and opens everything that writes to it but W&B and the checkpoints.

    Args:
        shown: shows the progress; None for the terminal.

    Raises:
        ConfigError: the folder already holds a run, or is not writable.
    """

    def __init__(
        self,
        options: Options,
        folder: Path,
        process: Process,
        source: Source,
        trained: Trained,
        tools: Tools,
        shown: Progress | None = None,
    ) -> None:
        self.options, self.folder, self.process = options, folder, process
        self.source, self.trained, self.tools = source, trained, tools
        ranks, state = process.ranks, trained.state
        self.compute = step_graph.chosen(options.compile, process.device, tools, process.parallel)
        # Injected disk and W&B faults wrap the objects that write, so they happen where real faults would.
        self.checkpoints = checkpoints_for_all_ranks(options.faults.checkpoints(options.checkpoint), ranks)
        self.wandb = options.faults.wandb(options.wandb) if ranks.is_main else NoWandb()
        sizes = (ranks.world_size, ranks.local_world_size)
        self.meter = extension().meter(process.device, *sizes) if ranks.is_main else NoMeter()
        self.run_folder = self._claim_folder()
        # If the ranks ever wait in vain, this shows for which one.
        collectives.record_to(folder, ranks, cards=process.device.type == "cuda")
        collectives.name_collectives(state.model)
        self.tracker = self._open_tracker(shown)
        self.page = extension().page(folder) if options.report and ranks.is_main else NoPage()
        self.data = self._training_data()
        watching = options.monitors, RollingStats(), trained.usage, options.forecast, self.meter, options.check
        self.monitoring = Monitoring(*watching)
        self.history = History()
        self.resumption = Resumption(
            options, folder, state, source.data, process.precision, tools.sanitizer, process.ranks
        )
        self.saved = self._saved_states()

    def _claim_folder(self) -> NoRunFolder:
        """Claims the run folder and writes `run.json`, on the main process only."""
        options, data, trained = self.options, self.source.data, self.trained
        run_folder = RunFolder(self.folder) if self.process.ranks.is_main else NoRunFolder(self.folder)
        fingerprint = self.source.fingerprint
        if fingerprint is None:
            fingerprint = data.fingerprint() if hasattr(data, "fingerprint") else option_fingerprint(options.data)
        check_data_of_checkpoint(options.resume, fingerprint)
        typed = [option for option in parse_arguments(started().resolved).options if option not in SWEEP]
        overrides = [each for each in job_overrides() if key_of(each) != "resume"]
        trust.remember_arguments(typed, overrides)
        resuming = options.resume == "auto"
        about = Description(
            choices=options.choices,
            hardware=machine_record(self.process, trained),
            data=fingerprint,
            model={"parameters": trained.parameters, **trained.usage.facts(UNITS[self.source.unit])},
            init_from=trained.loaded.record,
            options=typed,
            overrides=overrides,
            start=self.meter.facts(),
        )
        start = partial(run_folder.start, about, resuming=resuming, run_id=run_of(self.folder) if resuming else None)
        run_folder.id = run_on_main(self.process.ranks, start)
        return run_folder

    def _open_tracker(self, shown: Progress | None) -> NoTracker:
        """Opens metrics, events and the progress line, on the main process only."""

        def opened() -> Tracker:
            return Tracker(Metrics(self.folder), self.wandb, shown or Progress(self.options.log_every))

        try:
            return run_on_main(self.process.ranks, opened, NoTracker)
        except ConfigError as error:
            self.run_folder.abandon(str(error))
            raise

    def _training_data(self) -> TrainingData:
        options, process, data, state = self.options, self.process, self.source.data, self.trained.state
        objective, size = self.tools.objective, options.batch_size
        load = BatchLoader(process, data, state, objective, size, options.grad_accum_steps)
        return TrainingData(
            batches=Prefetch(load, pin=process.device.type == "cuda", threads=2 if reads_rows(data) else 1),
            validation=lambda: validation(data, size, options.eval_batches, process.ranks, self.tracker.evaluating),
            load=load,
            unit=self.source.unit,
            to_device=ToDevice(process.device),
        )

    def _saved_states(self) -> SavedStates:
        """Returns the run's saved states; there is none yet."""
        stateful = {  # everything stateful besides model and optimizer, by its name in checkpoints
            "guard": self.tools.guard,
            "precision": self.tools.precision,
            "clipping": self.tools.clipping,
            "history": self.history,
            "recent": self.monitoring.rolling,
            "monitors": self.monitoring.monitors,
            "forecast": self.monitoring.forecast,
        }
        return SavedStates(
            self.trained.state,
            cast("dict[str, Stateful]", stateful),
            guard=self.tools.guard,
            checkpoints=self.checkpoints,
            tracker=self.tracker,
            run_id=self.run_folder.id,
            resumption=self.resumption,
            any_rank=self.process.parallel.any_rank,
        )

    def start_wandb(self, *, sweeping: bool) -> None:
        """Starts the W&B run with the configuration and the description of the machine.

        Args:
            sweeping: whether Hydra reports a sweep.
        """
        about = {
            **self.options.config,
            "groups": self.options.choices,
            "hardware": machine_record(self.process, self.trained),
            "versions": versions(),
        } | ({"init_from_source": dict(source)} if (source := self.run_folder.init_from) else {})
        self.wandb.start(self.folder, self.run_folder.id, about, job_overrides(), sweeping=sweeping)

    def open_checkpoints(self) -> None:
        """Opens the checkpoint folder, and records what happens there as events."""
        event = self.tracker.event
        self.checkpoints.open(self.folder, lambda kind, step, fields: event(kind, step, **fields), self.run_folder.id)

    def announce_changes(self) -> None:
        """Records and shows what a resume has changed, and resets the guard for the new settings."""
        changed = self.resumption.announce(self.run_folder, self.tracker)
        if changed is None or not (keys := acting(changed.keys)):
            return
        # Earlier steps used other settings, so their losses are no reference, and a rollback must not restore them.
        self.tools.guard.reset_for_new_settings(None if changed.loss is None else changed.loss[1])
        # If only `steps` changed, older states stay allowed: they are no worse, and the last may be bad.
        self.saved.keep_before_new_settings(pin={*keys} != {"steps"})

    def opening_lines(self) -> str:
        """Returns the first lines on the terminal."""
        options, process, state = self.options, self.process, self.trained.state
        machine = f"{hardware.name(process.device)}, {hardware.threads()}"
        notes = opening_notes(self.source, process, options.batch_size, options.eval_batches)
        notes = [*self.trained.notes, *notes, update_note(self.tools.guard, state)]
        given = options.choices, options.config, state.model, self.source.data, self.tools
        return opening(*given, machine, str(self.folder), notes)

    def compile_model(self) -> None:
        """Compiles the model in place and tries it on one micro-batch.

        Raises:
            ConfigError: `compile=true`, but the model cannot be compiled.
        """
        options, process = self.options, self.process
        # Use the last step's batch: with data.length_warmup, earlier batches may be shorter than the final shape.
        batch = self.data.load(options.steps - 1).to(process.device).split(options.grad_accum_steps)[0]
        must, any_rank = options.compile in (True, "graph"), process.parallel.any_rank
        facts, told = warm_up_compiled(self.trained.state, batch, self.tools, must=must, any_rank=any_rank)
        self.run_folder.learn(facts)
        self.tracker.note(told)

    def assemble(self) -> TrainingRun:
        """Opens the incident handler and the progress line, and returns the run."""
        options, process, state = self.options, self.process, self.trained.state
        self.tracker.start(options.steps, state.step)
        return TrainingRun(
            plan=Plan(options.steps, options.grad_accum_steps, options.eval_every, options.log_every),
            state=state,
            tools=self.tools,
            device=process.device,
            parallel=process.parallel,
            data=self.data,
            monitoring=self.monitoring,
            forensics=self._start_forensics(),
            output=Output(self.tracker, self.run_folder, self.page, self.closing_lines, self.halt_lines),
            rollback=Rollback(
                self.saved,
                history=self.history,
                guard=self.tools.guard,
                batches=self.data.batches,
                tracker=self.tracker,
            ),
            history=self.history,
            compute=self.compute,
        )

    def _start_forensics(self) -> Forensics:
        """Opens the incident handler and gives it the run's settings."""
        options, process = self.options, self.process
        handler = for_all_ranks(options.forensics, process.ranks)
        # plain PyTorch on a CPU is deterministic even without determinism=strict
        uncompiled_cpu = process.device.type == "cpu" and compiling.compiled_shape(self.trained.state.model) is None
        run_settings = RunSettings(
            choices=options.choices,
            values=dict(leaves(options.config)),
            has_attention=self._has_attention,
            warmup=options.warmup.length(options.steps),
            deterministic=options.choices["determinism"] == "strict" or uncompiled_cpu,
            usual_lr=options.usual_lr,
        )
        handler.open(self.folder / "incidents", run_settings)
        trust.remember_config(options.config)  # an incident has it with its interpolations resolved
        metadata = {"config": options.config, "choices": options.choices, "started": time.time()}
        return Forensics(handler, self._another_model, metadata)

    def _another_model(self) -> nn.Module:
        """Returns another unsharded model, with arbitrary weights."""
        copy = make_model(self.options.model, self.source.data, self.options.objective).to(self.process.device)
        note_masks(copy)
        self.process.precision.wrap_fp32_modules(copy)
        self.options.activation_checkpointing.attach(copy)
        return copy

    @property
    def _has_attention(self) -> bool:
        return "qknorm" in self.options.model.node

    def halt_lines(self) -> str:
        """Returns the lines that follow the message of a halt; all ranks must call it."""
        found, typed = self.checkpoints.newest(healthy_only=True), parse_arguments(started().typed)
        path, values = None if found is None else found.path, dict(leaves(self.options.config))
        options, kind = self.options, self.tools.guard.kind
        return after_halt(typed, self.folder, path, kind, options.choices, values, options.usual_lr)

    def closing_lines(self) -> str:
        """Writes the run's page, and returns the last lines on the terminal."""
        source, state = self.source, self.trained.state
        device = next(state.model.parameters()).device
        # all ranks must call this, because the model that generates the sample may be sharded
        sample = sample_text(state.model, source.data, device, self.process.ranks)
        self.page.write(sample)
        return closing(
            state=state,
            history=self.history,
            guard=self.tools.guard,
            unit=source.unit,
            loss_unit=self.tools.objective.unit,
            per=source.per,
            folder=str(self.folder),
            sample=sample,
            again=self._suggestion(),
            healed_by=self.saved.healing.healed_by,
        )

    def _suggestion(self) -> str | None:
        """Returns the sweep to try next; None where there are no sweeps."""
        if not extension().sweeps:
            return None
        return suggestion(parse_arguments(started().resolved), self._has_attention, self.source.per)


def machine_record(process: Process, trained: Trained) -> dict[str, Any]:
    """Describes the machine, its precision and its determinism, for `run.json` and W&B."""
    return hardware.describe(process.device) | {
        "precision": process.precision.name,
        "fp32_modules": trained.fp32_modules,
        "determinism": process.switches,
    }


def choose_host_memory(process: Process, state: TrainState, guard: NoGuard, checkpoints: NoCheckpoints) -> None:
    """Compares the memory for copies of the state with what the host has free; says so on each machine with too little.

    All ranks must call it.
    """
    ranks = process.ranks
    first = ranks.rank - ranks.local_rank  # of this machine; the ranks that share the first copy write it
    writers = max(0, min(ranks.local_world_size, process.parallel.shards - first))
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


def warm_up_compiled(
    state: TrainState, batch: Batch, tools: Tools, *, must: bool, any_rank: Callable[[bool], bool]
) -> tuple[Mapping[str, Any], str]:
    """Compiles the model for micro-batches of this shape, if possible.

    Args:
        state: its model is compiled in place; nothing else changes.
        batch: a micro-batch on the model's device.
        must: raise an error if the model cannot be compiled.
        any_rank: returns whether its argument is true on any rank.

    Returns:
        the facts to record (`compiled`, `compile_seconds`), and a line for the terminal.

    Raises:
        ConfigError: `must` is set, but the model cannot be compiled.
    """
    if not batch.targets.numel():
        return left_uncompiled("the trial batch is empty", must)
    model = tools.wrap(state.model)

    # These two run the same operations as a step, so that the trial compiles exactly what training runs.
    def forward() -> Tensor:
        inputs, _, _ = tools.sanitizer.inputs(batch.inputs)
        with tools.precision.autocast():
            outputs = model(inputs)
        targets, _ = tools.sanitizer.targets(batch.targets, tools.objective.classes(outputs))
        return tools.objective(outputs, batch.having(inputs, targets), count_targets([batch])[0]).total

    def backward(loss: Tensor) -> None:
        tools.scale(loss).backward()

    seconds, why = try_compiled(state.model, batch.inputs.shape, forward, backward, any_rank)
    if not why:
        return {"compiled": True, "compile_seconds": round(seconds, 1)}, f"compile  on, in {seconds:.0f} s"
    return left_uncompiled(why, must)


def left_uncompiled(why: str, must: bool) -> tuple[Mapping[str, Any], str]:
    """Returns the facts and the line for a model that stays uncompiled; raises ConfigError if `must` is set."""
    if must:
        raise ConfigError(f"compile=true: the model cannot be compiled here ({why}): use compile=auto or compile=false")
    return {"compiled": False}, f"compile  off: {why}; training continues uncompiled (compile=false skips this attempt)"
