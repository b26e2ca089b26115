"""What shows that a held-out fault is silent and real, and that a clean program is clean, by the names of a loop."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SparseAdam

from stabletrain.beside.preflight.loop import loop_of
from tests.reliability.preflight.evidence import HUGE, LEAST, differ, finite, flat
from tests.reliability.preflight.faults import KINDS
from tests.reliability.preflight.held_out.program import Program, seed

STEPS = 3


@contextmanager
def warned(program: Program) -> Iterator[None]:
    """Ignores PyTorch's own warnings about a fault that says it has them."""
    with warnings.catch_warnings():
        if program.fault is not None and program.fault.warns:
            warnings.simplefilter("ignore")
        yield


def values(part: Any) -> Any:
    """Returns what a part of a loop holds."""
    if isinstance(part, torch.Generator):
        return part.get_state()
    return part.state_dict() if hasattr(part, "state_dict") else part


def state(made: Any) -> dict[str, Any]:
    """Returns copies of all that training changes, and gradients that are left."""
    loop = loop_of(made)
    found = {**loop.model.state_dict(), **dict(loop.model.named_buffers())}
    for name in ("optimizers", "schedulers"):
        found |= {f"{name}.{i}": values(each) for i, each in enumerate(getattr(loop, name))}
    found |= {name: values(each) for name, each in loop.others.items()}
    found |= {} if loop.scaler is None else {"scaler": loop.scaler.state_dict()}
    copied = {name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in flat(found).items()}
    return {name: each for name, each in copied.items() if not callable(each)}


def take(made: Any, steps: int) -> list[float]:
    """Takes so many steps; returns the loss of each batch before its step."""
    loop, losses = loop_of(made), []
    for _ in range(steps):
        batch = loop.next_batch()
        loss = loop.step(batch)
        losses.append(loss.item() if isinstance(loss, Tensor) else loss or 0.0)
    return losses


def trained(program: Program, steps: int = STEPS) -> Any:
    """Trains a fresh loop; returns it. Each step draws its own numbers, whatever was drawn before."""
    made = program.make()
    for step in range(steps):
        seed(100 + step)
        assert all(map(math.isfinite, take(made, 1)))
    return made


def steps_of(program: Program) -> int:
    """Returns how many steps a fault needs to show: an epoch for one of its last batch."""
    last = program.fault is not None and program.fault.kind == "last_partial"
    return loop_of(program.make()).epoch if last else STEPS


def sound(made: Any) -> bool:
    """Whether weights, moments, and what the loss is made of are finite."""
    loop = loop_of(made)
    return finite(state(made)) and bool(torch.isfinite(loop.loss(loop.batch(0))))


def trains_otherwise(program: Program) -> float:
    """Returns how far the weights are from the clean program's, relative to what those have moved."""
    steps = steps_of(program)
    ours, clean, start = (
        state(trained(each, n)) for each, n in ((program, steps), (program.clean, steps), (program.clean, 0))
    )
    names = [name for name, _ in loop_of(program.clean.make()).model.named_parameters()]
    both = [name for name in names if name in ours and ours[name].shape == clean[name].shape]
    if len(both) < len(names):
        return float("inf")
    return max(
        float((ours[name] - clean[name]).norm() / (clean[name] - start[name]).norm())
        for name in both
        if not torch.equal(clean[name], start[name])
    )


def resumed(program: Program, steps: int) -> list[str]:
    """Returns what differs between a loop and a fresh one that loaded its state, both after so many more steps."""
    made, fresh = trained(program), program.make()
    saved = loop_of(made).save()
    take(made, steps)
    loop_of(fresh).load(saved)
    take(fresh, steps)
    return differ(state(made), state(fresh))


def tensors(batch: Any) -> list[Tensor]:
    """Returns the tensors of a batch."""
    if isinstance(batch, Tensor):
        return [batch]
    return [*(batch.values() if isinstance(batch, Mapping) else batch)]


def data_differ(program: Program) -> bool:
    """Whether batches of some step and rank differ from the clean program's."""
    ours, clean = loop_of(program.make()), loop_of(program.clean.make())
    places = [(step, rank) for step in range(2 * max(clean.epoch, 2)) for rank in range(2)]
    pairs = [(tensors(ours.batch(*each)), tensors(clean.batch(*each))) for each in places]
    return any(not all(map(torch.equal, one, two)) for one, two in pairs)


def survives(program: Program, kind: str) -> bool:
    """Whether weights and moments stay finite in a step of this kind, as the first step and after one."""
    return all(finite(state(special(program, kind, before))) for before in (0, 1))


def special(program: Program, kind: str, before: int) -> Any:
    """Takes so many steps, and then one with zero gradients, huge ones, or weights of 0; returns the loop."""
    made = trained(program, before)
    for optimizer in loop_of(made).optimizers:
        if isinstance(optimizer, (LBFGS, SparseAdam)):
            continue  # one needs a closure, the other takes no dense gradients
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.full_like(p, HUGE if kind == "huge_gradient" else 0.0)
            if kind == "zero_weights":
                p.data.zero_()
                p.grad.fill_(0.01)
        optimizer.step()
    return made


def recovers(program: Program) -> bool:
    """Whether the step after one with NaN in its inputs moves the weights, and leaves everything finite."""
    made = trained(program, 1)
    loop = loop_of(made)
    loop.step([each * torch.nan if each.is_floating_point() else each for each in loop.next_batch()])
    before = state(made)
    take(made, 1)
    moved = differ(before, state(made))
    return finite(state(made)) and any(name in moved for name, _ in loop.model.named_parameters())


def real(program: Program) -> bool:
    """Whether a fault changes what it is about."""
    assert program.fault is not None
    kind = program.fault.kind
    if kind == "nan_stays":
        return not recovers(program)
    group = KINDS[kind]
    if group == "resume":
        return bool(resumed(program, 1))
    if group == "data":
        return data_differ(program)
    if group == "optimizer":
        return not survives(program, kind)
    return trains_otherwise(program) > LEAST


def names(program: Program) -> set[str]:
    """Returns what a fault can point at: parts of the state, modules."""
    loop = loop_of(program.make())
    return {name for name, _ in loop.model.named_modules()} | state(loop).keys()
