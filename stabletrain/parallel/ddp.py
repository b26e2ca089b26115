"""DDP: every rank has the whole model, and gradients are averaged while the backward pass goes on.

Source: Li et al., arXiv 2006.15704; `torch.nn.parallel.DistributedDataParallel`.
"""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stabletrain.errors import ConfigError
from stabletrain.parallel.distributed import Distributed
from stabletrain.parallel.ranks import Ranks
from stabletrain.parallel.replica_check import find_divergence
from stabletrain.records import GradNorms, TrainState

SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)
"""The argument by which every forward pass would take rank 0's buffers; an older PyTorch has another name for it."""


class DDP(Distributed):
    """Whole models whose gradients meet.

    Attributes:
        find_unused_parameters: for models of which a step may leave parameters without a gradient.
        compare: whether the ranks compare their states before one is evaluated or saved; see `replica_check.py`.
    """

    name = "ddp"

    def __init__(self, ranks: Ranks, find_unused_parameters: bool = False, compare: bool = True) -> None:
        super().__init__(ranks)
        self.compare = compare
        self.find_unused_parameters = find_unused_parameters
        self.head_apart = not find_unused_parameters  # it would be taken for unused
        self._wrapped: DistributedDataParallel | None = None

    def check(self, choices: Mapping[str, str]) -> None:
        """Refuses weights that are not the same tensors throughout: DDP would lose hold of their gradients.

        Raises:
            ConfigError: `precision=bf16_params`, which hands the optimizer others in their place.
        """
        if choices.get("precision") == "bf16_params":
            raise ConfigError(
                "precision=bf16_params trains in one process only: use precision=bf16, or start it without torchrun"
            )

    def wrap(self, model: nn.Module) -> None:
        """Gives every rank the weights of rank 0, and joins the gradients to the backward pass."""
        options: dict[str, Any] = {"find_unused_parameters": self.find_unused_parameters, SYNC_BUFFERS: False}
        self._wrapped = DistributedDataParallel(model, **options)

    def wrapped(self, model: nn.Module) -> nn.Module:
        """DDP's wrapper, whose forward pass prepares to average the gradients."""
        del model
        assert self._wrapped is not None, "wrap(model) comes first"
        return self._wrapped

    def gradient_sync(self, model: nn.Module, last: bool) -> AbstractContextManager:
        """Gradients of all micro-batches but the last stay on their rank."""
        assert self._wrapped is not None, "wrap(model) comes first"
        return self._all_meet(model) if last else self._wrapped.no_sync()

    @contextmanager
    def _all_meet(self, model: nn.Module) -> Generator[None]:
        """Refuses a step that has left a parameter out: DDP waits for it, and reduces nothing of its neighbours.

        Raises:
            ConfigError: names the parameter.
        """
        yield
        if self.find_unused_parameters:
            return
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise ConfigError(
                    f"parallel.find_unused_parameters=false, and '{name}' had no part in a step's loss: the ranks "
                    "would wait for its gradient; set parallel.find_unused_parameters=true, or take it out of the model"
                )

    def find_divergence(self, state: TrainState) -> str:
        """See `replica_check.py`."""
        return find_divergence(state) if self.compare else ""

    def of_gradients(self, norms: GradNorms) -> Tensor:
        """The norm, which is the same everywhere unless a reduction went wrong."""
        return norms.total[None]

    def norms_of(self, norms: GradNorms, rows: Tensor) -> GradNorms:
        """The largest of them; NaN if there is one."""
        return GradNorms(total=torch.amax(rows[:, 0]), each=norms.each)
