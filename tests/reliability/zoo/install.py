"""Puts faults into a built run: adds a part behind a module, or acts after every update.

The last arguments of each function are the job, and whether to install the fixed part instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from stabletrain.stability.precision import Fp8Linears
from stabletrain.trainer.run import TrainingRun
from tests.reliability.zoo.parts import Part


def behind(place: str, part: type[Part], at: int, job: TrainingRun, mended: bool) -> None:
    """Adds a part to a module of the model, as `<place>.extra`; the module's output passes through it."""
    module = job.state.model.get_submodule(place)
    module.add_module("extra", part(at, mended))
    module.register_forward_hook(through_extra)


def behind_in_fp8(place: str, part: type[Part], at: int, job: TrainingRun, mended: bool) -> None:
    """As `behind`, with the part's linear layers in the run's fp8."""
    behind(place, part, at, job, mended)
    if isinstance(job.tools.precision, Fp8Linears):
        extra = job.state.model.get_submodule(f"{place}.extra")
        job.tools.precision.convert([layer for layer in extra.modules() if isinstance(layer, nn.Linear)])


def learnt_behind(place: str, part: type[Part], at: int, lr: float, job: TrainingRun, mended: bool) -> None:
    """As `behind`, for a part with trained weights and its own learning rate."""
    behind(place, part, at, job, mended)
    extra, optimizer = job.state.model.get_submodule(f"{place}.extra"), job.state.optimizer
    given = {key: value for key, value in optimizer.param_groups[-1].items() if key not in ("params", "peak_lr")}
    optimizer.add_param_group({**given, "params": [*extra.parameters()], "lr": lr, "weight_decay": 0.0})


def behind_frozen(place: str, part: type[Part], at: int, job: TrainingRun, mended: bool) -> None:
    """As `behind`, and freezes the model's first parameter, which is harmless."""
    behind(place, part, at, job, mended)
    first = next(job.state.model.parameters())
    first.requires_grad_(False)


def through_extra(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Passes the output through the added part."""
    return module.extra(output)


def every_step(act: Callable[[TrainingRun], None], job: TrainingRun, mended: bool) -> None:
    """Acts after every update that is applied."""
    step = job.state.optimizer.step

    def stepped(*given: Any) -> Any:
        done = step(*given)
        withheld = getattr(job.state.optimizer, "found_inf", None)
        if not mended and not (withheld is not None and float(withheld)):
            with torch.no_grad():
                act(job)
        return done

    job.state.optimizer.step = stepped


def grow(names: Sequence[str], factor: float, start: int, stop: int, job: TrainingRun) -> None:
    """Lets weights grow a little in each step."""
    if start <= job.state.executed_steps < stop:
        for name, parameter in job.state.model.named_parameters():
            if any(part in name for part in names):
                parameter.mul_(factor)


def spoil_once(tick: int, act: Callable[[TrainingRun], None], job: TrainingRun) -> None:
    """Acts at one executed step; not again if that step is replayed."""
    if job.state.executed_steps == tick and not getattr(job, "spoilt", False):
        job.spoilt = True
        act(job)


def poison_moment(value: float, job: TrainingRun) -> None:
    """Sets one entry of an optimizer moment to an impossible value."""
    for state in job.state.optimizer.state.values():
        for name in ("exp_avg_sq", "momentum_buffer"):
            if name in state:
                state[name].view(-1)[0] = value
                return
