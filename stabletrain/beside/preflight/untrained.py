"""Parameters without a gradient: which have one is looked for in the losses of an epoch and in the loop's own steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.beside.preflight.finding import Finding, listed
from stabletrain.beside.preflight.loop import Loop, Maker
from stabletrain.beside.preflight.network import hidden_tensors
from stabletrain.beside.preflight.recording import parameters_of
from stabletrain.beside.preflight.state import parameters_beside

MOST_BATCHES = 32
"""Batches that are searched for a gradient of each parameter. Nearly always the first one is enough."""


@dataclass
class Gradients:
    """Which parameters have had a gradient, by name, in `loss` and in the loop's own steps.

    Attributes:
        some: those that had one, which may be 0.
        nonzero: those that had one that was not 0.
        others: further parameters that the loss depends on, by name, or by their shape if nothing names them.
        batches: how many were seen.
        whole: whether these are all of an epoch.
    """

    some: set[str] = field(default_factory=set)
    nonzero: set[str] = field(default_factory=set)
    others: dict[str, Tensor] = field(default_factory=dict)
    batches: int = 0
    whole: bool = False

    def add(self, gradients: dict[str, Tensor]) -> None:
        """Adds the gradients of a backward pass."""
        self.some |= gradients.keys()
        self.nonzero |= {name for name, each in gradients.items() if bool(each.any())}


def gradients_of_losses(loop: Loop) -> Gradients:
    """Differentiates the losses of batches until each trained parameter has had a gradient, or an epoch has ended.

    Parameters that begin at 0, such as a head or an adapter, get small random values: behind them all gradients would
    be 0 at first.
    """
    seen = Gradients()
    watched = {name: each for name, each in named(loop.model, loop.optimizers).items() if each.requires_grad}
    scale = loop.scaler.get_scale() if loop.scaler is not None else 1.0  # without it fp16 rounds small gradients to 0
    for parameter in watched.values():
        if not parameter.detach().any():
            nn.init.normal_(parameter, std=0.01)  # small beside any usual initial weight
    batches = min(loop.epoch or MOST_BATCHES, MOST_BATCHES)
    while seen.batches < batches and len(seen.nonzero) < len(watched):
        loss = loop.loss(loop.batch(seen.batches))
        for parameter in watched.values():
            parameter.grad = None
        if loss.requires_grad:
            seen.others |= unwatched(loss, watched, loop)
            (loss * scale).backward()
        seen.add({name: each.grad for name, each in watched.items() if each.grad is not None})
        seen.batches += 1
    seen.whole = seen.batches == loop.epoch
    return seen


def named(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Returns the model's parameters, tensors hidden in it, and other parameters of the optimizers, by name."""
    found: dict[str, Tensor] = {**dict(model.named_parameters()), **hidden_tensors(model)}
    known = {id(each) for each in found.values()}
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for place, each in enumerate(group["params"]):
                if id(each) not in known:
                    known.add(id(each))
                    found[f"optimizers.{index}.param_groups[{number}].params[{place}]"] = each
    return found


def unwatched(loss: Tensor, watched: dict[str, Tensor], loop: Loop) -> dict[str, Tensor]:
    """Returns the parameters that a loss depends on and that are not watched, by name."""
    known = {id(each) for each in watched.values()}
    found, visited, waiting = list[Tensor](), set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        waiting += [each for each, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:  # other leaves are inputs: a gradient penalty
            known.add(id(leaf))
            found.append(leaf)
    names = {id(each): name for name, each in parameters_beside(loop).items()} if found else {}
    return {
        names.get(id(each), f"parameter {number} of shape {tuple(each.shape)}"): each
        for number, each in enumerate(found, 1)
    }


def without_gradient(make: Maker, loop: Loop, seen: Gradients) -> list[Finding]:
    """Finds parameters of the model, in a group, that have no gradient in any batch of an epoch, or only zeros.

    Args:
        make: makes fresh loops.
        loop: after its steps.
        seen: which parameters have had a gradient.
    """
    held = {id(each) for optimizer in loop.optimizers for each in parameters_of(optimizer)}
    trained = {name: each for name, each in loop.parameters.items() if each.requires_grad and id(each) in held}
    dead = [name for name in trained if name not in seen.nonzero]
    if not dead:
        return []
    start = make().parameters
    unused = [name for name in dead if name not in seen.some]
    moved = [name for name in unused if not torch.equal(start[name], trained[name])]
    alive = {name.rpartition(".")[0] for name in trained if name in seen.nonzero}
    # Some gradients are 0 by nature: that of a bias before a norm, or of a key's bias in attention.
    biases = [
        name for name in dead if trained[name].ndim < 2 and name.rpartition(".")[0] in alive and name in seen.some
    ]
    zero = [name for name in dead if name not in unused and name not in biases]
    still = [name for name in unused if name not in moved]
    where = f"in {'all' if seen.whole else 'the first'} {seen.batches} batches{' of an epoch' if seen.whole else ''}"
    certain = "fault" if seen.whole else "note"  # a part that few batches use
    found = []
    if still:
        text = f"no gradient {where}, as the loss does not use them: {listed(still)} ({len(still)} parameters)"
        fix = "use them in forward, or leave them out; requires_grad_(False) for what is not to be trained"
        found.append(Finding("structure", certain, text, tuple(still), fix=fix))
    if zero:
        text = f"the gradient is exactly 0 {where}, also with random values in place of weights that begin at 0: "
        text += f"{listed(zero)} ({len(zero)} parameters); a factor is 0, or no unit behind them is active"
        fix = "look for a factor of 0, and for a ReLU whose inputs are all negative (a large negative bias)"
        found.append(Finding("structure", certain, text, tuple(zero), fix=fix))
    if moved:
        text = f"no gradient, and changed all the same, by something other than an optimizer: {listed(moved)}"
        found.append(Finding("structure", "note", text, tuple(moved)))
    if biases:
        text = f"the gradient is exactly 0 {where}, which is natural before a norm or a softmax: {listed(biases)}"
        found.append(Finding("structure", "note", text, tuple(biases)))
    return found
