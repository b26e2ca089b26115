"""Parameters and groups: stale, in no group, in two, without gradient; tied weights split by a copy; eval mode."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.beside.preflight.finding import Finding, listed
from stabletrain.beside.preflight.loop import Loop, Maker, seed
from stabletrain.beside.preflight.network import hidden_tensors, in_eval_mode, split_ties
from stabletrain.beside.preflight.recording import RecordedStep, parameters_of, record_step
from stabletrain.beside.preflight.state import objects_of, parameters_beside
from stabletrain.beside.preflight.untrained import Gradients, gradients_of_losses, named, without_gradient

FEWEST, MOST = 2, 10
"""Steps that are recorded: an evaluation may leave the model in eval mode, after a step or after a short epoch."""


def check(make: Maker) -> list[Finding]:
    """Checks a loop's parameters, and the model by itself."""
    seen = gradients_of_losses(make())
    loop = make()
    ties = split_ties(loop.model)
    evaluating: list[list[str]] = []
    twice: dict[str, tuple[int, int]] = {}
    held = {id(each) for optimizer in loop.optimizers for each in parameters_of(optimizer)}
    start = {name: each.detach().clone() for name, each in loop.parameters.items() if id(each) not in held}
    steps = loop.epoch + 2 if FEWEST <= loop.epoch + 2 <= MOST else FEWEST
    for number in range(steps if loop.step is not None else 0):
        step = record_step(loop, number)
        evaluating.append(step.evaluating)
        twice |= updated_twice(step)
        for gradients in (step.gradients, *step.given.values()):
            seen.add(gradients)
    now = loop.parameters
    moved = {name for name, each in start.items() if name in now and not torch.equal(each, now[name])}
    found = [*groups(loop.model, loop.optimizers, seen, twice, moved), *beside_the_model(loop, seen)]
    found += without_gradient(make, loop, seen)
    return [*found, *ties, *modes(make, loop.model, evaluating)] or passed(loop.model, loop.optimizers)


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
    text = (
        f"{count} trained parameters, each in one of {groups} groups" if groups > 1 else f"{count} trained parameters"
    )
    return [Finding("structure", "passed", text)]


# ---- each parameter in one group


def groups(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    seen: Gradients | None = None,
    twice: dict[str, tuple[int, int]] | None = None,
    moved: Set[str] = frozenset(),
) -> list[Finding]:
    """Finds stale parameters, and those in no group or in two.

    Args:
        model: the model.
        optimizers: all that train it.
        seen: which parameters have a gradient; None if that is not known.
        twice: parameters that two optimizers updated with the same gradient, and which; None if that is not known.
        moved: names of those in no group that the steps have changed all the same.
    """
    held = Counter(id(each) for optimizer in optimizers for each in parameters_of(optimizer))
    names = {name: each for name, each in named(model, optimizers).items() if each.requires_grad}
    hidden = hidden_tensors(model)
    trainable = {name: each for name, each in model.named_parameters() if each.requires_grad}
    missing = [name for name, each in trainable.items() if id(each) not in held]
    stale = [name for name in names if name not in trainable and name not in hidden]
    stale = [name for name in stale if seen is None or name not in seen.some]
    found = []
    if all_stale(missing, stale, names) if seen is None else stale and not seen.some.isdisjoint(missing):
        text = (
            f"the optimizers hold {len(stale)} parameters that are not the model's, and {len(missing)} of the model's "
        )
        text += f"{len(trainable)} are in no group ({listed(missing)}): they were replaced after the optimizer was made"
        fix = "make the optimizer after the last change of the model (new layers, copies, load_state_dict(assign=True))"
        found.append(Finding("structure", "fault", text, (*missing, *stale), fix=fix))
    else:
        found += in_no_group([name for name in missing if name not in moved], trainable, seen)
        if by_hand := [name for name in missing if name in moved]:
            text = f"in no group of an optimizer, and changed all the same, by something else: {listed(by_hand)} "
            text += f"({len(by_hand)} of {len(trainable)} trainable parameters)"
            found.append(Finding("structure", "note", text, tuple(by_hand)))
        if stale:
            text = f"the optimizers hold {len(stale)} parameters that are not the model's"
            text += f"{'' if seen is None else ' and have no gradient'}: {listed(stale)}"
            fix = "if they were parts of the model once, make the optimizer after the last change of the model"
            found.append(Finding("structure", "note", text, tuple(stale), fix=fix))
    found += in_two_groups(optimizers, {id(each): name for name, each in names.items()}, held, twice)
    if seen is not None:
        found += hidden_from_pytorch([name for name in hidden if name in seen.some and id(hidden[name]) not in held])
    return found


