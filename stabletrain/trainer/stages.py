"""The first stages of building a run: process, data, model and optimizer, and the tools of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stabletrain.buffers import note_masks
from stabletrain.config.arguments import job_overrides, key_of
from stabletrain.config.make import Choice
from stabletrain.config.resuming import kept_precision
from stabletrain.data.batches import Dataset
from stabletrain.data.order import position
from stabletrain.errors import ConfigError
from stabletrain.extension import NoFaults
from stabletrain.guard.checks.state_check import default_every
from stabletrain.guard.policy import NoGuard
from stabletrain.machine import hardware
from stabletrain.machine.determinism import mix
from stabletrain.machine.hardware import Usage, peak_flops, reset_peak
from stabletrain.parallel.ranks import Ranks, bind_to_card, current_ranks, join_process_group, run_on_main
from stabletrain.parallel.single import SingleProcess
from stabletrain.printable import say
from stabletrain.records import IGNORE_INDEX, Batch, TrainState, reads_rows
from stabletrain.stability.after_update import InTurn
from stabletrain.stability.objective import Objective
from stabletrain.stability.objective.chunked_loss import with_loss_chunk
from stabletrain.stability.objective.cross_entropy import check_head
from stabletrain.stability.optimizers.muon import MuonAndAdamW
from stabletrain.stability.optimizers.sgd import zero_momentum_
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.sanitize import Sanitizer
from stabletrain.stability.schedule import LearningRate
from stabletrain.tools import Tools
from stabletrain.trainer.banner import busy_note, split_note, text_note
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
from stabletrain.trainer.init_from import Loaded, OwnInit
from stabletrain.trainer.memory import check_memory
from stabletrain.trainer.options import Options, StepOptions
from stabletrain.trainer.same_data import on_all_ranks

RANK_SEEDS = 1 << 40
"""Added to a rank before `mix`. Larger than any step number, so a rank and a step are never mixed into one seed."""

OWN_INIT = OwnInit()


@dataclass(frozen=True)
class Process:
    """This process: its rank, its device, and how it computes.

    Attributes:
        switches: the determinism settings in force, recorded in `run.json`.
    """

    ranks: Ranks
    parallel: Any
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


def start_process(options: Options, folder: Path) -> Process:
    """Joins the other ranks, and prepares determinism, device and precision. `folder` is the run folder."""
    ranks, parallel = current_ranks(), options.parallel
    if ranks.launched:
        join_process_group(ranks)
    parallel.check(options.choices)
    parallel.set_timeout(started=False)
    # Before `choose_device`, which starts CUDA: cuBLAS reads its workspace only then.
    switches = options.determinism.prepare()
    device = hardware.choose_device(options.device, ranks.local_rank, ranks.local_world_size)
    bind_to_card(device)
    # `precision=auto` of a resumed run stays what it was, on whichever card the run continues.
    kept = ""
    if options.resume != "none":
        target = options.precision.target
        kept = run_on_main(ranks, lambda: kept_precision(options.resume, target, options.choices, folder))
    precision = options.precision.build(device=device, **({"kept": kept} if kept else {}))
    precision.prepare()
    return Process(ranks, parallel, precision, switches, device)


def rank_seed(seed: int, ranks: Ranks) -> int:
    """Returns the seed of a rank's randomness, in [0, 2^63): each rank has a different one."""
    # the main process keeps `seed` itself, so it draws the same numbers as a run of one process
    return seed if ranks.is_main else mix(seed, RANK_SEEDS + ranks.rank) >> 1


# ---- data and model


def load_data(choice: Choice[Dataset], faults: NoFaults, process: Process, batch_size: int) -> Source:
    """Builds the data set, with the faults that the `faults` group injects.

    Raises:
        ConfigError: the data set has no method `batch`, or the ranks read different data.
    """

    def load() -> Any:
        data: Any = choice.build()
        if callable(getattr(data, "to", None)):  # this data can build its batches on the training device
            data.to(process.device)
        return data

    data, fingerprint = on_all_ranks(process.ranks, load, batch_size)
    data = faults.data(data)
    return Source(data, *units(choice.node.get("modality"), data), fingerprint)


