"""Several optimizers as one.

A step takes `SeveralOptimizers` for one optimizer, so that it updates the parameters of all or of none: Muon for the
matrices and AdamW for the rest, or an actor's optimizer and a critic's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class SeveralOptimizers(Optimizer):
    """Steps several optimizers together.

    Groups and states are those of the optimizers, which stay as they are: their schedulers, hooks and
    `load_state_dict` work as before.

    Attributes:
        optimizers: in the order of their steps.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # Not `super().__init__`, which makes groups, a state and hooks of its own.
        self.optimizers = tuple(optimizers)
        self.defaults = {name: value for each in optimizers for name, value in each.defaults.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # ty: ignore[incompatible-property-override]
        """The groups of all optimizers, in order."""
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> "States":  # ty: ignore[incompatible-property-override]
        """The states of all optimizers, to read."""
        return States([each.state for each in self.optimizers])

    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Runs the step of each optimizer."""
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients."""
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each optimizer."""
        return {"optimizers": [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores them."""
        for each, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            each.load_state_dict(state)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Calls `hook` before the step of the first optimizer."""
        return self.optimizers[0].register_step_pre_hook(hook)


class States(Mapping[Tensor, Any]):
    """The states of several optimizers by parameter. Reading adds no entry, unlike with the dicts that they are in."""

    def __init__(self, states: Sequence[Mapping[Tensor, Any]]) -> None:
        self._states = states

    def __getitem__(self, parameter: Tensor) -> Any:
        for state in self._states:
            if parameter in state:
                return state[parameter]
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for state in self._states for parameter in state)

    def __len__(self) -> int:
        return sum(map(len, self._states))


def optimizers_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Returns the optimizers in a `SeveralOptimizers`; any other is the only one."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)
