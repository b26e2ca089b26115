"""Whole weights in a live model that FSDP2 shards, so that each rank runs its own samples without the others.

`fully_shard` keeps a shard of each parameter, and gathers the whole one in hooks of the forward pass. Here all ranks
gather every parameter once. Then the modules hold the whole parameters, and FSDP2's hooks are replaced by ones that do
not communicate. Afterwards the modules hold the same shards and hooks as before.
"""

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stabletrain.errors import StabletrainError
from stabletrain.forensics.agreement import exchange
from stabletrain.forensics.rerun import NotPossible
from stabletrain.guard.micro_batch import map_tensors
from stabletrain.guard.rerun import Rerun
from stabletrain.machine.memory import free_host_memory
from stabletrain.parallel.whole import free_on_card, nbytes, require_memory

NOT_TRIED = "single samples are not tried while the weights are sharded"

FSDP_HOOKS = "torch.distributed.fsdp._fully_shard"
"""Module of PyTorch that FSDP2's hooks come from."""

WEIGHTS_IN_TRIALS = 3
"""Free memory that trials need, in multiples of the weights: the weights, gradients and working memory."""


class WholeWeights:
    """The whole weights of a model that FSDP2 shards.

    Attributes:
        why_not: why they cannot be used; empty if they can, or before `gather`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self.why_not = model, ""
        self._whole: dict[int, nn.Parameter] = {}

    def gather(self) -> None:
        """Gathers them, unless a rank cannot hold or use them. All ranks must call it together."""
        self.why_not = next(filter(None, exchange(self._obstacle)), "")
        if self.why_not:
            return
        for module in self._model.modules():
            if is_sharded(module):
                # A forward pass alone may have left the root's parameters whole.
                module.reshard()  # ty: ignore[not-callable]
        with torch.no_grad():
            for formats, module in with_formats(self._model):
                for parameter in module.parameters(recurse=False):
                    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # ty: ignore[not-callable]
                    whole = whole.detach().to(formats.parameters or whole.dtype)
                    self._whole.setdefault(id(parameter), nn.Parameter(whole, requires_grad=parameter.requires_grad))

    @contextlib.contextmanager
    def in_place(self, rerun: Rerun) -> Generator[Rerun]:
        """A context in which the modules hold the whole weights; yields the rerun of the step on them.

        Raises:
            NotPossible: they were not gathered.
        """
        if self.why_not:
            raise NotPossible(self.why_not)
        with contextlib.ExitStack() as undo:
            for formats, module in with_formats(self._model):
                for name, shard in [*module._parameters.items()]:
                    if shard is not None:
                        undo.callback(setattr, module, name, shard)
                        setattr(module, name, self._whole[id(shard)])  # an RNN notices it, and replaces its copies
                for hooks, instead in hooks_without_communication(module, formats):
                    for key, hook in [*hooks.items()]:
                        if is_of_fsdp(hook):
                            undo.callback(hooks.__setitem__, key, hook)
                            hooks[key] = instead
            yield replace(rerun, parameters=[self._whole.get(id(each), each) for each in rerun.parameters])

    def _obstacle(self) -> str:
        """Returns why this rank cannot use whole weights; empty if it can."""
        parameters = [*self._model.parameters()]
        sharded = filter(is_sharded, self._model.modules())
        # Two shardings of one parameter: tensor parallelism, whose modules compute with shards.
        twice = any(not each.is_replicate() for p in parameters for each in getattr(p, "placements", ())[:-1])
        if twice or not all(has_known_hooks(module) for module in sharded):
            return NOT_TRIED
        needed = float(WEIGHTS_IN_TRIALS * sum(map(nbytes, parameters)))
        try:
            if parameters[0].device.type == "cuda":
                require_memory("the card", needed, free_on_card())
            else:
                here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
                where = f"the host, for the {here} ranks of this machine together"
                require_memory(where, here * needed, free_host_memory())
        except StabletrainError as error:
            return str(error)
        return ""


class Formats(NamedTuple):
    """The dtypes of FSDP2's mixed precision: of whole parameters, inputs and outputs; None leaves them as they are."""

    parameters: torch.dtype | None = None
    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None


def with_formats(model: nn.Module) -> Iterator[tuple[Formats, nn.Module]]:
    """Returns each module once, with the formats of the FSDP2 module that it belongs to."""
    seen = set[int]()

    def visit(module: nn.Module, formats: Formats) -> Iterator[tuple[Formats, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        formats = formats_of(module) if is_sharded(module) else formats
        yield formats, module
        for child in module.children():
            yield from visit(child, formats)

    return visit(model, Formats())


def formats_of(module: nn.Module) -> Formats:
    """Returns the formats of a module that FSDP2 shards. Raises AttributeError if PyTorch keeps them elsewhere."""
    policy = module._get_fsdp_state()._mp_policy  # ty: ignore[not-callable]
    return Formats(policy.param_dtype, policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype)


def is_sharded(module: nn.Module) -> bool:
    """Returns whether `fully_shard` was called on a module."""
    return any(each.__name__ == "FSDPModule" for each in type(module).__mro__)


def has_known_hooks(module: nn.Module) -> bool:
    """Returns whether FSDP2 has one hook before and one after a module's forward pass, and its formats are known."""
    counts = [sum(map(is_of_fsdp, hooks.values())) for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    with contextlib.suppress(AttributeError):
        return counts == [1, 1] and bool(formats_of(module))
    return False


def is_of_fsdp(hook: Any) -> bool:
    """Returns whether a hook is FSDP2's."""
    return str(getattr(hook, "__module__", "")).startswith(FSDP_HOOKS)


def hooks_without_communication(
    module: nn.Module, formats: Formats
) -> list[tuple[dict[int, Callable[..., Any]], Callable[..., Any]]]:
    """Returns a module's hooks before and after the forward pass, each with what replaces FSDP2's.

    As FSDP2's they cast inputs and outputs, and move inputs to the device.
    """

    def cast(values: Any, dtype: torch.dtype | None, device: torch.device | None) -> Any:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        return map_tensors(moved, values)

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        home = next((parameter.device for parameter in module.parameters()), None)
        return cast(args, formats.inputs, home), cast(kwargs, formats.inputs, home)

    def after(module: nn.Module, args: tuple, output: Any) -> Any:
        return cast(output, formats.outputs, None)

    return [(module._forward_pre_hooks, before), (module._forward_hooks, after)]
