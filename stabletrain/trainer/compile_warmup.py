"""The trial of a compiled model: one pass as a step makes it, before the first step.

A compiler that is missing, or does not know an operation, shows here and not within a step.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.machine.compiling import try_compiled
from stabletrain.protocols import Tools
from stabletrain.records import Batch, TrainState
from stabletrain.step import count_targets


def warm_up_compiled(
    state: TrainState, batch: Batch, tools: Tools, *, must: bool, any_rank: Callable[[bool], bool]
) -> tuple[Mapping[str, Any], str]:
    """Compiles the model for micro-batches like this one, if it can be.

    Args:
        state: its model is compiled in place; all else stays as it is.
        batch: a micro-batch on the model's device.
        tools: everything that acts.
        must: whether it may not be left uncompiled.
        any_rank: whether something is so on any rank.

    Returns:
        what is to be recorded: `compiled`, and the seconds it took; and a line for people.

    Raises:
        ConfigError: it must, and cannot be.
    """
    if not batch.targets.numel():
        return left_uncompiled("the batch to try it on is empty", must)
    model = tools.wrap(state.model)

    def forward() -> Tensor:
        inputs, _, _ = tools.sanitizer.inputs(batch.inputs)
        with tools.precision.autocast():
            logits = model(inputs)
        targets, _ = tools.sanitizer.targets(batch.targets, logits.shape[-1])
        return tools.objective(logits, targets, count_targets([batch]).clamp(min=1)).total

    def backward(loss: Tensor) -> None:
        tools.scale(loss).backward()

    seconds, why = try_compiled(state.model, batch.inputs.shape, forward, backward, any_rank)
    if not why:
        return {"compiled": True, "compile_seconds": round(seconds, 1)}, f"compile  on, in {seconds:.0f} s"
    return left_uncompiled(why, must)


def left_uncompiled(why: str, must: bool) -> tuple[Mapping[str, Any], str]:
    """What is recorded and said of a model that is left uncompiled.

    Raises:
        ConfigError: it must not be.
    """
    if must:
        raise ConfigError(f"compile=true: the model cannot be compiled here ({why}): use compile=auto or compile=false")
    return {"compiled": False}, f"compile  off: {why}; training goes on uncompiled (compile=false does not try)"
