"""A trial: a whole run made short, at one learning rate, with the configuration's model, data and optimizer.

The schedule is that of the whole run made short, so the learning rate has fallen when the losses are compared. Trials
of one seed begin with the same weights and read the same batches.

Nothing is written. There is no guard: a rate at which the loss is not finite is a result.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
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
from stabletrain.stability.averaging import NoAveraging
from stabletrain.stability.precision.base import FullPrecision
from stabletrain.stability.schedule import LinearWarmup, NoWarmup
from stabletrain.step import train_step
from stabletrain.trainer.contract import validation
from stabletrain.trainer.evaluate import evaluate
from stabletrain.trainer.init_from import starting_weights
from stabletrain.trainer.options import Options, read
from stabletrain.trainer.stages import BatchLoader, Source, build_model, load_data, make_tools, start_process

BATCHES = 8
"""Largest number of validation batches after a trial: about three steps' time, and the same batches in each trial."""

WARMUP_SHARE = 1 / 8
"""Largest share of a trial that is warmup.

What an optimizer needs at its start is a number of steps, so a trial has as many as the run, up to this share. Measured
on the GPT of `experiment=lr_sensitivity` with QK-norm, in trials of 40 steps: with a warmup of 2 steps, the run's own
share, the best rates are 0.0015 to 0.003, with 5 steps 0.003 to 0.006, with 10 steps 0.006 to 0.012. In the whole run
they are 0.003 to 0.006.
"""

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
            more = (to_device(load(steps + number)).split(parts)[0].inputs for number in range(BATCHES))
            renew_batch_norm(state.model, more, tools.precision)
            limit = min(options.eval_batches or BATCHES, BATCHES)
            batches = map(to_device, validation(source.data, options.batch_size, limit, process.ranks))
            plain = tools.objective.plain
            found = evaluate(state.model, batches, plain, tools.precision, tools.sanitizer, process.parallel)
            loss = found["val/loss"]
        loss, seconds = loss if math.isfinite(loss) else math.inf, time.perf_counter() - began
        trial = Trial(rate, seed, steps, first, loss, state.step, seconds)
        self.run.append(trial)
        self.tell(trial)
        return trial


def renew_batch_norm(model: nn.Module, inputs: Iterable[Tensor], precision: FullPrecision) -> None:
    """Sets the running statistics of BatchNorm to those of the present weights; does nothing without BatchNorm.

    They average over the last tens of steps. In a whole run the weights hardly change over its last steps; in a trial
    they do, most at high rates, and the validation loss would be that of other statistics than the weights have.
    Source: "precise BatchNorm" (Wu and Johnson, arXiv 2105.07576, section 3).
    """
    with precision.autocast():
        update_bn(inputs, model)


def short(options: Options, rate: float, steps: int) -> Options:
    """Returns the options of a run of `steps` steps at a peak learning rate, without guard, faults and averaging."""
    optimizer = replace(options.optimizer, node={**options.optimizer.node, "lr": rate})
    warmup = shortened(options.warmup, options.steps, steps)
    off = {"guard": NoGuard(), "faults": NoFaults(), "averaging": NoAveraging()}
    return replace(options, optimizer=optimizer, warmup=warmup, steps=steps, **off)


def shortened(warmup: NoWarmup, total: int, steps: int) -> NoWarmup:
    """Returns the warmup of a trial of `steps` steps, from that of a run of `total` steps; see `WARMUP_SHARE`."""
    if not isinstance(warmup, LinearWarmup):  # none, or a user's own
        return warmup
    return replace(warmup, steps=max(1, min(warmup.length(total), int(WARMUP_SHARE * steps))))
