"""Finds out whether a model's outputs alone give the loop's loss, and by which arithmetic.

    model(x, y).loss / 4                          the output `loss`, divided by 4
    ce, aux = model(x, y); ce + 0.01 * aux        two outputs
    F.cross_entropy(model(x), y)                  no: the loop computes it

`mark` marks the scalars that the model returned in the autograd graph. `Root` goes from the loss down to them.
Nothing is guessed: if an operation on the way has another input that is not known, the answer is no.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.guard.micro_batch import named_tensors

MAX_NODES = 64
"""Maximum number of operations between the loss and the model's outputs."""

UNSCALED = "the loss before the scaler"
"""Key of the loss in the metadata of the node that scaled it."""

Compute = Callable[[Sequence[Tensor]], Tensor]
"""Computes a scalar from the tensors of a model's output."""


@dataclass(eq=False)
class ForwardCall:
    """A forward call of a model that can be run again.

    Attributes:
        model: as the loop calls it.
        loss: computes the loop's loss, or this call's part of it; None if the loop computes that itself.
    """

    model: nn.Module
    loss: Compute | None = None

    def __call__(self, given: Mapping[str, Any]) -> Tensor:
        """Returns the loss; if that is not known, the sum of all values, which is not finite if one of them is not."""
        found = tensors_in(self.model(*given["args"], **given["kwargs"]))
        return total(found) if self.loss is None else self.loss(found)


def tensors_in(output: Any) -> list[Tensor]:
    """Returns the tensors of a model's output, in order: also those that are attributes of an object."""
    if not isinstance(output, Tensor | Mapping | tuple | list) and hasattr(output, "__dict__"):
        output = vars(output)
    return [tensor for _, tensor in named_tensors(output)]


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of all floating-point values, in fp32 at least."""
    values = [tensor for tensor in tensors if tensor.is_floating_point()]
    sums = [value.sum(dtype=torch.float32) if value.itemsize < 4 else value.sum() for value in values]
    return sum(sums, torch.zeros(()))


def mark(tensors: Sequence[Tensor], call: ForwardCall, owner: object) -> None:
    """Marks the scalars among the tensors of a call's output, for this owner."""
    for place, tensor in enumerate(tensors):
        if tensor.numel() == 1 and tensor.grad_fn is not None:
            tensor.grad_fn.metadata[id(owner), tensor.output_nr] = call, place  # ty: ignore[invalid-assignment]


def note_scaled(returned: Any, given: Any) -> None:
    """Notes in the graph which losses a scaler was given, so that what it returned is not taken for the loss."""
    for (_, scaled), (_, loss) in zip(named_tensors(returned), named_tensors(given), strict=True):
        if scaled.grad_fn is not None and scaled is not loss:  # a disabled scaler returns what it was given
            scaled.grad_fn.metadata[UNSCALED] = loss.detach()  # ty: ignore[invalid-assignment]


