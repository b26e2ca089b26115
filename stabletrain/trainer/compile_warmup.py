"""Compiles the model and tries it on one micro-batch, before the first step.

A missing compiler or an unsupported operation shows up here, not in the middle of training.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.machine.compiling import try_compiled
from stabletrain.records import Batch, TrainState
from stabletrain.step import count_targets
from stabletrain.tools import Tools


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