def build_model(
    options: Options, process: Process, source: Source, weights: OwnInit = OWN_INIT, count_flops: bool = False
) -> Trained:
    """Builds the model and the optimizer on their device, sharded or replicated over the ranks.

    Args:
        weights: puts other weights into the model than its `init`.
        count_flops: whether to count the FLOPs of a sample even if the device's peak is unknown.
    """
    device, precision, parallel = process.device, process.precision, process.parallel
    # A model that cannot fit is refused here: later it would fill the memory, and the system might end the process.
    long = check_memory(options, process, source.data, sizes_from_data(options.model, source.data))
    if long and process.ranks.is_main:
        say(long, flush=True)
    options.softcap.check_device(device)
    # Whatever drew random numbers before, the initial weights follow from the seed alone.
    options.determinism.seed_run(options.seed)
    model = make_model(options.model, source.data, options.objective)
    parameters = sum(p.numel() for p in model.parameters())
    # counting FLOPs reads a sample of the data: only do it if something depends on it
    peak, usage, measured = peak_flops(hardware.name(device), precision.name), Usage(device), None
    if peak is not None or count_flops:
        measured = cost(model, source.data)
    if peak is not None:
        usage = Usage(device, measured and measured[0] / measured[1], peak * process.ranks.world_size)
    reset_peak(device)
    options.init(model)  # on the CPU, so every device starts from the same weights
    loaded = weights.load_(model)
    note_masks(model)  # here, because it reads values: after this, nothing waits for the device
    model.to(device)
    fp32_modules = precision.wrap_fp32_modules(model)
    options.activation_checkpointing.attach(model)
    parallel.shard(model, precision.casts(model))  # before the optimizer is built: it must hold the sharded parameters
    overrides = {**parallel.optimizer_overrides(options.optimizer.option)}
    if getattr(options.clipping, "clips_updates", False):
        overrides["shows_update"] = True  # the configuration was checked: it is one of this package's optimizers
    optimizer, note = make_optimizer(options.optimizer, model, overrides)
    if isinstance(optimizer, MuonAndAdamW):
        optimizer.owners = parallel.owners
    LearningRate(options.warmup, options.schedule, options.steps).attach(optimizer.param_groups)
    state = TrainState(model, optimizer, average=options.averaging.begin(model, options.steps))
    precision.attach(model, state.optimizer)
    options.faults.state(state, precision)
    parallel.wrap(model)  # last, because it broadcasts the main process's weights to all ranks
    flops = None if measured is None else measured[0]
    return Trained(state, usage, fp32_modules, parameters, flops, loaded, [output_note(model), note, *loaded.notes])


def make_optimizer(choice: Choice[Callable], model: nn.Module, overrides: Mapping[str, Any]) -> tuple[Optimizer, str]:
    """Builds the optimizer of the model's trainable parameters.

    There are two kinds of `optimizer._target_`. A subclass of `torch.optim.Optimizer` gets all trainable parameters
    in one group. Any other class is a factory, as in stabletrain's own options: its object is called with
    the model and returns the optimizer.

    Args:
        choice: the option of the group `optimizer`.
        model: on its device, sharded already.
        overrides: arguments that `parallel` and `clipping` need to be different.

    Returns:
        the optimizer, and a line with its arguments if the user typed `optimizer._target_`, else an empty string.

    Raises:
        ConfigError: the target gives no optimizer, does not accept its arguments, or needs a closure.
    """
    target, kind, note = choice.target, choice.code, ""
    if isinstance(kind, type) and issubclass(kind, Optimizer):
        given, note = optimizer_arguments(choice, kind, overrides)
        factory: Any = replace(choice, node=given, role=None).build(_partial_=True)
        parameters: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    else:
        factory, parameters = choice.build(**overrides), model
    try:
        optimizer = factory(parameters)
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