class Root:
    """A tensor that a loop is about to differentiate.

    Args:
        root: the tensor, or a `GradientEdge`.
        factor: its `grad_tensors`; None if none is given.
        owner: see `mark`.

    Attributes:
        loss: its value, unscaled, as a copy, because the loop may write to it; 0-d.
        whole: whether that is the loss. If not, it only says whether the values that were seen are finite.
        parts: the calls whose outputs add up to the loss, and how the part of each is computed; None if others do.
    """

    def __init__(self, root: Any, factor: Tensor | None, owner: object) -> None:
        self.loss, self.whole = torch.zeros(()), False
        self.parts: list[tuple[ForwardCall, Compute]] | None = None
        self._owner, self._left = id(owner), MAX_NODES
        if not isinstance(root, Tensor) or hasattr(root, "to_local") or root.is_complex():
            return
        node, number, loss = root.grad_fn, root.output_nr, root.detach()
        if node is not None and (unscaled := self._unscaled(node)) is not None:
            loss = unscaled
        self._left = MAX_NODES
        self.whole = loss.numel() == 1
        self.loss = loss.reshape(()).clone() if self.whole else (loss * 0.0).sum()
        if factor is not None:
            self.loss = self.loss * (factor.detach().reshape(()) if self.whole else 1.0)
        elif node is not None:
            self.parts = self._sum(node, number)

    def _unscaled(self, node: Any) -> Tensor | None:
        """Returns the output of a node without the loss scale: scaled losses may be added up, or divided.

        Returns None if it is not computed from scaled losses alone.
        """
        if UNSCALED in node.metadata:
            return node.metadata[UNSCALED]
        inputs = [each for each, _ in node.next_functions if each is not None]
        compute = operation(node, len(inputs))
        self._left -= 1
        if compute is None or self._left <= 0:
            return None
        values = [self._unscaled(each) for each in inputs]
        return None if any(each is None for each in values) else compute(*values)

    def _sum(self, node: Any, number: int) -> list[tuple[ForwardCall, Compute]] | None:
        """Returns the calls whose outputs add up to an output of a node, without the loss scale."""
        if UNSCALED in node.metadata:
            return self._sum(*node.next_functions[0])
        found = self._of_one_call(node, number)
        if found is not None:
            return [found]
        if node.name() != "AddBackward0" or node._saved_alpha != 1 or self._left <= 0:
            return None
        parts = [None if each is None else self._sum(each, number) for each, number in node.next_functions]
        return None if None in parts else [found for part in parts for found in part or ()]

    def _of_one_call(self, node: Any, number: int) -> tuple[ForwardCall, Compute] | None:
        """Returns the call whose outputs give an output of a node, and how; None if it is not one call."""
        if (marked := node.metadata.get((self._owner, number))) is not None:
            call, place = marked
            return call, lambda outputs: outputs[place]
        if UNSCALED in node.metadata:
            return self._of_one_call(*node.next_functions[0])
        inputs = [each for each in node.next_functions if each[0] is not None]
        compute = operation(node, len(inputs))
        self._left -= 1
        if compute is None or self._left <= 0:
            return None
        found = [each for each in (self._of_one_call(*each) for each in inputs) if each is not None]
        if len(found) < len(inputs) or any(call is not found[0][0] for call, _ in found):
            return None
        return found[0][0], lambda outputs: compute(*[value(outputs) for _, value in found])


def operation(node: Any, inputs: int) -> Callable[..., Tensor] | None:
    """Returns the operation of a node, as a function of its inputs that need a gradient; None if it is not simple.

    Args:
        node: its inputs and outputs hold one value each.
        inputs: how many need a gradient. The others are constants, which the graph holds only of some operations.
    """
    kind, first = node.name().partition("Backward")[0], node.next_functions[0][0] if node.next_functions else None
    match kind, inputs:
        case "View" | "UnsafeView" | "Squeeze" | "Unsqueeze" | "Select" | "Alias" | "Clone" | "Mean" | "Sum", 1:
            return Tensor.clone  # these leave the only value as it is
        case "Add", 2:
            alpha = node._saved_alpha
            return lambda a, b: torch.add(a, b, alpha=alpha)
        case "Mul", 1:
            return with_constant(torch.mul, node, "self" if first is None else "other")
        case "Div", 1 if first is not None:
            return with_constant(torch.div, node, "other")
        case "Neg", 1:
            return torch.neg
        case "ToCopy", 1:
            dtype = node._input_metadata[0].dtype
            return lambda a: a.to(dtype)
    return None


def with_constant(run: Callable[..., Tensor], node: Any, name: str) -> Callable[[Tensor], Tensor] | None:
    """Returns an operation with a constant of one value, which its node holds; None if it has several."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    if getattr(saved, "unpack_hook", None) is not None:  # activation checkpointing would run the forward pass again
        return None
    constant: Tensor | float = getattr(node, f"_saved_{name}")
    if not isinstance(constant, Tensor):
        return lambda a: run(a, constant)
    if constant.numel() != 1:
        return None
    was = constant._version

    def compute(a: Tensor) -> Tensor:
        if constant._version != was:
            raise RuntimeError("the loop has changed a factor of its loss since")
        return run(a, constant)  # a Python number, as a tensor of the graph, does not change the dtype of the result

    return compute