def all_stale(missing: list[str], stale: list[str], names: dict[str, Tensor]) -> bool:
    """Whether each missing parameter has a stale one of its shape: what the optimizer holds in its place."""
    shapes = Counter(names[name].shape for name in missing)
    return bool(missing) and shapes <= Counter(names[name].shape for name in stale)


def in_no_group(missing: list[str], trainable: Mapping[str, Tensor], seen: Gradients | None) -> list[Finding]:
    """Finds trainable parameters that no optimizer has.

    A minority that the loss depends on was forgotten. If it is most of the model, the optimizer was given a head or
    adapters alone, and the rest may be meant to stay as it is.
    """
    used = [name for name in missing if seen is None or name in seen.some]
    if not used:
        return []
    elements = sum(trainable[name].numel() for name in used), sum(each.numel() for each in trainable.values())
    minority = len(used) < len(trainable) / 2 and elements[0] < elements[1] / 2
    text = f"in no group of an optimizer, so never updated: {listed(used)} "
    text += f"({len(used)} of {len(trainable)} trainable parameters)"
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
        if again := [names[number] for number, count in counts.items() if count > 1 and number in names]:
            text = f"twice in the groups of optimizers.{index}, so updated twice a step: {listed(again)}"
            found.append(Finding("structure", "fault", text, tuple(again), fix=fix))
    if twice:
        pairs = sorted({f"optimizers.{one} and optimizers.{two}" for one, two in twice.values()})
        text = f"updated twice a step with the same gradient, by {listed(pairs)}: {listed([*twice])}"
        found.append(Finding("structure", "fault", text, tuple(twice), fix=fix))
    elif not found and (both := [names[number] for number, count in held.items() if count > 1 and number in names]):
        text = f"in two optimizers, which is right only if each has a backward pass of its own: {listed(both)}"
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


def hidden_from_pytorch(hidden: list[str]) -> list[Finding]:
    """Finds tensors that the loss depends on, are in no optimizer, and that the model's modules hide from PyTorch."""
    if not hidden:
        return []
    text = f"the loss depends on {listed(hidden)}, and PyTorch does not see them: they are in a plain list, dict or "
    text += "attribute, so that they are never trained, saved or moved to a device"
    fix = "keep layers in nn.ModuleList or nn.ModuleDict, and tensors as nn.Parameter"
    return [Finding("structure", "fault", text, tuple(hidden), fix=fix)]


def beside_the_model(loop: Loop, seen: Gradients) -> list[Finding]:
    """Finds parameters that the loss depends on, that are in no optimizer, and that are not the model's.

    They may be another network's, such as a teacher or a discriminator, that is not trained here and was not frozen. A
    network has several layers: the parameters of one module without parts, or single ones, that are few beside those
    that are trained, are the loss's own, such as centers, a temperature, or weights of several losses. These were
    forgotten, unless something trains them: another optimizer, or the step itself.

    Args:
        loop: after its steps.
        seen: which parameters the loss depends on.
    """
    if not seen.others:
        return []
    trained = [each for optimizer in loop.optimizers for each in parameters_of(optimizer)]
    now, names = parameters_beside(loop), [*seen.others]
    elements = sum(each.numel() for each in seen.others.values()), sum(each.numel() for each in trained)
    few = len(names) < len(trained) / 2 and elements[0] < elements[1] / 2
    elsewhere = {
        id(each) for _, value in objects_of(loop) if isinstance(value, Optimizer) for each in parameters_of(value)
    }
    still = all(
        name in now and id(now[name]) not in elsewhere and torch.equal(now[name], seen.others[name]) for name in names
    )
    one_module = len({name.rpartition(".")[0] for name in names if "." in name}) <= 1
    certain = loop.step is not None and few and still and one_module
    text = f"the loss depends on {listed(names)}, which {'is' if len(names) == 1 else 'are'} not in the model and in "
    text += "no optimizer"
    text += ": never updated" if certain else ": right only if they are another network's, or not to be trained"
    fix = "give them to an optimizer, and that to the checks; or, if they are not to be trained, requires_grad_(False)"
    return [Finding("structure", "fault" if certain else "note", text, tuple(names), fix=fix)]


# ---- the mode of the model


def modes(make: Maker, model: nn.Module, evaluating: list[list[str]]) -> list[Finding]:
    """Finds trained parts that are in eval mode in the backward pass of a step.

    Args:
        make: makes fresh loops.
        model: of one of them.
        evaluating: names of the modules in eval mode, for each step that was recorded.
    """
    if not evaluating:
        return in_eval_mode(model)
    for number, names in enumerate(evaluating):
        when = f" from step {number + 1} on" if number else ""
        if found := in_eval_mode(model, names, when):
            if found[0].verdict == "note":
                found = in_eval_mode(model, names, when, differs=loss_differs(make, names))
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
