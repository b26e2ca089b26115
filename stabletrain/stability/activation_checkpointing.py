"""Activation checkpointing: a block keeps less for its backward pass, and computes the rest again there.

    blocks       keeps the inputs of each block                       Chen et al., arXiv 1604.06174
    selective    keeps the outputs of the expensive operations too    Korthikanti et al., arXiv 2205.05198, section 5

Source: `torch.utils.checkpoint` without reentrant autograd. A block is what monitors call one
(`monitors/module_groups.py`). The second forward pass must give the bits of the first, and must leave no trace:

- it draws the random numbers of the first, from the same state of the generators;
- it reads the buffers as they were before the first, and writes into copies of them. So BatchNorm's statistics and
  QK-clip's meter see each batch once;
- autocast is as it was.

The block's class changes, not the block: names, parameters, hooks and copies of the model stay as they are. Hooks of
the modules inside a block run again with it; hooks of the block itself do not. Only training passes that record a
gradient are affected, and no monitor's.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from stabletrain.errors import ConfigError
from stabletrain.machine.recomputation import may_recompute
from stabletrain.monitors.module_groups import blocks
from stabletrain.stability.precision.autocast import with_mixin

Contexts = tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]
"""A context for the first forward pass, and one for the second."""

ATEN = torch.ops.aten
EXPENSIVE = {
    *(ATEN.mm.default, ATEN.addmm.default, ATEN._scaled_mm.default, ATEN.convolution.default),
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}
"""The operations whose outputs `selective` keeps. Not `bmm`: explicit attention scores are large."""


def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> checkpoint.CheckpointPolicy:
    """Returns whether to keep an operation's output.

    Nothing that draws random numbers is kept: the second forward pass would not draw them, and its next numbers would
    be others than those of the first. Nothing is kept of operations without a gradient, such as QK-clip's meter.
    """
    if operation in EXPENSIVE and torch.is_grad_enabled() and not drops(operation, args, kwargs):
        return checkpoint.CheckpointPolicy.MUST_SAVE
    return checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def drops(operation: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Returns whether an operation has dropout."""
    names = [argument.name for argument in operation._schema.arguments]
    return bool((dict(zip(names, args, strict=False)) | kwargs).get("dropout_p"))


class CheckpointedBlock(nn.Module):
    """Mixin for a block's class: in a training pass, computes the block again when its backward pass begins.

    Attributes:
        options: `context_fn` of PyTorch's checkpoint, if it has one.
    """

    options: Mapping[str, Callable[[], Contexts]] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block's own forward."""
        run = super().forward
        if not (self.training and torch.is_grad_enabled() and may_recompute()):
            return run(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler writes into buffers once, however often it computes something
            given: dict[str, Any] = {"use_reentrant": False, **self.options, **kwargs}
            return checkpoint.checkpoint(run, *args, **given)
        held = [(module, values_of(module)) for module in self.modules() if module._buffers]
        # PyTorch's selective policy expects the same operations twice. Hooks of FSDP on a module inside the block run
        # others the second time, so such a block is computed again as a whole.
        inside = any(hasattr(module, "reshard") for module in self.modules() if module is not self)
        options = {} if inside else self.options
        contexts = partial(with_held, options.get("context_fn", checkpoint.noop_context_fn), held)
        return plain_checkpoint()(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class SelectiveBlock(CheckpointedBlock):
    """Mixin for a block's class: as `CheckpointedBlock`, but the expensive operations are not run again."""

    options: Mapping[str, Callable[[], Contexts]] = {
        "context_fn": partial(checkpoint.create_selective_checkpoint_contexts, policy)
    }


@dataclass(frozen=True)
class NoActivationCheckpointing:
    """Keeps every activation. Base class of all kinds, and what each must offer."""

    def attach(self, model: nn.Module) -> None:
        """Makes the model's blocks keep less, in place. Call it before the model is sharded. Does nothing."""


@dataclass(frozen=True)
class CheckpointedBlocks(NoActivationCheckpointing):
    """Keeps the inputs of each block."""

    option: ClassVar[str] = "blocks"
    mixin: ClassVar[type[CheckpointedBlock]] = CheckpointedBlock

    def attach(self, model: nn.Module) -> None:
        """Makes the model's blocks keep less, in place. Call it before the model is sharded.

        Raises:
            ConfigError: the model has no blocks.
        """
        found = [block for block in blocks(model).values() if any(True for _ in block.children())]
        if not found:
            raise ConfigError(
                f"activation_checkpointing={self.option} finds no blocks in {type(model).__name__}: it needs modules "
                "with modules of their own, in an nn.ModuleList or nn.Sequential; fix: activation_checkpointing=none"
            )
        for block in found:
            block.__class__ = with_mixin(self.mixin, type(block), "")


@dataclass(frozen=True)
class SelectiveBlocks(CheckpointedBlocks):
    """Keeps the inputs of each block, and the outputs of the expensive operations in it."""

    option: ClassVar[str] = "selective"
    mixin: ClassVar[type[CheckpointedBlock]] = SelectiveBlock


@cache
def plain_checkpoint() -> Callable[..., Any]:
    """Returns `checkpoint` without the wrapper that keeps the compiler out: outside of it, that imports it first."""
    return getattr(checkpoint.checkpoint, "__wrapped__", checkpoint.checkpoint)


def values_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns a module's buffers by name, with copies of those that a forward pass may write."""
    constant = getattr(module, "constant_buffers", ())
    return {
        name: buffer if buffer is None or name in constant else buffer.clone()
        for name, buffer in module._buffers.items()
    }


Held = list[tuple[nn.Module, dict[str, Tensor | None]]]
"""Modules, with their buffers from before the first forward pass."""


def with_held(contexts: Callable[[], Contexts], held: Held) -> Contexts:
    """Returns PyTorch's two contexts; in the second, the modules hold copies of these buffers."""
    first, second = contexts()
    return first, Recomputing(second, held) if held else second


class Recomputing(contextlib.ExitStack):
    """A context in which modules hold copies of the buffers from before the first forward pass.

    It can be entered again: with `retain_graph`, a block may be computed a third time.
    """

    def __init__(self, context: contextlib.AbstractContextManager, held: Held) -> None:
        super().__init__()
        self._context, self._held = context, held

    def __enter__(self) -> "Recomputing":
        """Puts the copies into the modules; on exit, the modules hold their own buffers again."""
        super().__enter__()
        for module, buffers in self._held:
            self.callback(module._buffers.update, {**module._buffers})
            module._buffers.update({name: each if each is None else each.clone() for name, each in buffers.items()})
        self.enter_context(self._context)
        return self
