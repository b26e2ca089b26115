"""Parameters and groups: stale, in no group, in two, without gradient; and what is wrong with the model by itself."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.beside.preflight.finding import Finding, listed
from stabletrain.beside.preflight.loop import Loop, Maker, seed
from stabletrain.beside.preflight.network import hidden_tensors, in_eval_mode, split_ties
from stabletrain.beside.preflight.recording import RecordedStep, parameters_of, record_step

STEPS = 3
"""Steps that are recorded: an evaluation after the first may leave the model in eval mode in the second."""

MOST_BATCHES = 32
"""Batches that are searched for a gradient of each parameter. Nearly always the first one is enough."""


@dataclass
class Gradients:
    """Which parameters have had a gradient, by name, in `loss` and in the loop's own steps.

    Attributes:
        some: those that had one, which may be 0.
        nonzero: those that had one that was not 0.
        batches: how many were seen.
        whole: whether these are all of an epoch.
    """

    some: set[str] = field(default_factory=set)
    nonzero: set[str] = field(default_factory=set)
    batches: int = 0
    whole: bool = False

    def add(self, gradients: dict[str, Tensor]) -> None:
        """Adds the gradients of a backward pass."""
        self.some |= gradients.keys()
        self.nonzero |= {name for name, each in gradients.items() if bool(each.any())}


def check(make: Maker) -> list[Finding]:
    """Checks a loop's parameters, and the model by itself."""
    loop = make()
    evaluating: list[list[str]] = []
    twice: dict[str, tuple[int, int]] = {}
    seen = gradients_of_losses(make())
    for number in range(STEPS if loop.step is not None else 0):
        step = record_step(loop, number)
        evaluating.append(step.evaluating)
        twice |= updated_twice(step)
        for gradients in (step.gradients, *step.given.values()):
            seen.add(gradients)
    found = [*groups(loop.model, loop.optimizers, seen, twice), *without_gradient(make, loop, seen)]
    return [*found, *split_ties(make().model), *modes(make, evaluating)] or passed(loop.model, loop.optimizers)


def structure_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Finding]:
    """Checks what a model and its optimizers alone show, at a small part of the cost of a step.

    Changes nothing. Finds stale parameters, those in no group or in two, split ties, and trained parts in eval mode.

    Args:
        model: in the mode in which it is trained.
        optimizers: all that train it.
    """
    found = [*groups(model, optimizers), *split_ties(model), *in_eval_mode(model)]
    return found or passed(model, optimizers)


def passed(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Finding]:
    """Returns what is said of a model and optimizers of which nothing is wrong."""
    count, groups = sum(each.requires_grad for each in model.parameters()), sum(len(o.param_groups) for o in optimizers)
    return [Finding("structure", "passed", f"{count} trained parameters, each in one of {groups} groups")]


def gradients_of_losses(loop: Loop) -> Gradients:
    """Differentiates the losses of batches until each trained parameter has had a gradient, or an epoch has ended.

    Parameters that begin at 0, such as a head or an adapter, get small random values: behind them all gradients would
    be 0 at first.
    """
    seen = Gradients()
    watched = {name: each for name, each in named(loop).items() if each.requires_grad}
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
            (loss * scale).backward()
        seen.add({name: each.grad for name, each in watched.items() if each.grad is not None})
        seen.batches += 1
    seen.whole = seen.batches == loop.epoch
    return seen


def named(loop: Loop) -> dict[str, Tensor]:
    """Returns the model's parameters, tensors hidden in it, and other parameters of the optimizers, by name."""
    found = {**loop.parameters, **hidden_tensors(loop.model)}
    known = {id(each) for each in found.values()}
    for optimizer in loop.optimizers:
        found |= {loop.name_of(each): each for each in parameters_of(optimizer) if id(each) not in known}
    return found


# ---- each parameter in one group


