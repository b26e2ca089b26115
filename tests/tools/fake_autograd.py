"""Autograd's backward pass as a walk in Python, for fake tensors: the engine needs a real device.

`backward` and `grad` stand in for `Tensor.backward` and `torch.autograd.grad`. They call the same nodes of the same
graph as the engine does, so the same operations run in the same order.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves


class Walk:
    """The node that `differentiate` runs now, which autograd's engine would tell."""

    node: Any = None


def differentiate(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], wanted: Sequence[Tensor] | None, create_graph: bool
) -> list[Tensor | None]:
    """Runs the backward pass as autograd's engine does, in the order of the nodes' numbers, latest first.

    Args:
        outputs, gradients: where it begins; None is a gradient of ones.
        wanted: returns the gradients of these tensors. None accumulates the gradients of all leaves in `.grad`.
        create_graph: whether the pass can itself be differentiated.
    """
    edges = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in wanted or ()]
    found: dict[tuple[int, int], Tensor] = {}
    waiting: dict[int, dict[int, Tensor]] = {}
    queue: list[tuple[int, int, Any]] = []

    def give(node: Any, place: int, gradient: Tensor) -> None:
        if id(node) not in waiting:
            waiting[id(node)] = {}
            leaf = hasattr(node, "variable")
            heapq.heappush(queue, (1 if leaf else -node._sequence_nr(), len(kept), node))
            kept.append(node)
        there = waiting[id(node)].get(place)
        waiting[id(node)][place] = gradient if there is None else there + gradient

    kept: list[Any] = []  # keeps the ids of nodes unique
    with torch.set_grad_enabled(create_graph):
        for tensor, gradient in zip(outputs, gradients, strict=True):
            edge = torch.autograd.graph.get_gradient_edge(tensor)
            give(edge.node, edge.output_nr, torch.ones_like(tensor) if gradient is None else gradient)
        while queue:
            _, _, node = heapq.heappop(queue)
            arrived = waiting.pop(id(node))
            found |= {(id(node), place): gradient for place, gradient in arrived.items()}
            if hasattr(node, "variable"):
                if wanted is None:
                    accumulate(node, arrived[0])
                continue
            for following, place, gradient in run(node, arrived):
                give(following, place, as_expected(following, place, gradient))
    return [found.get((id(edge.node), edge.output_nr)) for edge in edges]


def run(node: Any, arrived: Mapping[int, Tensor]) -> list[tuple[Any, int, Tensor]]:
    """Runs a node on the gradients of its outputs; returns those of its inputs, with the node and place of each."""
    arguments = [arrived.get(place) for place in range(len(node._input_metadata))]
    Walk.node = node
    try:
        if not isinstance(node, BackwardCFunction):
            results, following = node(*arguments), node.next_functions
            results = results if isinstance(results, tuple) else (results,)
        else:  # a `torch.autograd.Function` gets zeros instead of None, and returns a value for each input of any type
            device = next(iter(arrived.values())).device
            filled = [
                torch.zeros(meta.shape, dtype=meta.dtype, device=device) if given is None else given
                for given, meta in zip(arguments, node._input_metadata, strict=True)
            ]
            results = node.apply(*filled)
            results = results if isinstance(results, tuple) else (results,)
            results = [each for each, needed in zip(results, node.needs_input_grad, strict=True) if needed]
            following = [edge for edge in node.next_functions if edge[0] is not None]
    finally:
        Walk.node = None
    edges = zip(following, results, strict=True)
    return [(there, place, each) for (there, place), each in edges if there is not None and each is not None]


def as_expected(node: Any, place: int, gradient: Tensor) -> Tensor:
    """Returns the gradient with the shape and dtype that a node expects."""
    meta = node._input_metadata[place]
    same = [*gradient.shape] == [*meta.shape]  # `sum_to_size` would run a sum for a single number
    return (gradient if same else gradient.sum_to_size(meta.shape)).to(meta.dtype)


@torch.no_grad()
def accumulate(leaf: Any, gradient: Tensor) -> None:
    """Adds to the `.grad` of a leaf, and calls its hooks."""
    variable = leaf.variable
    Walk.node = leaf
    try:
        for hook in (variable._backward_hooks or {}).values():
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if variable.grad is None:
            variable.grad = gradient.detach().clone()
        else:
            variable.grad += gradient
        for hook in (getattr(variable, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(variable)
    finally:
        Walk.node = None


def backward(tensor: Tensor, gradient: Tensor | None = None, create_graph: bool = False, **_: Any) -> None:
    """Stands in for `Tensor.backward`."""
    differentiate([tensor], [gradient], None, create_graph)


def grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, create_graph: bool = False, **_: Any
) -> tuple[Tensor | None, ...]:
    """Stands in for `torch.autograd.grad`."""
    outputs, inputs = ([each] if isinstance(each, Tensor) else [*each] for each in (outputs, inputs))
    given = [None] * len(outputs) if grad_outputs is None else tree_leaves(grad_outputs)
    return tuple(differentiate(outputs, given, inputs, create_graph))
