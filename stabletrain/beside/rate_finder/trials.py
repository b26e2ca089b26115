"""A trial: a whole run made short, at one learning rate, with the configuration's model, data and optimizer.

Warmup and schedule keep their shares of the run, so the learning rate has fallen when the losses are compared. Trials
of one seed begin with the same weights and read the same batches.

Nothing is written. There is no guard: a rate at which the loss is not finite is a result.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from stabletrain.beside.rate_finder.peak import Trial
from stabletrain.data.batches import ToDevice
from stabletrain.extension import NoFaults
from stabletrain.guard.policy import NoGuard
from stabletrain.machine.determinism import Seeded
from stabletrain.stability.schedule import NoWarmup
from stabletrain.step import train_step
from stabletrain.tools import Tools
from stabletrain.trainer.contract import validation
from stabletrain.trainer.evaluate import evaluate
from stabletrain.trainer.init_from import starting_weights
from stabletrain.trainer.options import Options, read
from stabletrain.trainer.stages import BatchLoader, Source, build_model, load_data, make_tools, start_process

BATCHES = 8
"""Largest number of validation batches after a trial: about three steps' time, and the same batches in each trial."""

NOWHERE = Path()
"""The run folder of a run that has none: it is read only if the run resumes one."""


@dataclass
class Trials:
    """Runs trials. Call it inside a Hydra job, as `trainer.build.build`.

    Attributes:
        configs: for each seed, the configuration with it, plain and checked.
        choices: the chosen option of each config group.
        tell: is given each trial.
        run: all trials so far.
    """

    configs: Mapping[int, Mapping[str, Any]]
    choices: Mapping[str, str]
    tell: Callable[[Trial], None] = lambda trial: None

    def __post_init__(self) -> None:
        self.run: list[Trial] = []
        self._sources: dict[int, Source] = {}

    def __call__(self, rate: float, seed: int, steps: int) -> Trial:
        """Returns the trial at a rate."""
        began = time.perf_counter()
        # Options hold objects with a state, such as adaptive clipping: each trial needs its own.
        options = short(read(Options, self.configs[seed], self.choices), rate, steps)
        process = start_process(options, NOWHERE)
        if seed not in self._sources:
            self._sources[seed] = load_data(options.data, options.faults, process, options.batch_size)
        source = self._sources[seed]
        Seeded().seed_run(seed)  # with determinism=off too, so that all trials begin with the same weights
        weights = starting_weights(options, source.data, process.ranks, NOWHERE)
        state = build_model(options, process, source, weights).state
        tools = make_tools(options, process, source, state.model)
        parts = options.grad_accum_steps
        load = BatchLoader(process, source.data, state, tools.objective, options.batch_size, parts)
        to_device = ToDevice(process.device)

        first = loss = math.nan
        while state.step < steps:
            reading = train_step(state, to_device(load(state.step)).split(parts), tools)
            first, loss = reading.loss if state.step == 1 else first, reading.loss
            if not math.isfinite(loss) and not reading.overflow:  # fp16's loss scale finds its value at the start
                break
        else:
            renew_batch_norm(state.model, [to_device(load(steps + number)).inputs for number in range(BATCHES)], tools)
            limit = min(options.eval_batches or BATCHES, BATCHES)
            batches = map(to_device, validation(source.data, options.batch_size, limit, process.ranks))
            plain = tools.objective.plain
            found = evaluate(state.model, batches, plain, tools.precision, tools.sanitizer, process.parallel)
            loss = found["val/loss"]
        trial = Trial(
            rate, seed, steps, first, loss if math.isfinite(loss) else math.inf, state.step, time.perf_counter() - began
        )
        self.run.append(trial)
        self.tell(trial)
        return trial


def renew_batch_norm(model: nn.Module, inputs: Sequence[Tensor], tools: Tools) -> None:
    """Sets the running statistics of BatchNorm to those of the present weights; does nothing without BatchNorm.

    They average over the last tens of steps. In a whole run the weights hardly change over its last steps; in a trial
    they do, most at high rates, and the validation loss would be that of other statistics than the weights have.
    Source: "precise BatchNorm" (Wu and Johnson, arXiv 2105.07576, section 3).
    """
    with tools.precision.autocast():
        update_bn(inputs, model)


def short(options: Options, rate: float, steps: int) -> Options:
    """Returns the options of a run of `steps` steps at a peak learning rate, without guard and faults."""
    optimizer = replace(options.optimizer, node={**options.optimizer.node, "lr": rate})
    warmup = shortened(options.warmup, options.steps, steps)
    return replace(options, optimizer=optimizer, warmup=warmup, steps=steps, guard=NoGuard(), faults=NoFaults())


def shortened(warmup: NoWarmup, total: int, steps: int) -> NoWarmup:
    """Returns a warmup with the same share of `steps` steps as it has of `total`."""
    if getattr(warmup, "steps", None) is None:  # none, or a share already
        return warmup
    return replace(warmup, steps=max(1, warmup.steps * steps // total))