def optimizer_arguments(
    choice: Choice[Callable], kind: type, overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Returns the arguments of an optimizer class, and a line that shows them if the user typed `optimizer._target_`.

    If the user typed `optimizer._target_`, the other keys still come from the chosen option, such as `adamw`. The class
    gets only the keys that it accepts.

    Raises:
        ConfigError: the user typed a key that the class does not accept.
    """
    given, known = dict(choice.node), signature(kind).parameters
    taken = {key: value for key, value in overrides.items() if key in known}
    typed = [key_of(override) for override in job_overrides()]
    if "optimizer._target_" not in typed:
        return given | taken, ""
    unknown = [key for key in given if not key.startswith("_") and key not in known]
    for key in unknown:
        if f"optimizer.{key}" in typed:
            raise ConfigError(f"optimizer.{key}={given[key]}: {choice.target} has no such argument; fix: leave it out")
    kept = {key: value for key, value in given.items() if key not in unknown} | taken
    shown = ", ".join(f"{key}={value}" for key, value in kept.items() if not key.startswith("_"))
    rest = f"; unused: {', '.join(f'optimizer.{key}' for key in unknown)}" if unknown else ""
    return kept, f"optimizer {choice.target}({shown}) over all parameters{rest}"


@dataclass(frozen=True)
class BatchLoader:
    """Loads this rank's part of the training batch of a step.

    Attributes:
        data: the data set.
        state: knows which data a rollback has skipped.
        batch_size: samples of the whole batch.
        grad_accum_steps: micro-batches per rank and step.
    """

    process: Process
    data: Any
    state: TrainState
    objective: Objective
    batch_size: int
    grad_accum_steps: int

    def __call__(self, step: int) -> Batch:
        """Returns this rank's part.

        Raises:
            ConfigError: the data set returned something else than it was asked for.
        """
        batch = self._read(step)
        # What has to be moved to a card stays as small as the data gave it: the card transforms it.
        batch = batch.transformed() if batch.inputs.device == self.process.device else batch
        # Read the values here, on a background thread: bad ones are found without any work in the step.
        return batch.examined()

    def _read(self, step: int) -> Batch:
        size, world_size = self.batch_size, self.process.ranks.world_size
        at = position(step, self.state.skipped)  # leaves out the data that a rollback has skipped
        if reads_rows(self.data):
            mine = self.process.parallel.rows(size)
            batch = checked(self.data.rows(at, size, "train", mine))
            if len(batch) not in (0, mine.stop - mine.start):
                raise ConfigError(
                    f"data: rows({at}, {size}, 'train', {mine}) has {len(batch)} samples: return one for each row"
                )
            if world_size > 1 and batch.counted is None:
                raise ConfigError(
                    "data: rows() gives no `counted`, by which the ranks divide their losses: set it to the number of "
                    f"targets in the whole batch that are not {IGNORE_INDEX}"
                )
            self.objective.check_targets(batch.targets)
            if len(batch):
                batch = batch.of_step(len(batch) / size)
                # In one process the step counts the valid targets itself, as they are then.
                return batch if world_size > 1 else replace(batch, counted=None)
        else:
            batch = checked(self.data.batch(at, size, "train"))
            self.objective.check_targets(batch.targets)
        if len(batch) % (self.grad_accum_steps * world_size):
            among = f" x {world_size} ranks" if world_size > 1 else ""
            raise ConfigError(
                f"data: batch {step} has {len(batch)} samples, not a multiple of grad_accum_steps="
                f"{self.grad_accum_steps}{among}: return batch_size={size} samples, or use grad_accum_steps=1"
            )
        return self.process.parallel.shard_batch(batch, size)


# ---- tools


def chooses_checksums(guard: Any) -> bool:
    """Returns whether the guard leaves it open how often it checks the state."""
    return getattr(guard, "checksum_every", 0) is None


def choose_checksums(guard: Any, process: Process, trained: Trained, batch_size: int) -> None:
    """Sets how often the guard checks the state if `guard.checksum_every` is null: as often as it costs little."""
    if not chooses_checksums(guard):
        return
    weights = sum(p.numel() * p.element_size() for p in trained.state.model.parameters())
    copies = 3 + (trained.state.average is not None)  # weights, two moments, and the average
    flops = trained.sample_flops and trained.sample_flops * batch_size / process.ranks.world_size
    guard.check_state_every(default_every(copies * weights / process.parallel.shards, flops, process.device.type))


def make_tools(options: Options, process: Process, source: Source, model: nn.Module) -> Tools:
    """Builds everything that acts in a step.

    Raises:
        ConfigError: the objective couples the samples of a batch, which is split among micro-batches or ranks.
    """
    tools = tools_from_options(
        options,
        model,
        vocab_size=vocabulary(model, source.data),
        precision=process.precision,
        guard=options.guard,
        seed=rank_seed(options.seed, process.ranks),
        parallel=process.parallel,
        head_apart=process.parallel.head_apart,
    )
    tools = replace(tools, averaging=options.averaging)  # here, because no replay of a step averages
    name, parts = options.choices["objective"], options.grad_accum_steps
    if tools.objective.couples_samples and parts * process.ranks.world_size > 1:
        what = f"grad_accum_steps={parts}" if parts > 1 else f"{process.ranks.world_size} ranks"
        raise ConfigError(
            f"objective={name} couples the samples of a batch, and {what} would split the batch: use "
            f"{'grad_accum_steps=1' if parts > 1 else 'one process'}"
        )
    return tools


# ---- the first lines


def opening_notes(source: Source, process: Process, batch_size: int, eval_batches: int | None) -> list[str]:
    """Returns what else the user should know about this run, one line each; some may be empty."""
    notes = [split_note(source.data)]
    if process.ranks.is_main:  # only it prints, and loads a tokenizer
        notes.append(text_note(source.data))
    if process.device.type == "cpu":
        batches = val_batches(source.data, batch_size, eval_batches)
        notes.append(busy_note(*hardware.load_and_cores(), torch.get_num_threads(), batches))
    return notes


def tools_from_options(
    options: StepOptions,
    model: nn.Module,
    *,
    vocab_size: int | None,
    precision: FullPrecision,
    guard: NoGuard,
    seed: int,
    parallel: SingleProcess,
    head_apart: bool = True,
) -> Tools:
    """Builds the tools that options describe, for training and for replay.

    Args:
        options: the run's, or those of a recorded step.
        vocab_size: None if unknown.
        seed: seed of this rank.
        head_apart: whether the model's head may run outside the model's forward pass.

    Raises:
        ConfigError: a value is out of bounds.
    """
    zloss = options.choices["zloss"] if isinstance(options, Options) else type(options.zloss).__name__
    check_head(options.zloss, zloss, model)
    return Tools(
        sanitizer=Sanitizer(vocab_size),
        precision=precision,
        objective=with_loss_chunk(options.objective, options.loss_chunk, model, head_apart),
        clipping=options.clipping,
        after_update=InTurn((options.qkclip, options.zloss.after_update)),
        guard=guard,
        learning_rate=LearningRate(options.warmup, options.schedule, options.steps),
        determinism=options.determinism,
        seed=seed,
        parallel=parallel,
    )
