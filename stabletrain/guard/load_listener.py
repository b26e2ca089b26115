"""Notices that a loop loads weights or moments by itself, so that the guard does not report a memory fault."""

from typing import Any

from torch import nn
from torch.optim import Optimizer


class LoadListener:
    """Notices every `load_state_dict` of a model, of its modules and of an optimizer.

    Attributes:
        noticed: whether one was called.
    """

    def __init__(self) -> None:
        self.noticed = False

    def listen(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Notices the calls from now on."""
        for module in model.modules():
            module.register_load_state_dict_post_hook(self)
        optimizer.register_load_state_dict_post_hook(self)

    def __call__(self, *_: Any) -> None:
        """Is called after a `load_state_dict`."""
        self.noticed = True

    def __reduce__(self) -> Any:
        """Copies and pickles of a hooked model have a new instance, which no guard reads."""
        return (LoadListener, ())
