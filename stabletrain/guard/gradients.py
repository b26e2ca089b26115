"""The gradients of the optimizer's parameters, and their norms.

Like `monitors/tensor_norms.py`, but also for frozen parameters, parameters of another optimizer, sparse and complex
gradients, and several devices, which a user's loop may have.
"""

from collections.abc import Iterable, Sequence
from operator import is_

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.guard.checks.written import needs_closure
from stabletrain.model_tensors import tensors_of
from stabletrain.monitors.tensor_norms import lengths, measure_all
from stabletrain.records import GradNorms, Number
from stabletrain.several_optimizers import SeveralOptimizers, optimizers_of


def trained_parameters(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters that the optimizer updates, in the order of `model.parameters()`.

    Raises:
        ConfigError: the optimizer holds a parameter that is not in the model, or none that requires a gradient; or two
            optimizers hold the same one.
    """
    held: dict[int, Tensor] = {}
    for each in optimizers_of(optimizer):
        own = {id(parameter): parameter for group in each.param_groups for parameter in group["params"]}
        if twice := held.keys() & own.keys():
            names = (name for name, parameter in model.named_parameters() if id(parameter) in twice)
            raise ConfigError(
                f"{next(names, 'a parameter')} is in two of the optimizers: {len(twice)} parameters would be updated "
                "twice in a step; give each parameter to one of them"
            )
        held |= own
    found: list[Tensor] = [parameter for parameter in model.parameters() if held.pop(id(parameter), None) is not None]
    if held:
        shapes = ", ".join(str(list(parameter.shape)) for parameter in [*held.values()][:3])
        raise ConfigError(
            f"the optimizer holds {len(held)} parameters that are not in the model (shapes {shapes}): build it from "
            "model.parameters(), after the model was moved or sharded; a loss with weights of its own belongs in the "
            "model: Guard(nn.ModuleList([model, loss]), optimizer)"
        )
    if not any(parameter.requires_grad for parameter in found):
        raise ConfigError("no parameter of the optimizer requires a gradient: nothing can be trained")
    return found


def held_by(optimizer: Optimizer) -> list[list[int]]:
    """Returns the `id` of each parameter that an optimizer holds, by group."""
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


class TrainedParameters:
    """The parameters that the optimizer updates. A loop may add some later, or replace some.

    Attributes:
        found: the parameters, in the order of `model.parameters()`.

    Raises:
        ConfigError: see `trained_parameters`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._tensors = tensors_of(model)
        self.found = trained_parameters(model, optimizer)
        self._groups, self._present = held_by(optimizer), self._tensors.parameters
        self._first_ids = {id(parameter) for parameter in model.parameters()}

    def find(self) -> bool:
        """Finds them again, if the optimizer holds others than before; returns whether it does."""
        self._tensors.find()
        if (groups := held_by(self._optimizer)) == self._groups:
            return False
        self.found, self._groups = trained_parameters(self._model, self._optimizer), groups
        return True

    def replaced(self) -> list[str]:
        """Returns, once, the names of parameters that have replaced trained ones: the optimizer never updates them."""
        if self._tensors.parameters is self._present:  # as in the step before
            return []
        present = {id(parameter) for parameter in self._tensors.parameters}
        gone = [parameter for parameter in self.found if id(parameter) not in present]
        if any(parameter.grad is not None for parameter in gone):  # FSDP's shards, while the weights are gathered
            return []
        self._present = self._tensors.parameters
        if not gone:
            return []
        named, known = self._model.named_parameters(), self._first_ids.union(*self._groups)
        return [name for name, each in named if each.requires_grad and id(each) not in known]


def as_one(optimizer: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """Returns what a step takes for its optimizer: the one that the user gave, or several as one, without wrappers.

    Raises:
        ConfigError: one is no optimizer, or one of several runs a closure in its step.
    """
    several = [unwrapped(each) for each in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    for each in several:
        name = type(each).__name__
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigError(f"Guard(model, {name}(...)): give the torch.optim.Optimizer that updates the model")
        if not hasattr(each, "_optimizer_step_pre_hooks"):
            raise ConfigError(
                f"{name} is no complete optimizer: call super().__init__(params, defaults) in {name}.__init__"
            )
        if len(several) > 1 and needs_closure(each):
            raise ConfigError(
                f"Guard(model, [..., {name}(...)]): {name} evaluates the loss several times in its step, between which "
                "no other optimizer may move the weights; give it a guard of its own"
            )
    if not several:
        raise ConfigError("Guard(model, []): give at least one optimizer")
    return several[0] if len(several) == 1 else SeveralOptimizers(several)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer inside accelerate's wrapper, which has no hooks; any other as it is.

    Others that hold an optimizer, such as Lookahead, have an update of their own.
    """
    return optimizer.optimizer if type(optimizer).__name__ == "AcceleratedOptimizer" else optimizer  # ty: ignore[missing-attribute]


class BareTensors(nn.Module):
    """A model without modules: the tensors that a loop trains, as they are."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        # `register_parameter` takes instances of `nn.Parameter` only.
        self._parameters.update({str(number): tensor for number, tensor in enumerate(tensors)})  # ty: ignore[no-matching-overload]


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients as dense real tensors that share their memory; of a sharded one, this rank's shard."""
    found = given(parameters)
    if all(map(is_dense, found)):  # nearly always
        return found
    return [dense(parameter) for parameter in parameters if parameter.grad is not None]


def summed_gradients(parameters: Sequence[Tensor], found: list[Tensor]) -> list[Tensor]:
    """Returns `gradients`, but of a sparse one a copy in which the values of each place are summed up.

    Args:
        found: `gradients` of these parameters.
    """
    as_given = given(parameters)
    if all(map(is_, as_given, found)):  # nearly always: none was sparse
        return found
    pairs = zip(as_given, found, strict=True)
    return [each.coalesce().values() if each.layout == torch.sparse_coo else values for each, values in pairs]


def given(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients as they are."""
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]


def is_dense(gradient: Tensor) -> bool:
    """Returns whether a gradient is a dense real tensor as it is."""
    return type(gradient) is Tensor and gradient.layout is torch.strided and not gradient.is_complex()


def dense(parameter: Tensor) -> Tensor:
    """Returns a parameter's gradient as a dense real tensor that shares its memory."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout == torch.sparse_coo:
        return gradient._values()  # as they are: coalescing sums up values that a step would add one by one
    if hasattr(gradient, "to_local"):
        gradient = gradient.to_local()  # ty: ignore[not-callable]
    if gradient.is_conj():  # its values are conjugated when they are read, which a real view cannot show
        parameter.grad = gradient = gradient.resolve_conj()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Groups tensors by device, in order."""
    if len({*map(Tensor.get_device, tensors)}) == 1:  # nearly always
        return {tensors[0].device: tensors}
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups


def measure(found: list[Tensor], buffers: list[Tensor]) -> tuple[GradNorms, Number]:
    """Returns the norms of gradients and buffers as `measure_all` does, also if they lie on several devices."""
    devices = by_device([*found, *buffers])
    if len(devices) <= 1:
        return measure_all(found, buffers)
    home = found[0].device if found else buffers[0].device

    def norms(tensors: list[Tensor]) -> list[Tensor]:
        return [length.to(home) for length in lengths(tensors)]

    each = torch.stack(norms(found) or [torch.zeros((), device=home)])
    of_buffers = torch.linalg.vector_norm(torch.stack(norms(buffers))) if buffers else 0.0
    return GradNorms(total=torch.linalg.vector_norm(each), each=each), of_buffers


@torch.no_grad()
def multiply_(found: list[Tensor], factor: Tensor) -> None:
    """Multiplies gradients by a 0-d factor, in place."""
    for device, tensors in by_device(found).items():
        torch._foreach_mul_(tensors, factor.to(device))