def groups(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    seen: Gradients | None = None,
    twice: dict[str, tuple[int, int]] | None = None,
) -> list[Finding]:
    """Finds stale parameters, and those in no group or in two.

    Args:
        model: the model.
        optimizers: all that train it.
        seen: which parameters have a gradient; None if that is not known.
        twice: parameters that two optimizers updated with the same gradient, and which; None if that is not known.
    """
    loop = Loop(model, optimizers, loss=lambda _: torch.zeros(()), batch=lambda _: None)
    held = Counter(id(each) for optimizer in optimizers for each in parameters_of(optimizer))
    names = {name: each for name, each in named(loop).items() if each.requires_grad}
    hidden = hidden_tensors(model)
    trainable = {name: each for name, each in names.items() if name in loop.parameters}
    missing = [name for name, each in trainable.items() if id(each) not in held]
    stale = [name for name, each in names.items() if name not in trainable and name not in hidden]
    stale = [name for name in stale if seen is None or name not in seen.some]
    replaced = all_stale(missing, stale, names) if seen is None else bool(stale and seen.some.intersection(missing))
    found = []
    if replaced:
        text = f"the optimizers hold {len(stale)} parameters that are not the model's, and {listed(missing)} "
        text += f"({len(missing)} of {len(trainable)}) are in no group: they were replaced after the optimizer was made"
        fix = "make the optimizer after the last change of the model (new layers, copies, load_state_dict(assign=True))"
        found.append(Finding("structure", "fault", text, (*missing, *stale), fix=fix))
    else:
        found += in_no_group(missing, trainable, seen)
        if stale:
            text = f"the optimizers hold {len(stale)} parameters that are not the model's: {listed(stale)}"
            fix = "if they were parts of the model once, make the optimizer after the last change of the model"
            found.append(Finding("structure", "note", text, tuple(stale), fix=fix))
    found += in_two_groups(optimizers, {id(each): name for name, each in names.items()}, held, twice)
    unseen = [name for name, each in hidden.items() if id(each) not in held]
    if seen is not None and (used := [name for name in unseen if name in seen.some]):
        text = f"the loss depends on {listed(used)}, and PyTorch does not see them: they are in a plain list, dict or "
        text += "attribute, so that they are never trained, saved or moved to a device"
        fix = "keep layers in nn.ModuleList or nn.ModuleDict, and tensors as nn.Parameter"
        found.append(Finding("structure", "fault", text, tuple(used), fix=fix))
    return found


def all_stale(missing: list[str], stale: list[str], names: dict[str, Tensor]) -> bool:
    """Whether each missing parameter has a stale one of its shape: what the optimizer holds in its place."""
    shapes = Counter(names[name].shape for name in missing)
    return bool(missing) and shapes <= Counter(names[name].shape for name in stale)


def in_no_group(missing: list[str], trainable: dict[str, Tensor], seen: Gradients | None) -> list[Finding]:
    """Finds trainable parameters that no optimizer has.

    A minority that the loss depends on was forgotten. If it is most of the model, the optimizer was given a head or
    adapters alone, and the rest may be meant to stay as it is.
    """
    used = [name for name in missing if seen is None or name in seen.some]
    if not used:
        return []
    elements = sum(trainable[name].numel() for name in used), sum(each.numel() for each in trainable.values())
    minority = len(used) < len(trainable) / 2 and elements[0] < elements[1] / 2
    text = f"{listed(used)} ({len(used)} of {len(trainable)} trainable parameters) are in no group of the optimizer"
    text += ": they are never updated"
    fix = "give them to the optimizer; or, if they are not to be trained, call requires_grad_(False)"
    return [Finding("structure", "fault" if minority else "note", text, tuple(used), fix=fix)]


