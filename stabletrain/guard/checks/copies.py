"""Copies of everything that an optimizer's step may write, to undo a step bit for bit."""

from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.buffers import SavedBuffers, buffers_of
from stabletrain.guard.checks.written import (
    attributes_of,
    containers,
    needs_closure,
    own,
    parts_of,
    tensors_in,
    update_is_finite,
    weights_of,
)
from stabletrain.machine.determinism import Generators
from stabletrain.machine.untouched import Attributes, put_back_attributes
from stabletrain.machine.untouched import attributes_of as attributes_of_modules


class Copies:
    """Copies of everything that an optimizer's step may write, and of the gradients, which some overwrite."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._tensors: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # each with its memory and a copy
        self._contents: list[tuple[Any, Any]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._generators: Generators | None = None
        self._forward: tuple[SavedBuffers, Attributes] | None = None  # what a forward pass writes besides

    @torch.no_grad()
    def take(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Copies the present values, into the memory of the previous copies where it fits."""
        before, self._tensors = self._tensors, {}
        self._model, self._optimizer = model, optimizer
        parameters = weights_of(model, optimizer)
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._contents = [*containers(optimizer, set())]
        found = [
            *parameters,
            *buffers_of(model).judged,
            *(each for _, held in self._contents for each in tensors_in(held)),
        ]
        found += [gradient for _, gradient in self._gradients if gradient is not None]
        old, new = [], []
        for tensor in (part for each in found for part in parts_of(each)):
            if id(tensor) in self._tensors:
                continue
            known, value = before.get(id(tensor)), own(tensor)
            if known is not None and known[0] is tensor and fits(known[2], value):
                old.append(known[2])
                new.append(value)
                self._tensors[id(tensor)] = (tensor, value, known[2])
            else:
                self._tensors[id(tensor)] = (tensor, value, value.clone())
        if old:
            torch._foreach_copy_(old, new)
        self._generators = Generators.now(next(model.parameters()).device)
        self._forward = None
        if needs_closure(optimizer):
            self._forward = buffers_of(model).save(), attributes_of_modules(model)

    def are_finite_now(self) -> bool:
        """Returns whether everything that the step wrote is finite; waits for the device."""
        assert self._model is not None
        assert self._optimizer is not None
        return update_is_finite(self._model, self._optimizer)

    @torch.no_grad()
    def put_back(self) -> None:
        """Restores all values, bit for bit, and removes everything that was added since."""
        for container, contents in self._contents:
            fill(container, contents)
        for tensor, memory, copy in self._tensors.values():
            if not hasattr(tensor, "to_local") and not same_memory(own(tensor), memory):
                tensor.data = memory if fits(copy, memory) else copy.clone()
            unexpanded(own(tensor)).copy_(unexpanded(copy, like=memory))
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if self._forward is not None:
            buffers, attributes = self._forward
            put_back_attributes(attributes)
            buffers.put_back()
        assert self._generators is not None
        self._generators.set()


def fill(container: Any, contents: Any) -> None:
    """Restores the contents of a container."""
    if isinstance(container, Optimizer):
        for name in attributes_of(container).keys() - contents.keys():
            delattr(container, name)
        vars(container).update(contents)
    elif isinstance(container, dict | set):
        container.clear()
        container.update(contents)
    elif isinstance(container, deque | list):
        container.clear()
        container.extend(contents)
    elif not isinstance(container, tuple | nn.Module):  # an object in the state
        vars(container).clear()
        vars(container).update(contents)


def same_memory(tensor: Tensor, memory: Tensor) -> bool:
    """Returns whether a tensor still has this memory, with the same shape and strides."""
    if not fits(memory, tensor) or tensor.layout != torch.strided:
        return tensor.layout == memory.layout and fits(memory, tensor)
    return tensor.data_ptr() == memory.data_ptr() and tensor.stride() == memory.stride()


def unexpanded(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Returns the part of an expanded tensor that has its own memory; any other tensor unchanged."""
    form = tensor if like is None else like
    if form.layout != torch.strided or 0 not in form.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in form.stride())]


def fits(copy: Tensor, tensor: Tensor) -> bool:
    """Returns whether a tensor can be copied to another bit for bit."""
    return copy.shape == tensor.shape and copy.dtype == tensor.dtype and copy.device == tensor.device


@contextmanager
def put_back_after(model: nn.Module, optimizer: Optimizer) -> Generator[None]:
    """A context in which an optimizer's step may run: on exit, all that it wrote is restored bit for bit."""
    copies = Copies()
    copies.take(model, optimizer)
    try:
        yield
    finally:
        copies.put_back()