def in_two_groups(
    optimizers: Sequence[Optimizer],
    names: dict[int, str],
    held: Counter[int],
    twice: dict[str, tuple[int, int]] | None,
) -> list[Finding]:
    """Finds parameters that an optimizer has twice, or that two optimizers update with the same gradient."""
    found = []
    fix = "leave them out of one of the two"
    for index, optimizer in enumerate(optimizers):
        counts = Counter(id(each) for each in parameters_of(optimizer))
        if again := [names.get(number, "?") for number, count in counts.items() if count > 1]:
            text = f"{listed(again)} are in the groups of optimizers.{index} twice: each step updates them twice"
            found.append(Finding("structure", "fault", text, tuple(again), fix=fix))
    if twice:
        pairs = sorted({f"optimizers.{one} and optimizers.{two}" for one, two in twice.values()})
        text = (
            f"{listed([*twice])} are in {listed(pairs)}, which update them one after the other with the same gradient"
        )
        found.append(Finding("structure", "fault", text, tuple(twice), fix=fix))
    elif not found and (both := [names.get(number, "?") for number, count in held.items() if count > 1]):
        text = f"{listed(both)} are in two optimizers: meant only if each has a backward pass of its own"
        found.append(Finding("structure", "note", text, tuple(both), fix=fix))
    return found


def updated_twice(step: RecordedStep) -> dict[str, tuple[int, int]]:
    """Returns the parameters that two optimizers updated without a backward pass in between, and which these are."""
    found: dict[str, tuple[int, int]] = {}
    updated: dict[str, int] = {}
    for event in step.events:
        if event.kind == "backward":
            updated = {}
        elif event.kind == "optimizer":
            for name in step.given.get(event.index, {}):
                if updated.setdefault(name, event.index) != event.index:
                    found[name] = updated[name], event.index
    return found


# ---- each trained parameter with a gradient


def without_gradient(make: Maker, loop: Loop, seen: Gradients) -> list[Finding]:
    """Finds parameters of the model, in a group, that have no gradient in any batch of an epoch, or only zeros."""
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
    seen_in = f"in {'all' if seen.whole else 'the first'} {seen.batches} batches{' of an epoch' if seen.whole else ''}"
    certain = "fault" if seen.whole else "note"
    found = []
    if still := [name for name in unused if name not in moved]:
        text = f"{listed(still)} ({len(still)}) get no gradient {seen_in}: the loss does not use them"
        fix = "use them in forward, or leave them out; requires_grad_(False) for what is not to be trained"
        found.append(Finding("structure", certain, text, tuple(still), fix=fix))
    if zero:
        text = f"the gradient of {listed(zero)} ({len(zero)}) is exactly 0 {seen_in}, with random values in place of "
        text += "weights that begin at 0: units that are never active, or a factor of 0"
        fix = "look for a factor of 0, and for a ReLU whose inputs are all negative (a large negative bias)"
        found.append(Finding("structure", certain, text, tuple(zero), fix=fix))
    if moved:
        text = (
            f"{listed(moved)} get no gradient and change all the same: something other than the optimizer updates them"
        )
        found.append(Finding("structure", "note", text, tuple(moved)))
    if biases:
        text = f"the gradient of {listed(biases)} is exactly 0 {seen_in}: what comes behind takes it out again"
        found.append(Finding("structure", "note", text, tuple(biases)))
    return found


# ---- the mode of the model


def modes(make: Maker, evaluating: list[list[str]]) -> list[Finding]:
    """Finds trained parts that are in eval mode in the backward pass of a step; `evaluating` has names for each step."""
    loop = make()
    if not evaluating:
        return in_eval_mode(loop.model)
    for number, names in enumerate(evaluating):
        when = f" from step {number + 1} on" if number else ""
        if found := in_eval_mode(loop.model, names, when):
            if found[0].verdict == "note":
                found = in_eval_mode(loop.model, names, when, differs=loss_differs(make, names))
            return found
    return []


def loss_differs(make: Maker, evaluating: list[str]) -> bool:
    """Whether the loss with these modules in eval mode is another one than in training mode."""
    losses = []
    for mode in (False, False, True):
        loop = make()
        for name, module in loop.model.named_modules():
            if name in evaluating:
                module.training = mode
        seed(1)
        losses.append(float(loop.loss(loop.batch(0)).detach()))
    return losses[0] == losses[1] != losses[2]
